"""Triton kernels of rows: norms, rotation, the MLP's gate and the loss, and the adapters' thin products.

One program computes one row, or a block of one. What each computes is said in fast/ops.py; sums are in float32.
Pointers are to rows of the caller's buffers; a `..._row` is the distance between two of them, in elements.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm(x, delta, delta_row, total, w, eps, y, rstd, width, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0)
    if HAS_DELTA:
        value += tl.load(delta + row * delta_row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * width + at, value, mask=inside)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(rstd + row, scale)
    normed = value * scale * tl.load(w + at, mask=inside, other=0.0)
    tl.store(y + row * width + at, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(dy, x, rstd, w, dx, y, width, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    scale = tl.load(rstd + row)
    weight = tl.load(w + at, mask=inside, other=0.0)
    unit = tl.load(x + row * width + at, mask=inside, other=0.0) * scale
    dunit = tl.load(dy + row * width + at, mask=inside, other=0.0).to(tl.float32) * weight
    mean = tl.sum(dunit * unit, 0) / width
    before = tl.load(dx + row * width + at, mask=inside, other=0.0)
    tl.store(dx + row * width + at, before + scale * (dunit - unit * mean), mask=inside)
    if HAS_Y:
        tl.store(y + row * width + at, (unit * weight).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rope(x, x_row, cos, sin, sign, half, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate the pairs (i, i + half) of one head in place; program (row, head)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < half
    first_at = x + row * x_row + tl.program_id(1) * HEAD_DIM + at
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + row * half + at, mask=inside, other=0.0)
    s = sign * tl.load(sin + row * half + at, mask=inside, other=0.0)
    tl.store(first_at, (first * c - second * s).to(x.dtype.element_ty), mask=inside)
    tl.store(first_at + half, (second * c + first * s).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1  # libdevice's name for it differs between CUDA and ROCm


@triton.jit
def _activate(gate, GELU: tl.constexpr):
    """Return the activation and its derivative: SiLU, or GELU in its tanh form."""
    if GELU:
        cubed = 0.044715 * gate * gate * gate
        inner = _tanh(0.7978845608028654 * (gate + cubed))
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
        act = 0.5 * gate * (1 + inner)
        derivative = 0.5 * (1 + inner) + 0.5 * gate * (1 - inner * inner) * slope
    else:
        share = tl.sigmoid(gate)
        act = gate * share
        derivative = share * (1 + gate * (1 - share))
    return act, derivative


@triton.jit
def glu(gate_up, gate_up_row, h, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * gate_up_row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_row + width + at, mask=inside, other=0.0).to(tl.float32)
    act, _ = _activate(gate, GELU)
    tl.store(h + row * width + at, (act * up).to(h.dtype.element_ty), mask=inside)


@triton.jit
def glu_backward(dh, gate_up, gate_up_row, dgate_up, dgate_up_row, h, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * gate_up_row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_row + width + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dh + row * width + at, mask=inside, other=0.0).to(tl.float32)
    act, derivative = _activate(gate, GELU)
    target = dgate_up + row * dgate_up_row + at
    tl.store(target, (grad * up * derivative).to(dgate_up.dtype.element_ty), mask=inside)
    tl.store(target + width, (grad * act).to(dgate_up.dtype.element_ty), mask=inside)
    tl.store(h + row * width + at, (act * up).to(h.dtype.element_ty), mask=inside)


@triton.jit
def _mix(x):
    x = ((x ^ (x >> 16)) * 0x7FEB352D).to(tl.uint32)
    x = ((x ^ (x >> 15)) * 0x846CA68B).to(tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def drop(x, key, salt, below, scale, out, width, BLOCK: tl.constexpr):
    """Apply the mask of TorchOps.drop, number for number."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    row_key = tl.load(key + row) ^ salt
    mixed = _mix((at.to(tl.uint32) * 0x9E3779B9 + _mix(row_key.to(tl.uint32))).to(tl.uint32))
    keep = _mix(mixed ^ (row_key >> 32).to(tl.uint32)).to(tl.int64) >= below
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, tl.where(keep, value * scale, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy(
    logits, target, count, cap, nll, vocabulary, CAPPED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the loss of a row of logits, read twice: for the normaliser, and to write the gradient over it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    highest = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(logits + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        if CAPPED:
            z = tl.where(at < vocabulary, cap * _tanh(z / cap), -float("inf"))
        now = tl.maximum(highest, tl.max(z, 0))
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(z - now), 0)
        highest = now
    normaliser = highest + tl.log(total)
    token = tl.load(target + row)
    chosen = tl.load(logits + token).to(tl.float32)
    if CAPPED:
        chosen = cap * _tanh(chosen / cap)
    tl.store(nll + row, normaliser - chosen)
    if GRADIENT:
        times = tl.load(count + row)
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32)
            if CAPPED:
                z = cap * _tanh(z / cap)
            dz = tl.exp(z - normaliser) - tl.where(at == token, 1.0, 0.0)
            if CAPPED:
                dz *= 1 - (z / cap) * (z / cap)
            tl.store(logits + at, (dz * times).to(logits.dtype.element_ty), mask=at < vocabulary)


# The adapters' thin products. No library sees their shapes, which are behind many of the libraries' crashes.
#
# `RANKS` is the number of rank columns that are read, a power of two of at least 16; `rank` of them are real. Products
# of float32 are exact to its rounding ("ieee": no TensorFloat-32). No sum is shared between programs, so each is made
# in the same order every time.


@triton.jit
def adapt(
    y, y_row, up, tokens, start, size, s_at, rank, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add S up to y[:, start : start + size], with S the columns of y from `s_at`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANKS)
    y_at = y + row[:, None] * y_row
    inside = (row < tokens)[:, None] & (column < size)[None, :]
    s = tl.load(y_at + s_at + r[None, :], mask=(row < tokens)[:, None] & (r < rank)[None, :], other=0.0)
    u = tl.load(
        up + r[:, None] * size + column[None, :], mask=(r < rank)[:, None] & (column < size)[None, :], other=0.0
    )
    target = y_at + start + column[None, :]
    added = tl.dot(s, u, input_precision="ieee") + tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, added.to(y.dtype.element_ty), mask=inside)


