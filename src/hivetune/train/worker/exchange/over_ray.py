"""The ranks on a cluster: one placement group of the user's own Ray, and in it a task for each rank but rank 0.

A rank is a task of Ray that runs the same loop in a folder of its own, with the rows and the model, which are carried
once and kept below HOME/carried. Ray ends the tasks when rank 0, their driver, ends. Why not Ray Train: decision 0143.
"""

import importlib
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hivetune.base.disk import (
    MANIFEST,
    home,
    manifest_problems,
    path_to_store,
    read_json,
    sha256_file,
    stored_path,
)
from hivetune.base.paths import install_command
from hivetune.base.private import keep_private, make_folder, open_plain
from hivetune.errors import MachineNotFit
from hivetune.process.child import Heartbeat, report_failure
from hivetune.process.cluster import no_answer, own_address
from hivetune.process.launch import ENVIRONMENT
from hivetune.process.protocol import ENTRIES, Rank, Train
from hivetune.run.folder import OUTCOME
from hivetune.train.worker.exchange.ranks import CARRIED, CONNECT_S, RankEnd, Ranks, watch_ranks

# Of a dead machine Ray says for up to half a minute that it lives.
PLACE_S, RETRY_S = 120.0, 10.0
PIECE_BYTES = 64 << 20
CARRIED_FOLDERS = "carried"
# Ray hides cards by these; a rank on rank 0's own machine chooses its card itself, beside rank 0's.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Folder:
    """A folder that never changes: its path below the home, or elsewhere, and the hash of its manifest."""

    stored: str
    manifest: str

    @property
    def copy(self) -> Path:
        return home() / CARRIED_FOLDERS / self.manifest[:32]

    @property
    def place(self) -> Path | None:
        """Return where this machine has it, None where it does not."""
        for path in (stored_path(self.stored), self.copy):
            if (path / MANIFEST).exists() and sha256_file(path / MANIFEST) == self.manifest:
                return path
        return None


def describe(folder: Path) -> Folder:
    return Folder(path_to_store(folder.resolve()), sha256_file(folder / MANIFEST))


@dataclass(frozen=True)
class Seat:
    """The place of a rank: its bundle in the placement group, its machine, and its place among the ranks there."""

    bundle: int
    host: str
    address: str
    node: str
    local: int
    is_own: bool


def open_ranks_on_cluster(task: Train, address: str, threads: int) -> Ranks:
    """Start the other ranks on the devices of the cluster and return rank 0's view; alone where there are none.

    A rank takes a card (Ray's GPU), or `threads` of Ray's CPUs. Raises MachineNotFit when the cluster does not answer
    or has no room.
    """
    own = own_address(address)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    if importlib.util.find_spec("ray") is None:
        raise MachineNotFit("a cluster needs Ray, which is not installed", hint=install_command("cluster"))
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    try:
        ray.init(address=address, namespace="hivetune", log_to_driver=False, logging_level="ERROR")
    except (ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError) as error:
        raise no_answer(address, " ".join(str(error).split())) from None
    need = {"CPU": float(threads)} if task.devices[0] == "cpu" else {"GPU": 1.0}
    seats, group = _reserve(ray, need)
    if not seats:
        ray.shutdown()
        return Ranks()

    def remote(function: Callable[..., Any], seat: Seat, *, calls: int = 0, **needed: float) -> Callable[..., Any]:
        """Return the function as a task at this seat; its process ends after `calls` of them, 0: with the run."""
        made = ray.remote(max_calls=calls, max_retries=0)(function)
        at = PlacementGroupSchedulingStrategy(group, seat.bundle)
        call: Callable[..., Any] = made.options(
            num_cpus=needed.get("CPU", 0), num_gpus=needed.get("GPU", 0), scheduling_strategy=at
        ).remote
        return call

    folders = (describe(task.model), describe(task.snapshot))
    for seat in {seat.node: seat for seat in seats}.values():
        for described, folder in zip(folders, (task.model, task.snapshot), strict=True):
            if not ray.get(remote(has, seat)(described)):
                for piece in _pieces(folder):
                    ray.get(remote(receive, seat)(described, *piece))
                ray.get(remote(finish, seat)(described))
    store = dist.TCPStore(own, 0, len(seats) + 1, True, timedelta(seconds=CONNECT_S), wait_for_workers=False)
    first = Rank(0, len(seats) + 1, f"tcp://{own}:{store.port}", own)
    files = {name: (task.run / name).read_bytes() for name in CARRIED if (task.run / name).exists()}
    started = {}
    for number, seat in enumerate(seats, 1):
        card = seat.is_own and task.devices[0] != "cpu"
        changes = replace(task.changes, device=task.devices[seat.local]) if card else task.changes
        rank = replace(first, number=number, address=seat.address)
        order = replace(task, rank=rank, devices=(), changes=changes)
        started[remote(compute, seat, calls=1, **need)(order, files, folders, card)] = (number, seat.host)
    watch = watch_ranks(task.run, _Watch(ray, started))
    ranks = Ranks(first, store, own)
    ranks.watch = watch
    return ranks


