"""The ranks on a cluster: one placement group of the user's own Ray, with a task for each rank except rank 0.

Each such task runs the same loop in a folder of its own. The rows and the model are copied to each machine once and
kept below HOME/carried. Ray ends the tasks when rank 0, their driver, ends. Decision 0143: why not Ray Train.
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

from hivetune.base.disk import MANIFEST, home, manifest_problems, path_to_store, read_json, sha256_file, stored_path
from hivetune.base.paths import install_command
from hivetune.base.private import keep_private, make_folder, open_plain
from hivetune.errors import MachineNotFit
from hivetune.process.child import Heartbeat, report_failure
from hivetune.process.launch import ENVIRONMENT, no_answer, reach_cluster
from hivetune.process.protocol import ENTRIES, Rank, Train
from hivetune.run.folder import OUTCOME
from hivetune.train.worker.ranks import CARRIED, CONNECT_S, RankEnd, Ranks, lost_outcome

# Of a dead machine Ray says for up to half a minute that it lives.
PLACE_S, RETRY_S = 120.0, 10.0
# One message of Ray; a model's file has gigabytes.
PIECE_BYTES = 64 << 20
# Ray hides cards by these; a rank on rank 0's own machine chooses its card itself, beside rank 0's.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class RankPlacement:
    """The placement of a rank: its bundle in the placement group, its machine, and its number on that machine."""

    bundle: int
    host: str
    address: str
    node: str
    local: int
    is_own: bool


def open_ranks_on_cluster(task: Train, head: str, threads: int) -> Ranks:
    """Start the other ranks, if any, on the devices of the cluster, and return rank 0's view.

    A rank takes a card (Ray's GPU), or `threads` of Ray's CPUs. Raises MachineNotFit if no `head` (HOST:PORT) answers,
    or if the cluster's devices are in use.
    """
    own = reach_cluster(head)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}  # no telemetry of any kind
    if importlib.util.find_spec("ray") is None:
        raise MachineNotFit("a cluster needs Ray, which is not installed", hint=install_command("cluster"))
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    try:
        ray.init(address=head, namespace="hivetune", log_to_driver=False, logging_level="ERROR")
    except (ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError) as error:
        raise no_answer(head, " ".join(str(error).split())) from None
    on_card = task.devices[0] != "cpu"
    need = {"GPU": 1.0} if on_card else {"CPU": float(threads)}
    seats, group = _reserve(ray, need)
    if not seats:  # only this machine is left, or its devices are all that the cluster has
        ray.shutdown()
        return Ranks()

    def remote(function: Callable[..., Any], seat: RankPlacement, **options: Any) -> Callable[..., Any]:
        """Return the function as a Ray task at this placement."""
        at = PlacementGroupSchedulingStrategy(group, seat.bundle)
        made = ray.remote(max_retries=0, **{"num_cpus": 0, "scheduling_strategy": at, **options})(function)
        call: Callable[..., Any] = made.remote
        return call

    folders = tuple(
        Folder(path_to_store(path.resolve()), sha256_file(path / MANIFEST)) for path in (task.model, task.snapshot)
    )
    for seat in {seat.node: seat for seat in seats}.values():
        for folder, path in zip(folders, (task.model, task.snapshot), strict=True):
            if ray.get(remote(place_of, seat)(folder)) is None:
                for piece in _pieces(path):
                    ray.get(remote(receive, seat)(folder, *piece))
                ray.get(remote(finish, seat)(folder))
    store = dist.TCPStore(own, 0, len(seats) + 1, True, timedelta(seconds=CONNECT_S), wait_for_workers=False)
    first = Rank(0, len(seats) + 1, f"tcp://{own}:{store.port}", own)
    files = {name: (task.run / name).read_bytes() for name in CARRIED if (task.run / name).exists()}
    amount = {"num_gpus": 1.0} if on_card else {"num_cpus": float(threads)}
    started = {}
    for number, seat in enumerate(seats, 1):
        chooses_card = seat.is_own and on_card
        changes = replace(task.changes, device=task.devices[seat.local]) if chooses_card else task.changes
        rank = replace(first, number=number, address=seat.address)
        order = replace(task, rank=rank, devices=(), changes=changes)
        # Its process ends with the call, because nothing may be left of a run in it.
        call = remote(compute, seat, max_calls=1, **amount)
        started[call(order, files, folders, chooses_card)] = (number, seat.host)
    return Ranks(first, store, task.run, _Ends(ray, started))


def _reserve(ray: Any, need: Mapping[str, float]) -> tuple[list[RankPlacement], Any]:
    """Return a seat for each rank that the living machines have room for, besides rank 0, and their placement group.

    Raises MachineNotFit when others use them.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    own, deadline = ray.get_runtime_context().get_node_id(), time.monotonic() + PLACE_S
    while True:
        seats: list[RankPlacement] = []
        for node in ray.nodes():
            if node["Alive"]:
                is_own = node["NodeID"] == own
                room = min(int(node["Resources"].get(name, 0) // amount) for name, amount in need.items())
                where = (node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"])
                # Rank 0 is not a task of Ray, but has one of its machine's devices.
                seats += [RankPlacement(len(seats) + i, *where, i + is_own, is_own) for i in range(room - is_own)]
        if not seats:
            return [], None
        # Each machine has a resource of its own, by which a bundle is bound to it.
        group = placement_group([{**need, f"node:{seat.address}": 0.001} for seat in seats])
        if group.wait(RETRY_S):
            return seats, group
        remove_placement_group(group)
        if time.monotonic() > deadline:
            raise MachineNotFit(
                f"the cluster can't start {len(seats)} ranks: other jobs use its devices",
                hint="wait until they are free, or train on this machine alone: --set workers=auto",
            )


class _Ends:
    """A callable that returns how the ranks' Ray tasks ended so far."""

    def __init__(self, ray: Any, ranks: Mapping[Any, tuple[int, str]]):
        self._ray, self._living, self._ends = ray, dict(ranks), list[RankEnd]()

    def __call__(self) -> Sequence[RankEnd]:
        living = list(self._living)
        ended = self._ray.wait(living, num_returns=len(living), timeout=0)[0] if living else ()
        for reference in ended:
            number, host = self._living.pop(reference)
            try:
                outcome = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().partition("\n")[0]
                outcome = lost_outcome("MachineLost", f"rank {number} on {host} was lost: {reason}")
            if outcome["status"] != "done":
                self._ends.append(RankEnd(number, 0, outcome))
        return self._ends


# What follows runs in Ray's processes, on the ranks' machines.


@dataclass(frozen=True)
class Folder:
    """A folder that never changes: its path, relative to the home if it is below it, and its manifest's hash."""

    stored: str
    manifest: str

    @property
    def copy(self) -> Path:
        """Return the path of this machine's copy of the folder, which may not exist."""
        return home() / "carried" / self.manifest[:32]


def compute(task: Train, files: Mapping[str, bytes], folders: Sequence[Folder], chooses_card: bool) -> dict[str, Any]:
    """Run the loop as one rank, in a Ray task. Return the content of its outcome.json.

    `files`: those of the run's folder. `folders`: the model and the snapshot. `chooses_card`: the task does, not Ray.
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
            model, snapshot = (place_of(folder) or folder.copy for folder in folders)
            loop = importlib.import_module(ENTRIES[Train])  # imports torch, after the environment is set
            loop.main(replace(task, run=run, model=model, snapshot=snapshot), Heartbeat(None))
            return {"status": "done"}
        except BaseException as error:  # noqa: BLE001 (as in the last frame of a child: every error is told)
            report_failure(run, error)
            return dict(read_json(run / OUTCOME))


def place_of(folder: Folder) -> Path | None:
    """Return the path of the folder on this machine, or None if it is not here."""
    for path in (stored_path(folder.stored), folder.copy):
        if (path / MANIFEST).exists() and sha256_file(path / MANIFEST) == folder.manifest:
            return path
    return None


def _pieces(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            offset = 0
            while (piece := file.read(PIECE_BYTES)) or not offset:
                yield str(path.relative_to(folder)), offset, piece
                offset += max(1, len(piece))


def receive(folder: Folder, name: str, offset: int, piece: bytes) -> None:
    """Write one received piece of a file at its offset."""
    # Another run may write the same one at this moment: both have the same bytes, and `finish` compares hashes.
    path = _unfinished(folder) / name
    make_folder(path.parent)
    with open(open_plain(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.seek(offset)
        file.write(piece)


def finish(folder: Folder) -> None:
    """Rename the received files to the folder's final name. Raises MachineNotFit if they are not what was sent."""
    unfinished = _unfinished(folder)
    problems = manifest_problems(unfinished)
    if problems or sha256_file(unfinished / MANIFEST) != folder.manifest:
        shutil.rmtree(unfinished)
        raise MachineNotFit(f"the copy of {folder.stored} on {platform.node()} is incomplete", hint="start it again")
    unfinished.rename(folder.copy)


def _unfinished(folder: Folder) -> Path:
    return folder.copy.with_name(f".{folder.copy.name}")
