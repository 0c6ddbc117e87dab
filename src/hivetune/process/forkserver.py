"""A fork server: a process that imports torch once, and forks a child for each task of a command with many.

An import takes 1.3 s of processor time, with transformers 3.7 s, and a task on a small model may take 0.3 s. A fork is
what `python -m hivetune.process MODULE TASK.json` is, a process of its own with its session, guards, heartbeat, log and
limits: its fault, kill or full memory ends no other one. A fork is safe only in a process with one thread. So the
server computes nothing, and forks nothing once it has two. It dies with the process that started it, as its forks do.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NoReturn

import psutil

from hivetune.process import launch
from hivetune.process.child import guard
from hivetune.process.still import join_standstill

# `python -m hivetune.process fork SOCKET MODULE...` is a fork server.
FORK = "fork"
# The server keeps the file numbers below free, since files have the same number in a fork as in its parent. A parent
# with more open files starts a new process. Some systems allow a process 256.
RESERVED_HANDLES = 200
# It imports torch and the engine: all but 0.03 s of the 1.7 s of imports of a probe or training worker.
ENGINE = "hivetune.train.worker.exchange.exchange"
# The server takes 240 MB with torch, and the parent needs room to read rows.
MIN_AVAILABLE_BYTES = 1 << 30
MESSAGE_BYTES = 65_536
# The first fork waits for imports, about 30 s from a cold disk. Later the child is started without the server.
FORK_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
# Read when they are used, so a fork may have others than its server. Libraries read the rest when they are loaded.
_READ_LATE = ("HIVETUNE_HOME", "HIVETUNE_KERNELS", "TRITON_CACHE_DIR")
# A server without forks ends then, so that a loop that waits for rows keeps no 240 MB. The next task starts another.
IDLE_S = 60.0
_MAX_NAP_S = 0.05
_BEGIN = b"b"


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Fork the children that this thread launches within the block from one server, started for the first of them."""
    if launch.OPEN.server is not None or sys.platform != "linux":  # Apple's libraries can't be used after a fork
        yield
        return
    launch.OPEN.server = server = _Server()
    try:
        yield
    finally:
        launch.OPEN.server = None
        server.close()


def start_ahead() -> None:
    """Start the server of an open `forking` now: it imports torch and the engine while this process reads rows."""
    if launch.OPEN.server is not None:
        launch.OPEN.server.start(launch.child_environment({}), ENGINE)


