"""The sandbox of a process that reads untrusted files: Landlock for files and TCP, and limits.

The process can open only the named files. It can start no program, open no TCP connection (from Linux 6.7 on), gain no
privileges, and it leaves no core dump. Landlock needs no privileges itself. On a kernel without Landlock the process
runs without it, and `doctor` reports that. The sandbox applies to the calling thread and to threads and processes that
it starts later, so call `confine` before other threads exist.

Numbers: linux/landlock.h.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _READ_DIR, _REMOVE_FILE, _MAKE_FILE, _MAKE_SOCKET = 1, 2, 4, 8, 1 << 5, 1 << 8, 1 << 9
_READING = _EXECUTE | _READ | _READ_DIR
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
# The number of file rights of each version of Landlock. Version 4 added TCP, 6 signals and abstract sockets.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NETWORK_VERSION, _SCOPES_VERSION = 4, 6
_BIND_AND_CONNECT = _SIGNALS_AND_ABSTRACT = 3

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/opt", "/nix", "/snap", "/proc", "/sys", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/shm")


def landlock_version() -> int:
    """Return the version of Landlock that this kernel offers, 0 for none."""
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))))


def protection(version: int) -> str:
    """Return, in words, the protection that a version of Landlock gives."""
    if not version:
        return "none: this kernel has no Landlock"
    network = "files and network" if version >= _NETWORK_VERSION else "files, but not the network (before Linux 6.7)"
    return f"{network} by Landlock {version}"


def confine(
    readable: Iterable[str | Path],
    writable: Iterable[str | Path] = (),
    *,
    may_execute: bool = False,
    read_all: bool = False,
    data_bytes: int | None = None,
) -> int:
    """Confine this process for the rest of its life, and return the version of Landlock that is in effect. Paths that
    do not exist are ignored.

    `readable`: files, and folders whose contents may be read; with `may_execute` they may also be run as programs.
    `writable`: folders in which files and sockets may be created. `read_all`: limit only writing. `data_bytes`: the
    limit of the process's memory.
    """
    if sys.platform != "linux":
        return 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if data_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    version = landlock_version()
    if not version:
        return 0
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    handled = rights & ~((_READ | _READ_DIR) | (_EXECUTE if may_execute else 0)) if read_all else rights
    attributes = struct.pack("<QQQ", handled, _BIND_AND_CONNECT, _SIGNALS_AND_ABSTRACT)
    size = 8 if version < _NETWORK_VERSION else 16 if version < _SCOPES_VERSION else 24
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    if rules < 0:
        return 0
    reading = _READING if may_execute else _READING & ~_EXECUTE
    making = _READ | _READ_DIR | _WRITE | _REMOVE_FILE | _MAKE_FILE | _MAKE_SOCKET | _TRUNCATE | _IOCTL
    try:
        for paths, allowed in ((readable, reading), (writable, making)):
            for path in paths:
                _allow(libc, rules, path, allowed & handled)
        return version if libc.syscall(_RESTRICT_SELF, rules, ctypes.c_uint32(0)) == 0 else 0
    finally:
        os.close(rules)


def die_with_parent() -> None:
    """Let the kernel kill this process, even while it is stopped, when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _allow(libc: ctypes.CDLL, rules: int, path: str | Path, allowed: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # missing or not readable, so it needs no rule
        return
    try:
        if not os.path.isdir(path):
            allowed &= _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL  # the rights that files have
        rule = struct.pack("<Qi", allowed, descriptor)
        if allowed:
            libc.syscall(_ADD_RULE, rules, ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


# llama.cpp reads about two hundred environment variables. `LLAMA_ARG_HOST` opens a port, `LLAMA_ARG_RPC` sends the
# model to another machine (CVE-2024-42477 to -42479), `LLAMA_ARG_SLEEP_IDLE_SECONDS` frees memory in use
# (CVE-2026-43631), `GGML_BACKEND_PATH` and `LD_PRELOAD` load code. So a child that works for strangers gets only the
# variables named here.
NAMES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("XDG_DATA_HOME", "XDG_CACHE_HOME"),
)
# Threads, Python, Hivetune, and the drivers of graphics cards.
PREFIXES = (
    *("LC_", "OMP_", "GOMP_", "KMP_", "PYTHON", "HIVETUNE_", "COVERAGE_"),
    *("CUDA_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "ROCM_", "AMD_", "GPU_", "VK_", "ONEAPI_", "SYCL_", "ZE_"),
)


def named_environment(environment: Mapping[str, str] = os.environ, **more: str) -> dict[str, str]:
    """Return the variables of `environment` that are in NAMES or PREFIXES, and `more`."""
    chosen = {name: value for name, value in environment.items() if name in NAMES or name.startswith(PREFIXES)}
    return {**chosen, **more}
