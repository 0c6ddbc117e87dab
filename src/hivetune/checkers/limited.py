"""Running a program with limits: of time and memory always, and of everything else in a sandbox.

The sandbox is bubblewrap: namespaces of its own for files, processes, users and network; of the machine's files only
the programs and libraries, read-only; an empty folder in memory to write to; no process can be started.
"""

import contextlib
import errno
import os
import platform
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from hivetune.errors import MachineNotFit

# The seccomp filter under which a program can start threads but no processes: a classic BPF program for bubblewrap.
#
# Looking at a program's children and killing them when they are too many is a race that a fork bomb wins on a busy
# machine: one reached thousands of processes between two looks. RLIMIT_NPROC does not hold for root.

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
    """Return the filter as `bwrap --seccomp` reads it. Raises MachineNotFit for a processor whose calls are not
    listed.
    """
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


MEMORY_BYTES = 1 << 30
FILE_BYTES = 16 << 20
OUTPUT_BYTES = 1 << 20
MAX_THREADS = 64  # in all processes together
_LOOK_S = 0.1


class TooSlow(Exception):
    """It took longer than it may."""


def run_sandboxed(command: Sequence[str], text: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run `run_limited` inside bubblewrap, where `command` can start no process. Raises TooSlow, MachineNotFit."""
    with tempfile.TemporaryFile() as rules:
        rules.write(no_children())
        rules.seek(0)
        box = _sandbox(rules.fileno())
        return run_limited([*box, "--", *command], text, timeout_s, pass_fds=(rules.fileno(),))


def run_limited(
    command: Sequence[str],
    text: str,
    timeout_s: float,
    memory_bytes: int = MEMORY_BYTES,
    *,
    pass_fds: Sequence[int] = (),
) -> "subprocess.CompletedProcess[str]":
    """Run `command` with `text` on its standard input; both outputs are cut at `OUTPUT_BYTES`. Raises TooSlow.

    Each process may use `memory_bytes` and write files of `FILE_BYTES`; more than `MAX_THREADS`, or more memory in
    all of them together, ends them.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode("utf-8", "surrogatepass"))
        given.seek(0)
        process = subprocess.Popen(
            list(command),
            stdin=given,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=lambda: _limit(memory_bytes),
            pass_fds=pass_fds,
        )
        try:
            code = _watch(process, timeout_s, memory_bytes)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(OUTPUT_BYTES).decode("utf-8", "replace"))
    return subprocess.CompletedProcess(list(command), code, *texts)


def _watch(process: "subprocess.Popen[bytes]", timeout_s: float, memory_bytes: int) -> int:
    """Return its exit code, -SIGKILL when it and its children grew too many or too large. Raises TooSlow."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, _LOOK_S))
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
            if _num_threads(family) > MAX_THREADS or _memory_bytes(family) > memory_bytes:
                for child in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                return -signal.SIGKILL
    raise TooSlow


def _num_threads(family: Sequence[psutil.Process]) -> int:
    total = 0
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += child.num_threads()
    return total


def _memory_bytes(family: Sequence[psutil.Process]) -> int:
    total = 0
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += child.memory_info().rss
    return total


def _sandbox(rules: int) -> list[str]:
    """Return the beginning of a command inside bubblewrap.

    `rules`: the descriptor of its seccomp filter. Raises MachineNotFit without bubblewrap.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise MachineNotFit("running an answer's code needs bubblewrap", hint="apt install bubblewrap")
    box = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    box += ["--seccomp", str(rules)]
    for name in ("/usr", "/lib", "/lib64", "/bin"):
        path = Path(name)
        if path.is_symlink():
            box += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            box += ["--ro-bind", name, name]
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        box += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    box += ["--proc", "/proc", "--dev", "/dev", "--size", str(FILE_BYTES), "--tmpfs", "/work", "--chdir", "/work"]
    return box


def base_python() -> str:
    """Return the interpreter outside any virtual environment, which the sandbox can see."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(Path(sys.base_prefix) / "bin" / name)


def _limit(memory_bytes: int) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
