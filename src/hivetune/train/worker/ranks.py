"""The ranks of a run: equal processes, each with the run's plan and rows, which compute every step together.

Rank 0 is the supervisor's child and writes the run's folder. It starts the other ranks: on this machine as children in
its own session, so that a signal to the session reaches them all, or as tasks of a Ray cluster (over_ray.py). A rank
gets what torchrun passes in the environment (its number, the number of ranks, where they meet) in its task, because
Kubernetes and SLURM set these variables to other values.

Nothing here recovers from faults. If a rank dies, rank 0 ends in the same way, its end ends the others, and the
supervisor starts all of them again from the newest checkpoint, which rank 0 reads and sends to the others.
"""

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hivetune.base.disk import read_json, write_json
from hivetune.base.private import make_folder
from hivetune.base.typed import from_plain, to_plain
from hivetune.errors import HivetuneError
from hivetune.process.protocol import Rank, Train, write_task
from hivetune.run.folder import AMENDMENTS, CONFIG, OUTCOME, PLAN, PLAN_ROWS, RANKS

# Each rank imports torch before it connects; over Ray, after it got its files.
CONNECT_S = 600.0
# The others wait while rank 0 saves. A dead rank is noticed by its connection, a silent one by the supervisor, because
# rank 0 gives no heartbeat while it waits.
SILENCE_S = 24 * 3600.0
LOOK_S = 0.1
# How long a rank waits for the news of which rank broke the connection.
NEWS_S = 10.0
# What another rank needs of the run's folder besides its task.
CARRIED = (CONFIG, PLAN, PLAN_ROWS, AMENDMENTS)

_T = TypeVar("_T")


class RankLost(HivetuneError):
    """Raised when the connection to another rank is broken."""


@dataclass(frozen=True)
class RankEnd:
    """The end of another rank: the `signal` that killed it, or the content of its outcome.json."""

    number: int
    signal: int = 0
    outcome: Mapping[str, Any] | None = None

    @property
    def is_consequence(self) -> bool:
        """Return whether the rank ended only because another rank did."""
        error = (self.outcome or {}).get("error") or {}
        return error.get("type") == RankLost.__name__


