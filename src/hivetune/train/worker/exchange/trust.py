"""Which workers may compute for a run, and what their results show: admission by description, then by comparison.

Equal bits hold within one class of (kernels, instruction set, torch, precision, threads). A worker of another class on
this machine is a mistake and is refused. A cluster of mixed cards is made of several classes: there it is admitted, the
run's journal says that equality is up to rounding from then on, and its gradients are compared as far as that goes.
"""

import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hivetune import __version__
from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.errors import HivetuneError
from hivetune.train.worker.exchange.work import WorkResult
from hivetune.train.worker.measure.agreement import GRADIENT
from hivetune.train.worker.measure.canary import CanaryFailed
from hivetune.train.worker.model.protocol import LoraModel

OWN = 0
"""The number of the run's own process among its workers."""

Tell = Callable[[str, dict[str, Any]], None]


class WorkerWrong(HivetuneError):
    """A worker computed wrong numbers. Everything that it did after step `good` is doubtful."""

    def __init__(self, worker: int, good: int, reason: str):
        super().__init__(f"worker {worker} computes wrong numbers: {reason}", hint="test its card: hivetune doctor")
        self.worker, self.good = worker, good


def hello(number: int, model_folder: Path, model: LoraModel) -> dict[str, Any]:
    """Return how a worker describes itself. `class`: everything that decides how its process rounds numbers."""
    on_card = model.device.type == "cuda"
    processor = torch.cuda.get_device_name(model.device) if on_card else torch.backends.cpu.get_cpu_capability()
    return {
        "worker": number,
        "pid": os.getpid(),
        "host": platform.node(),
        "hivetune": __version__,
        "model": sha256_file(model_folder / MANIFEST),
        "class": {
            "torch": torch.__version__,
            "path": model.path,
            "kernels": model.kernels,
            "dtype": str(model.dtype).removeprefix("torch."),
            "processor": processor,
            "threads": 0 if on_card else torch.get_num_threads(),
            "weights": model.master_N.numel(),
        },
    }


def objection(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return why a worker can't compute for this run, "" where it can. Both arguments are as `hello` returns them."""
    if theirs.get("hivetune") != mine["hivetune"]:
        return f"it is hivetune {theirs.get('hivetune')}, this run is of {mine['hivetune']}"
    if theirs.get("model") != mine["model"]:
        return "its model has other bytes; prepare the model there again: hivetune fetch"
    if type(number := theirs.get("worker")) is not int or number < 1:
        return f"its number is {number!r}; the run's own worker is 0, the others count from 1"
    return ""


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return in words how the classes of two workers differ, "" where they are equal."""
    own, other = mine["class"], theirs["class"]
    return ", ".join(f"{name} {other.get(name)} instead of {own[name]}" for name in own if own[name] != other.get(name))


def more_than_rounding(theirs: WorkResult, mine: WorkResult, dtype: torch.dtype) -> str:
    """Return in words how a gradient of another class differs, "" where rounding explains the difference."""
    if theirs.integers_N is None or mine.integers_N is None:
        same = theirs.finite == mine.finite
        return "" if same else "it is not finite" if mine.finite else "it is finite, this process's is not"
    right = mine.integers_N.to(torch.float64)
    off = float((theirs.integers_N.to(torch.float64) - right).norm() / right.norm().clamp_min(1.0))
    bound = GRADIENT[str(dtype).removeprefix("torch.")]
    return "" if off <= bound else f"it is {off:.0%} of its length off, and rounding explains {bound:.1%}"


class Vote(NamedTuple):
    """The digest of a pack's result, as one worker computed it."""

    worker: int
    digest: str


class Comparisons:
    """The results of comparing packs, for each worker over the steps of a run."""

    def __init__(self, tell: Tell):
        self._tell = tell
        self._good: dict[int, int] = {}
        self.dismissed: dict[int, str] = {}
        """Workers that computed wrong numbers, each with the reason; they are not admitted again."""

    def begin(self, worker: int, step: int) -> None:
        """Note the first step that a worker has a part in."""
        self._good.setdefault(worker, step)

    def passed(self, worker: int, step: int) -> None:
        """Note a step at which a worker's numbers were right."""
        self._good[worker] = step

    def judge(self, step: int, pack: int, votes: Sequence[Vote], ask: Callable[[], Sequence[Vote]]) -> None:
        """Compare several workers' results for one pack; `ask` makes each worker compute it twice more.

        Raises WorkerWrong for a worker in the minority, CanaryFailed when it is this process or when it is unclear.
        """
        if len({vote.digest for vote in votes}) > 1:
            votes = [*votes, *ask()]
            truth = majority(votes)
            wrong = sorted({vote.worker for vote in votes if vote.digest != truth})
            if truth is None or OWN in wrong:
                wrong_workers = [] if truth is None else wrong
                self._tell("packs_differ", {"step": step, "pack": pack, "wrong": wrong_workers})
                raise CanaryFailed(
                    f"step {step}, pack {pack}: two workers computed different numbers, "
                    + ("and each repeats its own" if truth is None else "this process is in the minority"),
                    hint="one of the cards, its driver or its memory is broken: hivetune doctor",
                )
            if wrong:
                self.accuse(wrong, step, f"its gradient of step {step}, pack {pack} differs from the others'")
        self._good |= dict.fromkeys({vote.worker for vote in votes}, step)

    def accuse(self, workers: Sequence[int], step: int, reason: str) -> None:
        """Dismiss these workers and raise WorkerWrong for the first of them."""
        self.dismissed |= dict.fromkeys(workers, reason)
        self._tell("worker_wrong", {"step": step, "worker": workers[0], "why": reason})
        raise WorkerWrong(workers[0], min(self._good.get(worker, 0) for worker in workers), reason)


def majority(votes: Sequence[Vote]) -> str | None:
    """Return the digest of most workers, None while two are level. A worker that contradicts itself does not count."""
    digests = {vote.worker: {own_vote.digest for own_vote in votes if own_vote.worker == vote.worker} for vote in votes}
    steady = Counter(next(iter(w)) for w in digests.values() if len(w) == 1)
    ranked = steady.most_common(2)
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0][0]
