"""Samples of memory, load and cards during a run, for post-mortems, and the energy that the machine uses.

They are from psutil, AMD's sysfs (hwmon), nvidia-smi and the processor's RAPL. Missing sensors are left out. `root`
replaces `/` in tests.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hivetune.base.kernel import whole_number
from hivetune.machine.nvidia import read_nvidia

# The values of an NVIDIA card that change during a run.
SENSORS = ("memory_bytes", "used_bytes", "temperature_c", "watts", "busy_percent", "hot")
# A card is hot from so many degrees below its own limit.
NEAR_LIMIT_C = 3.0


def sample(pid: int | None, folder: Path, root: Path = Path("/")) -> dict[str, Any]:
    """Return the current use of the machine, of the process tree of `pid`, and of the cards."""
    measured: dict[str, Any] = {
        "available_bytes": psutil.virtual_memory().available,
        "swap_used_bytes": psutil.swap_memory().used,
        "disk_free_bytes": psutil.disk_usage(str(folder)).free,
        "load": round(os.getloadavg()[0], 2),
    }
    if pid is not None:
        measured |= process_tree(pid)
    if cards := read_cards(root):
        measured["cards"] = cards
    return measured


def process_tree(pid: int) -> dict[str, Any]:
    """Return resident memory and CPU seconds of a process and its descendants; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}
    resident, cpu_s = 0, 0.0
    for p in tree:
        try:
            with p.oneshot():
                resident += p.memory_info().rss
                times = p.cpu_times()
                cpu_s += times.user + times.system
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return {"resident_bytes": resident, "cpu_s": round(cpu_s, 2)}


def read_cards(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Return memory, temperature, watts and load of each card, and whether heat or power limits its clocks."""
    nvidia = [{name: card[name] for name in SENSORS if name in card} for card in read_nvidia()]
    return [*read_amd(root), *nvidia]


def read_amd(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Return the samples of AMD's cards from sysfs, which works with every driver and without ROCm."""
    cards = []
    for device in sorted((root / "sys/class/drm").glob("card[0-9]*/device")):
        total = whole_number(device / "mem_info_vram_total")
        if total is None:
            continue
        card: dict[str, Any] = {"memory_bytes": total, "used_bytes": whole_number(device / "mem_info_vram_used")}
        card["busy_percent"] = whole_number(device / "gpu_busy_percent")
        for sensors in sorted((device / "hwmon").glob("hwmon*")):
            if heat := _heat(sensors):
                card["temperature_c"], card["hot"] = heat
            microwatts = whole_number(sensors / "power1_average") or whole_number(sensors / "power1_input")
            if microwatts is not None:
                card["watts"] = microwatts / 1e6
        cards.append({name: value for name, value in card.items() if value is not None})
    return cards


def _heat(sensors: Path) -> tuple[float, bool] | None:
    """Return degrees Celsius and whether they are near the card's limit, None without a sensor."""
    for number in (2, 1):  # temp2 is the junction, which decides throttling; older cards only have temp1, the edge
        degrees, limit = (whole_number(sensors / f"temp{number}_{name}") for name in ("input", "crit"))
        if degrees is not None:
            return degrees / 1000, limit is not None and degrees / 1000 >= limit / 1000 - NEAR_LIMIT_C
    return None


def any_hot(cards: Sequence[dict[str, Any]]) -> bool:
    """Return whether one of the sampled cards is hot."""
    return any(card.get("hot") for card in cards)


# Only processor and cards count as energy; board, memory, disks and losses take 20 to 60 W more.
KWH = 3.6e6  # joules
# Estimates without a sensor: the package power of processors under full load is 4 to 12 W a thread, at rest 10 to 30 W;
# the board power of cards is 75 to 300 W.
CORE_W, REST_W, CARD_W = 8.0, 20.0, 200.0
_MAX_GAP_S = 300.0  # after a longer gap the watts of the last sample are only an estimate


@dataclass(frozen=True)
class Energy:
    """The joules of a period; `estimated_j` is the part that no sensor measured."""

    joules: float = 0.0
    estimated_j: float = 0.0

    @property
    def kwh(self) -> float:
        """The energy in kilowatt-hours."""
        return self.joules / KWH

    @property
    def measured(self) -> bool:
        """Return whether nothing was estimated."""
        return self.estimated_j == 0

    def __add__(self, energy: "Energy") -> "Energy":
        return Energy(self.joules + energy.joules, self.estimated_j + energy.estimated_j)


@dataclass(frozen=True)
class PowerSample:
    """The counters at one moment, by a clock that stops while the machine sleeps.

    `package_j` has RAPL's counters by zone, empty if they can't be read (they belong to root). `busy_core_s` counts all
    cores since the start of the machine.
    """

    time_s: float
    busy_core_s: float
    package_j: dict[str, tuple[float, float]] = field(default_factory=dict)  # (value, value at which it wraps to 0)
    cards: tuple[dict[str, Any], ...] = ()


def sample_power(time_s: float, root: Path = Path("/")) -> PowerSample:
    """Return the counters now. `root` replaces `/` in tests."""
    return PowerSample(time_s, busy_core_seconds(), _read_rapl(root), tuple(read_cards(root)))


def energy_between(before: PowerSample, after: PowerSample) -> Energy:
    """Return the energy between two samples, which should be seconds apart, since a card reports only its watts now."""
    seconds = max(0.0, after.time_s - before.time_s)
    package_known = bool(before.package_j and after.package_j)
    zones = [zone for zone in after.package_j if zone in before.package_j]
    changes = [(after.package_j[zone][0] - before.package_j[zone][0], after.package_j[zone][1]) for zone in zones]
    package_j = sum(change if change >= 0 else change + end for change, end in changes)  # a counter wraps to 0
    if not package_known:
        package_j = CORE_W * max(0.0, after.busy_core_s - before.busy_core_s) + REST_W * seconds
    measured = sum(card["watts"] for card in after.cards if "watts" in card) * seconds
    guessed = sum(CARD_W * card.get("busy_percent", 100) / 100 for card in after.cards if "watts" not in card) * seconds
    estimated = guessed + (0.0 if package_known else package_j) + (measured if seconds > _MAX_GAP_S else 0.0)
    return Energy(package_j + measured + guessed, estimated)


def busy_core_seconds() -> float:
    """Return the processor seconds of all programs since the machine started."""
    times = psutil.cpu_times()  # user: without niced processes
    return float(times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq")))


def own_seconds() -> float:
    """Return the processor seconds of this process and of everything that it started."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ended meanwhile
            total += sum(process.cpu_times()[:4])  # user, system, and those of children that have ended
    return total


def _read_rapl(root: Path) -> dict[str, tuple[float, float]]:
    """Return the counters of whole packages; `intel-rapl:0:1` is a part of one. AMD's zones have the same names."""
    counters = {}
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        value, end = (whole_number(zone / name) for name in ("energy_uj", "max_energy_range_uj"))
        if zone.name.count(":") == 1 and value is not None and end is not None:
            counters[zone.name] = value / 1e6, end / 1e6
    return counters