class Ranks:
    """One rank's view of all ranks of a run. Every method must be called by all ranks in the same order.

    `store`: the store through which they connect, None for a single rank; `address`: this machine's own, for the
    others. `ends` returns how other ranks ended so far; rank 0 then ends in the same way. `note`: for the journal.
    """

    def __init__(
        self,
        rank: Rank = Rank(),
        store: dist.Store | None = None,
        run: Path = Path(),
        ends: Callable[[], Sequence[RankEnd]] | None = None,
    ):
        self.number, self.size = rank.number, rank.size
        self.note = ""
        self._gloo: Any = None
        self._watch = None if ends is None else _watch(run, ends)
        if store is not None:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=CONNECT_S)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=rank.address)]
            self._gloo = self._joined(lambda: dist.ProcessGroupGloo(store, rank.number, rank.size, options))

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which reads and writes the run's folder."""
        return self.number == 0

    def agree(self, value: _T, kind: type[_T], tensors: Iterable[Tensor] = ()) -> _T:
        """Broadcast: return rank 0's value on every rank, and copy its tensors into those of the others, in place."""
        if self.size == 1:
            return value
        text = json.dumps(to_plain(value)).encode() if self.is_first else b""
        length = self._broadcast(torch.tensor([len(text)]))
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.is_first else None
        content = self._broadcast(torch.zeros(int(length), dtype=torch.uint8) if content is None else content)
        # Gloo moves memory of the host, so a card's tensors pass through it, once a start.
        for tensor in tensors:
            on_host = self._broadcast(tensor.cpu().contiguous())
            tensor.copy_(on_host)
        return value if self.is_first else from_plain(kind, json.loads(bytes(content.tolist())))

    def add(self, integers: Tensor) -> None:
        """Replace an int64 tensor on the CPU by its sum over all ranks (an all-reduce), which is exact."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.timeout = timedelta(seconds=SILENCE_S)
            self._joined(lambda: self._gloo.allreduce([integers], options).wait())

    def _broadcast(self, tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=SILENCE_S)
        self._joined(lambda: self._gloo.broadcast([tensor], options).wait())
        return tensor

    def _joined(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if self._watch is not None:  # it ends this process with the reason
                self._watch.join(NEWS_S)
            raise RankLost(f"rank {self.number} lost the others: {str(error).partition(chr(10))[0]}") from None


def start_ranks(task: Train) -> Ranks:
    """Start the other ranks on this machine, one for each of the task's devices, and return rank 0's view."""
    folder = task.run / RANKS
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    # A file that only this user can open: a port of the loopback is open to everybody on the machine.
    first = Rank(0, len(task.devices), f"file://{folder.resolve() / 'meeting'}")
    children = {number: _start(task, replace(first, number=number)) for number in range(1, first.size)}

    def ends() -> list[RankEnd]:
        found = []
        for number, child in children.items():
            if code := child.poll():
                path = folder / str(number) / OUTCOME
                outcome = read_json(path) if code > 0 and path.exists() else None
                found.append(RankEnd(number, max(0, -code), outcome))
        return found

    return Ranks(first, _rendezvous(first), task.run, ends)


def _start(task: Train, rank: Rank) -> "subprocess.Popen[bytes]":
    """Start a rank on this machine with the same program, in this process's session, with its log."""
    folder = task.run / RANKS / str(rank.number)
    make_folder(folder)
    for name in CARRIED:
        if (task.run / name).exists():
            shutil.copyfile(task.run / name, folder / name)
    device = task.devices[rank.number]
    changes = task.changes if device == "cpu" else replace(task.changes, device=device)
    path = write_task(replace(task, run=folder, changes=changes, devices=(), rank=rank), folder)
    # Without a pipe for heartbeats: rank 0's speak for all, because each step waits for all.
    command = [sys.executable, "-m", "hivetune.process", sys.argv[0], str(path)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def join_ranks(rank: Rank) -> Ranks:
    """Return the view of a rank that rank 0 started, after it has connected to the others."""
    return Ranks(rank, _rendezvous(rank))


def _rendezvous(rank: Rank) -> dist.Store:
    kind, _, place = rank.meeting.partition("://")
    if kind == "file":
        return dist.FileStore(place, rank.size)
    host, _, port = place.rpartition(":")
    return dist.TCPStore(host, int(port), rank.size, False, timedelta(seconds=CONNECT_S))


def _watch(run: Path, ends: Callable[[], Sequence[RankEnd]]) -> threading.Thread:
    """Start a thread that ends this process, rank 0, as soon as another rank has ended other than well."""

    def keep_looking() -> None:
        while not ends():
            time.sleep(LOOK_S)
        time.sleep(LOOK_S)  # the cause came first, but need not be the first one seen
        found = ends()
        _end_like(run, next((end for end in found if not end.is_consequence), found[0]))

    thread = threading.Thread(target=keep_looking, name="ranks", daemon=True)
    thread.start()
    return thread


def _end_like(run: Path, end: RankEnd) -> None:
    """End this process as another rank ended, so the supervisor finds what it would if rank 0 had ended so."""
    how = f"was killed by {signal.Signals(end.signal).name}" if end.signal else "failed"
    os.write(2, f"rank {end.number} {how}, and so this process ends\n".encode())
    if end.signal:
        faulthandler.disable()  # its handlers would write this process's stacks, which show nothing
        os.kill(os.getpid(), end.signal)
    write_json(run / OUTCOME, dict(end.outcome or lost_outcome(RankLost.__name__, f"rank {end.number} was lost")))
    os._exit(1)


def lost_outcome(kind: str, message: str) -> dict[str, Any]:
    """Return a substitute for the outcome.json of a rank that wrote none."""
    error = {"type": kind, "message": message, "hint": "", "exit_code": 1}
    return {"schema": 1, "status": "failed", "error": error}
