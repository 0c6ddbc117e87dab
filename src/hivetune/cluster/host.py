"""One device of a machine that takes in a whole run of another machine, brings it forward, and gives it back.

Ray makes a process of `RunHost` on the machine and calls its methods in order, from one thread. It loads no torch: the
run is `hivetune resume` in this machine's own environment. The files of the run are deleted here at the end.
"""

import contextlib
import os
import platform
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hivetune import __version__
from hivetune.base.disk import home, lock
from hivetune.base.journal import JournalPlace, read_after
from hivetune.base.private import make_folder, open_plain
from hivetune.cluster.guest import GUEST
from hivetune.cluster.parcel import pack, unpack
from hivetune.errors import Busy, MachineNotFit
from hivetune.machine.cluster import Membership, claim_device, find_model, read_membership
from hivetune.machine.inventory import read_machine
from hivetune.run.folder import AMENDMENTS, CONFIG, EVENTS, METRICS, ROW_LOSSES, SUPERVISOR_LOG
from hivetune.train.open import update_record
from hivetune.train.queue import visible_devices

RUN, SNAPSHOT = "run", "snapshot"
# These journals of a run are kept up to date at home while it is away.
FOLLOWED = (METRICS, EVENTS, ROW_LOSSES, AMENDMENTS)
# A piece of a parcel in one call: far below the shared memory that Ray has (node.py).
CARRIED_BYTES = 4 << 20
_IN, _OUT, _LOG, _CARRIED = "in", "out", "log", "kept"
_YOUNG_S, _CLAIM_S = 60.0, 5.0
_NO_CARDS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Guest:
    """A run that asks for a device. `model_folder`: where its own machine has the model, `model_hash`: of its manifest;
    `device`: what it computes on ("auto", "cpu" or "cuda"), by its choices where they are made."""

    name: str
    model: str
    model_folder: Path
    model_hash: str
    device: str
    version: str = __version__


@dataclass(frozen=True)
class Growth:
    """The content of one of FOLLOWED from `offset` on; it replaces what was there before."""

    name: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class News:
    """The news of a run since the last look. `said`: what its process printed; `code`: its exit code."""

    growth: tuple[Growth, ...]
    said: bytes
    code: int | None


