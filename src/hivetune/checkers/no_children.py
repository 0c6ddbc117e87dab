"""The seccomp filter under which a program can start threads but no processes: a classic BPF program for bubblewrap.

Looking at a program's children and killing them when they are too many is a race that a fork bomb wins on a busy
machine: one reached thousands of processes between two looks. RLIMIT_NPROC does not hold for root.
"""

import errno
import platform
import struct
from typing import NamedTuple

from hivetune.errors import MachineNotFit

# linux/bpf_common.h, linux/seccomp.h, linux/sched.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; both machines are little-endian
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # numbers of the x32 ABI, which would go around the others
_CLONE3 = 435  # its flags lie in memory that a filter can't read; without it the C library uses clone


class _Calls(NamedTuple):
    """`audit`: the value of linux/audit.h; the others are system call numbers."""

    audit: int
    clone: int
    forks: tuple[int, ...]


_MACHINES = {"x86_64": _Calls(0xC000003E, 56, (57, 58)), "aarch64": _Calls(0xC00000B7, 220, ())}


def no_children(machine: str = platform.machine()) -> bytes:
    """The filter as `bwrap --seccomp` reads it. Raises MachineNotFit for a processor whose calls are not listed."""
    calls = _MACHINES.get(machine)
    if calls is None:
        raise MachineNotFit(
            f"no sandbox for programs is known on {machine}",
            hint=f"it is on {' and '.join(_MACHINES)}; leave python_passes out",
        )
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
    for number in calls.forks:
        program += [(_EQUAL, 0, 1, number), denied]
    program += [
        (_EQUAL, 0, 3, calls.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        denied,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
