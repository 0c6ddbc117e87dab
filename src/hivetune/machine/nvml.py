"""NVIDIA's cards through their driver's library (NVML), called directly (docs/decisions/0102).

API: https://docs.nvidia.com/deploy/nvml-api/. Values that a card does not report are missing.
"""

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96
TEMPERATURE_GPU = 0  # nvmlTemperatureSensors_t
# The bits of nvmlClocksEventReasons that heat and power set.
HEAT_OR_POWER = 0x08 | 0x20 | 0x40 | 0x80


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Busy(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


def read_nvidia() -> list[dict[str, Any]]:
    """Return each card: name, driver, architecture ("9.0" or empty), memory_bytes, free_bytes and used_bytes.

    Cards that report them also have temperature_c, watts, busy_percent and hot. Without a driver there are no cards.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        driver = _string(library.nvmlSystemGetDriverVersion)
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [card for i in range(count.value) if (card := _read_card(library, i, driver))]
    finally:
        library.nvmlShutdown()


def _read_card(library: ctypes.CDLL, index: int, driver: str) -> dict[str, Any] | None:
    handle = ctypes.c_void_p()
    memory = _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    has_capability = library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
    return {
        "name": _string(library.nvmlDeviceGetName, handle),
        "driver": driver,
        "architecture": f"{major.value}.{minor.value}" if has_capability else "",
        "memory_bytes": memory.total,
        "free_bytes": memory.free,
        "used_bytes": memory.used,
        **_read_sensors(library, handle),
    }


def _read_sensors(library: ctypes.CDLL, handle: ctypes.c_void_p) -> dict[str, Any]:
    sensors: dict[str, Any] = {}
    number = ctypes.c_uint()
    if library.nvmlDeviceGetTemperature(handle, TEMPERATURE_GPU, ctypes.byref(number)) == 0:
        sensors["temperature_c"] = float(number.value)
    if library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(number)) == 0:
        sensors["watts"] = number.value / 1000
    busy = _Busy()
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy)) == 0:
        sensors["busy_percent"] = busy.gpu
    reasons = ctypes.c_ulonglong()
    if library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons)) == 0:
        sensors["hot"] = bool(reasons.value & HEAT_OR_POWER)
    return sensors


def _string(function: Any, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(NAME_BYTES)
    if function(*arguments, buffer, NAME_BYTES) != 0:
        return "unknown"
    return buffer.value.decode("utf-8", "replace")
