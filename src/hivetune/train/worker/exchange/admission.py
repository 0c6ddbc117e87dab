"""Who may compute for a run: a worker of the same model and packages, whose kernels round alike.

Equal bits hold within one class of (kernels, instruction set, torch, precision, threads). A worker of another class on
this machine is a mistake and is refused. A cluster of mixed cards is made of several classes: there it is admitted, the
run's journal says that equality is up to rounding from then on, and its gradients are compared as far as that goes.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hivetune import __version__
from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.train.worker.exchange.work import WorkResult
from hivetune.train.worker.measure.agreement import GRADIENT
from hivetune.train.worker.model.protocol import LoraModel


def hello(number: int, model_folder: Path) -> dict[str, Any]:
    """What a worker says of itself before it has loaded anything."""
    return {
        "kind": "hello",
        "worker": number,
        "pid": os.getpid(),
        "host": platform.node(),
        "hivetune": __version__,
        "model": sha256_file(model_folder / MANIFEST),
    }


def objection(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Why a worker can't compute for this run, "" where it can. Both as `hello`."""
    if theirs.get("hivetune") != mine["hivetune"]:
        return f"it is hivetune {theirs.get('hivetune')}, this run is of {mine['hivetune']}"
    if theirs.get("model") != mine["model"]:
        return "its model has other bytes; prepare the model there again: hivetune fetch"
    if type(number := theirs.get("worker")) is not int or number < 1:
        return f"its number is {number!r}; the run's own worker is 0, the others count from 1"
    return ""


def class_of(model: LoraModel) -> dict[str, Any]:
    """What decides how numbers are rounded."""
    on_card = model.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "path": model.path,
        "kernels": model.kernels,
        "dtype": str(model.dtype).removeprefix("torch."),
        "processor": torch.cuda.get_device_name(model.device) if on_card else torch.backends.cpu.get_cpu_capability(),
        "threads": 0 if on_card else torch.get_num_threads(),
        "weights": model.master_N.numel(),
    }


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """In words, "" where the classes are equal."""
    return ", ".join(
        f"{name} {theirs.get(name)} instead of {mine[name]}" for name in mine if mine[name] != theirs.get(name)
    )


def more_than_rounding(theirs: WorkResult, mine: WorkResult, dtype: torch.dtype) -> str:
    """How a gradient of another class of kernels differs, in words; "" where rounding explains it."""
    if theirs.integers_N is None or mine.integers_N is None:
        same = theirs.figures.finite == mine.figures.finite
        return "" if same else "it is not finite" if mine.figures.finite else "it is finite, this process's is not"
    right = mine.integers_N.to(torch.float64)
    off = float((theirs.integers_N.to(torch.float64) - right).norm() / right.norm().clamp_min(1.0))
    bound = GRADIENT[str(dtype).removeprefix("torch.")]
    return "" if off <= bound else f"it is {off:.0%} of its length off, and rounding explains {bound:.1%}"