class RunHost:
    """The host of a run; it holds a device until its process ends. Call `admit`, `receive` for all data, `begin`; then
    look and fetch.
    """

    _folder: Path
    _model: Path
    _python: str
    _environment: Mapping[str, str]
    _process: "subprocess.Popen[bytes]"

    def __init__(self) -> None:
        self._resources = contextlib.ExitStack()
        self._positions: dict[str, JournalPlace] = {}
        self._output_bytes = 0

    def where(self) -> str:
        """Return Ray's name of the machine."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def admit(self, guest: Guest) -> tuple[str, str]:
        """Return the names of this machine and of the device that the run gets. Raises MachineNotFit."""
        host, membership = platform.node(), read_membership()
        if guest.version != __version__:
            raise MachineNotFit(
                f"{host} has Hivetune {__version__}, the run's own machine {guest.version}",
                hint="install the same version on both",
            )
        device = None if membership is None else _claim(membership.devices, guest.device)
        if membership is None or device is None:
            raise MachineNotFit(f"{host} has no free device that computes on {guest.device}")
        model = find_model(guest.model, guest.model_folder, guest.model_hash, host)
        guests = home() / "cluster" / "runs"
        _clear(guests)
        self._folder = guests / f"{guest.name}-{secrets.token_hex(4)}"
        self._resources.callback(shutil.rmtree, self._folder)
        self._resources.enter_context(lock(self._folder))
        self._model, self._python, self._environment = model, membership.python, _environment(membership, device)
        return host, device

    def receive(self, piece: bytes) -> None:
        """Store the next piece of the parcel."""
        with open(open_plain(self._folder / _IN, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            file.write(piece)

    def begin(self) -> None:
        """Unpack the received run and continue it. Raises ValueError, OSError, UsageError for a damaged run."""
        target = self._folder / _CARRIED
        unpack(self._folder / _IN, target)
        (self._folder / _IN).unlink()
        update_record(target / RUN, model=str(self._model), snapshot=str(target / SNAPSHOT))
        for name in FOLLOWED:
            while self._grown(name) is not None:
                pass
        with open(open_plain(self._folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", GUEST, str(target / RUN), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=dict(self._environment),
            )
        self._resources.callback(self._end)

    def look(self) -> News:
        """Return the news of the run. Its exit code comes last, when nothing else is left."""
        code = self._process.poll()  # first: what it wrote before its end is read below
        growth = tuple(grown for name in FOLLOWED if (grown := self._grown(name)) is not None)
        with open(self._folder / _LOG, "rb") as file:
            file.seek(self._output_bytes)
            output = file.read(CARRIED_BYTES)
        self._output_bytes += len(output)
        return News(growth, output, None if growth or output else code)

    def pause(self) -> None:
        """Ask for the clean end."""
        if self._process.poll() is None:
            self._process.terminate()

    def gather(self) -> int | None:
        """Pack the run as it is now and return the parcel's size in bytes; None when the run changed meanwhile."""
        run, ended = self._folder / _CARRIED / RUN, self._process.poll() is not None
        if ended:
            self._end()
        before = (run / CONFIG).read_bytes()
        try:
            size_bytes = pack({RUN: run}, self._folder / _OUT, leave_out=(f"{RUN}/{SUPERVISOR_LOG}",))
        except FileNotFoundError:  # an older checkpoint made room for a newer one
            if ended:
                raise
            return None
        return size_bytes if ended or (run / CONFIG).read_bytes() == before else None

    def give(self, offset: int) -> bytes:
        """Return the piece of the packed run at `offset`."""
        with open(self._folder / _OUT, "rb") as file:
            file.seek(offset)
            return file.read(CARRIED_BYTES)

    def leave(self) -> None:
        """Delete everything of the run: it is at home again, or will not come back."""
        self._resources.close()

    def _end(self) -> None:
        """End the run's process, and others in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _grown(self, name: str) -> Growth | None:
        path, position = self._folder / _CARRIED / RUN / name, self._positions.get(name, JournalPlace())
        followed = read_after(path, position)
        if followed.place == position:
            return None
        self._positions[name] = followed.place
        start = 0 if followed.anew else position.offset
        if not followed.place.offset:
            return Growth(name, 0, b"")
        with open(open_plain(path), "rb") as file:
            file.seek(start)
            return Growth(name, start, file.read(followed.place.offset - start))


def _claim(devices: Sequence[str], kind: str) -> str | None:
    """Hold a device. A run that computes on the processor may use any; one that began on a card needs a card."""
    fitting = [device for device in dict.fromkeys(devices) if kind != "cuda" or device.startswith("cuda")]
    deadline = time.monotonic() + _CLAIM_S
    while fitting:
        for device in fitting:
            if claim_device(devices, device) is not None:  # its lock is held until this process ends
                return device
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)  # Ray gives a device away when it has ended its agent, which may still be ending
    return None


def _environment(membership: Membership, device: str) -> dict[str, str]:
    """Return the environment of this machine's Ray, with only this device visible. CPU devices share the cores."""
    machine = read_machine()
    environment = dict(os.environ)
    # Ray sets it to 1 for its own processes; what its parent has is the user's own.
    threads = psutil.Process(os.getppid()).environ().get("OMP_NUM_THREADS")
    environment.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    elif device == "cpu":
        environment["OMP_NUM_THREADS"] = str(max(1, machine.cores // membership.devices.count("cpu")))
    if device == "cpu":
        return environment | (_NO_CARDS if machine.cards else {})
    return environment | visible_devices(machine.cards, "cuda", environment)[int(device.partition(":")[2])]


def _clear(guests: Path) -> None:
    """Delete the folders of hosts that were killed. A host that has just made its folder may not hold the lock yet."""
    make_folder(guests)
    for folder in guests.iterdir():
        if time.time() - folder.stat().st_mtime > _YOUNG_S:
            with contextlib.suppress(Busy), lock(folder):
                shutil.rmtree(folder)
