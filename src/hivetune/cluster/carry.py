"""A whole run on a free device of a cluster: it is carried there, followed, and carried home, whatever machines die.

A run folder is all of a run's state and a resume is bit for bit, so only folders have to travel. Meanwhile this process
keeps the run's own folder locked and up to date: the journals at each look, all of it now and then. When a machine is
lost, the run continues from that state on another machine.
"""

import functools
import glob
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hivetune.base.disk import FULL_DISK, MANIFEST, lock, sha256_file, write_manifest
from hivetune.base.journal import read_journal
from hivetune.base.paths import quoted
from hivetune.base.private import open_plain
from hivetune.cluster.host import CARRIED_BYTES, FOLLOWED, RUN, SNAPSHOT, Growth, Guest, RunHost
from hivetune.cluster.parcel import pack, replace_folder, unpack
from hivetune.errors import (
    DataRefused,
    DoesNotFit,
    HivetuneError,
    MachineNotFit,
    RecoveryExhausted,
    Stopped,
    UsageError,
)
from hivetune.machine.cluster import DEVICE, connect_ray, offered_by
from hivetune.process.detach import Exporters
from hivetune.process.stop import StopRequest
from hivetune.run.folder import EVENTS, SUPERVISOR_LOG, read_record, read_resolved
from hivetune.run.status import hold_run
from hivetune.train.open import Run, update_record

FOLLOW_EVERY_S = 0.5
# All of a run comes home this often, for at most this share of the time. A lost machine costs what came after.
HOME_EVERY_S, HOME_SHARE = 600.0, 0.02
# After this a person is told why a run does not go on.
WAITS_S, COUNT_EVERY_S = 60.0, 5.0
# A machine whose agent dies so often without a word gets the run no more.
LOSSES = 3
# With these codes a run's end is the machine's: it is not fit, too small, or busy. A signal's is negative.
_OF_THE_MACHINE = (4, 5, 75)
_ERRORS = {each.exit_code: each for each in (UsageError, DataRefused, DoesNotFit, RecoveryExhausted)}
_ANY = "any machine"

Teller = Callable[[str], None]


class _Lost(Exception):
    """The machine or its actor is lost, or its answer is invalid."""


class _Refused(Exception):
    """The machine can't bring this run forward; the text is the reason."""


def check_carried(run: Run) -> None:
    """Raise UsageError for a run that can only run on this machine."""
    config, hint = run.config, "train it on this machine: leave out --on"
    if config.workers is not None:
        raise UsageError(
            "--on and `workers` exclude each other: --on sends a whole run, `workers` divides its steps", hint=hint
        )
    if config.lora.start is not None:
        raise UsageError(f"the adapter in lora.start exists on this machine only: {config.lora.start}", hint=hint)
    if config.device.startswith("cuda:"):
        raise UsageError(f"device {config.device} names one card of this machine", hint="choose auto, cpu or cuda")


