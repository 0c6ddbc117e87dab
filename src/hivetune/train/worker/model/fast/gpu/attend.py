"""Triton kernels of causal attention over a tree of segments: a query sees its path, a key all that come after it.

Softmax is made block by block with a running maximum, and backward recomputes it from the kept normaliser
(FlashAttention, arXiv 2205.14135). A key of a shared prefix gathers from every segment behind it in one program, in one
order, so that no sum depends on chance.

Tables, int32: `blocks` [segment, offset of its first token in the segment]; `segments` [start, size, depth, first
range, ranges, first reader, readers]; `ranges` [start, size, position of the first token] of a segment's path, itself
last; `readers` [start, size, depth] of the segments that see it, itself first.
"""

import triton
import triton.language as tl

# Columns of `segments` that point to a segment's entries in `ranges` and in `readers`.
RANGES, READERS = tl.constexpr(3), tl.constexpr(5)


@triton.jit
def _block(blocks, segments, LIST: tl.constexpr):
    """Return the block of a program: its offset in its segment; the segment's start, size and depth; and the place and
    length of its list in another table (columns `LIST` and `LIST` + 1).
    """
    block = blocks + 2 * tl.program_id(0)
    segment = segments + tl.load(block) * 7
    offset, start, size, depth = tl.load(block + 1), tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    return offset, start, size, depth, tl.load(segment + LIST), tl.load(segment + LIST + 1)


