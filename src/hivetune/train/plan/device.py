"""The device that a plan is for: this machine's card or CPU, or a card of another machine, as one record."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hivetune.errors import MachineNotFit, UsageError
from hivetune.machine.cards import known_card, similar_card
from hivetune.machine.inventory import Machine

GB = 10**9
# Newest instruction set first: the entry of cards.yaml whose rate stands for this CPU until it is measured.
CPU_ENTRIES = (("amx_bf16", "amx"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"))
# PCIe 4 with 16 lanes as copies from pinned memory reach it (31.5 GB/s raw), and a plain NVMe drive (SATA reaches 0.5
# GB/s, PCIe 5 drives 12): for streamed layers.
LINK_BYTES_PER_S = 25e9
DISK_READ_BYTES_PER_S = 2e9
# Instruction sets of processors, and chips of AMD, that multiply bfloat16 themselves; NVIDIA's do from 8.0 on. Others
# emulate it, 40 to 500 times slower (pytorch/pytorch#146508), or fail (a user's MI50).
BFLOAT16_ISA = ("avx512_bf16", "amx_bf16")
BFLOAT16_CHIPS = re.compile(r"gfx(908|90a|94\d|95\d|11\w\w|12\w\w)")


def computes_bfloat16(kind: str, architecture: str, isa: Sequence[str] = ()) -> bool:
    """Return whether a device multiplies bfloat16 natively, by a processor's flags or a card's chip or capability."""
    if kind == "cpu":
        return any(flag in BFLOAT16_ISA for flag in isa)
    if kind == "rocm":
        return BFLOAT16_CHIPS.match(architecture) is not None
    major = architecture.partition(".")[0]
    return major.isdigit() and int(major) >= 8


@dataclass(frozen=True)
class Device:
    """A device to plan for. `rates`: dtype -> published FLOP/s of a large matrix product, empty if none is known;
    `source`: where they are published.

    kind: cpu, cuda or rocm. free_bytes: memory that no other program uses now. note: a remark on the card for people.
    """

    name: str
    kind: str
    memory_bytes: int
    free_bytes: int
    rates: Mapping[str, float]
    has_bfloat16: bool = False
    source: str = ""
    note: str = ""
    cores: int = 0
    torch_name: str = "cpu"
    """The name that torch and the config use: cpu, cuda:0."""
    host_memory_bytes: int | None = None
    """Memory of the machine around a card; None where it is not this one."""

    def limit_bytes(self, memory_share: float = 0.9) -> int:
        """Return the bytes that a run may use: its share of the installed memory, whatever other programs use now."""
        return round(self.memory_bytes * memory_share)


def device_of_card(name: str, *, cores: int | None = None, memory_gb: float | None = None) -> Device:
    """Return a card or a kind of CPU from cards.yaml, as if no other program used it. Raises UsageError."""
    card = known_card(name)
    device = _published(card, cores or card.get("cores", 0))
    if cores is not None and device.kind != "cpu":
        raise UsageError(f"{device.name} is a card, but --cores applies to a CPU", hint="leave out --cores")
    memory = round((memory_gb or card["memory_gb"]) * GB)
    title = f"{card['name']}, {device.cores} cores" if device.kind == "cpu" else card["name"]
    return replace(device, name=title, memory_bytes=memory, free_bytes=memory)


def device_of_machine(machine: Machine, setting: str = "auto") -> Device:
    """Return the device of this machine that the config sets: for `auto` the first card, else the CPU.

    Raises UsageError for an unknown device, MachineNotFit for a card that this machine does not have.
    """
    if setting == "auto":
        setting = f"cuda:{machine.cards[0].index}" if machine.cards else "cpu"
    if setting == "cpu":
        isa = next((name for flag, name in CPU_ENTRIES if flag in machine.isa), "avx")
        return replace(
            _published(known_card(isa), machine.cores),
            name=f"{machine.cpu}, {machine.cores} cores",
            memory_bytes=machine.memory_bytes,
            free_bytes=machine.available_bytes,
            has_bfloat16=computes_bfloat16("cpu", "", machine.isa),
        )
    kind, _, index_text = setting.partition(":")
    index_text = index_text or "0"
    if kind != "cuda" or not index_text.isdigit():
        raise UsageError(
            f"unknown device {setting!r}; choose auto, cpu, cuda or cuda:N", hint="AMD cards are cuda too, as in torch"
        )
    index = int(index_text)
    # torch's number of the card: graphics in a processor may come before it and are left out of `cards`.
    card = next((card for card in machine.cards if card.index == index), None)
    if card is None:
        has = ", ".join(["cpu", *(f"cuda:{card.index} ({card.name})" for card in machine.cards)])
        raise MachineNotFit(
            f"device {setting} is not available: this machine has {has}",
            hint="set device: cpu, or plan for another machine with --card",
        )
    entry = similar_card(card.name, card.architecture, card.memory_bytes)
    return replace(
        Device("", "", 0, 0, {}) if entry is None else _published(entry),
        name=card.name,
        kind=card.kind,
        memory_bytes=card.memory_bytes,
        free_bytes=card.free_bytes,
        has_bfloat16=computes_bfloat16(card.kind, card.architecture),
        torch_name=f"cuda:{index}",
        host_memory_bytes=machine.memory_bytes,
    )


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
        has_bfloat16="bfloat16" in card["tflops"],
        source=card["measured"],
        note=card.get("note", ""),
        cores=cores if on_cpu else 0,
        torch_name="cpu" if on_cpu else "cuda",
    )
