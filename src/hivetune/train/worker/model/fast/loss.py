"""Logits and loss at the positions that predict something, in chunks; the gradient is made in the forward pass.

So the vocabulary's matrix is used twice (2 products, 4 V D FLOPs an entry instead of 6 with recomputed logits), and
only one chunk of logits exists at a time, as in Liger-Kernel's fused linear cross entropy (arXiv 2410.10989).

Shapes: R rows of the stream, E entries (a row and the token it must predict), C entries of a chunk, D hidden, V tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.state import Walk
from hivetune.train.worker.model.fast.weights.matrices import Weights

CHUNK_LOGITS = 16 << 20
"""Logits of a chunk: 340 entries at SmolLM2's 49k tokens, 110 at Qwen's 152k. More is not faster: 410 GFLOP/s a core
at 192 entries, 411 at 320, 426 at 512 (docs/log.md)."""


def chunk_rows(vocab: int, wanted: int | None) -> int:
    """Entries of a chunk, a multiple of 64 where there are that many."""
    return wanted or max(64, CHUNK_LOGITS // vocab // 64 * 64)


Weigh = Callable[[Tensor], Tensor]


def loss_and_gradient(
    walk: Walk, weights: Weights, x_RD: Tensor, delta_RD: Tensor, chunk: int | None, weigh: Weigh | None = None
) -> tuple[Tensor, Tensor]:
    """nll [E] of each entry in nats, and the gradient [R, D] of sum(weight * nll) by the last layer's output, wide.

    x_RD + delta_RD is that output; `chunk`: entries of a chunk, None for the default. The weight of an entry is its
    count, or what `weigh` makes of the nll of all entries: then each entry's gradient is kept until all are known, so
    that the vocabulary's matrix is used no more often.
    """
    spec, ops, batch = walk.spec, walk.ops, walk.batch
    rows = len(x_RD)
    sum_RD, rstd_R = walk.buffer("final", rows, spec.hidden, wide=True), walk.buffer("final_rstd", rows, wide=True)
    y_RD, dy_RD = walk.buffer("y", rows, spec.hidden), walk.buffer("dy", rows, spec.hidden)
    ops.add_norm(x_RD, delta_RD, sum_RD, weights.norm_D, spec.eps, y_RD, rstd_R)
    if weigh is not None:
        each_ED = walk.buffer("each", len(batch.entry_row_E), spec.hidden)
        nll_E = _entry_nll(walk, weights, y_RD, each_ED, chunk, each=True)
        each_ED.mul_(weigh(nll_E)[:, None])
        dy_RD.zero_().index_add_(0, batch.entry_row_E, each_ED)
    else:
        if not batch.straight:
            dy_RD.zero_()  # several entries of a row add to it below
        nll_E = _entry_nll(walk, weights, y_RD, dy_RD, chunk)
    dx_RD = walk.buffer("dx", rows, spec.hidden, wide=True).zero_()
    ops.norm_backward(dy_RD, sum_RD, rstd_R, weights.norm_D, dx_RD, None)
    return nll_E, dx_RD


def loss_only(walk: Walk, weights: Weights, x_RD: Tensor, delta_RD: Tensor, chunk: int | None) -> Tensor:
    """nll [E] of each entry in nats."""
    spec = walk.spec
    rows = len(x_RD)
    sum_RD, rstd_R = walk.buffer("final", rows, spec.hidden, wide=True), walk.buffer("final_rstd", rows, wide=True)
    y_RD = walk.buffer("y", rows, spec.hidden)
    walk.ops.add_norm(x_RD, delta_RD, sum_RD, weights.norm_D, spec.eps, y_RD, rstd_R)
    return _entry_nll(walk, weights, y_RD, None, chunk)


def _entry_nll(
    walk: Walk, weights: Weights, y_RD: Tensor, dy_RD: Tensor | None, chunk: int | None, *, each: bool = False
) -> Tensor:
    """nll of all entries, until the next micro-batch; the gradient of the normed rows is written to `dy_RD` if it is
    given.

    `each`: of each entry with the weight 1 instead, [E, D]; padding has 0 as ever.
    """
    spec, batch = walk.spec, walk.batch
    count_E = batch.count_E.clamp(max=1) if each else batch.count_E
    entries, size = len(batch.entry_row_E), chunk_rows(spec.vocab, chunk)
    nll_E = walk.buffer("nll", entries, wide=True)
    for start in range(0, entries, size):
        stop = min(start + size, entries)
        part, rows_C = slice(start, stop), batch.entry_row_E[start:stop]
        hidden_CD = y_RD[part]
        if not batch.straight:
            hidden_CD = torch.index_select(y_RD, 0, rows_C, out=walk.buffer("entries", len(rows_C), spec.hidden))
        logits_CV = walk.buffer("logits", stop - start, spec.vocab)
        walk.ops.multiply(hidden_CD, weights.head_VD.t(), logits_CV)
        walk.ops.cross_entropy(
            logits_CV,
            batch.target_E[part],
            count_E[part],
            spec.logit_softcap,
            nll_E[part],
            gradient=dy_RD is not None,
        )
        if dy_RD is None:
            continue
        if each or batch.straight:
            walk.ops.multiply(logits_CV, weights.head_VD, dy_RD[part])
        else:
            dhidden_CD = walk.buffer("dentries", len(rows_C), spec.hidden)
            walk.ops.multiply(logits_CV, weights.head_VD, dhidden_CD)
            dy_RD.index_add_(0, rows_C, dhidden_CD)
    return nll_E