@triton.jit
def _range(ranges, number, first_at, window, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Return a range's start, size and depth, and which of its keys, [begin, end), a block of queries can see.

    The block's first query is at position `first_at`.
    """
    start, size = tl.load(ranges + 3 * number), tl.load(ranges + 3 * number + 1)
    depth = tl.load(ranges + 3 * number + 2)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, first_at - window + 1 - depth) // KEYS * KEYS
    return start, size, depth, begin, tl.minimum(size, first_at + QUERIES - depth)


@triton.jit
def _score(product, scale, cap, CAPPED: tl.constexpr):
    """Return the score, and its derivative by the product."""
    score = product * scale
    slope = scale
    if CAPPED:
        inner = 2 * tl.sigmoid(2 * score / cap) - 1
        score = cap * inner
        slope = scale * (1 - inner * inner)
    return score, slope


@triton.jit
def _visible(query_at, key_at, query_in, key_in, window, WINDOW: tl.constexpr):
    """Return which queries [Q, 1] see which keys [1, K] by their positions, or the other way round."""
    ago = query_at - key_at
    visible = (ago >= 0) & query_in & key_in
    if WINDOW:
        visible = visible & (ago < window)
    return visible


@triton.jit
def forward(
    qkv, row, out, lse, blocks, segments, ranges, heads, k_at, v_at, scale, cap, window,
    SHARE: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of queries and a head; program (block of queries, head)."""
    head = tl.program_id(1)
    offset, start, size, depth, first, count = _block(blocks, segments, RANGES)
    i = offset + tl.arange(0, QUERIES)
    e = tl.arange(0, CHANNELS)
    token = (start + i).to(tl.int64)
    q_mask = (i < size)[:, None] & (e < DIM)[None, :]
    q = tl.load(qkv + token[:, None] * row + head * DIM + e[None, :], mask=q_mask, other=0.0)
    k_base, v_base = qkv + k_at + head // SHARE * DIM, qkv + v_at + head // SHARE * DIM
    highest = tl.full((QUERIES,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    sums = tl.zeros((QUERIES, CHANNELS), dtype=tl.float32)
    for number in range(first, first + count):
        k_start, k_size, k_depth, begin, end = _range(ranges, number, depth + offset, window, QUERIES, KEYS, WINDOW)
        for at in range(begin, end, KEYS):
            j = at + tl.arange(0, KEYS)
            key = (k_start + j).to(tl.int64)
            k_mask = (e < DIM)[:, None] & (j < k_size)[None, :]
            k = tl.load(k_base + key[None, :] * row + e[:, None], mask=k_mask, other=0.0)
            score, _ = _score(tl.dot(q, k, input_precision="ieee"), scale, cap, CAPPED)
            visible = _visible((depth + i)[:, None], (k_depth + j)[None, :], (i < size)[:, None], (j < k_size)[None, :],
                         window, WINDOW)  # fmt: skip
            score = tl.where(visible, score, -float("inf"))
            now = tl.maximum(highest, tl.max(score, 1))
            safe = tl.where(now == -float("inf"), 0.0, now)  # nothing seen yet
            share = tl.exp(score - safe[:, None])
            decay = tl.exp(highest - safe)
            v_mask = (j < k_size)[:, None] & (e < DIM)[None, :]
            v = tl.load(v_base + key[:, None] * row + e[None, :], mask=v_mask, other=0.0)
            total = total * decay + tl.sum(share, 1)
            sums = sums * decay[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
            highest = now
    total = tl.where(i < size, total, 1.0)
    highest = tl.where(i < size, highest, 0.0)
    out_at = out + token[:, None] * (heads * DIM) + head * DIM + e[None, :]
    tl.store(out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=q_mask)
    tl.store(lse + token * heads + head, highest + tl.log(total), mask=i < size)


@triton.jit
def output_sums(dout, out, sums, DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Compute sum(dout * out) of each token and head; program (token, head)."""
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    e = tl.arange(0, CHANNELS)
    at = (token * heads + head) * DIM + e
    d = tl.load(dout + at, mask=e < DIM, other=0.0).to(tl.float32)
    o = tl.load(out + at, mask=e < DIM, other=0.0).to(tl.float32)
    tl.store(sums + token * heads + head, tl.sum(d * o, 0))


@triton.jit
def backward_queries(
    qkv, row, dout, lse, sums, dqkv, dqkv_row, blocks, segments, ranges, heads, k_at, v_at, scale, cap, window,
    SHARE: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries and a head, in the order of forward."""
    head = tl.program_id(1)
    offset, start, size, depth, first, count = _block(blocks, segments, RANGES)
    i = offset + tl.arange(0, QUERIES)
    e = tl.arange(0, CHANNELS)
    token = (start + i).to(tl.int64)
    q_mask = (i < size)[:, None] & (e < DIM)[None, :]
    q = tl.load(qkv + token[:, None] * row + head * DIM + e[None, :], mask=q_mask, other=0.0)
    d = tl.load(dout + token[:, None] * (heads * DIM) + head * DIM + e[None, :], mask=q_mask, other=0.0)
    normaliser = tl.load(lse + token * heads + head, mask=i < size, other=0.0)
    mean = tl.load(sums + token * heads + head, mask=i < size, other=0.0)
    k_base, v_base = qkv + k_at + head // SHARE * DIM, qkv + v_at + head // SHARE * DIM
    dq = tl.zeros((QUERIES, CHANNELS), dtype=tl.float32)
    for number in range(first, first + count):
        k_start, k_size, k_depth, begin, end = _range(ranges, number, depth + offset, window, QUERIES, KEYS, WINDOW)
        for at in range(begin, end, KEYS):
            j = at + tl.arange(0, KEYS)
            key = (k_start + j).to(tl.int64)
            mask = (e < DIM)[:, None] & (j < k_size)[None, :]
            k = tl.load(k_base + key[None, :] * row + e[:, None], mask=mask, other=0.0)
            v = tl.load(v_base + key[None, :] * row + e[:, None], mask=mask, other=0.0)
            score, slope = _score(tl.dot(q, k, input_precision="ieee"), scale, cap, CAPPED)
            visible = _visible((depth + i)[:, None], (k_depth + j)[None, :], (i < size)[:, None], (j < k_size)[None, :],
                         window, WINDOW)  # fmt: skip
            share = tl.where(visible, tl.exp(score - normaliser[:, None]), 0.0)
            dscore = share * (tl.dot(d, v, input_precision="ieee") - mean[:, None]) * slope
            dq += tl.dot(dscore.to(k.dtype), tl.trans(k), input_precision="ieee")
    dq_at = dqkv + token[:, None] * dqkv_row + head * DIM + e[None, :]
    tl.store(dq_at, dq.to(dqkv.dtype.element_ty), mask=q_mask)


@triton.jit
def backward_keys(
    qkv, row, dout, lse, sums, dqkv, dqkv_row, blocks, segments, readers, heads, k_at, v_at, scale, cap, window,
    SHARE: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys and a key-value head, over all segments and heads that see them."""
    kv_head = tl.program_id(1)
    offset, start, size, depth, first, count = _block(blocks, segments, READERS)
    j = offset + tl.arange(0, KEYS)
    e = tl.arange(0, CHANNELS)
    token = (start + j).to(tl.int64)
    k_mask = (j < size)[:, None] & (e < DIM)[None, :]
    k = tl.load(qkv + token[:, None] * row + k_at + kv_head * DIM + e[None, :], mask=k_mask, other=0.0)
    v = tl.load(qkv + token[:, None] * row + v_at + kv_head * DIM + e[None, :], mask=k_mask, other=0.0)
    dk = tl.zeros((KEYS, CHANNELS), dtype=tl.float32)
    dv = tl.zeros((KEYS, CHANNELS), dtype=tl.float32)
    for number in range(first, first + count):
        q_start, q_size = tl.load(readers + 3 * number), tl.load(readers + 3 * number + 1)
        q_depth = tl.load(readers + 3 * number + 2)
        begin = tl.maximum(0, depth + offset - q_depth) // QUERIES * QUERIES
        end = q_size
        if WINDOW:
            end = tl.minimum(q_size, depth + offset + KEYS - 1 + window - q_depth)
        for at in range(begin, end, QUERIES):
            i = at + tl.arange(0, QUERIES)
            query = (q_start + i).to(tl.int64)
            visible = _visible((q_depth + i)[None, :], (depth + j)[:, None], (i < q_size)[None, :], (j < size)[:, None],
                         window, WINDOW)  # fmt: skip
            mask = (i < q_size)[:, None] & (e < DIM)[None, :]
            for head in range(kv_head * SHARE, kv_head * SHARE + SHARE):
                q = tl.load(qkv + query[:, None] * row + head * DIM + e[None, :], mask=mask, other=0.0)
                d = tl.load(dout + query[:, None] * (heads * DIM) + head * DIM + e[None, :], mask=mask, other=0.0)
                normaliser = tl.load(lse + query * heads + head, mask=i < q_size, other=0.0)
                mean = tl.load(sums + query * heads + head, mask=i < q_size, other=0.0)
                score, slope = _score(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, cap, CAPPED)
                share = tl.where(visible, tl.exp(score - normaliser[None, :]), 0.0)
                dv += tl.dot(share.to(d.dtype), d, input_precision="ieee")
                dscore = share * (tl.dot(v, tl.trans(d), input_precision="ieee") - mean[None, :]) * slope
                dk += tl.dot(dscore.to(q.dtype), q, input_precision="ieee")
    dkv_at = dqkv + token[:, None] * dqkv_row + kv_head * DIM + e[None, :]
    tl.store(dkv_at + k_at, dk.to(dqkv.dtype.element_ty), mask=k_mask)
    tl.store(dkv_at + v_at, dv.to(dqkv.dtype.element_ty), mask=k_mask)
