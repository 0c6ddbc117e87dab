"""Graphics cards as their drivers show them now: NVIDIA's by `nvidia-smi`, AMD's by sysfs, which needs no ROCm.

Each card has index (among its maker's, in torch's order), name, driver, architecture ("9.0", "gfx1201" or empty),
memory_bytes, used_bytes and free_bytes, and where its driver tells them temperature_c, watts, busy_percent and hot:
heat or power limit its clocks, or are about to.

Standard library alone, since set-up reads it before anything is installed. `root` replaces `/` in tests.
"""

import csv
import re
import subprocess
from pathlib import Path
from typing import Any

from hivetune.base.kernel import kernel_release, kfd_architectures, memory_sizes, system_text, whole_number
from hivetune.machine.facts import chip_has

PROGRAM = "nvidia-smi"
TIMEOUT_S = 20.0  # a driver that is loaded at its first use takes some seconds
_ROOT = Path("/")
# The fields: `nvidia-smi --help-query-gpu`.
_FIELDS = ["name", "driver_version", "compute_cap", "memory.total", "memory.used", "memory.free"]
_SENSORS = {"temperature_c": "temperature.gpu", "watts": "power.draw", "busy_percent": "utilization.gpu"}
_HOT = [
    f"clocks_throttle_reasons.{reason}"
    for reason in ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown", "sw_power_cap")
]
_UNKNOWN = re.compile(r'Field "([\w.]+)" is not a valid field')

AMD_VENDOR = "0x1002"
PAGE_BYTES = 4096  # on the processors with unified memory
# A card counts as hot from this many degrees below its own limit.
NEAR_LIMIT_C = 3.0


def read_nvidia(program: str = PROGRAM) -> list[dict[str, Any]]:
    """Return NVIDIA's cards; an empty list without a driver that answers."""
    fields = [*_FIELDS, *_SENSORS.values(), *_HOT]
    while True:
        command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            answered = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        unknown = _UNKNOWN.search(answered.stdout + answered.stderr)
        if unknown is None or unknown[1] not in fields:
            break
        fields.remove(unknown[1])  # another version of the driver has another name for it, or none
    rows = csv.reader(answered.stdout.splitlines() if answered.returncode == 0 else [], skipinitialspace=True)
    whole = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
    return [{"index": index, **_nvidia_card(told)} for index, told in enumerate(whole)]


def _nvidia_card(told: dict[str, str]) -> dict[str, Any]:
    numbers = {name: float(text) for name, text in told.items() if text.replace(".", "", 1).isdecimal()}
    total, used, free = (round(numbers.get(f"memory.{part}", 0.0)) << 20 for part in ("total", "used", "free"))  # MiB
    if not total:  # it uses the machine's memory, and reports none of its own (DGX Spark)
        sizes = memory_sizes()
        total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    return {
        "name": told["name"],
        "driver": told["driver_version"],
        "architecture": told["compute_cap"] if "compute_cap" in numbers else "",
        "memory_bytes": total,
        "used_bytes": used,
        "free_bytes": free,
        **{name: numbers[field] for name, field in _SENSORS.items() if field in numbers},
        "hot": any(told.get(reason) == "Active" for reason in _HOT),
    }


def read_amd(root: Path = _ROOT) -> list[dict[str, Any]]:
    """Return AMD's cards in torch's order. `slot` is the PCI address of each, as its driver writes it."""
    architectures = kfd_architectures(root)
    order = list(architectures)
    driver = system_text(root / "sys/module/amdgpu/version") or f"kernel {kernel_release(root)}"
    cards: list[dict[str, Any]] = []
    devices = [path for path in (root / "sys/class/drm").glob("card*/device") if path.parent.name[4:].isdecimal()]
    for device in sorted(devices, key=lambda path: int(path.parent.name[4:])):
        total, used = (whole_number(device / f"mem_info_vram_{part}") or 0 for part in ("total", "used"))
        if system_text(device / "vendor") != AMD_VENDOR or not total:
            continue
        slot = device.resolve().name
        architecture = architectures.get(slot, "")
        shared = _shared_memory(root, device, architecture)
        if shared > total:
            total, used = shared, max(0, shared - memory_sizes(root).get("MemAvailable", shared))
        card = {
            "index": order.index(slot) if slot in order else len(cards),
            "slot": slot,
            # Cards for workstations tell their name. Others are known by chip and memory (machine/cards.py).
            "name": system_text(device / "product_name")
            or f"AMD GPU {system_text(device / 'device').removeprefix('0x')}",
            "driver": driver,
            "architecture": architecture,
            "memory_bytes": total,
            "used_bytes": used,
            "free_bytes": total - used,
        }
        cards.append(card | _amd_sensors(device))
    return sorted(cards, key=lambda card: int(card["index"]))


def _shared_memory(root: Path, device: Path, architecture: str) -> int:
    """Return the memory that a chip with unified memory may use, 0 for other cards.

    It is the driver's table (GTT), limited by the kernel's pages_limit (ttm), by default half of the memory. The memory
    that the firmware reserves can be 0.5 GB of 128 (ROCm/legacy-rocm-build#5595, unslothai/unsloth#7960).
    """
    if not chip_has(architecture, "unified"):
        return 0
    table = whole_number(device / "mem_info_gtt_total") or 0
    pages = whole_number(root / "sys/module/ttm/parameters/pages_limit")
    return min(table, pages * PAGE_BYTES) if pages else table


def _amd_sensors(device: Path) -> dict[str, Any]:
    told: dict[str, Any] = {"busy_percent": whole_number(device / "gpu_busy_percent")}
    for sensors in sorted((device / "hwmon").glob("hwmon*")):
        microwatts = whole_number(sensors / "power1_average") or whole_number(sensors / "power1_input")
        told["watts"] = None if microwatts is None else microwatts / 1e6
        for number in (1, 2):  # the junction, 2, decides throttling; older cards only have the edge
            degrees, limit = (whole_number(sensors / f"temp{number}_{name}") for name in ("input", "crit"))
            if degrees is not None:
                told["temperature_c"] = degrees / 1000
                told["hot"] = limit is not None and degrees >= limit - NEAR_LIMIT_C * 1000
    return {name: value for name, value in told.items() if value is not None}
