"""The processes that torchrun started: rank 0 trains, the others compute packs for it until it has no more.

Sums go through gloo on host tensors, so cards of any make can take part. Rank 0 alone reads checkpoints, decides and
writes; it hands each step's packs out by their tokens and receives the others' sums one by one, so that a rank which is
silent is named. There is no supervisor here: a rank that is lost ends the run's process, and torchrun starts all again
(--max-restarts), which goes on from the newest checkpoint.

Shapes: N adapter weights, F figures.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from hivetune.errors import HivetuneError
from hivetune.process.child import Ranks
from hivetune.train.worker.exchange.work import Figures, Work, WorkResult, compute, cost_of, read_work, work_message
from hivetune.train.worker.model.protocol import LoraModel

# A rank that is silent for this many times as long as rank 0 computed itself, or for this long, is lost.
SILENT_TIMES = 5.0
SILENT_FLOOR_S = 60.0
# Others wait for rank 0 while it loads, validates and saves; its death is noticed by its connection.
GROUP_TIMEOUT_S = 4 * 3600.0
WORK, END = 1, 0


def join_ranks(ranks: Ranks) -> None:
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    torch.distributed.init_process_group("gloo", rank=ranks.rank, world_size=ranks.size, timeout=timeout)


def tell_ranks(document: Mapping[str, Any]) -> None:
    """Once, before anything else: what the others need to load the model."""
    data = json.dumps(document).encode()
    _broadcast(torch.tensor([len(data)], dtype=torch.int64))
    _broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def from_rank_0() -> dict[str, Any]:
    """What `tell_ranks` was given there."""
    size = int(_broadcast(torch.zeros(1, dtype=torch.int64)))
    data = bytearray(size)
    _broadcast(torch.frombuffer(data, dtype=torch.uint8))
    document: dict[str, Any] = json.loads(data)
    return document


class RankCrew:
    """A `Crew` of all ranks, for rank 0."""

    def __init__(self, model: LoraModel, ranks: Ranks):
        self._model, self._size = model, ranks.size

    def run(self, works: Sequence[Work], step: int, sum_N: Tensor) -> list[Figures]:
        """Raises HivetuneError naming the rank that is gone or silent."""
        shares = shares_of([cost_of(work) for work in works], self._size)
        messages = [work_message(number, work) for number, work in enumerate(works)]
        headers = json.dumps({"shares": shares, "works": [header for header, _ in messages]}).encode()
        payload = b"".join(data for _, data in messages)
        _broadcast_command(WORK, headers, payload)
        _broadcast(self._model.master_N.cpu())
        started = time.monotonic()
        table_F = _table(works)
        _add_own(self._model, works, shares[0], sum_N, table_F)
        silent_s = max(SILENT_FLOOR_S, SILENT_TIMES * (time.monotonic() - started))
        part_N, part_F = torch.empty_like(sum_N), torch.empty_like(table_F)
        for rank in range(1, self._size):
            for part, whole in ((part_F, table_F), (part_N, sum_N)):
                _receive(part, rank, silent_s)
                whole.add_(part)
        return _read_table(works, table_F)

    def close(self) -> None:
        """After an error the others end by themselves: the connection is gone."""
        _broadcast_command(END, b"", b"")


def serve_rank(model: LoraModel, on_item: Callable[[], None]) -> int:
    """What every other rank does: compute its share until rank 0 has no more; how many pieces it computed.

    Raises RuntimeError of torch when rank 0 is gone.
    """
    computed = 0
    sum_N = torch.zeros(model.master_N.numel(), dtype=torch.int64)
    rank = torch.distributed.get_rank()
    while (command := _receive_command()) is not None:
        headers, payload = command
        works, at = [], 0
        for header in headers["works"]:
            size = 5 * sum(header["lengths"])
            works.append(read_work(header, memoryview(payload)[at : at + size]))
            at += size
        model.master_N.copy_(_broadcast(torch.empty_like(model.master_N, device="cpu")))
        sum_N.zero_()
        table_F = _table(works)
        _add_own(model, works, headers["shares"][rank], sum_N, table_F)
        for part in (table_F, sum_N):
            torch.distributed.send(part, 0)
        computed += len(headers["shares"][rank])
        on_item()
    return computed


def shares_of(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of the pieces of work for each rank: the largest first, each to the rank that has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += costs[number]
    return shares


def _add_own(model: LoraModel, works: Sequence[Work], share: Sequence[int], sum_N: Tensor, table_F: Tensor) -> None:
    at = 0
    for number, work in enumerate(works):
        size = 2 + len(work.documents)
        if number in share:
            result: WorkResult = compute(model, work)
            if result.integers_N is not None:
                sum_N.add_(result.integers_N)
            figures = result.figures
            values = (figures.peak, float(figures.fits), *figures.nlls)
            table_F[at : at + len(values)] = torch.tensor(values, dtype=torch.float64)
        at += size


def _table(works: Sequence[Work]) -> Tensor:
    """Room for the figures of all work; each row is written by one rank, so that adding the tables is exact."""
    return torch.zeros(sum(2 + len(work.documents) for work in works), dtype=torch.float64)


def _read_table(works: Sequence[Work], table_F: Tensor) -> list[Figures]:
    found, at = [], 0
    for work in works:
        peak, fits, *nlls = table_F[at : at + 2 + len(work.documents)].tolist()
        found.append(Figures(tuple(nlls), peak, bool(fits)))
        at += 2 + len(work.documents)
    return found


def _broadcast_command(kind: int, headers: bytes, payload: bytes) -> None:
    _broadcast(torch.tensor([kind, len(headers), len(payload)], dtype=torch.int64))
    for data in (headers, payload):
        if data:
            _broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _receive_command() -> tuple[dict[str, Any], bytearray] | None:
    kind, *sizes = _broadcast(torch.zeros(3, dtype=torch.int64)).tolist()
    if kind == END:
        return None
    parts = [bytearray(size) for size in sizes]
    for part in parts:
        if part:
            _broadcast(torch.frombuffer(part, dtype=torch.uint8))
    return json.loads(parts[0]), parts[1]


def _broadcast(tensor: Tensor) -> Tensor:
    """What rank 0 has of it, in place."""
    try:
        torch.distributed.broadcast(tensor, 0)
    except RuntimeError as error:
        raise _lost("a process", error) from None
    return tensor


def _receive(part: Tensor, rank: int, timeout_s: float) -> None:
    try:
        torch.distributed.irecv(part, rank).wait(timedelta(seconds=timeout_s))  # type: ignore[union-attr]
    except RuntimeError as error:
        raise _lost(f"rank {rank}", error) from None


def _lost(who: str, error: RuntimeError) -> HivetuneError:
    return HivetuneError(
        f"{who} is gone or silent: {str(error).splitlines()[0]}",
        hint="torchrun starts all again with --max-restarts; training goes on from the newest checkpoint",
    )
