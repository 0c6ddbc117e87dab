"""The device that a plan is for: this machine's card or CPU, or a card of another machine, as one record."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hivetune.errors import MachineNotFit, UsageError
from hivetune.machine.inventory import Card, Machine
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

    @property
    def margin(self) -> float:
        """Return the share of free memory that is left alone."""
        return MARGIN[self.kind]

    def limit_bytes(self, memory_share: float = 0.9) -> int:
        """Return the most that a run may hold: free memory less the margin, and no more than its share of the whole."""
        return round(min(self.free_bytes * (1 - self.margin), self.memory_bytes * memory_share))


def device_of_card(name: str, *, cores: int | None = None, memory_gb: float | None = None) -> Device:
    """Return a card or kind of CPU from cards.yaml, as if nothing else used it. Raises UsageError."""
    card = known_card(name)
    memory = round((memory_gb or card["memory_gb"]) * GB)
    if card["kind"] == "cpu":
        cores = cores or card["cores"]
        return _cpu_device(card, f"{card['name']}, {cores} cores", cores, memory, memory)
    return Device(
        name=card["name"],
        kind=card["kind"],
        memory_bytes=memory,
        free_bytes=memory,
        rates={dtype: rate * 1e12 for dtype, rate in card["tflops"].items()},
        bandwidth=card["bandwidth_gbs"] * 1e9,
        source=card["measured"],
        note=card.get("note", ""),
        torch_name="cuda",
    )


def device_of_machine(machine: Machine, profile: Profile, wanted: str = "auto") -> Device:
    """Return this machine's device of the config: `auto` is the first card if there is one, else the CPU.

    Raises UsageError for an unknown device, MachineNotFit for a card that this machine does not have.
    """
    if wanted == "auto":
        wanted = "cuda:0" if machine.cards else "cpu"
    if wanted == "cpu":
        return _this_cpu(machine, profile)
    kind, _, index_text = wanted.partition(":")
    index_text = index_text or "0"
    if kind != "cuda" or not index_text.isdigit():
        raise UsageError(
            f"unknown device {wanted!r}; choose auto, cpu, cuda or cuda:N", hint="AMD cards are cuda too, as in torch"
        )
    index = int(index_text)
    if index >= len(machine.cards):
        raise MachineNotFit(
            f"device {wanted} is not available: this machine has {len(machine.cards)} cards",
            hint="set device: cpu, or plan for another machine with --card",
        )
    card = _this_card(machine.cards[index], profile, f"cuda:{index}")
    link = profile.other_rates.get(card.torch_name, {}).get("to_device", LINK_BYTES_PER_S)
    return replace(card, host_free_bytes=machine.available_bytes, link_bytes_per_s=link)


def _this_card(card: Card, profile: Profile, torch_name: str) -> Device:
    known = similar_card(card.name, card.architecture, card.memory_bytes)
    measured = profile.right_rates(torch_name)
    if measured is None and known is None:
        raise MachineNotFit(
            f"the memory and speed of {card.name} are unknown",
            hint="plan for a similar card: hivetune plan CONFIG --card NAME",
        )
    published_bandwidth = known["bandwidth_gbs"] * 1e9 if known else None
    published = {dtype: rate * 1e12 for dtype, rate in known["tflops"].items()} if known else {}
    return Device(
        name=card.name,
        kind=card.kind,
        memory_bytes=card.memory_bytes,
        free_bytes=card.free_bytes,
        rates=measured or published,
        bandwidth=profile.other_rates.get(torch_name, {}).get("bandwidth", published_bandwidth),
        measured=measured is not None,
        source="GEMMs measured on this machine" if measured else str(known and known["measured"]),
        note=known.get("note", "") if known else "",
        torch_name=torch_name,
        decided_dtype=profile.decided_dtype(torch_name),
    )


def _this_cpu(machine: Machine, profile: Profile) -> Device:
    entry = next((name for flag, name in CPU_ENTRIES if flag in machine.isa), "avx")
    name = f"{machine.cpu}, {machine.cores} cores"
    known = _cpu_device(known_card(entry), name, machine.cores, machine.memory_bytes, machine.available_bytes)
    measured = profile.right_rates("cpu")
    if measured is None:
        return known
    return Device(
        name=name,
        kind="cpu",
        memory_bytes=machine.memory_bytes,
        free_bytes=machine.available_bytes,
        rates=measured,
        measured=True,
        source="GEMMs measured on this machine",
        cores=machine.cores,
        decided_dtype=profile.decided_dtype("cpu"),
    )


def _cpu_device(card: Mapping[str, Any], name: str, cores: int, memory: int, free: int) -> Device:
    return Device(
        name=name,
        kind="cpu",
        memory_bytes=memory,
        free_bytes=free,
        rates={dtype: rate * 1e12 * cores for dtype, rate in card["tflops"].items()},
        source=card["measured"],
        note=card.get("note", ""),
        cores=cores,
    )
