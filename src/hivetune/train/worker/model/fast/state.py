"""The state of one micro-batch on its way through the layers: tables on the device, buffers, inputs of backward.

Shapes as at the head of layer.py.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.ops import Drop, TorchOps
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.tables import BatchTables
from hivetune.train.worker.model.fast.weights.matrices import Weights
from hivetune.train.worker.model.memory import Workspace, wide_of


class Attention(Protocol):
    """Attention of one layout; see attention.TorchAttention for what the buffers hold."""

    def forward(self, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, window: int | None) -> None: ...

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None: ...


@dataclass
class Saved:
    """The inputs of one layer's backward pass; the plan counts these bytes (plan/memory.py, `saved_bytes_per_token`).

    x_TD: the stream at the input, delta added; rstd_T: 1 / root mean square of its rows. qkv_TW: after inner norms and
    rotation, with X A^T in the rank columns. out_TN, lse_TH: attention's output and the log-sum-exp of its scores, from
    which backward recomputes them (FlashAttention, arXiv 2205.14135). s_o_SR: X A^T of o, whose output buffer is used
    again. mid_SD, rstd_mid_S: the stream after attention. delta_SD: not part of backward; what the next layer has still
    to add.
    """

    x_TD: Tensor
    rstd_T: Tensor
    qkv_TW: Tensor
    out_TN: Tensor
    lse_TH: Tensor
    s_o_SR: Tensor
    mid_SD: Tensor
    rstd_mid_S: Tensor
    mlp: "SavedMlp"
    delta_SD: Tensor
    inner: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Input and rstd of further norms, flattened to one row per norm: q, k, after_attention, after_mlp."""


@dataclass
class SavedMlp:
    """The inputs of an MLP's backward pass. gate_up: before the activation, with X A^T in the rank columns.

    s_down: X A^T of the down projection.
    """

    gate_up_SW: Tensor
    s_down_SR: Tensor


@dataclass
class Walk:
    """One micro-batch on its way through the layers. `adapter` False: the base alone. `keep`: for a backward pass.

    The chain of gradients runs unscaled, because 1 / trained tokens would push fp16 gradients below its smallest number
    (6e-8). dA is multiplied by `scale` and dB by `up_scale` (scale * alpha / r) when they are added up.
    """

    spec: ModelSpec
    weights: Weights
    ops: TorchOps
    workspace: Workspace
    dtype: torch.dtype
    batch: BatchTables
    attention: Attention
    adapter: bool = True
    drop: Drop | None = None
    scale: float = 1.0
    up_scale: float = 1.0
    keep: bool = True

    def buffer(self, name: str, *shape: int, wide: bool = False) -> Tensor:
        return self.workspace.take(name, *shape, dtype=wide_of(self.dtype) if wide else self.dtype)

    def is_last(self, index: int) -> bool:
        return index == len(self.weights.layers) - 1

    def drop_of(self, index: int) -> Drop | None:
        """Return dropout of the S rows that a product of layer `index` sees after attention."""
        rows_R = self.batch.rows_R
        return self.drop if self.drop is None or rows_R is None or not self.is_last(index) else self.drop.of(rows_R)