@triton.jit
def adapt_backward(
    dy, dy_row, up, tokens, start, size, s_at, rank, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write dS = dy[:, start : start + size] up^T to the columns of dy from `s_at`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANKS)
    dy_at = dy + row[:, None] * dy_row
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for begin in range(0, size, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (row < tokens)[:, None] & (column < size)[None, :]
        d = tl.load(dy_at + start + column[None, :], mask=inside, other=0.0)
        inside_up = (column < size)[:, None] & (r < rank)[None, :]
        u = tl.load(up + r[None, :] * size + column[:, None], mask=inside_up, other=0.0)
        total += tl.dot(d, u, input_precision="ieee")
    mask = (row < tokens)[:, None] & (r < rank)[None, :]
    tl.store(dy_at + s_at + r[None, :], total.to(dy.dtype.element_ty), mask=mask)


@triton.jit
def sum_up(
    dy, dy_row, s, s_row, d_up, tokens, size, rank, scale,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add scale * dy^T S to d_up [size, rank], of the columns of one member."""
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
    target = d_up + column[:, None] * rank + r[None, :]
    mask = (column < size)[:, None] & (r < rank)[None, :]
    tl.store(target, tl.load(target, mask=mask, other=0.0) + scale * total, mask=mask)


@triton.jit
def sum_down(
    ds, ds_row, x, x_row, d_downs, tokens, inputs, rank, columns, scale,
    RANKS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Add scale * dS^T X to d_downs [members * rank, inputs], `columns` of dS each; program (inputs, member)."""
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
    target = d_downs + (member * rank + r[:, None]).to(tl.int64) * inputs + k[None, :]
    mask = (r < rank)[:, None] & (k < inputs)[None, :]
    tl.store(target, tl.load(target, mask=mask, other=0.0) + scale * total, mask=mask)
