"""The implementation that a prepared model gets: the fast path if it knows the architecture, else the general one.

Other processes of a run load the same model by what the run tells them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hivetune.base.typed import from_plain, to_plain
from hivetune.config import LoraConfig, RunConfig
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.worker.device import start_with
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.fast.spec import NotFast, read_spec
from hivetune.train.worker.model.protocol import LoraModel


def is_known(folder: Path) -> bool:
    """Return whether the fast path computes the model that config.json describes; nothing is loaded."""
    try:
        read_spec(folder)
    except NotFast:
        return False
    return True


def load_model(
    folder: Path,
    lora: LoraConfig,
    *,
    method: str,
    dtype: torch.dtype,
    device: torch.device,
    choices: Choices = NO_CHOICES,
    first_layers: int | None = None,
) -> LoraModel:
    """Load the model of a prepared folder with adapters of zeros: on the fast path if it knows the architecture.

    `choices`: of the run; path "general" forces the general path. `first_layers`: without the others, to compare paths.
    Raises UsageError for target modules that the model does not have, MachineNotFit when qlora lacks its package.
    """
    cause = (choices.path_why or "the choices ask for it") if choices.path == "general" else ""
    quantized = method == "qlora"
    cause = cause or ("the base is quantized" if quantized else "")
    if not cause:
        try:
            return FastModel(
                folder,
                lora,
                dtype=dtype,
                device=device,
                choices=choices,
                first_layers=first_layers,
            )
        except NotFast as error:
            cause = str(error)
    # transformers costs 3.5 s of processor time at each start of a worker; the fast path does without.
    from hivetune.train.worker.model.general import load_general

    return load_general(
        folder, lora, method=method, dtype=dtype, device=device, choices=choices, why=cause, first_layers=first_layers
    )


def welcome_of(config: RunConfig, choices: Choices) -> dict[str, Any]:
    """Return everything that a worker needs to load the same model by `load_welcomed`."""
    return {
        "lora": config.lora.model_dump(mode="json"),
        "method": config.method,
        "memory_share": config.memory_share,
        "choices": to_plain(choices),
    }


def load_welcomed(folder: Path, welcome: Mapping[str, Any], changes: Choices) -> LoraModel:
    """Return the same model as the run's process has, with this worker's own device and `changes`."""
    choices = changes.over(from_plain(Choices, welcome["choices"]))
    device, dtype = start_with(choices, welcome["memory_share"])
    lora = LoraConfig(**welcome["lora"])
    return load_model(folder, lora, method=welcome["method"], dtype=dtype, device=device, choices=choices)
