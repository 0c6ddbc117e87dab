"""The sandbox of a process that reads untrusted files: Landlock for files, seccomp for system calls, and limits.

The process has no network, starts no processes, gains no privileges, leaves no core dump, and opens only named files.
Landlock and seccomp need no rights. A kernel without one of them runs without it, and `doctor` reports that. They hold
for the calling thread and what it starts later, so call `confine` before other threads exist.

Numbers: linux/landlock.h, linux/seccomp.h, linux/bpf_common.h, linux/audit.h and the tables of system calls.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _READ_DIR, _REMOVE_FILE, _MAKE_FILE, _MAKE_SOCKET = 1, 2, 4, 8, 1 << 5, 1 << 8, 1 << 9
_READING = _EXECUTE | _READ | _READ_DIR
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
# The number of file rights of each version of Landlock. Version 4 added TCP, 6 signals and abstract sockets.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_BIND_AND_CONNECT = _SIGNALS_AND_ABSTRACT = 3

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; both machines are little-endian
_AF_UNIX, _CLONE_THREAD = 1, 0x00010000
_X32 = 0x40000000  # numbers of the x32 ABI, which would bypass the others
_CLONE3 = 435  # a filter can't read its flags; without it the C library uses clone


class _Calls(NamedTuple):
    """The system call numbers of a processor. `denied`: forks, tracing, namespaces, mounts, modules, keys, io_uring."""

    audit: int
    clone: int
    socket: int
    execute: tuple[int, ...]
    denied: tuple[int, ...]


_MACHINES = {
    "x86_64": _Calls(
        *(0xC000003E, 56, 41, (59, 322)),
        (57, 58, 101, 155, 161, 165, 166, 175, 176, 246, 248, 249, 250, 272, 298, 308, 310, 311, 313, 321, 323, 425),
    ),
    "aarch64": _Calls(
        *(0xC00000B7, 220, 198, (221, 281)),
        (39, 40, 41, 51, 97, 104, 105, 106, 117, 217, 218, 219, 241, 268, 270, 271, 273, 280, 282, 425),
    ),
}
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/opt", "/nix", "/snap", "/proc", "/sys", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/shm")


@dataclass(frozen=True)
class Protection:
    """The protection that holds: the version of Landlock (0: none), and whether system calls are filtered."""

    landlock: int
    seccomp: bool

    @property
    def words(self) -> str:
        """The protection in words."""
        files = f"files by Landlock {self.landlock}" if self.landlock else "files not (no Landlock)"
        return f"{files}, network and processes {'by seccomp' if self.seccomp else 'not (no seccomp)'}"


def available() -> Protection:
    """Return the protection that this kernel offers, without applying it."""
    machine = platform.machine() in _MACHINES and sys.platform == "linux"
    return Protection(_landlock_version(), machine and Path("/proc/sys/kernel/seccomp").is_dir())


def confine(
    readable: Iterable[str | Path],
    writable: Iterable[str | Path] = (),
    *,
    may_execute: bool = False,
    read_all: bool = False,
    data_bytes: int | None = None,
) -> Protection:
    """Confine this process for good, and return the protection that holds. Missing paths are ignored.

    `readable` has files, and folders whose contents may be read and executed; `writable` has folders where files and
    sockets may be made. With `read_all` only writing is limited. With `may_execute` another program may replace this
    one. `data_bytes` limits its memory.
    """
    if sys.platform != "linux":
        return Protection(0, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if data_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    files = _limit_files(libc, readable, writable, read_all)
    program, filtered = call_filter(may_execute=may_execute), False
    if program is not None:
        buffer = ctypes.create_string_buffer(program, len(program))
        head = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
        filtered = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0) == 0
    return Protection(files, filtered)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; it reaches even one that stands still."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _landlock_version() -> int:
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))))


def _limit_files(
    libc: ctypes.CDLL, readable: Iterable[str | Path], writable: Iterable[str | Path], read_all: bool
) -> int:
    version = _landlock_version()
    if not version:
        return 0
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    handled = rights & ~_READING if read_all else rights
    attributes = struct.pack("<QQQ", handled, _BIND_AND_CONNECT, _SIGNALS_AND_ABSTRACT)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    if rules < 0:
        return 0
    making = _READING | _WRITE | _REMOVE_FILE | _MAKE_FILE | _MAKE_SOCKET | _TRUNCATE | _IOCTL
    try:
        for paths, allowed in ((readable, _READING), (writable, making)):
            for path in paths:
                _allow(libc, rules, path, allowed & handled)
        return version if libc.syscall(_RESTRICT_SELF, rules, ctypes.c_uint32(0)) == 0 else 0
    finally:
        os.close(rules)


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


def call_filter(*, may_execute: bool, any_socket: bool = False, machine: str = platform.machine()) -> bytes | None:
    """Return a classic BPF program that allows threads but no processes, and Unix sockets (with `any_socket` all).

    Return None for a processor whose calls are not listed. A filter is needed where counting processes is not enough:
    a fork bomb reached thousands of them between two looks, and RLIMIT_NPROC does not hold for root.
    """
    calls = _MACHINES.get(machine)
    if calls is None:
        return None
    denied = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, calls.audit),
        denied,
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        denied,
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for number in (*calls.denied, *(() if may_execute else calls.execute)):
        program += [(_EQUAL, 0, 1, number), denied]
    if not any_socket:
        program += [
            (_EQUAL, 0, 4, calls.socket),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_EQUAL, 1, 0, _AF_UNIX),
            (_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT),
            (_RETURN, 0, 0, _ALLOW),
        ]
    program += [
        (_EQUAL, 0, 3, calls.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        denied,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


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