def _reserve(ray: Any, need: Mapping[str, float]) -> tuple[list[Seat], Any]:
    """Return a seat for each rank that the living machines have room for, besides rank 0, and their placement group."""
    from ray.util.placement_group import placement_group, remove_placement_group

    own, deadline = ray.get_runtime_context().get_node_id(), time.monotonic() + PLACE_S
    while True:
        seats: list[Seat] = []
        for node in ray.nodes():
            if node["Alive"]:
                is_own = node["NodeID"] == own
                room = min(int(node["Resources"].get(name, 0) // amount) for name, amount in need.items())
                where = (node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"])
                # Rank 0 is no task of Ray, but has one of its machine's devices.
                seats += [Seat(len(seats) + i, *where, i + is_own, is_own) for i in range(room - is_own)]
        if not seats:
            return [], None
        # Each machine has a resource of its own, by which a bundle is bound to it.
        group = placement_group([{**need, f"node:{seat.address}": 0.001} for seat in seats])
        if group.wait(RETRY_S):
            return seats, group
        remove_placement_group(group)
        if time.monotonic() > deadline:
            raise MachineNotFit(
                f"the cluster has no room for {len(seats)} ranks: others use its devices",
                hint="wait until they are free, or train on this machine alone: --set workers=auto",
            )


class _Watch:
    """The ends of the ranks' tasks, as the thread of `watch_ranks` asks for them."""

    def __init__(self, ray: Any, ranks: Mapping[Any, tuple[int, str]]):
        self._ray, self._living, self._ends = ray, dict(ranks), list[RankEnd]()

    def __call__(self) -> Sequence[RankEnd]:
        if self._living:
            ended, _ = self._ray.wait(list(self._living), num_returns=len(self._living), timeout=0)
            for reference in ended:
                number, host = self._living.pop(reference)
                try:
                    outcome = self._ray.get(reference)
                except self._ray.exceptions.RayError as error:
                    message = f"rank {number} on {host} was lost: {str(error).strip().partition(chr(10))[0]}"
                    lost = {"type": "MachineLost", "message": message, "hint": "", "exit_code": 1, "traceback": ""}
                    outcome = {"schema": 1, "status": "failed", "error": lost}
                if outcome["status"] != "done":
                    self._ends.append(RankEnd(number, 0, outcome))
        return self._ends


def compute(task: Train, files: Mapping[str, bytes], folders: Sequence[Folder], chooses_card: bool) -> dict[str, Any]:
    """Be a rank: the body of a task of Ray. Return the content of its outcome.json.

    `files` of the run's folder; `folders`: the model and the snapshot; `chooses_card`: by the task, not by Ray.
    """
    keep_private()
    removed = [name for name, value in task.environment.items() if value is None]
    for name in (*removed, *(VISIBLE if chooses_card else ())):
        os.environ.pop(name, None)
    os.environ.update({**ENVIRONMENT, **{name: value for name, value in task.environment.items() if value is not None}})
    with tempfile.TemporaryDirectory(prefix="hivetune-rank-") as scratch:
        run = Path(scratch)
        for name, content in files.items():
            (run / name).write_bytes(content)
        try:
            model, snapshot = (need_folder(folder) for folder in folders)
            loop = importlib.import_module(ENTRIES[Train])  # imports torch, after the environment is set
            loop.main(replace(task, run=run, model=model, snapshot=snapshot), Heartbeat(None))
            return {"status": "done"}
        except BaseException as error:  # noqa: BLE001 (as in the last frame of a child: every error is told)
            report_failure(run, error)
            return dict(read_json(run / OUTCOME))


# A folder is carried to machines that do not have it.


def has(folder: Folder) -> bool:
    return folder.place is not None


def need_folder(folder: Folder) -> Path:
    """Return the folder here. Raises MachineNotFit when it vanished."""
    place = folder.place
    if place is None:
        raise MachineNotFit(f"{folder.stored} is missing on {platform.node()}", hint="start the run again")
    return place


def _pieces(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield the content of all files: relative path, offset, bytes."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            offset = 0
            while (piece := file.read(PIECE_BYTES)) or not offset:
                yield str(path.relative_to(folder)), offset, piece
                offset += max(1, len(piece))


def receive(folder: Folder, name: str, offset: int, piece: bytes) -> None:
    """Write one piece of a file. Another run may write the same one."""
    path = _unfinished(folder) / name
    make_folder(path.parent)
    with open(open_plain(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.seek(offset)
        file.write(piece)


def finish(folder: Folder) -> None:
    """Make the received files the folder's copy. Raises MachineNotFit when they are not what was sent."""
    unfinished = _unfinished(folder)
    problems = manifest_problems(unfinished)
    if problems or sha256_file(unfinished / MANIFEST) != folder.manifest:
        shutil.rmtree(unfinished)
        raise MachineNotFit(f"{folder.stored} did not arrive whole on {platform.node()}", hint="start the run again")
    unfinished.rename(folder.copy)


def _unfinished(folder: Folder) -> Path:
    return folder.copy.with_name(f".{folder.copy.name}")
