"""The implementation that a prepared model gets: the fast path if it knows the architecture, else the general one."""

from pathlib import Path

import torch

from hivetune.config import LoraConfig
from hivetune.run.choices import NO_CHOICES, Choices
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
) -> LoraModel:
    """Load the model of a prepared folder with adapters of zeros: on the fast path if it knows the architecture.

    `choices`: of the run; path "general" forces the general path.
    Raises UsageError for target modules that the model does not have, MachineNotFit when qlora lacks its package.
    """
    if choices.path == "general":
        cause = choices.path_why or "the choices ask for it"
    elif method == "qlora":
        cause = "the base is quantized"
    else:
        try:
            return FastModel(folder, lora, dtype=dtype, device=device, choices=choices)
        except NotFast as error:
            cause = str(error)
    # transformers costs 3.5 s of processor time at each start of a worker; the fast path does without.
    from hivetune.train.worker.model.general import load_general

    return load_general(folder, lora, method=method, dtype=dtype, device=device, choices=choices, why=cause)