class _Fork:
    """A fork as its task's parent sees it: as `subprocess.Popen`, though it is the server's child."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end, self._lock = end, threading.Lock()
        end.setblocking(False)

    def poll(self) -> int | None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self.returncode is None:
                try:
                    word = self._end.recv(MESSAGE_BYTES)
                except ConnectionResetError:
                    word = b""
                self.returncode = int(word or -signal.SIGKILL)  # without a word the server has died
                self._end.close()  # until now the server kept the number from other processes
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline, nap_s = time.monotonic() + (timeout or 0.0), 0.001
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _MAX_NAP_S)
        return code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class _Server:
    """The server as its parent sees it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._usable, self._forked = True, False

    def start(self, variables: Mapping[str, str], *imported: str) -> None:
        """Start the server, which imports these modules, unless one runs or memory is short."""
        if self._runs() or psutil.virtual_memory().available < MIN_AVAILABLE_BYTES:
            return
        # What its imports say is said again, in a log, when one of them fails in a fork.
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            arguments = [FORK, str(number), *imported]
            self._process = launch.start_python(arguments, subprocess.DEVNULL, [number], variables)
        self._variables, self._forked = _read_early(variables), False

    def fork(
        self, module: str, task_file: str, log: IO[bytes], handles: Sequence[int], environment: Mapping[str, str | None]
    ) -> _Fork | None:
        """Return a fork for a task, or None: after a failure, where memory is short, or for another environment, since
        libraries read variables when they are loaded."""
        variables = launch.child_environment(environment)
        if not self._usable or max(handles) >= RESERVED_HANDLES or not self._serves(variables):
            return None
        message = json.dumps(
            {
                "module": module,
                "task": task_file,
                "handles": [1, 2, *handles],
                "folder": launch.start_folder(),
                "variables": {name: variables.get(name) for name in _READ_LATE},
            }
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(FORK_TIMEOUT_S)
        try:
            with theirs:
                files = [theirs.fileno(), log.fileno(), log.fileno(), *handles]
                socket.send_fds(self._requests, [message.encode()], files)
            if pid := int(ours.recv(MESSAGE_BYTES) or 0):
                ours.send(_BEGIN)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pid = 0
        if not pid:
            ours.close()  # so a fork that comes late ends: never two children for one task
            self._usable = False
            return None
        self._forked = True
        process = _Fork(pid, ours)
        join_standstill(process)
        return process

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _serves(self, variables: Mapping[str, str]) -> bool:
        """Return whether a server with these variables runs. One is started where none runs, or an unused other one."""
        early = _read_early(variables)
        if self._runs() and (self._forked or early == self._variables):
            return early == self._variables
        self.close()
        self.start(variables)
        return self._process is not None

    def close(self) -> None:
        """End the server, and with it what it has forked."""
        if self._process is None:
            return
        self._requests.close()
        if not self._forked:
            self._process.kill()  # it may still import
        try:
            self._process.wait(END_TIMEOUT_S)  # its own end counts its forks' processor time as this process's
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def serve_forks(handle: int, imported: Sequence[str] = ()) -> tuple[str, str]:
    """Fork for each request at the socket `handle`; return module and task file in each fork.

    A task's module is imported before its fork, so that the next one has it too. End when the other end closes, or
    after IDLE_S.
    """
    server, reserved = os.getpid(), _reserve_handles()
    os.close(os.pidfd_open(server))  # a kernel before Linux 5.3 ends the server here
    requests = socket.socket(fileno=handle)
    for module in imported:
        _import(module)
    running: dict[int, tuple[int, socket.socket]] = {}  # handle of a process: its number, and where its end is told
    ended: dict[int, tuple[int, socket.socket]] = {}  # handle of that socket: the same
    watch = select.poll()
    watch.register(requests, select.POLLIN)
    while True:
        events = watch.poll(None if running or ended else IDLE_S * 1000)
        if not events:
            os._exit(0)
        for number, _ in events:
            if number in running:
                pid, told = running.pop(number)
                _tell_end(pid, told)
                ended[told.fileno()] = pid, told
                watch.unregister(number)
                watch.register(told, 0)
                os.close(number)
            elif number in ended:  # the parent has closed its end, so it signals this number no more
                pid, told = ended.pop(number)
                watch.unregister(number)
                told.close()
                os.waitpid(pid, 0)
            else:
                sent, files, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, RESERVED_HANDLES)
                if not sent:
                    _end(ended)
                message = json.loads(sent)
                told = socket.socket(fileno=files[0])
                if not running:  # an import that ends the server would end them too
                    _import(message["module"])
                forked = _fork()
                if forked == 0:
                    for process in running:
                        os.close(process)
                    for _, other in (*running.values(), *ended.values()):
                        other.close()
                    requests.close()
                    os.setsid()
                    _take_handles(files[1:], message["handles"], reserved)
                    os.chdir(message["folder"])
                    _set_variables(message["variables"])
                    guard()
                    if os.getppid() != server or not _may_begin(told):
                        os._exit(1)
                    sys.modules.pop(message["module"], None)  # it runs as __main__
                    return message["module"], message["task"]
                for file in files[1:]:
                    os.close(file)
                if forked is None:
                    told.close()
                else:
                    process = os.pidfd_open(forked)
                    running[process] = forked, told
                    watch.register(process, select.POLLIN)


def _read_early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in _READ_LATE}


def _set_variables(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _reserve_handles() -> list[int]:
    """Occupy the numbers below RESERVED_HANDLES, so that no import opens a file there."""
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < RESERVED_HANDLES:
        opened.append(os.open(os.devnull, os.O_RDONLY))
    return opened


def _take_handles(files: Sequence[int], numbers: Sequence[int], reserved: Sequence[int]) -> None:
    """Give the files that were received the numbers that they have in the parent, and free what was reserved."""
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    for number in set(reserved) - set(numbers):
        os.close(number)


def _import(module: str) -> None:
    with contextlib.suppress(Exception):  # the task's own module raises it again, where it is reported
        if not module.endswith(".py"):
            importlib.import_module(module)


def _fork() -> int | None:
    """Return the number of a new fork, 0 in it, or None if there is none."""
    gc.freeze()  # a collection in a fork would copy what it shares with the server
    try:
        return os.fork() if len(os.listdir("/proc/self/task")) == 1 else None
    except OSError:
        return None


def _may_begin(told: socket.socket) -> bool:
    """Tell the parent this fork's number, and return whether it still waited for it."""
    with told, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        told.send(str(os.getpid()).encode())
        return told.recv(1) == _BEGIN
    return False


def _tell_end(pid: int, told: socket.socket) -> None:
    """Tell the parent the exit code of a fork, negative for a signal, and leave the fork a zombie."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        told.send(str(code).encode())


def _end(ended: Mapping[int, tuple[int, socket.socket]]) -> NoReturn:
    for pid, _ in ended.values():
        os.waitpid(pid, 0)
    os._exit(0)
