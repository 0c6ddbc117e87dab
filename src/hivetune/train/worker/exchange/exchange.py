"""How a step's gradient comes about, with packs or without: all that the loop knows of workers.

`Whole` is one process that adds in fp32. `Packs` adds integers (grid.py), so the sum is the same whoever computes. A
`Crew` decides who that is: this process alone, a group on this machine (group.py), or a cluster's actors (cluster.py).

Shapes: N adapter weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.base.journal import Journal
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot
from hivetune.errors import UsageError
from hivetune.process.child import read_ranks
from hivetune.process.cluster import cluster_of
from hivetune.process.protocol import Train
from hivetune.run.choices import Choices
from hivetune.train.plan.layout import pack_tokens
from hivetune.train.worker.device import complete
from hivetune.train.worker.exchange.actor import ActorOrder
from hivetune.train.worker.exchange.cluster import RayCrew
from hivetune.train.worker.exchange.grid import exponent_of, to_gradient
from hivetune.train.worker.exchange.group import GroupCrew, open_store
from hivetune.train.worker.exchange.trust import OWN, hello
from hivetune.train.worker.exchange.work import Pack, Work, WorkResult, compute, pack_seed, step_seed
from hivetune.train.worker.model.load import welcome_of
from hivetune.train.worker.model.protocol import Document, LoraModel

# Documents that a worker scores at once in validation.
SCORED_TOGETHER = 16


@dataclass(frozen=True)
class Summed:
    """The `loss` of a step, a scalar: nll of its trained tokens; the gradient is in `grad_N`.

    `exponent`: of the next step's grid.
    """

    loss: Tensor
    exponent: int


class Whole:
    """An exchange of one process that adds in fp32."""

    def __init__(self, model: LoraModel, seed: int):
        self._model, self._seed = model, seed

    def backward(self, documents: Sequence[Document], step: int, *, scale: float, exponent: int) -> Summed:
        """Leave the gradient of `scale` times the step's loss in the model's `grad_N`."""
        torch.manual_seed(step_seed(self._seed, step))
        self._model.grad_N.zero_()
        return Summed(self._model.backward(documents, scale), exponent)

    def nll(self, documents: Sequence[Document], step: int) -> list[float]:
        """Return the sum over the trained tokens of each document."""
        return list(self._model.nll(documents).tolist())

    def close(self) -> None:
        pass


class LocalCrew:
    """A crew of this process alone."""

    def __init__(self, model: LoraModel):
        self._model = model

    def run(self, works: Sequence[Work], step: int, sum_N: Tensor) -> list[WorkResult]:
        """Compute the works in order. Return the numbers of each one's result, and add their integers to `sum_N`."""
        results = []
        for work in works:
            results.append(compute(self._model, work))
            if results[-1].integers_N is not None:
                sum_N.add_(results[-1].integers_N)
        return results

    def close(self) -> None:
        pass


Crew = LocalCrew | GroupCrew | RayCrew
"""The processes that compute a round."""


class Packs:
    """Sums of integers: the same bits whichever process of the crew computed which pack."""

    def __init__(self, model: LoraModel, seed: int, crew: Crew):
        self._model, self._seed, self._crew = model, seed, crew
        self._sum_N = torch.zeros(model.master_N.numel(), dtype=torch.int64)

    def backward(self, documents: Sequence[Document], step: int, *, scale: float, exponent: int) -> Summed:
        """Compute `Whole.backward` by the crew. Raises WorkerWrong."""
        batches = [tuple(documents[index] for index in indices) for indices in self._model.micro_batches(documents)]
        grad_N, fits = self._model.grad_N, False
        while not fits:
            works = [
                Work(batch, Pack(pack_seed(self._seed, step, number), scale, exponent, len(batches)))
                for number, batch in enumerate(batches)
            ]
            self._sum_N.zero_()
            results = self._crew.run(works, step, self._sum_N)
            if not all(result.finite for result in results):
                grad_N.fill_(torch.nan)
                return Summed(self._loss(math.nan), exponent)
            fits = all(result.fits for result in results)
            if not fits:
                exponent = exponent_of(max(result.peak for result in results), exponent)
        grad_N.copy_(to_gradient(self._sum_N, exponent, grad_N.dtype))
        loss = self._loss(math.fsum(result.nlls[0] for result in results))
        return Summed(loss, exponent_of(float(grad_N.abs().max()), exponent))

    def nll(self, documents: Sequence[Document], step: int) -> list[float]:
        """Compute `Whole.nll` by the crew."""
        starts = range(0, len(documents), SCORED_TOGETHER)
        works = [Work(tuple(documents[start : start + SCORED_TOGETHER])) for start in starts]
        return [nll for result in self._crew.run(works, step, self._sum_N) for nll in result.nlls]

    def close(self) -> None:
        self._crew.close()

    def _loss(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self._model.device)


Exchange = Whole | Packs


def with_packs(config: RunConfig, choices: Choices, snapshot: Snapshot) -> Choices:
    """Return `choices` with the size of packs where the config sets `workers`."""
    if config.workers is None or choices.pack_tokens is not None:
        return choices
    lengths = [length for _, _, length, _ in snapshot.plan_rows("train")]
    device = torch.device(complete(config.device, config.dtype, choices).device or "cpu").type
    return replace(choices, pack_tokens=pack_tokens(sum(lengths), len(lengths), config.batch_size, device))


def open_exchange(task: Train, config: RunConfig, choices: Choices, model: LoraModel, metrics: Journal) -> Exchange:
    """Return how steps are summed: in fp32 without the setting `workers`, as integers with it.

    Raises UsageError where torchrun started several processes for a run without the setting.
    """
    ranks = read_ranks()
    if choices.pack_tokens is None:
        if ranks.size > 1:
            raise UsageError(
                f"torchrun started {ranks.size} processes for a run of one process",
                hint="begin a run with workers: auto; then any number of processes gives the same bits",
            )
        return Whole(model, config.seed)

    def tell(event: str, fields: dict[str, Any]) -> None:
        metrics.append(event, **fields)

    cluster = cluster_of(config)
    if cluster is not None and ranks.size == 1:
        model_hash = sha256_file(task.model / MANIFEST)
        return Packs(
            model,
            config.seed,
            RayCrew(
                model,
                cluster,
                own_device="cuda:0" if choices.device == "cuda" else choices.device or "cpu",
                order=ActorOrder(OWN, config.model, task.model.resolve(), model_hash, welcome_of(config, choices)),
                mine=hello(OWN, task.model, model),
                tell=tell,
            ),
        )
    if ranks.size == 1 and task.meeting is None:
        return Packs(model, config.seed, LocalCrew(model))
    crew = GroupCrew(
        model,
        open_store(task.meeting),
        local=task.meeting is not None,
        mine=hello(OWN, task.model, model),
        welcome=welcome_of(config, choices),
        tell=tell,
        expected=ranks.size - 1,
    )
    return Packs(model, config.seed, crew)
