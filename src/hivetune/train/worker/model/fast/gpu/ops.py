"""The operations and attention (ops.TorchOps, attention.TorchAttention) by the Triton kernels, on a card.

They compute float32, bfloat16 and float16. Arguments are the caller's buffers as ops.py describes them; every kernel
writes where the plain form writes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from hivetune.train.plan.layout import Layout
from hivetune.train.worker.model.fast.gpu import attend, row_kernels
from hivetune.train.worker.model.fast.ops import Drop, TorchOps, drop_below
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.tables import few_of
from hivetune.train.worker.model.fast.weights.matrices import Group, Member
from hivetune.train.worker.model.memory import Workspace

SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
# Threads of a program. AMD's Instinct cards run 64 of them in step (a wave), Radeon and NVIDIA cards 32.
ROW_THREADS = 256
BLOCK_THREADS = 128
LOGITS, GATES = 4096, 1024
ROWS, COLUMNS = 64, 64
MIN_DOT = 16  # the least size of each side of a product in a kernel
# Tiles of queries, keys and values of a block must fit into the 64 KB that a program of every card has, and CUDA's
# compiler keeps three of them: of 16 KB each they took 103 KB (make proof NAME=triton).
TILE_BYTES = 64 * 64 * 2


class TritonOps(TorchOps):
    """The operations of ops.TorchOps, in Triton. `wave`: threads that a device runs in step."""

    name = "triton"

    def __init__(self, device: torch.device):
        super().__init__()
        self.wave = torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32

    def add_norm(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        sum_TD: Tensor,
        w_D: Tensor,
        eps: float,
        y_TD: Tensor,
        rstd_T: Tensor,
    ) -> None:
        rows, width = x_TD.shape
        delta = x_TD if delta_TD is None else delta_TD
        row_kernels.add_norm[(rows,)](
            x_TD, delta, delta.stride(0), sum_TD, w_D, eps, y_TD, rstd_T, width,
            HAS_DELTA=delta_TD is not None, BLOCK=triton.next_power_of_2(width), num_warps=self._warps(ROW_THREADS),
        )  # fmt: skip

    def norm_backward(
        self, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, w_D: Tensor, dx_TD: Tensor, y_TD: Tensor | None
    ) -> None:
        rows, width = x_TD.shape
        y = dy_TD if y_TD is None else y_TD
        row_kernels.norm_backward[(rows,)](
            dy_TD, x_TD, rstd_T, w_D, dx_TD, y, width,
            HAS_Y=y_TD is not None, BLOCK=triton.next_power_of_2(width), num_warps=self._warps(ROW_THREADS),
        )  # fmt: skip

    def rope(self, x_TN: Tensor, cos_TH: Tensor, sin_TH: Tensor, head_dim: int, *, inverse: bool) -> None:
        rows, width = x_TN.shape
        half = cos_TH.shape[1]
        row_kernels.rope[(rows, width // head_dim)](
            x_TN, x_TN.stride(0), cos_TH, sin_TH, -1.0 if inverse else 1.0, half,
            HEAD_DIM=head_dim, BLOCK=triton.next_power_of_2(half), num_warps=1,
        )  # fmt: skip

    def glu(self, gate_up_TN: Tensor, h_TF: Tensor, activation: str) -> None:
        rows, width = h_TF.shape
        row_kernels.glu[(rows, triton.cdiv(width, GATES))](
            gate_up_TN, gate_up_TN.stride(0), h_TF, width,
            GELU=activation == "gelu", BLOCK=GATES, num_warps=self._warps(ROW_THREADS),
        )  # fmt: skip

    def glu_backward(
        self, dh_TF: Tensor, gate_up_TN: Tensor, dgate_up_TN: Tensor, h_TF: Tensor, activation: str
    ) -> None:
        rows, width = h_TF.shape
        row_kernels.glu_backward[(rows, triton.cdiv(width, GATES))](
            dh_TF, gate_up_TN, gate_up_TN.stride(0), dgate_up_TN, dgate_up_TN.stride(0), h_TF, width,
            GELU=activation == "gelu", BLOCK=GATES, num_warps=self._warps(ROW_THREADS),
        )  # fmt: skip

    def adapt(self, y_TW: Tensor, group: Group, *, adapter: bool) -> None:
        if group.bias_N is not None:
            y_TW[:, : group.outputs] += group.bias_N
        for member in group.adapted if adapter else ():
            grid = (triton.cdiv(len(y_TW), ROWS), triton.cdiv(member.size, COLUMNS))
            row_kernels.adapt[grid](*_thin(y_TW, group, member), **self._tiles(member))

    def adapt_backward(self, dy_TW: Tensor, group: Group) -> None:
        dy_TW[:, group.outputs + group.ranks :].zero_()
        for member in group.adapted:
            row_kernels.adapt_backward[(triton.cdiv(len(dy_TW), ROWS),)](
                *_thin(dy_TW, group, member), **self._tiles(member)
            )

    def up_gradient(self, dy_TW: Tensor, s_TR: Tensor, group: Group, scale: float) -> None:
        for member in group.adapted:
            d_up_NR = member.d_up_NR
            dy_TN, s = dy_TW[:, member.start : member.stop], s_TR[:, member.rank_at :]
            row_kernels.sum_up[(triton.cdiv(member.size, COLUMNS),)](
                dy_TN, dy_TN.stride(0), s, s.stride(0), d_up_NR, len(dy_TW), member.size, d_up_NR.shape[1], scale,
                **self._tiles(member),
            )  # fmt: skip

    def down_gradient(self, ds_TR: Tensor, x_TK: Tensor, group: Group, scale: float) -> None:
        if not group.adapted:
            return
        members, inputs = len(group.adapted), x_TK.shape[1]
        rank = len(group.d_downs_RK) // members
        row_kernels.sum_down[(triton.cdiv(inputs, COLUMNS), members)](
            ds_TR, ds_TR.stride(0), x_TK, x_TK.stride(0), group.d_downs_RK, len(x_TK), inputs, rank,
            group.ranks // members, scale,
            RANKS=_padded(rank), ROWS=ROWS, INPUTS=COLUMNS, num_warps=self._warps(BLOCK_THREADS),
        )  # fmt: skip

    def drop(self, x_TK: Tensor, drop: Drop, salt: int, out_TK: Tensor) -> None:
        rows, width = x_TK.shape
        row_kernels.drop[(rows, triton.cdiv(width, GATES))](
            x_TK, drop.key_T, salt, drop_below(drop.rate), 1 / (1 - drop.rate), out_TK, width,
            BLOCK=GATES, num_warps=self._warps(ROW_THREADS),
        )  # fmt: skip

    def cross_entropy(
        self,
        logits_CV: Tensor,
        target_C: Tensor,
        count_C: Tensor,
        softcap: float | None,
        nll_C: Tensor,
        *,
        gradient: bool,
    ) -> None:
        rows, vocabulary = logits_CV.shape
        row_kernels.cross_entropy[(rows,)](
            logits_CV, target_C, count_C, softcap or 0.0, nll_C, vocabulary,
            CAPPED=softcap is not None, GRADIENT=gradient, BLOCK=LOGITS, num_warps=self._warps(ROW_THREADS),
        )  # fmt: skip

    def _tiles(self, member: Member) -> dict[str, int]:
        return {
            "RANKS": _padded(len(member.scaled_up_RN)),
            "ROWS": ROWS,
            "COLUMNS": COLUMNS,
            "num_warps": self._warps(BLOCK_THREADS),
        }

    def _warps(self, threads: int) -> int:
        return threads // self.wave


class TritonAttention:
    """The attention of attention.TorchAttention, in Triton, by `block_tables` on the device."""

    def __init__(
        self, tables: Sequence[Tensor], spec: ModelSpec, dtype: torch.dtype, workspace: Workspace, ops: TritonOps
    ):
        self._spec, self._workspace, self._warps = spec, workspace, BLOCK_THREADS // ops.wave
        self._channels = _channels(spec)
        self._size = tokens_at_once(self._channels, dtype.itemsize)
        self._blocks, self._segments, self._ranges, self._readers = tables

    def forward(self, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, window: int | None) -> None:
        spec = self._spec
        attend.forward[(len(self._blocks), spec.heads)](
            qkv_TW, qkv_TW.stride(0), out_TN, lse_TH, self._blocks, self._segments, self._ranges,
            *self._numbers(window), **self._constants(window),
        )  # fmt: skip

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None:
        spec = self._spec
        sums_TH = self._workspace.take("attention_sums", *lse_TH.shape, dtype=torch.float32)
        attend.output_sums[tuple(lse_TH.shape)](
            dout_TN, out_TN, sums_TH, DIM=spec.head_dim, CHANNELS=self._channels, num_warps=1
        )
        shared = (
            qkv_TW, qkv_TW.stride(0), dout_TN, lse_TH, sums_TH, dqkv_TW, dqkv_TW.stride(0), self._blocks, self._segments
        )  # fmt: skip
        for kernel, table, heads in (
            (attend.backward_queries, self._ranges, spec.heads),
            (attend.backward_keys, self._readers, spec.kv_heads),
        ):
            kernel[(len(self._blocks), heads)](*shared, table, *self._numbers(window), **self._constants(window))

    def _numbers(self, window: int | None) -> tuple[float, ...]:
        spec = self._spec
        v_at = spec.q_width + spec.kv_width
        return (spec.heads, spec.q_width, v_at, spec.attention_scale, spec.attention_softcap or 0.0, window or 0)

    def _constants(self, window: int | None) -> dict[str, Any]:
        spec = self._spec
        return {
            "SHARE": spec.heads // spec.kv_heads,
            "DIM": spec.head_dim,
            "CHANNELS": self._channels,
            "QUERIES": self._size,
            "KEYS": self._size,
            "CAPPED": spec.attention_softcap is not None,
            "WINDOW": window is not None,
            "num_warps": self._warps,
        }


def tokens_at_once(channels: int, itemsize: int) -> int:
    """Return how many queries, and keys, a program of attention has at a time."""
    return next((size for size in (64, 32) if size * channels * itemsize <= TILE_BYTES), MIN_DOT)


def block_tables(layout: Layout, spec: ModelSpec, dtype: torch.dtype, *, few: bool = False) -> tuple[Tensor, ...]:
    """Return blocks, segments, ranges and readers, as attend.py names them, on the host.

    `few`: padded to shapes that come again and again, with blocks of a segment without a token, which write nothing.
    """
    block = tokens_at_once(_channels(spec), dtype.itemsize)
    seeing: list[list[int]] = [[number] for number in range(len(layout.segments))]
    for number, segment in enumerate(layout.segments):
        for parent in segment.parents:
            seeing[parent].append(number)
    blocks: list[tuple[int, ...]] = []
    segments: list[tuple[int, ...]] = []
    ranges: list[tuple[int, ...]] = []
    readers: list[tuple[int, ...]] = []
    for number, segment in enumerate(layout.segments):
        path = [layout.segments[parent] for parent in (*segment.parents, number)]
        later = [layout.segments[segment_number] for segment_number in seeing[number]]
        blocks += [(number, offset) for offset in range(0, segment.size, block)]
        segments.append((segment.start, segment.size, segment.depth, len(ranges), len(path), len(readers), len(later)))
        ranges += [(part.start, part.size, part.depth) for part in path]
        readers += [(part.start, part.size, part.depth) for part in later]
    if few:
        nothing = len(segments)
        segments += [(0,) * 7] * (few_of(len(segments) + 1) - len(segments))
        blocks += [(nothing, 0)] * (few_of(len(blocks)) - len(blocks))
        for table in (ranges, readers):
            table += [(0, 0, 0)] * (few_of(len(table)) - len(table))
    return tuple(torch.tensor(table, dtype=torch.int32) for table in (blocks, segments, ranges, readers))


def _channels(spec: ModelSpec) -> int:
    return max(MIN_DOT, int(triton.next_power_of_2(spec.head_dim)))


def _thin(y_TW: Tensor, group: Group, member: Member) -> tuple[Any, ...]:
    """Return arguments of the products with `scaled_up_RN`, whose rows may be more than the rank: zeros behind."""
    up_RN = member.scaled_up_RN
    at = group.outputs + member.rank_at
    return (y_TW, y_TW.stride(0), up_RN, len(y_TW), member.start, member.size, at, len(up_RN))


def _padded(rank: int) -> int:
    return max(MIN_DOT, int(triton.next_power_of_2(rank)))
