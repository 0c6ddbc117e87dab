"""The device that a plan is for: this machine's card or CPU, or a card of another machine, as one record."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hivetune.errors import MachineNotFit, UsageError
from hivetune.machine.inventory import Machine
from hivetune.machine.knowledge.cards import known_card, similar_card
from hivetune.machine.profile import Profile

GB = 10**9
# Newest instruction set first: the entry of cards.yaml whose rate stands for this CPU until it is measured.
CPU_ENTRIES = (("amx_bf16", "amx"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"))
# Shares of free memory that a run leaves alone: fragmentation, a desktop that draws, the error of the prediction.
MARGIN = {"cpu": 0.10, "cuda": 0.25, "rocm": 0.25}
# Assumed until they are measured: PCIe 4 with 16 lanes as copies from pinned memory reach it (31.5 GB/s raw), and a
# plain NVMe drive (SATA reaches 0.5 GB/s, PCIe 5 drives 12).
LINK_BYTES_PER_S = 25e9
DISK_READ_BYTES_PER_S = 2e9


@dataclass(frozen=True)
class Device:
    """A device. `rates`: dtype -> FLOP/s of a large GEMM. `free_bytes`: memory that no other program holds now.

    kind: cpu, cuda or rocm. measured: the rates are this machine's, else published ones, and `source` names where from.
    note: what is special about the card.
    """

    name: str
    kind: str
    memory_bytes: int
    free_bytes: int
    rates: Mapping[str, float]
    bandwidth: float | None = None
    """Bytes a second; measured where the doctor did."""
    measured: bool = False
    source: str = ""
    note: str = ""
    cores: int = 0
    torch_name: str = "cpu"
    """The name that torch and the config use: cpu, cuda:0."""
    decided_dtype: str | None = None
    """What `dtype: auto` was on this machine before."""
    host_free_bytes: int | None = None
    """Free memory of the machine around a card; None where it is not this one."""
    link_bytes_per_s: float = LINK_BYTES_PER_S
    """From pinned host memory to a card; measured where the doctor did."""
    disk_bytes_per_s: float = DISK_READ_BYTES_PER_S

    def limit_bytes(self, memory_share: float = 0.9) -> int:
        """Return the most that a run may hold: free memory less the margin, and no more than its share of the whole."""
        return round(min(self.free_bytes * (1 - MARGIN[self.kind]), self.memory_bytes * memory_share))


def device_of_card(name: str, *, cores: int | None = None, memory_gb: float | None = None) -> Device:
    """Return a card or kind of CPU from cards.yaml, as if nothing else used it. Raises UsageError."""
    card = known_card(name)
    device = _published(card, cores or card.get("cores", 0))
    if cores is not None and device.kind != "cpu":
        raise UsageError(f"{device.name} is a card, and --cores is of a CPU", hint="leave out --cores")
    memory = round((memory_gb or card["memory_gb"]) * GB)
    title = f"{card['name']}, {device.cores} cores" if device.kind == "cpu" else card["name"]
    return replace(device, name=title, memory_bytes=memory, free_bytes=memory)


def device_of_machine(machine: Machine, profile: Profile, setting: str = "auto") -> Device:
    """Return this machine's device of the config: `auto` is the first card if there is one, else the CPU.

    Raises UsageError for an unknown device, MachineNotFit for a card that this machine does not have.
    """
    if setting == "auto":
        setting = "cuda:0" if machine.cards else "cpu"
    if setting == "cpu":
        isa = next((name for flag, name in CPU_ENTRIES if flag in machine.isa), "avx")
        processor = replace(
            _published(known_card(isa), machine.cores),
            name=f"{machine.cpu}, {machine.cores} cores",
            memory_bytes=machine.memory_bytes,
            free_bytes=machine.available_bytes,
        )
        return _with_measured(processor, profile)
    kind, _, index_text = setting.partition(":")
    index_text = index_text or "0"
    if kind != "cuda" or not index_text.isdigit():
        raise UsageError(
            f"unknown device {setting!r}; choose auto, cpu, cuda or cuda:N", hint="AMD cards are cuda too, as in torch"
        )
    index = int(index_text)
    if index >= len(machine.cards):
        raise MachineNotFit(
            f"device {setting} is not available: this machine has {len(machine.cards)} cards",
            hint="set device: cpu, or plan for another machine with --card",
        )
    card = machine.cards[index]
    entry = similar_card(card.name, card.architecture, card.memory_bytes)
    device = replace(
        Device("", "", 0, 0, {}) if entry is None else _published(entry),
        name=card.name,
        kind=card.kind,
        memory_bytes=card.memory_bytes,
        free_bytes=card.free_bytes,
        torch_name=f"cuda:{index}",
        host_free_bytes=machine.available_bytes,
    )
    device = _with_measured(device, profile)
    if not device.rates:
        raise MachineNotFit(
            f"the memory and speed of {card.name} are unknown",
            hint="plan for a similar card: hivetune plan CONFIG --card NAME",
        )
    return device


def _published(card: Mapping[str, Any], cores: int = 0) -> Device:
    """Return an entry of cards.yaml as a device. A CPU's rates are for each of its cores."""
    on_cpu = card["kind"] == "cpu"
    times = 1e12 * (cores if on_cpu else 1)
    return Device(
        name=card["name"],
        kind=card["kind"],
        memory_bytes=0,
        free_bytes=0,
        rates={dtype: rate * times for dtype, rate in card["tflops"].items()},
        bandwidth=None if on_cpu else card["bandwidth_gbs"] * 1e9,
        source=card["measured"],
        note=card.get("note", ""),
        cores=cores if on_cpu else 0,
        torch_name="cpu" if on_cpu else "cuda",
    )


def _with_measured(device: Device, profile: Profile) -> Device:
    """Return the device with this machine's measurements instead of published numbers."""
    measured = profile.rates.get(device.torch_name)
    if measured is not None:
        note = "" if device.kind == "cpu" else device.note
        device = replace(device, rates=measured, measured=True, source="GEMMs measured on this machine", note=note)
    device = replace(device, decided_dtype=profile.decided("dtypes", device.torch_name))
    if device.kind == "cpu":
        return device
    others = profile.other_rates.get(device.torch_name, {})
    link = others.get("to_device", LINK_BYTES_PER_S)
    return replace(device, bandwidth=others.get("bandwidth", device.bandwidth), link_bytes_per_s=link)
