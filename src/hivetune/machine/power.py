"""How much energy the machine takes: cards by hwmon and NVML, the processor by RAPL; what no sensor tells is estimated.

Only processor and cards are counted; a machine takes 20 to 60 W more for its board, memory, disks and losses.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hivetune.machine.telemetry import read_cards

KWH = 3.6e6  # joules
# Estimates where nothing measures, from the package power of desktop and server processors under full load divided by
# their threads (4 to 12 W a thread) and at rest (10 to 30 W), and from the board power of cards (75 to 300 W).
CORE_W, REST_W, CARD_W = 8.0, 20.0, 200.0
_SELDOM_S = 300.0  # between two looks; after more, what was taken between them is unknown and estimated by the last


@dataclass(frozen=True)
class Energy:
    """Joules since a meter began. `estimated_j`: the part of `joules` that no sensor told."""

    joules: float = 0.0
    estimated_j: float = 0.0

    @property
    def kwh(self) -> float:
        return self.joules / KWH

    @property
    def measured(self) -> bool:
        return self.estimated_j == 0

    def __add__(self, other: "Energy") -> "Energy":
        return Energy(self.joules + other.joules, self.estimated_j + other.estimated_j)


@dataclass(frozen=True)
class PowerSample:
    """`time_s`: of a clock that stands still while the machine sleeps. `package_j`: RAPL's counters by zone, empty
    where they can't be read (they are root's); `busy_core_s`: of all cores since the start of the machine."""

    time_s: float
    busy_core_s: float
    package_j: dict[str, tuple[float, float]] = field(default_factory=dict)  # value, where it begins again at 0
    cards: tuple[dict[str, Any], ...] = ()


def sample_power(time_s: float, root: Path = Path("/")) -> PowerSample:
    """What the counters say now. `root` replaces `/` in tests."""
    return PowerSample(time_s, busy_core_seconds(), _read_rapl(root), tuple(read_cards(root)))


def energy_between(before: PowerSample, after: PowerSample) -> Energy:
    """What was taken from one sample to the next, which should be seconds apart: a card's watts are those of now."""
    seconds = max(0.0, after.time_s - before.time_s)
    package_j, package_known = _package_energy(before, after), bool(before.package_j and after.package_j)
    if not package_known:
        busy = max(0.0, after.busy_core_s - before.busy_core_s)
        package_j = CORE_W * busy + REST_W * seconds
    told = sum(card["watts"] for card in after.cards if "watts" in card) * seconds
    guessed = sum(CARD_W * card.get("busy_percent", 100) / 100 for card in after.cards if "watts" not in card) * seconds
    estimated = guessed + (0.0 if package_known else package_j) + (told if seconds > _SELDOM_S else 0.0)
    return Energy(package_j + told + guessed, estimated)


def busy_core_seconds() -> float:
    """Seconds of processor time that all programs together have taken since the machine started."""
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
    """Whole packages only: `intel-rapl:0:1` is a part of `intel-rapl:0`. AMD's processors have the same names."""
    found = {}
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        try:
            value, end = (int((zone / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
        except (OSError, ValueError):
            continue
        found[zone.name] = value / 1e6, end / 1e6
    return found
