"""Run a program with limits of time and memory, and, where it is asked for, in a sandbox without network and files."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from hivetune.errors import MachineNotFit

MEMORY_BYTES = 1 << 30
FILE_BYTES = 16 << 20
OUTPUT_BYTES = 1 << 20
MAX_THREADS = 64  # in all processes together
_LOOK_S = 0.1


class TooSlow(Exception):
    """The program exceeded its time limit."""


def run_sandboxed(command: Sequence[str], text: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run `run_limited` inside bubblewrap. Raises TooSlow, MachineNotFit without bubblewrap."""
    # Within the sandbox's own user namespace, the limit counts its processes alone (Linux 5.14). It never holds for
    # root, whose fork bomb reached 2,743 processes before it was seen: then nobody (65534) runs the program.
    as_nobody = ["/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    limit = [*(as_nobody if os.geteuid() == 0 else []), "/usr/bin/prlimit", f"--nproc={MAX_THREADS}"]
    return run_limited([*_sandbox(), "--", *limit, *command], text, timeout_s)


def run_limited(
    command: Sequence[str], text: str, timeout_s: float, memory_bytes: int = MEMORY_BYTES
) -> "subprocess.CompletedProcess[str]":
    """Run `command` with `text` on its standard input; both outputs are cut at `OUTPUT_BYTES`. Raises TooSlow.

    Each process may use `memory_bytes` and write files of `FILE_BYTES`. All are ended if together they have more than
    `MAX_THREADS` threads or use more memory.
    """
    limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_CORE: 0}

    def limit() -> None:
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))

    # Files and no pipes: a program that prints for ever meets the limit of a file, and nobody has to read beside it.
    with contextlib.ExitStack() as stack:
        stdin, *outputs = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        stdin.write(text.encode("utf-8", "surrogatepass"))
        stdin.seek(0)
        process = subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=outputs[0],
            stderr=outputs[1],
            start_new_session=True,
            preexec_fn=limit,
        )
        try:
            code = _watch(process, timeout_s, memory_bytes)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in outputs:
            file.seek(0)
            texts.append(file.read(OUTPUT_BYTES).decode("utf-8", "replace"))
    return subprocess.CompletedProcess(list(command), code, *texts)


def _watch(process: "subprocess.Popen[bytes]", timeout_s: float, memory_bytes: int) -> int:
    """Return the process's exit code; -SIGKILL if it and its children had too many threads or used too much memory.
    Raises TooSlow.
    """
    deadline = time.monotonic() + timeout_s
    while (remaining := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(remaining, _LOOK_S))
        family, num_threads, used_bytes = [], 0, 0
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                num_threads += child.num_threads()
                used_bytes += child.memory_info().rss
        if num_threads > MAX_THREADS or used_bytes > memory_bytes:
            # One by one, since a child may have left the session that is killed at the end.
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            return -signal.SIGKILL
    raise TooSlow


def _sandbox() -> list[str]:
    """Return the bubblewrap command line, to be followed by the command to run. Raises MachineNotFit without
    bubblewrap.
    """
    # Namespaces of its own for files, processes, users and network; of the machine's files only the programs and
    # libraries, read-only; an empty folder in memory to write to.
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise MachineNotFit("running an answer's code needs bubblewrap", hint="apt install bubblewrap")
    box = [bwrap, "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # a user namespace of its own would hold no second user
        box += [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")]
        box += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        box += ["--unshare-all"]
    for name in ("/usr", "/lib", "/lib64", "/bin"):
        path = Path(name)
        if path.is_symlink():
            box += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            box += ["--ro-bind", name, name]
    base = Path(sys.base_prefix)
    if not base.is_relative_to("/usr"):
        for parent in reversed(base.parents[:-1]):  # which may be closed to others, as /root is
            box += ["--perms", "0755", "--dir", str(parent)]
        box += ["--ro-bind", str(base), str(base)]
    box += ["--proc", "/proc", "--dev", "/dev", "--size", str(FILE_BYTES), "--perms", "1777", "--tmpfs", "/work"]
    return [*box, "--chdir", "/work"]


def base_python() -> str:
    """Return the interpreter outside any virtual environment, which can be read in the sandbox."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
