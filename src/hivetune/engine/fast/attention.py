"""Causal attention over segments in plain torch: each query sees its parents' keys and its own segment's before it.

Correct anywhere; native.py does the same faster on CPUs, varlen.py on GPUs. Nothing crosses documents, because a
segment's keys are gathered along its own path.

Shapes: T tokens, H query heads, G key/value heads, E channels of a head, Q queries of a block, K keys of a segment.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hivetune.engine.fast.layout import Layout
from hivetune.engine.fast.spec import ModelSpec

QUERY_BLOCK = 256


class TorchAttention:
    """Attention of one layout. The qkv buffer holds [q | k | v | ...] in each row, rotary already applied."""

    def __init__(self, layout: Layout, spec: ModelSpec, device: torch.device):
        self._spec, self._layout = spec, layout
        self._keys = [_path(layout, number).to(device) for number in range(len(layout.segments))]

    def forward(self, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, window: int | None) -> None:
        out_TN.zero_()
        for rows, keys, mask_QK in self._blocks(window, qkv_TW.device):
            q_HQE, k_HKE, v_HKE = self._gather(qkv_TW, rows, keys)
            scores_HQK, _ = self._scores(q_HQE, k_HKE, mask_QK)
            lse_HQ = torch.logsumexp(scores_HQK, 2)
            weight_HQK = torch.exp(scores_HQK - lse_HQ[..., None])
            out_TN[rows] = (weight_HQK @ v_HKE).transpose(0, 1).flatten(1).to(out_TN.dtype)
            lse_TH[rows] = lse_HQ.t().to(lse_TH.dtype)

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None:
        """Gradients of q, k and v into the first columns of `dqkv_TW`. Summed in the wide dtype."""
        spec, share = self._spec, self._spec.heads // self._spec.kv_heads
        total_TW = torch.zeros(len(qkv_TW), spec.qkv_width, dtype=lse_TH.dtype, device=qkv_TW.device)
        k_at, v_at = spec.q_width, spec.q_width + spec.kv_width
        for rows, keys, mask_QK in self._blocks(window, qkv_TW.device):
            q_HQE, k_HKE, v_HKE = self._gather(qkv_TW, rows, keys)
            scores_HQK, slope_HQK = self._scores(q_HQE, k_HKE, mask_QK)
            weight_HQK = torch.exp(scores_HQK - lse_TH[rows].t()[..., None])
            dout_HQE = self._heads(dout_TN[rows])
            delta_HQ = (dout_HQE * self._heads(out_TN[rows])).sum(2)
            dscore_HQK = weight_HQK * (dout_HQE @ v_HKE.transpose(1, 2) - delta_HQ[..., None]) * spec.attention_scale
            if slope_HQK is not None:
                dscore_HQK *= slope_HQK
            total_TW[rows, :k_at] = (dscore_HQK @ k_HKE).transpose(0, 1).flatten(1)
            dk_HKE, dv_HKE = dscore_HQK.transpose(1, 2) @ q_HQE, weight_HQK.transpose(1, 2) @ dout_HQE
            for start, grad_HKE in ((k_at, dk_HKE), (v_at, dv_HKE)):
                grad_GKE = grad_HKE.unflatten(0, (-1, share)).sum(1)
                total_TW[:, start : start + spec.kv_width].index_add_(0, keys, grad_GKE.transpose(0, 1).flatten(1))
        dqkv_TW[:, : spec.qkv_width].copy_(total_TW)

    def _blocks(self, window: int | None, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Row range of queries, flat numbers of the keys on their path, and which of them each may see."""
        for segment, keys_K in zip(self._layout.segments, self._keys, strict=True):
            key_at_K = torch.arange(len(keys_K), device=device)
            for start in range(0, segment.size, QUERY_BLOCK):
                stop = min(start + QUERY_BLOCK, segment.size)
                query_at_Q = torch.arange(segment.depth + start, segment.depth + stop, device=device)
                distance_QK = query_at_Q[:, None] - key_at_K
                mask_QK = distance_QK >= 0 if window is None else (distance_QK >= 0) & (distance_QK < window)
                yield slice(segment.start + start, segment.start + stop), keys_K, mask_QK

    def _gather(self, qkv_TW: Tensor, rows: slice, keys: Tensor) -> Sequence[Tensor]:
        spec = self._spec
        k_at, v_at = spec.q_width, spec.q_width + spec.kv_width
        share = spec.heads // spec.kv_heads
        k_KN, v_KN = qkv_TW[keys, k_at:v_at], qkv_TW[keys, v_at : v_at + spec.kv_width]
        return self._heads(qkv_TW[rows, :k_at]), *(self._heads(t).repeat_interleave(share, 0) for t in (k_KN, v_KN))

    def _heads(self, x_TN: Tensor) -> Tensor:
        wide = torch.float64 if x_TN.dtype == torch.float64 else torch.float32
        return x_TN.unflatten(1, (-1, self._spec.head_dim)).transpose(0, 1).to(wide)

    def _scores(self, q_HQE: Tensor, k_HKE: Tensor, mask_QK: Tensor) -> tuple[Tensor, Tensor | None]:
        """Masked scores, and their slope where they are capped (Gemma 2)."""
        scores_HQK, slope_HQK = (q_HQE @ k_HKE.transpose(1, 2)) * self._spec.attention_scale, None
        cap = self._spec.attention_softcap
        if cap is not None:
            tanh_HQK = torch.tanh(scores_HQK / cap)
            scores_HQK, slope_HQK = cap * tanh_HQK, 1 - tanh_HQK.square()
        return scores_HQK.masked_fill(~mask_QK, float("-inf")), slope_HQK


def _path(layout: Layout, number: int) -> Tensor:
    """Flat token numbers of all keys of a segment: its parents' and its own, in order of position."""
    ranges = [layout.segments[parent] for parent in (*layout.segments[number].parents, number)]
    return torch.cat([torch.arange(s.start, s.start + s.size) for s in ranges])
