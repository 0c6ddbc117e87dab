"""Workers on the machines of a cluster: asked for through a process that speaks Ray, and started again with it.

Ray only places them and says when one is gone. What they compute travels over the run's own sockets, so the run goes on
alone while the cluster's head is away, and its workers go on with it.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hivetune.base.private import make_folder, open_plain
from hivetune.base.typed import from_plain, to_plain
from hivetune.errors import MachineNotFit
from hivetune.process.cluster import LINK, AgentSign, Order, own_address
from hivetune.process.protocol import ChildError, Meeting, Outcome
from hivetune.run.choices import Choices

# Between two starts of the process that speaks Ray, doubled each time up to the most.
AGAIN_S, MOST_AGAIN_S = 5.0, 300.0
_PIPE_BYTES = 1 << 16


class ClusterPlaces:
    """`WorkerPlaces` on the devices of the cluster at `address`. `order` makes one of what differs between workers;
    `own_device`: of the run's own worker, which no other one gets; `log`: where the process that speaks Ray writes."""

    def __init__(self, address: str, order: Callable[..., Order], own_device: str, log: Path):
        self._address, self._order, self._own_device, self._log = address, order, own_device, log
        self._link: subprocess.Popen[bytes] | None = None
        self._read = _Lines()
        self._again_s, self._again_at = AGAIN_S, 0.0
        self._workers: dict[int, ClusterWorker] = {}
        self._untold: list[str] = []
        self.count = 0
        self.meeting: Meeting | None = None
        try:
            self.meeting = Meeting(f"{own_address(address)}:{_free_port(address)}", secrets.token_hex(32), mixed=True)
        except MachineNotFit as error:  # the run does not need it
            self._untold.append(f"{error.message}; the run goes on without its workers")

    def look(self) -> tuple[str, ...]:
        if self.meeting is not None:
            self._keep_link()
            for said in self._read.lines(self._link):
                self._hear(said)
        untold, self._untold = self._untold, []
        return tuple(untold)

    def start(self, number: int, changes: Choices, environment: Mapping[str, str | None]) -> "ClusterWorker":
        assert self.meeting is not None
        order = self._order(number=number, meeting=self.meeting, changes=changes, environment=environment)
        worker = ClusterWorker(self, order)
        self._workers[number] = worker
        self.say(number, start=to_plain(order))
        return worker

    def say(self, number: int, **what: Any) -> None:
        """To the process that speaks Ray; one that is not there is told when it starts."""
        if self._link is not None and self._link.stdin is not None:
            with contextlib.suppress(OSError):  # it ended: `look` will see it
                self._link.stdin.write(json.dumps({"place": number, **what}).encode() + b"\n")
                self._link.stdin.flush()

    def close(self) -> None:
        if self._link is not None:
            self._link.kill()  # Ray ends the agents of a process that is gone, and they their workers
            self._link.wait()

    def _keep_link(self) -> None:
        if self._link is not None and self._link.poll() is not None:
            self._untold.append(f"the connection to the cluster at {self._address} ended: {_last_line(self._log)}")
            self._link = None
            for worker in self._workers.values():
                worker.lose("the connection to the cluster ended")
            self._workers.clear()
            self._again_at = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, MOST_AGAIN_S)
        if self._link is None and time.monotonic() >= self._again_at:
            make_folder(self._log.parent)
            with open(open_plain(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
                self._link = subprocess.Popen(
                    [sys.executable, "-m", LINK, self._address, self._own_device],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            self._read = _Lines()
            for number, worker in self._workers.items():
                self.say(number, start=to_plain(worker.order))

    def _hear(self, said: Mapping[str, Any]) -> None:
        if "devices" in said:
            self.count, self._again_s = max(self.count, int(said["devices"])), AGAIN_S
        if "text" in said:
            self._untold.append(str(said["text"]))
        worker = self._workers.get(said.get("place", 0))
        if worker is not None and "sign" in said:
            worker.sign = from_plain(AgentSign, said["sign"])
            if worker.sign.outcome is not None:
                del self._workers[worker.order.number]


class ClusterWorker:
    """`BesideWorker` that an agent has started, as its newest sign says."""

    def __init__(self, places: ClusterPlaces, order: Order):
        self._places, self.order = places, order
        self.sign = AgentSign()
        self._still = False

    @property
    def pid(self) -> int:
        return self.sign.pid

    @property
    def host(self) -> str:
        return self.sign.host

    @property
    def device(self) -> str:
        return self.sign.device

    @property
    def worked(self) -> bool:
        return self.sign.worked

    def look(self) -> Outcome | None:
        return self.sign.outcome

    def lose(self, why: str) -> None:
        """Nobody knows what became of it."""
        error = ChildError("ConnectionError", why, "", 1, f"ConnectionError: {why}")
        self.sign = replace(self.sign, outcome=Outcome("died", None, None, 0.0, {}, "", error))

    def stand_still(self, still: bool) -> None:
        if still != self._still:
            self._still = still
            self._places.say(self.order.number, still=still)

    def end(self) -> None:
        self._places.say(self.order.number, end=True)

    def taken(self) -> Mapping[str, object]:
        return self.sign.taken


class _Lines:
    """Whole lines of JSON from a process's output, without waiting for any."""

    def __init__(self) -> None:
        self._text = b""

    def lines(self, process: "subprocess.Popen[bytes] | None") -> Iterator[dict[str, Any]]:
        if process is None or process.stdout is None:
            return
        os.set_blocking(process.stdout.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(process.stdout.fileno(), _PIPE_BYTES):
                self._text += data
        *whole, self._text = self._text.split(b"\n")
        for line in whole:
            try:
                said = json.loads(line)
            except ValueError:  # whoever watches does not die of what a library prints
                said = {"text": f"the process that speaks Ray said: {line.decode(errors='replace')[:200]}"}
            yield said


def _free_port(address: str) -> int:
    """A free one now; should somebody take it meanwhile, the run's worker ends and the next one has another."""
    with socket.create_server((own_address(address), 0)) as listener:
        return int(listener.getsockname()[1])


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no reason was given"
