"""The computation of a step's gradient over one or all ranks of a run. Only here does the loop depend on other ranks,
besides values that all ranks share (ranks.py).

`FloatExchange` is one process that adds in fp32. `IntegerExchange` adds integers: each micro-batch of a step is a pack,
rank r of N computes packs r, r + N, and so on, and one sum of int64 over the ranks has the same bits for any N, because
a sum of integers depends neither on its order nor on the rank that computed a term.

A pack's gradient is rounded to multiples of 2^(exponent - 45), where 2^exponent bounds the largest value of the step
before. A value 2^-22 times as large as that bound still keeps all 24 bits of its significand, and the error of smaller
ones is less than that of a sum in fp32. Prior art: reproducible summation (Demmel and Nguyen, ARITH 2013); the same
training result on any number of workers: EasyScale (SC '23).

Shapes: N adapter weights, P packs of a step.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hivetune import __version__
from hivetune.config import RunConfig
from hivetune.errors import MachineNotFit
from hivetune.process.protocol import Train
from hivetune.run import checkpoints
from hivetune.run.choices import Choices
from hivetune.train.worker.model.protocol import Document, LoraModel
from hivetune.train.worker.over_ray import open_ranks_on_cluster
from hivetune.train.worker.ranks import Ranks, join_ranks, start_ranks

# |sum| < 2^61, and rounding may add a half to each term.
SUM_BITS = 61
# A gradient may be this many times (as a power of two) as large as the largest of the step before. A larger one makes
# the step again on a wider grid.
HEADROOM_BITS = 16
# The factor 2^(45 - exponent) must be a finite fp32 number.
MIN_EXPONENT, MAX_EXPONENT = -80, 128
# Of the first step: gradients of a mean loss are far below 2^16, and 1e-4 of them still keep 24 bits.
FIRST_EXPONENT = 0
# Documents that a rank scores at once in validation.
SCORED_TOGETHER = 16


def exponent_of(peak: float, before: int) -> int:
    """Return the exponent of the rounding unit of the next step, from the largest absolute value of this step's
    gradient, `peak`; `before` if there was no gradient."""
    if peak == 0:
        return before
    return min(max(math.frexp(peak)[1], MIN_EXPONENT), MAX_EXPONENT)


def fits(peak: float, exponent: int, packs: int) -> bool:
    """Return whether `packs` gradients with absolute values up to `peak` can be added without overflow."""
    return peak <= 2.0 ** (exponent + HEADROOM_BITS) / packs


def to_integers(grad_N: Tensor, exponent: int) -> Tensor:
    """Return `grad_N` rounded to multiples of the rounding unit, as int64 on the CPU. `fits` must hold."""
    return torch.round(grad_N * 2.0 ** (SUM_BITS - HEADROOM_BITS - exponent)).to(torch.int64).cpu()


def to_gradient(sum_N: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """Return a sum of such integers as a floating-point gradient, rounded once."""
    return sum_N.to(dtype) * 2.0 ** (exponent + HEADROOM_BITS - SUM_BITS)


@dataclass(frozen=True)
class Summed:
    """The `loss` of a step (a scalar: the sum of nll over its trained tokens, in nats), whose gradient is in `grad_N`.

    `exponent`: that of the next step's rounding unit.
    """

    loss: Tensor
    exponent: int


class FloatExchange:
    """The exchange of a run without `workers`: a single process, which adds in fp32."""

    def __init__(self, model: LoraModel, seed: int):
        self._model, self._seed = model, seed

    def backward(self, documents: Sequence[Document], step: int, *, scale: float, exponent: int) -> Summed:
        """Write the gradient of `scale` times the step's loss to the model's `grad_N`, and return the loss."""
        torch.manual_seed(_seed_of(self._seed, step))
        self._model.grad_N.zero_()
        return Summed(self._model.backward(documents, scale), exponent)

    def nll(self, documents: Sequence[Document]) -> list[float]:
        """Return each document's nll in nats, summed over its trained tokens."""
        return list(self._model.nll(documents).tolist())


