"""The parts of a training step between and besides its matrix products, each forward and backward, at a job's sizes.

There is one list of parts, computed twice: by the backends under test on their device, and in float64 on the CPU by the
plain forms (fast/ops.py). Both begin with the same numbers, rounded to the precision under test.

Shapes: T tokens, D hidden, F MLP width, C rows of logits, V tokens of the vocabulary, W columns of a merged matrix.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hivetune.train.plan.layout import Layout, TrimmedDocument, make_layout
from hivetune.train.worker.model.fast.computing import Computing
from hivetune.train.worker.model.fast.ops import TorchOps
from hivetune.train.worker.model.fast.passes import chunk_rows
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.weights.matrices import Group, Member
from hivetune.train.worker.model.fast.weights.read import RANK_COLUMNS_MULTIPLE
from hivetune.train.worker.model.memory import Workspace, wide_of
from hivetune.train.worker.optimizer import AdamW

Compute = Callable[[], tuple[Tensor, ...]]
LOSS_ROWS = 128


@dataclass(frozen=True)
class Sizes:
    """The sizes of a job: model, rank, tokens of a micro-batch."""

    spec: ModelSpec
    rank: int
    tokens: int


@dataclass(frozen=True)
class _Inputs:
    """The numbers that a part begins with: the same for every backend, rounded to `rounded`."""

    backend: Computing
    rounded: torch.dtype

    def __call__(self, name: str, *shape: int, wide: bool = False) -> Tensor:
        """Return normal numbers that depend on name and shape. `wide`: as the residual stream is kept."""
        seed = hashlib.blake2b(f"{name}/{shape}".encode(), digest_size=7).digest()
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(seed, "big")))
        numbers = numbers if wide else numbers.to(self.rounded)
        return numbers.to(self.backend.device, self._dtype(wide))

    def empty(self, *shape: int, wide: bool = False) -> Tensor:
        """Return a buffer to write to, NaN inside and behind it: no result may depend on unwritten memory."""
        rows = torch.full((shape[0] + 1, *shape[1:]), torch.nan, dtype=self._dtype(wide), device=self.backend.device)
        return rows[: shape[0]]

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return `empty` in the shape of `tensor`, in the dtype of products."""
        return self.empty(*tensor.shape)

    def _dtype(self, wide: bool) -> torch.dtype:
        return wide_of(self.backend.dtype) if wide else self.backend.dtype


def reference() -> Computing:
    """Return the reference: float64 on the CPU, in plain torch."""
    return Computing(torch.device("cpu"), torch.float64, TorchOps(), eager=True)


def make(name: str, backend: Computing, sizes: Sizes, rounded: torch.dtype) -> Compute:
    """Return the part `name` of PARTS, ready to be computed any number of times with the same result."""
    return PARTS[name](_Inputs(backend, rounded), sizes)


def _norm(inputs: _Inputs, sizes: Sizes) -> Compute:
    shape, ops = (sizes.tokens, sizes.spec.hidden), inputs.backend.ops
    x_TD, dx_before_TD = inputs("x", *shape, wide=True), inputs("dx", *shape, wide=True)
    delta_TD, dy_TD, w_D = inputs("delta", *shape), inputs("dy", *shape), inputs("w", shape[1], wide=True)
    sum_TD, dx_TD = inputs.empty(*shape, wide=True), inputs.empty(*shape, wide=True)
    y_TD, again_TD, rstd_T = inputs.empty(*shape), inputs.empty(*shape), inputs.empty(shape[0], wide=True)

    def run() -> tuple[Tensor, ...]:
        ops.add_norm(x_TD, delta_TD, sum_TD, w_D, sizes.spec.eps, y_TD, rstd_T)
        dx_TD.copy_(dx_before_TD)
        ops.norm_backward(dy_TD, sum_TD, rstd_T, w_D, dx_TD, again_TD)
        return sum_TD, y_TD, rstd_T, dx_TD, again_TD

    return run


