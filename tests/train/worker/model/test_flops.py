"""The matrix products of a step, counted as they run, against the plan's formula."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from train.worker.models import write_model

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.protocol import Document


class Counter(TorchDispatchMode):
    """Floating point operations of all two-dimensional products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = args[-2:] if name == "aten::mm" else args[1:3]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def test_products_of_a_step_are_those_of_the_formula(tmp_path: Path) -> None:
    """4 per frozen weight and token, 6 per adapter weight, 4 V d per trained token; no weight gradient anywhere.

    Attention is left out on both sides: its blocks are rectangles here and triangles in the kernels.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 12, "head_dim": 64, "vocab_size": 512}
    folder = write_model(tmp_path, **sizes)
    model = FastModel(
        folder,
        LoraConfig(r=8, alpha=16),
        dtype=torch.float32,
        device=torch.device("cpu"),
        choices=Choices(kernels="torch"),
    )
    length, count = 64, 4
    docs = [
        Document(row, torch.randint(3, 512, (length,)), torch.tensor([False] + [True] * (length - 1)))
        for row in range(count)
    ]
    with Counter() as counter:
        model.backward(docs, 1.0)
    tokens = count * (length - 1)
    frozen = sum(g.outputs * g.inputs for x in model.weights.layers for g in x.matrices)
    formula = tokens * (4 * frozen + 6 * model.master_N.numel() + 4 * 512 * 256)
    assert abs(counter.flops / formula - 1) < 0.02
