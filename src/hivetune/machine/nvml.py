"""NVIDIA cards through the driver's own library (NVML), called directly: no package, no torch, no subprocess."""

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def read_nvidia() -> list[dict[str, Any]]:
    """name, memory_bytes, free_bytes, driver and architecture of each card; empty where there is no driver."""
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
    known = library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
    return {
        "name": _string(library.nvmlDeviceGetName, handle),
        "memory_bytes": memory.total,
        "free_bytes": memory.free,
        "driver": driver,
        "architecture": f"{major.value}.{minor.value}" if known else "",
    }


def _string(function: Any, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(NAME_BYTES)
    if function(*arguments, buffer, NAME_BYTES) != 0:
        return "unknown"
    return buffer.value.decode("utf-8", "replace")
