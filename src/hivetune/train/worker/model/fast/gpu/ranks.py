"""Triton kernels of the adapters' thin products: no library sees their shapes, which are behind many of its crashes.

`RANKS` is the number of rank columns that are read, a power of two of at least 16; `rank` of them are real. Products of
float32 are exact to its rounding ("ieee": no TensorFloat-32). No sum is shared between programs, so each is made in the
same order every time.
"""

import triton
import triton.language as tl


@triton.jit
def adapt(
    y, y_row, up, tokens, start, size, s_at, rank, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """y[:, start : start + size] += S up, with S the columns of y from `s_at`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANKS)
    here = y + row[:, None] * y_row
    inside = (row < tokens)[:, None] & (column < size)[None, :]
    s = tl.load(here + s_at + r[None, :], mask=(row < tokens)[:, None] & (r < rank)[None, :], other=0.0)
    u = tl.load(
        up + r[:, None] * size + column[None, :], mask=(r < rank)[:, None] & (column < size)[None, :], other=0.0
    )
    there = here + start + column[None, :]
    added = tl.dot(s, u, input_precision="ieee") + tl.load(there, mask=inside, other=0.0).to(tl.float32)
    tl.store(there, added.to(y.dtype.element_ty), mask=inside)


@triton.jit
def adapt_backward(
    dy, dy_row, up, tokens, start, size, s_at, rank, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The columns of dy from `s_at` become dS = dy[:, start : start + size] up^T."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANKS)
    here = dy + row[:, None] * dy_row
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for begin in range(0, size, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (row < tokens)[:, None] & (column < size)[None, :]
        d = tl.load(here + start + column[None, :], mask=inside, other=0.0)
        known = (column < size)[:, None] & (r < rank)[None, :]
        u = tl.load(up + r[None, :] * size + column[:, None], mask=known, other=0.0)
        total += tl.dot(d, u, input_precision="ieee")
    mask = (row < tokens)[:, None] & (r < rank)[None, :]
    tl.store(here + s_at + r[None, :], total.to(dy.dtype.element_ty), mask=mask)


@triton.jit
def sum_up(
    dy, dy_row, s, s_row, d_up, tokens, size, rank, scale,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """d_up [size, rank] += scale * dy^T S, of the columns of one member."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANKS)
    total = tl.zeros((COLUMNS, RANKS), dtype=tl.float32)
    for begin in range(0, tokens, ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        d_mask = (column < size)[:, None] & (row < tokens)[None, :]
        d = tl.load(dy + row[None, :] * dy_row + column[:, None], mask=d_mask, other=0.0)
        s_mask = (row < tokens)[:, None] & (r < rank)[None, :]
        read = tl.load(s + row[:, None] * s_row + r[None, :], mask=s_mask, other=0.0)
        total += tl.dot(d, read, input_precision="ieee")
    there = d_up + column[:, None] * rank + r[None, :]
    mask = (column < size)[:, None] & (r < rank)[None, :]
    tl.store(there, tl.load(there, mask=mask, other=0.0) + scale * total, mask=mask)


@triton.jit
def sum_down(
    ds, ds_row, x, x_row, d_downs, tokens, inputs, rank, columns, scale,
    RANKS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """d_downs [members * rank, inputs] += scale * dS^T X; program (block of inputs, member), `columns` of dS each."""
    member = tl.program_id(1)
    k = tl.program_id(0) * INPUTS + tl.arange(0, INPUTS)
    r = tl.arange(0, RANKS)
    total = tl.zeros((RANKS, INPUTS), dtype=tl.float32)
    for begin in range(0, tokens, ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        ds_mask = (r < rank)[:, None] & (row < tokens)[None, :]
        read = tl.load(ds + row[None, :] * ds_row + member * columns + r[:, None], mask=ds_mask, other=0.0)
        x_mask = (row < tokens)[:, None] & (k < inputs)[None, :]
        value = tl.load(x + row[:, None] * x_row + k[None, :], mask=x_mask, other=0.0)
        total += tl.dot(read, value, input_precision="ieee")
    there = d_downs + (member * rank + r[:, None]).to(tl.int64) * inputs + k[None, :]
    mask = (r < rank)[:, None] & (k < inputs)[None, :]
    tl.store(there, tl.load(there, mask=mask, other=0.0) + scale * total, mask=mask)
