"""Samples of memory, load and cards during a run, for post-mortems.

They are from psutil, AMD's sysfs (hwmon) and nvidia-smi. Missing sensors are left out. `root`
replaces `/` in tests.
"""

import os
from collections.abc import Sequence
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
