"""The energy that the machine uses: cards by hwmon and NVML, the processor by RAPL, and estimates without a sensor.

Only processor and cards count; board, memory, disks and losses take 20 to 60 W more.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hivetune.machine.telemetry import read_cards

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
    package_j, package_known = _package_energy(before, after), bool(before.package_j and after.package_j)
    if not package_known:
        package_j = CORE_W * max(0.0, after.busy_core_s - before.busy_core_s) + REST_W * seconds
    measured = sum(card["watts"] for card in after.cards if "watts" in card) * seconds
    guessed = sum(CARD_W * card.get("busy_percent", 100) / 100 for card in after.cards if "watts" not in card) * seconds
    estimated = guessed + (0.0 if package_known else package_j) + (measured if seconds > _MAX_GAP_S else 0.0)
    return Energy(package_j + measured + guessed, estimated)


def busy_core_seconds() -> float:
    """Return the processor seconds of all programs since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))


def _package_energy(before: PowerSample, after: PowerSample) -> float:
    total = 0.0
    for zone, (value, end) in after.package_j.items():
        if zone in before.package_j:
            change = value - before.package_j[zone][0]
            total += change if change >= 0 else change + end
    return total


def _read_rapl(root: Path) -> dict[str, tuple[float, float]]:
    """Return the counters of whole packages; `intel-rapl:0:1` is a part of one. AMD's zones have the same names."""
    counters = {}
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        try:
            value, end = (int((zone / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
        except (OSError, ValueError):
            continue
        counters[zone.name] = value / 1e6, end / 1e6
    return counters