def carry_run(run: Run, address: str, tell: Teller) -> dict[str, Any]:
    """Finish a run on a free device of the cluster at `address`, and return the document of `train --json`.

    A signal ends the run cleanly and copies it back; a second one skips the copy. Raises the errors that end a run,
    Busy, UsageError, and MachineNotFit when no machine is left that can bring it forward.
    """
    if run.record["status"] == "done":
        return run.summary
    check_carried(run)
    with ExitStack() as resources:
        resources.enter_context(hold_run(run.folder))
        # The leftovers of an earlier process that was killed while it sent this run.
        for path in run.folder.parent.glob(f".{glob.escape(run.folder.name)}.*.tmp"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        ray = connect_ray(address)
        stop = resources.enter_context(StopRequest())  # Ray has taken the signals for itself
        code = _Carrier(run, address, ray, stop, resources, tell).finish()
    if code > 128:
        hint = f"to continue: hivetune resume {quoted(run.folder)}"
        raise Stopped("stopped; everything up to its last step is saved", signal_number=stop.number, hint=hint)
    if code:  # the error that `hivetune resume` would have raised here
        hint = f"see the log: hivetune logs {quoted(run.folder)}; then: hivetune resume {quoted(run.folder)}"
        raise _ERRORS.get(code, HivetuneError)(_reason(run.folder, code), hint=hint)
    return {**run.record["result"], "already_done": False}


class _Carrier:
    """One run in transit. `held`: the locks of its folder, which is replaced each time that the run is copied back."""

    def __init__(self, run: Run, address: str, ray: Any, stop: StopRequest, stack: ExitStack, tell: Teller):
        self._run, self._address, self._ray, self._stop, self._stack, self._tell = run, address, ray, stop, stack, tell
        self._beside = run.folder.with_name(f".{run.folder.name}.{os.getpid()}")
        self._exporters = Exporters(run.folder, run.config.report_to)
        self._given_up: dict[str, str] = {}
        self._losses = Counter[str]()
        self._counted = 0.0
        self._homes = 0
        self._said = b""
        self._too_small = False
        self._disk_reported = False

    def finish(self) -> int:
        """Return the exit code of the run's process, on whatever machine it ended. 0: the run is done."""
        while not self._stop.count:
            actor, node, host = None, _ANY, ""
            try:
                actor, node = self._place()
                config, choices = read_resolved(self._run.folder)
                kind = (choices.device or config.device).partition(":")[0]
                model = self._run.model.resolve()
                guest = Guest(self._run.folder.name, config.model, model, sha256_file(model / MANIFEST), kind)
                host, device = self._ask(actor.admit.remote(guest))
                self._deliver(actor)
                self._tell(f"{self._run.folder.name} continues on {host}, {device}")
                code = self._accompany(actor, host)
                if code not in _OF_THE_MACHINE and code >= 0:
                    return code
                self._too_small = self._too_small or code == DoesNotFit.exit_code
                self._give_up(node, f"{host}: {_reason(self._run.folder, code)}")
            except _Lost as error:
                self._losses[node] += 1
                self._tell(f"{host or 'a machine'} is lost: {error}; {self._run.folder.name} continues here")
                if self._losses[node] >= LOSSES:
                    self._give_up(node, f"{host or 'a machine'} was lost {LOSSES} times")
            except _Refused as error:
                self._give_up(node, f"{host}: {error}" if host else str(error))
            finally:
                if actor is not None:
                    with suppress(_Lost, _Refused, Stopped):
                        self._ask(actor.leave.remote())
                    self._ray.kill(actor)
        return 128 + (self._stop.number or 15)

    def _give_up(self, node: str, reason: str) -> None:
        self._given_up[node] = reason
        self._tell(f"given up for {self._run.folder.name}: {reason}")
        if node == _ANY:
            self._no_machine_left()

    def _place(self) -> tuple[Any, str]:
        """Wait for a free device of a machine that was not given up; return the actor and Ray's name of the machine.

        An actor takes no core and no memory of those that Ray counts, because its child computes.
        """
        self._counted = 0.0
        self._no_machine_left()
        others = {"ray.io/node-id": f"!in({','.join(self._given_up)})"} if self._given_up else {}
        host = self._ray.remote(num_cpus=0, resources={DEVICE: 1}, max_restarts=0, label_selector=others)(RunHost)
        actor = host.remote()
        waits = time.monotonic() + WAITS_S

        def look() -> None:
            nonlocal waits
            self._no_machine_left()
            if self._stop.count:
                raise Stopped("stopped while waiting for a device", signal_number=self._stop.number)
            if time.monotonic() > waits:
                waits = float("inf")
                self._tell(f"{self._run.folder.name} waits for a device of the cluster: none is free")

        try:
            return actor, str(self._ask(actor.where.remote(), look))
        except BaseException:
            self._ray.kill(actor)
            raise

    def _no_machine_left(self) -> None:
        """Raise MachineNotFit if no machine is left for the run, DoesNotFit if one was too small for it."""
        if time.monotonic() < self._counted + COUNT_EVERY_S and _ANY not in self._given_up:
            return
        self._counted = time.monotonic()
        nodes = [node for node in self._ray.nodes() if node["NodeID"] not in self._given_up]
        if not offered_by(nodes) or _ANY in self._given_up:
            reason = "; ".join(self._given_up.values()) or "none of its machines offers one"
            kind = DoesNotFit if self._too_small else MachineNotFit
            raise kind(
                f"no device of the cluster at {self._address} can continue {self._run.folder.name}: {reason}",
                hint=f"fix that, or continue here: hivetune resume {quoted(self._run.folder)}",
            )

    def _deliver(self, actor: Any) -> None:
        parcel = self._beside.with_name(f"{self._beside.name}.parcel.tmp")
        folders = {RUN: self._run.folder, SNAPSHOT: self._run.snapshot.folder}
        try:
            pack(folders, parcel, leave_out=(f"{RUN}/{SUPERVISOR_LOG}",))
            with open(parcel, "rb") as file:
                while piece := file.read(CARRIED_BYTES):
                    self._ask(actor.receive.remote(piece))
        finally:
            parcel.unlink(missing_ok=True)
        self._ask(actor.begin.remote())

    def _accompany(self, actor: Any, host: str) -> int:
        """Follow the remote run until it ends or pauses and is copied back; return its exit code."""
        stopping, home_at = False, time.monotonic() + HOME_EVERY_S
        while True:
            news = self._ask(actor.look.remote())
            for growth in news.growth:
                self._with_room(functools.partial(_follow, self._run.folder, growth))
            *lines, self._said = (self._said + news.said).split(b"\n")
            for line in lines:
                self._tell(f"{host}: {line.decode(errors='replace')}")
            if news.code is not None:
                packed = self._ask(actor.gather.remote())
                while not self._with_room(functools.partial(self._fetch, actor, packed)):
                    self._ask(actor.where.remote())  # it is kept there as long as that answers
                    time.sleep(COUNT_EVERY_S)
                return int(news.code)
            self._exporters.look()
            if self._stop.count and not stopping:
                stopping = True
                self._ask(actor.pause.remote())
            if not stopping and time.monotonic() >= home_at:  # the whole run as it is now, while it continues there
                began = time.monotonic()
                packed = self._ask(actor.gather.remote())
                if packed is not None:
                    self._with_room(functools.partial(self._fetch, actor, packed))
                home_at = time.monotonic() + max(HOME_EVERY_S, (time.monotonic() - began) / HOME_SHARE)
            time.sleep(FOLLOW_EVERY_S)

    def _with_room(self, write: Callable[[], object]) -> bool:
        """Call `write`, and return whether the disk had room for it. The first time without room is reported."""
        try:
            write()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            if not self._disk_reported:
                self._tell(f"the disk of {self._run.folder} is full: what is made there waits until there is room")
            self._disk_reported = True
            return False
        return True

    def _fetch(self, actor: Any, size_bytes: int) -> None:
        """Replace the folder here by the remote run, when all of it has arrived."""
        self._homes += 1
        parcel, came = (self._beside.with_name(f"{self._beside.name}.{n}.tmp") for n in ("parcel", f"{self._homes}"))
        try:
            with open(open_plain(parcel, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                while file.tell() < size_bytes:
                    piece = self._ask(actor.give.remote(file.tell()))
                    if not piece:
                        raise _Lost(f"what it packed ends at byte {file.tell()} of {size_bytes}")
                    file.write(piece)
            try:
                unpack(parcel, came)
            except ValueError as error:
                raise _Lost(str(error)) from None
            self._stack.enter_context(lock(came / RUN))
            bring_home(came / RUN, self._run)
        finally:
            parcel.unlink(missing_ok=True)
            shutil.rmtree(came, ignore_errors=True)

    def _ask(self, call: Any, look: Callable[[], None] = lambda: None) -> Any:
        """Return what the actor answers.

        Raises _Lost when it is gone, _Refused when it can't do it, Stopped when a second signal comes meanwhile.
        """
        while not self._ray.wait([call], timeout=FOLLOW_EVERY_S)[0]:
            look()
            if self._stop.count > 1:
                raise Stopped("ended at once; the run here has its last copied state", signal_number=self._stop.number)
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise _Refused(cause.message if isinstance(cause, HivetuneError) else str(cause)) from None
        except self._ray.exceptions.RayError as error:
            raise _Lost(f"Ray reports {type(error).__name__} for its actor") from None


def bring_home(came: Path, run: Run) -> None:
    """Give `came` the name of the run's folder and the paths of this machine; the old folder gets the name of `came`.

    Raises HivetuneError for another run's folder.
    """
    record = read_record(came)
    if record.get("identity") != run.record.get("identity"):
        raise HivetuneError(f"the cluster returned another run for {run.folder}", hint="see: hivetune cluster status")
    changes: dict[str, Any] = {"model": str(run.model), "snapshot": str(run.snapshot.folder)}
    if "result" in record:
        changes["result"] = {**record["result"], "run": str(run.folder)}
    update_record(came, **changes)
    if (run.folder / SUPERVISOR_LOG).exists():  # who started this process has it open
        os.rename(run.folder / SUPERVISOR_LOG, came / SUPERVISOR_LOG)
    if (came / MANIFEST).exists():
        write_manifest(came, {"kind": "run"})
    replace_folder(came, run.folder)


def _follow(run: Path, growth: Growth) -> None:
    """Append the remote lines of a journal. A journal that is shorter here waits until the whole run is copied back."""
    if growth.name not in FOLLOWED:
        raise _Lost(f"it tells of a journal {growth.name!r}")
    with open(open_plain(run / growth.name, os.O_RDWR | os.O_CREAT), "r+b") as file:
        if file.seek(0, os.SEEK_END) >= growth.offset:
            file.truncate(growth.offset)
            file.seek(growth.offset)
            file.write(growth.data)


def _reason(run: Path, code: int) -> str:
    """Return why the run's supervisor ended, by its journal."""
    ends = [entry for entry in read_journal(run / EVENTS) if entry["event"] == "supervisor_ended"]
    return (ends[-1].get("why") if ends else "") or f"its process ended with exit code {code}"
