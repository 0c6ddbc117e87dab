"""The tables that the host prepares for a micro-batch: all indices that the device reads, in few shapes.

Shapes: T tokens, R rows that predict something, E entries of the loss, H rotated pairs of a head.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hivetune.train.plan.layout import Layout, Padding
from hivetune.train.worker.model.fast.spec import Frequencies, ModelSpec
from hivetune.train.worker.model.memory import wide_dtype

MASK_64 = (1 << 64) - 1


@dataclass(frozen=True)
class BatchTables:
    """The index tables of a layout, all on the host or all on one device.

    tokens_T: token ids. angles: cos and sin [T, rotated pairs] of each of the model's rotations in turn. attention: the
    tables that its attention reads. rows_R: the flat rows that predict a token, None if all do. entry_row_E: for each
    loss entry, its index into these rows. target_E: the token to predict. count_E: the factor of its loss (the number
    of documents that train it, 0 for padding). straight: entry i is of row i and there are no others, so nothing needs
    to be gathered. key_T: the seeds of dropout's masks, None without dropout.
    """

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

    def on(self, device: torch.device) -> "BatchTables":
        """Return a copy on the device, without waiting for the transfer; on a CPU return the tables themselves."""
        return self if device.type == "cpu" else self.changed(lambda table: table.to(device, non_blocking=True))

    def changed(self, change: Callable[[Tensor], Tensor]) -> "BatchTables":
        """Return a copy with `change` applied to each table."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        single = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(
            self, **single, angles=tuple(map(change, self.angles)), attention=tuple(map(change, self.attention))
        )


def make_tables(
    layout: Layout,
    spec: ModelSpec,
    dtype: torch.dtype,
    attention: tuple[Tensor, ...],
    *,
    pad: Padding,
    keys: Sequence[int] | None,
) -> BatchTables:
    """Return the tables of a layout. `attention`: the result of `attention.tables_for`.

    `keys`: the seeds of dropout's masks, None without dropout.
    """
    # Padding entries may fall on rows that have one already; then rows without an entry are added.
    computed = set(layout.rows)
    idle = (row for row in range(layout.size) if row not in computed)
    rows = sorted(computed.union(itertools.islice(idle, pad(len(computed)) - len(computed))))
    position = {row: number for number, row in enumerate(rows)}
    entry_rows = [position[row] for row in layout.rows]
    return BatchTables(
        layout=layout,
        tokens_T=_indices(layout.tokens),
        angles=tuple(part for rope in spec.ropes for part in _angles(rope, layout.positions, wide_dtype(dtype))),
        attention=attention,
        rows_R=None if len(rows) == layout.size else _indices(rows),
        entry_row_E=_indices(entry_rows),
        target_E=_indices(layout.targets),
        count_E=torch.tensor(layout.counts, dtype=wide_dtype(dtype)),
        straight=entry_rows == list(range(len(rows))),
        key_T=None if keys is None else _indices(keys),
    )


def drop_keys(layout: Layout, draw: int) -> list[int]:
    """Return the seed of each token's dropout mask [T]: a hash of `draw` (the step's) and of the tokens up to it."""
    # So rows with a common prefix have the same masks in it, whether it is computed once or not, and the masks of a
    # row are the same in any company.
    keys = [0] * layout.size
    for segment in layout.segments:
        indices = range(segment.start, segment.start + segment.size)
        key = draw
        if segment.parents:
            last = layout.segments[segment.parents[-1]]
            key = keys[last.start + last.size - 1]
        for index in indices:
            keys[index] = key = _next_key(key, layout.tokens[index])
    return [key - (key >> 63 << 64) for key in keys]


def _next_key(key: int, token: int) -> int:
    """Return 64 bits from 64 bits: the step of splitmix64 (Vigna), with the token in place of its counter."""
    key = (key + token * 2 + 0x9E3779B97F4A7C15) & MASK_64
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & MASK_64
    return key ^ (key >> 31)


def _indices(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _angles(frequencies: Frequencies, positions: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # In fp64: fp32 angles are off by 1e-3 at position 32,000.
    angle_TH = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    return angle_TH.cos().to(dtype), angle_TH.sin().to(dtype)
