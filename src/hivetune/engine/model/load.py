"""Which implementation a prepared model gets: the fast path if it knows the architecture, else the general one."""

from pathlib import Path

import torch

from hivetune.config import LoraConfig
from hivetune.engine.model.fast.model import FastModel
from hivetune.engine.model.fast.spec import NotFast
from hivetune.engine.model.protocol import LoraModel
from hivetune.run.choices import NO_CHOICES, Choices


def load_model(
    folder: Path,
    lora: LoraConfig,
    *,
    method: str,
    dtype: torch.dtype,
    device: torch.device,
    choices: Choices = NO_CHOICES,
) -> LoraModel:
    """The model of a prepared folder with adapters of zeros: on the fast path if it knows the architecture.

    `choices`: of the run; path "general" forces the general path.
    Raises UsageError for target modules that the model does not have, MachineNotFit when qlora lacks its package.
    """
    why = (choices.path_why or "the choices ask for it") if choices.path == "general" else ""
    why = why or ("the base is quantized" if method == "qlora" else "")
    if not why:
        try:
            return FastModel(folder, lora, dtype=dtype, device=device, choices=choices)
        except NotFast as reason:
            why = str(reason)
    # transformers costs 3.5 s of processor time at each start of a worker; the fast path does without.
    from hivetune.engine.model.general import load_general

    return load_general(folder, lora, method=method, dtype=dtype, device=device, choices=choices, why=why)
