"""NVIDIA's cards by `nvidia-smi`, which comes with their driver. Values that a card does not report are missing.

Fields: `nvidia-smi --help-query-gpu`. Standard library alone, since set-up reads it before anything is installed.
"""

import csv
import re
import subprocess
from typing import Any

PROGRAM = "nvidia-smi"
TIMEOUT_S = 20.0  # a driver that is loaded at its first use takes some seconds
_UNKNOWN = re.compile(r'Field "([\w.]+)" is not a valid field')
_SENSORS = {"temperature_c": "temperature.gpu", "watts": "power.draw", "busy_percent": "utilization.gpu"}
_HOT = [
    f"clocks_throttle_reasons.{reason}"
    for reason in ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown", "sw_power_cap")
]
_FIELDS = ["name", "driver_version", "compute_cap", "memory.total", "memory.used", "memory.free"]


def read_nvidia(program: str = PROGRAM) -> list[dict[str, Any]]:
    """Return each card: name, driver, architecture ("9.0" or empty), memory_bytes, free_bytes and used_bytes.

    Cards that report them also have temperature_c, watts, busy_percent and hot: heat or power limits their clocks.
    Without a driver that answers there are no cards.
    """
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
    return [_card(dict(zip(fields, row, strict=True))) for row in rows if len(row) == len(fields)]


def _card(told: dict[str, str]) -> dict[str, Any]:
    numbers = {name: float(text) for name, text in told.items() if text.replace(".", "", 1).isdecimal()}
    card: dict[str, Any] = {
        "name": told["name"],
        "driver": told["driver_version"],
        "architecture": told["compute_cap"] if "compute_cap" in numbers else "",
    }
    for part, field in {"memory": "total", "free": "free", "used": "used"}.items():
        card[f"{part}_bytes"] = round(numbers.get(f"memory.{field}", 0.0)) << 20  # it tells MiB
    card |= {name: numbers[field] for name, field in _SENSORS.items() if field in numbers}
    return card | {"hot": any(told.get(reason) == "Active" for reason in _HOT)}
