"""The inventory of this machine: cores, memory and its limits, cards and disk, read without torch.

Nothing is measured here, so it takes milliseconds; measurements are in the machine's profile. `root` replaces `/` in
tests.
"""

import contextlib
import hashlib
import itertools
import json
import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from hivetune.base.disk import home
from hivetune.base.kernel import cgroups, memory_sizes, system_text, usable_cores, whole_number
from hivetune.machine.drivers import read_amd, read_nvidia
from hivetune.machine.facts import chip_has

CardKind = Literal["cpu", "cuda", "rocm"]
# The instruction sets that decide the speed of a GEMM, slowest first.
ISA = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")
# A worker without a card gets a quarter of the cores (config: workers).
WORKERS_PER_MACHINE = 4
SMALL_CARD_BYTES = 2 << 30  # graphics in a processor have less


@dataclass(frozen=True)
class Card:
    """One GPU as its driver reports it; sizes in bytes."""

    kind: CardKind
    index: int  # among the maker's cards, as torch counts them if all are visible
    name: str
    memory_bytes: int
    free_bytes: int  # what no program uses now
    driver: str
    architecture: str = ""  # gfx1201, or a compute capability such as 9.0; empty if the driver does not report it
    slot: str = ""  # the place on the bus, domain:bus:device.function; only of AMD's


@dataclass(frozen=True)
class Machine:
    """This machine. Cores and memory respect affinity, CPU quota and cgroup limits."""

    cpu: str
    isa: tuple[str, ...]
    cores: int
    memory_bytes: int
    available_bytes: int
    memory_limit: str  # where it is from: "machine" or the cgroup's file
    disk_free_bytes: int
    cards: tuple[Card, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Return a hash (16 hex digits) of everything that can change a measured rate or a chosen backend."""
        parts = {
            "cpu": [self.cpu, *self.isa, self.cores],
            "cards": [[card.name, card.architecture, card.memory_bytes, card.driver] for card in self.cards],
            "versions": dict(self.versions),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read_machine(
    root: Path = Path("/"), folder: Path | None = None, nvidia: Callable[[], Sequence[Card]] | None = None
) -> Machine:
    """Return this machine as it is now. `folder`: where runs will be stored (default: the home), for its free space.

    `nvidia` returns NVIDIA's cards (default: by nvidia-smi).
    """
    cpu, isa = _read_cpu(root / "proc/cpuinfo")
    # Without swap: a training that swaps never ends.
    sizes, now = memory_sizes(root), psutil.virtual_memory()
    total, available = sizes.get("MemTotal", now.total), sizes.get("MemAvailable", now.available)
    memory_limit = "machine"
    if (limit := _memory_limit(root)) and limit[0] < total:
        total, available, memory_limit = limit[0], min(available, limit[1]), limit[2]
    return Machine(
        cpu=cpu,
        isa=isa,
        cores=usable_cores(root),
        memory_bytes=total,
        available_bytes=available,
        memory_limit=memory_limit,
        disk_free_bytes=disk_free_bytes(folder or home()),
        cards=without_integrated(read_cards(root, nvidia)),
        versions=_versions(),
    )


def disk_free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the disk where `folder` is or would be created."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def read_cards(root: Path = Path("/"), nvidia: Callable[[], Sequence[Card]] | None = None) -> list[Card]:
    """Return all cards, also those in the processor. `nvidia` as in `read_machine`."""
    of_nvidia = nvidia() if nvidia else [_card("cuda", told) for told in read_nvidia()]
    return [*of_nvidia, *(_card("rocm", told) for told in read_amd(root))]


def _card(kind: CardKind, told: Mapping[str, Any]) -> Card:
    return Card(kind, **{each.name: told[each.name] for each in fields(Card) if each.name in told})


def without_integrated(cards: Sequence[Card]) -> tuple[Card, ...]:
    """Return the cards that a run may use; integrated graphics only if there is no other card."""
    return tuple(card for card in cards if not is_integrated(card)) or tuple(cards)


def as_torch_sees(machine: Machine, environment: Mapping[str, str | None]) -> Machine:
    """Return the machine with the cards that torch sees in this environment, by the numbers that they have there."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        value = environment.get(variable)
        if value is None or value.upper().startswith(("GPU-", "MIG-")):  # UUIDs, which the inventory does not have
            continue
        of_driver = {str(card.index): card for card in machine.cards}
        # Drivers ignore -1 and all that follows it.
        names = enumerate(itertools.takewhile(str.isdecimal, map(str.strip, value.split(","))))
        seen = tuple(replace(of_driver[name], index=place) for place, name in names if name in of_driver)
        return replace(machine, cards=seen)
    return machine


def is_integrated(card: Card) -> bool:
    """Return whether a card is a part of the processor, by its architecture, else by its memory."""
    known = card.kind == "rocm" and chip_has(card.architecture, "integrated")
    return bool(known) or 0 < card.memory_bytes < SMALL_CARD_BYTES


def _read_cpu(path: Path) -> tuple[str, tuple[str, ...]]:
    lines = [line.partition(":") for line in system_text(path).splitlines() if ":" in line]
    fields = {key.strip(): value.strip() for key, _, value in reversed(lines)}  # of the first core
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or fields.get("Hardware") or platform.processor() or platform.machine()
    return name, tuple(flag for flag in ISA if flag in flags)


def _memory_limit(root: Path) -> tuple[int, int, str] | None:
    """Return the smallest cgroup limit on this process as (limit, bytes left, file), or None."""
    limits: list[tuple[int, int, str]] = []
    for folder in cgroups(root, "memory"):
        for name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if limit := whole_number(folder / name):
                # The kernel would free this page cache before it kills a process.
                cache = re.search(r"^(?:total_)?inactive_file (\d+)", system_text(folder / "memory.stat"), re.MULTILINE)
                used = (whole_number(folder / used_name) or 0) - (int(cache[1]) if cache else 0)
                limits.append((limit, min(max(0, limit - used), limit), f"/{(folder / name).relative_to(root)}"))
    return min(limits, default=None)


def _versions() -> dict[str, str]:
    """Return the versions that decide which kernels run, from package metadata: importing torch takes seconds."""
    versions = {"python": platform.python_version(), "system": platform.system()}
    for name in ("torch", "triton", "bitsandbytes"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