class IntegerExchange:
    """The exchange of a run with `workers`: gradients are summed as integers over the ranks, with the same bits for any
    number of ranks."""

    def __init__(self, model: LoraModel, seed: int, ranks: Ranks):
        self._model, self._seed, self._ranks = model, seed, ranks
        self._buffer = torch.empty(0, dtype=torch.int64)

    def backward(self, documents: Sequence[Document], step: int, *, scale: float, exponent: int) -> Summed:
        """Compute the same as `FloatExchange.backward` over all ranks; afterwards each rank has the same gradient."""
        model, ranks, grad_N = self._model, self._ranks, self._model.grad_N
        batches = model.micro_batches(documents)
        packs = len(batches)
        while True:
            # One buffer, which is summed at once: the integers, and nll and peak of each pack. One rank writes the
            # numbers of a pack, so the sum of their bits over the ranks is exact.
            if len(self._buffer) != grad_N.numel() + 2 * packs:
                self._buffer = torch.empty(grad_N.numel() + 2 * packs, dtype=torch.int64)
            sum_N, told = self._buffer.zero_().split([grad_N.numel(), 2 * packs])
            told_P2 = told.view(torch.float64).view(packs, 2)
            for number in range(ranks.number, packs, ranks.size):
                torch.manual_seed(_seed_of(self._seed, step, number))  # dropout's, whoever computes the pack
                grad_N.zero_()
                nll = model.backward_one([documents[index] for index in batches[number]], scale)
                told_P2[number] = torch.stack([nll.to(torch.float64), grad_N.abs().max().to(torch.float64)]).cpu()
                if fits(peak := float(told_P2[number, 1]), exponent, packs) and math.isfinite(peak):
                    sum_N.add_(to_integers(grad_N, exponent))
            ranks.add(self._buffer)  # the only exchange of a step
            nlls, peaks = told_P2.T.tolist()
            if not all(map(math.isfinite, (*nlls, *peaks))):
                grad_N.fill_(torch.nan)
                return Summed(torch.tensor(math.nan, dtype=torch.float64, device=model.device), exponent)
            if all(fits(peak, exponent, packs) for peak in peaks):
                break
            exponent = exponent_of(max(peaks), exponent)
        grad_N.copy_(to_gradient(sum_N, exponent, grad_N.dtype))
        loss = torch.tensor(math.fsum(nlls), dtype=torch.float64, device=model.device)
        return Summed(loss, exponent_of(float(grad_N.abs().max()), exponent))

    def nll(self, documents: Sequence[Document]) -> list[float]:
        """Return the same as `FloatExchange.nll`, computed by all ranks together."""
        starts = range(0, len(documents), SCORED_TOGETHER)
        nlls = torch.zeros(len(documents), dtype=torch.float64)
        for start in starts[self._ranks.number :: self._ranks.size]:
            part = documents[start : start + SCORED_TOGETHER]
            nlls[start : start + len(part)] = self._model.nll(part).to("cpu", torch.float64)
        self._ranks.add(nlls.view(torch.int64))  # one rank writes each number, so the sum of the bits is the number
        return list(nlls.tolist())


Exchange = FloatExchange | IntegerExchange


def _seed_of(*numbers: int) -> int:
    """Return the seed of dropout in a step, or in one pack of it, so that resuming is "go to step i"."""
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def open_ranks(task: Train, cluster: str | None, choices: Choices) -> Ranks:
    """Return this process's view of the run's ranks, and start the others if this is rank 0.

    `cluster`: HOST:PORT of Ray's head, None for ranks on this machine. Raises MachineNotFit when a run can't begin on
    its cluster.
    """
    if task.rank is not None:
        return join_ranks(task.rank)
    if cluster is None or not task.devices:
        return start_ranks(task) if len(task.devices) > 1 else Ranks()
    try:
        return open_ranks_on_cluster(task, cluster, choices.threads or 1)
    except MachineNotFit as error:
        if not checkpoints.steps(task.run):
            raise
        # One that has begun goes on alone, because its bits are the same.
        alone = Ranks()
        alone.note = f"{error.message}; the run continues on this machine alone"
        return alone


def open_exchange(config: RunConfig, choices: Choices, model: LoraModel, ranks: Ranks) -> Exchange:
    """Return the exchange that sums a step's gradients: in fp32 without the setting `workers`, as integers with it.

    Raises MachineNotFit if ranks would round differently.
    """
    if choices.pack_tokens is None:
        return FloatExchange(model, config.seed)
    on_card = model.device.type == "cuda"
    processor = torch.cuda.get_device_name(model.device) if on_card else torch.backends.cpu.get_cpu_capability()
    # All that decides how this process rounds: else the sum would depend on who computed what.
    described = {
        "hivetune": __version__,
        "torch": torch.__version__,
        "path": model.path,
        "kernels": model.kernels,
        "dtype": str(model.dtype).removeprefix("torch."),
        "processor": processor,
        "threads": str(0 if on_card else torch.get_num_threads()),
    }
    first = ranks.agree(described, dict)
    if different := [
        f"{name} {described[name]} instead of {of}" for name, of in first.items() if described[name] != of
    ]:
        raise MachineNotFit(
            f"rank {ranks.number} would round differently from rank 0: {', '.join(different)}",
            hint="let only equal machines and cards share a run",
        )
    return IntegerExchange(model, config.seed, ranks)
