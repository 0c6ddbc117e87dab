"""What the host prepares of a micro-batch: every index table that the device will read, and nothing that it computes.

Shapes: T tokens, R rows that predict something, E entries of the loss, H rotated pairs of a head.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hivetune.train.plan.layout import Layout, Padding
from hivetune.train.worker.model.fast.ops import wide_of
from hivetune.train.worker.model.fast.spec import Frequencies, ModelSpec

MASK_64 = (1 << 64) - 1


@dataclass(frozen=True)
class BatchTables:
    """A layout in tables, all on the host or all on one device. state.LayerBatch says what most of them hold; `angles`:
    cos and sin of each of the model's rotations in turn; `attention`: what its kernels read."""

    layout: Layout
    tokens_T: Tensor
    angles: tuple[Tensor, ...]
    attention: tuple[Tensor, ...]
    rows_R: Tensor | None
    entry_row_E: Tensor
    target_E: Tensor
    count_E: Tensor
    straight: bool
    key_T: Tensor | None

    @property
    def shape(self) -> Hashable:
        """Equal for layouts that are the same work of the device, on other numbers."""
        flags = (self.straight, self.rows_R is None, self.key_T is None)
        return flags, tuple((tuple(table.shape), table.dtype) for table in self._all())

    def on(self, device: torch.device) -> "BatchTables":
        """A copy there, which the host does not wait for."""
        if device.type == "cpu":
            return self._with(iter(list(self._all())))
        return self._with(table.to(device, non_blocking=True) for table in self._all())

    def pinned(self) -> "BatchTables":
        """In memory that a card reads by itself."""
        return self._with(table.pin_memory() for table in self._all())

    def buffers(self, device: torch.device) -> "BatchTables":
        """Memory of this shape on a device, for `read`. What is in it is undefined."""
        return self._with(torch.empty(table.shape, dtype=table.dtype, device=device) for table in self._all())

    def read(self, other: "BatchTables") -> None:
        """Another layout of this shape into the same memory, without waiting for it."""
        for here, there in zip(self._all(), other._all(), strict=True):
            here.copy_(there, non_blocking=True)

    def _all(self) -> Iterator[Tensor]:
        yield from (self.tokens_T, self.entry_row_E, self.target_E, self.count_E, *self.angles, *self.attention)
        yield from (table for table in (self.rows_R, self.key_T) if table is not None)

    def _with(self, tables: Iterator[Tensor]) -> "BatchTables":
        """These tables, in the order of `_all`."""
        tokens_T, entry_row_E, target_E, count_E = itertools.islice(tables, 4)
        return BatchTables(
            layout=self.layout,
            tokens_T=tokens_T,
            entry_row_E=entry_row_E,
            target_E=target_E,
            count_E=count_E,
            angles=tuple(itertools.islice(tables, len(self.angles))),
            attention=tuple(itertools.islice(tables, len(self.attention))),
            rows_R=None if self.rows_R is None else next(tables),
            straight=self.straight,
            key_T=None if self.key_T is None else next(tables),
        )


def lay_tables(
    layout: Layout,
    spec: ModelSpec,
    dtype: torch.dtype,
    attention: tuple[Tensor, ...],
    *,
    pad: Padding,
    keys: Sequence[int] | None,
) -> BatchTables:
    """`attention`: computing.attention_tables of the layout. `keys`: of dropout, None without it."""
    # Padding entries may fall on rows that have one already; then rows without an entry are added.
    taken = set(layout.rows)
    idle = (row for row in range(layout.size) if row not in taken)
    rows = sorted(taken.union(itertools.islice(idle, pad(len(taken)) - len(taken))))
    place = {row: number for number, row in enumerate(rows)}
    entry_rows = [place[row] for row in layout.rows]
    return BatchTables(
        layout=layout,
        tokens_T=_indices(layout.tokens),
        angles=tuple(part for rope in spec.ropes for part in _angles(rope, layout.positions, wide_of(dtype))),
        attention=attention,
        rows_R=None if len(rows) == layout.size else _indices(rows),
        entry_row_E=_indices(entry_rows),
        target_E=_indices(layout.targets),
        count_E=torch.tensor(layout.counts, dtype=wide_of(dtype)),
        straight=entry_rows == list(range(len(rows))),
        key_T=None if keys is None else _indices(keys),
    )


def drop_keys(layout: Layout, draw: int, *, whole_rows: bool) -> list[int]:
    """What the dropout of each token follows from: `draw` (of the step) and the tokens up to this one.

    So rows with a common prefix have the same masks in it, whether it is computed once or not, and the masks of a row
    are the same in any company. `whole_rows`: from all tokens of the row instead, so that no two rows share a mask.
    """
    keys = [0] * layout.size
    for segment in layout.segments:
        places = range(segment.start, segment.start + segment.size)
        key = draw
        if segment.parents:
            last = layout.segments[segment.parents[-1]]
            key = keys[last.start + last.size - 1]
        if whole_rows:
            for place in places:
                key = _next_key(key, layout.tokens[place])
        for place in places:
            keys[place] = key = _next_key(key, layout.tokens[place])
    return [key - (key >> 63 << 64) for key in keys]


def _next_key(key: int, token: int) -> int:
    """64 bits from 64 bits: the step of splitmix64 (Vigna), with the token in place of its counter."""
    key = (key + token * 2 + 0x9E3779B97F4A7C15) & MASK_64
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & MASK_64
    return key ^ (key >> 31)


def _indices(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _angles(frequencies: Frequencies, positions: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, H], computed in fp64: fp32 angles are off by 1e-3 at position 32,000."""
    angle_TH = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    return angle_TH.cos().to(dtype), angle_TH.sin().to(dtype)