def _rotation(inputs: _Inputs, sizes: Sizes) -> Compute:
    spec, ops = sizes.spec, inputs.backend.ops
    half = max((len(rope) for rope in spec.ropes), default=spec.head_dim // 2)
    angle_TH = inputs("angle", sizes.tokens, half, wide=True)
    cos_TH, sin_TH = angle_TH.cos(), angle_TH.sin()
    before_TN = inputs("q", sizes.tokens, spec.q_width)
    turned_TN, back_TN = inputs.empty_like(before_TN), inputs.empty_like(before_TN)

    def run() -> tuple[Tensor, ...]:
        turned_TN.copy_(before_TN)
        ops.rope(turned_TN, cos_TH, sin_TH, spec.head_dim, inverse=False)
        back_TN.copy_(turned_TN)
        ops.rope(back_TN, cos_TH, sin_TH, spec.head_dim, inverse=True)
        return turned_TN, back_TN

    return run


def _gate(inputs: _Inputs, sizes: Sizes) -> Compute:
    spec, ops = sizes.spec, inputs.backend.ops
    gate_up_TF, dh_TF = inputs("gate_up", sizes.tokens, 2 * spec.ffn), inputs("dh", sizes.tokens, spec.ffn)
    h_TF, again_TF, dgate_up_TF = inputs.empty_like(dh_TF), inputs.empty_like(dh_TF), inputs.empty_like(gate_up_TF)

    def run() -> tuple[Tensor, ...]:
        ops.glu(gate_up_TF, h_TF, spec.activation)
        ops.glu_backward(dh_TF, gate_up_TF, dgate_up_TF, again_TF, spec.activation)
        return h_TF, dgate_up_TF, again_TF

    return run


def _loss(inputs: _Inputs, sizes: Sizes) -> Compute:
    """Return the loss of half as many rows as tokens, as in a step.

    There are no more than LOSS_ROWS, since the truth of each costs a pass over the vocabulary.
    """
    spec, ops = sizes.spec, inputs.backend.ops
    rows = min(max(1, sizes.tokens // 2), chunk_rows(spec.vocab), LOSS_ROWS)
    before_CV = inputs("logits", rows, spec.vocab)
    target_C = (torch.arange(rows) * 7919 % spec.vocab).to(before_CV.device)
    count_C = (torch.arange(rows) % 3).to(before_CV.device, wide_of(before_CV.dtype))
    logits_CV, nll_C = inputs.empty_like(before_CV), inputs.empty(rows, wide=True)

    def run() -> tuple[Tensor, ...]:
        logits_CV.copy_(before_CV)
        ops.cross_entropy(logits_CV, target_C, count_C, spec.logit_softcap, nll_C, gradient=True)
        return nll_C, logits_CV

    return run


def _attention(inputs: _Inputs, sizes: Sizes) -> Compute:
    """Return attention of rows with a common prefix, computed once, and of one row without."""
    spec, layout = sizes.spec, layout_of(sizes.tokens)
    tables = [table.to(inputs.backend.device) for table in inputs.backend.attention_tables(layout, spec)]
    attend = inputs.backend.attention(layout, tables, spec, Workspace(inputs.backend.device))
    qkv_TW, dout_TN = inputs("qkv", layout.size, spec.qkv_width), inputs("dout", layout.size, spec.q_width)
    windows = sorted({layer.window for layer in spec.layers}, key=lambda window: window or 0)
    buffers = [
        (inputs.empty(layout.size, spec.q_width), inputs.empty(layout.size, spec.heads, wide=True),
         inputs.empty(layout.size, spec.qkv_width))
        for _ in windows
    ]  # fmt: skip

    def run() -> tuple[Tensor, ...]:
        for window, (out_TN, lse_TH, dqkv_TW) in zip(windows, buffers, strict=True):
            attend.forward(qkv_TW, out_TN, lse_TH, window)
            attend.backward(dout_TN, qkv_TW, out_TN, lse_TH, dqkv_TW, window)
        return tuple(tensor for out_TN, _, dqkv_TW in buffers for tensor in (out_TN, dqkv_TW))

    return run


def _adapter(inputs: _Inputs, sizes: Sizes) -> Compute:
    """Return both factors on a linear layer of the width of the stream: output, its gradients, those of A and B."""
    spec, rank, tokens, ops = sizes.spec, sizes.rank, sizes.tokens, inputs.backend.ops
    hidden, columns = spec.hidden, -(-rank // RANK_COLUMNS_MULTIPLE) * RANK_COLUMNS_MULTIPLE
    d_down_RK, d_up_NR = inputs.empty(rank, hidden, wide=True), inputs.empty(hidden, rank, wide=True)
    member = Member("one", 0, hidden, d_down_RK=d_down_RK, d_up_NR=d_up_NR, scaled_up_RN=inputs("up", rank, hidden))
    group = Group(inputs.empty(hidden + columns, hidden), None, hidden, (member,), d_downs_RK=d_down_RK)
    y_before_TW, dy_before_TN = inputs("y", tokens, hidden + columns), inputs("dy", tokens, hidden)
    x_TK, y_TW, dy_TW = inputs("x", tokens, hidden), inputs.empty_like(y_before_TW), inputs.empty_like(y_before_TW)

    def run() -> tuple[Tensor, ...]:
        y_TW.copy_(y_before_TW)
        dy_TW[:, :hidden].copy_(dy_before_TN)
        dy_TW[:, hidden:].fill_(torch.nan)  # as in a step, nothing is there yet
        for gradient in (d_down_RK, d_up_NR):
            gradient.zero_()
        ops.adapt(y_TW, group, adapter=True)
        ops.adapt_backward(dy_TW, group)
        ops.up_gradient(dy_TW, y_TW[:, hidden:], group, 1 / tokens)
        ops.down_gradient(dy_TW[:, hidden:], x_TK, group, 1 / tokens)
        return y_TW[:, : hidden + rank], dy_TW[:, : hidden + rank], d_up_NR, d_down_RK

    return run


def _optimizer(inputs: _Inputs, sizes: Sizes) -> Compute:
    """Return two updates of the adapters of a layer."""
    spec = sizes.spec
    count = sizes.rank * (4 * spec.hidden + spec.qkv_width + spec.q_width + 3 * spec.ffn)
    before_N, grad_N = inputs("master", count, wide=True), inputs("grad", count, wide=True)
    optimizer = AdamW(before_N.clone(), weight_decay=0.01, kernels=inputs.backend.ops.name)

    def run() -> tuple[Tensor, ...]:
        optimizer.master_N.copy_(before_N)
        for average in (optimizer.exp_avg_N, optimizer.exp_avg_sq_N):
            average.zero_()
        for number in (1, 2):
            optimizer.update(grad_N, rate=1e-3, number=number)
        return optimizer.master_N, optimizer.exp_avg_N, optimizer.exp_avg_sq_N

    return run


def _copy(inputs: _Inputs, sizes: Sizes) -> Compute:
    """Return a copy from the host, on the device, and back."""
    host_TD = inputs("copied", sizes.tokens, sizes.spec.hidden).cpu()
    device = inputs.backend.device

    def run() -> tuple[Tensor, ...]:
        device_TD = host_TD.to(device)
        return device_TD.clone(), device_TD.t().contiguous().cpu()

    return run


PARTS: Mapping[str, Callable[[_Inputs, Sizes], Compute]] = {
    "copy": _copy,
    "norm": _norm,
    "rotation": _rotation,
    "gate": _gate,
    "adapter": _adapter,
    "attention": _attention,
    "loss": _loss,
    "optimizer": _optimizer,
}
# How often a layer of a step has each; "loss" and "optimizer": once a step, for as many layers as there are.
A_LAYER = {"norm": 2, "rotation": 1, "gate": 1, "adapter": 4, "attention": 1}


def layout_of(tokens: int) -> Layout:
    """Return a layout of three rows behind a prefix of a quarter of the tokens, and one row of the rest."""
    prefix = tuple(range(1, 1 + tokens // 4))
    length = tokens // 5

    def row(*ids: int) -> TrimmedDocument:
        return TrimmedDocument(ids, ((len(ids) - 1, 1),))

    shared = [row(*prefix, *range(start, start + length)) for start in (10_000, 20_000, 30_000)]
    remaining = tokens - len(prefix) - 3 * length
    return make_layout([*shared, *([row(*range(40_000, 40_000 + remaining))] if remaining else [])], share=True)
