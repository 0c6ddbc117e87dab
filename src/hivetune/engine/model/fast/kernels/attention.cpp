// Causal attention over segments (attention.py says what they are), forward and backward, by blocks of 64 queries, 32
// where no more are left.
//
// Scores are kept transposed, [keys, queries]: the softmax of all queries then runs along the lanes, keys are read as
// they lie, and only the small block of queries is ever turned. Sums and softmax are fp32; bf16 is multiplied as bf16 where
// the processor can (units.h).
// Keys and values are packed once for all that read them. All blocks of queries pass over one piece of at most 512 keys
// before the next piece is touched, so that a piece and its gradients stay in L2; the softmax runs along (the maximum
// so far, and what was summed under it), as in FlashAttention (arXiv 2205.14135).
// A forward task is some queries of a segment, a backward task one head of one tree of segments and a share of its keys:
// what tasks write never overlaps, so results are the same whatever the number of threads and the order in which they
// finish.
#include <vector>

#include "units.h"

constexpr long Q = 64;       // the most queries of a block: with fewer, gradients of keys are read and written more often
constexpr long KEYS = 64;    // keys of a block: with what is done to their scores they stay in L1
constexpr long PIECE = 512;  // keys of a piece
constexpr long SPAN = 512;   // queries of a forward task

// Mirrored by native.AttentionArguments.
struct Shape {
    int64_t heads, kv_heads, head_dim, stride, window;  // window 0: none
    float scale, softcap;                               // softcap 0: none
};
struct Segment {
    int64_t start, size, depth, first_part, num_parts;  // its keys: those of these segments, its own the last
};
struct Tree {
    int64_t first_segment, num_segments, start, size;
};
struct Layout {
    const Segment* segments;
    const int64_t* paths;
    const Tree* trees;
    int64_t num_segments, num_trees;
};

// A piece of the keys of one segment: `size` keys from `position` on, packed from `row` on.
struct Piece {
    long size, position, row;
};

// A block of queries of a segment: those from `q0` on, and what of `wide` numbers they are laid out in.
struct Queries {
    long q0, rows, wide, first;  // first: position of the first one
    Queries(const Segment& g, long q0, long end)
        : q0(q0), rows(std::min(Q, end - q0)), wide(rows > Q / 2 ? Q : Q / 2), first(g.depth + q0) {}
};

// Blocks of keys, each with where its scores are and what they are still to be multiplied by.
struct Block {
    const Piece* piece;
    long k0, k1;
    float *scores, scale;
};

// A thread's buffers; they stay. _a row-wise, _b pair-wise (units.h), _t turned.
template <class U> struct Scratch {
    typedef typename U::unit unit;
    Room memory;
    float *scores, *dscores, *out, *top, *total, *delta, *level;
    std::vector<Piece> pieces;
    std::vector<Block> blocks;
    unit *block_a, *query_b, *query_t, *dout_b, *dout_t, *p, *ds_a, *ds_b;
    void reserve(long queries, long width) {
        long rows = (queries + Q - 1) / Q * Q, span = std::min(rows, SPAN), scored = KEYS * Q;
        size_t size = (PIECE + KEYS) * Q + 4 * scored + span * width + 4 * rows + Q * width + 4 * rows * width;
        float* at = memory.take(size);
        auto take = [&](long n) { return at += n, at - n; };
        scores = take((PIECE + KEYS) * Q), dscores = take(scored), out = take(span * width);
        for (float** x : {&top, &total, &delta, &level}) *x = take(rows);
        block_a = (unit*)take(Q * width);
        for (unit** x : {&query_t, &query_b, &dout_t, &dout_b}) *x = (unit*)take(rows * width);
        for (unit** x : {&p, &ds_a, &ds_b}) *x = (unit*)take(scored);
    }
};
template <class U> static Scratch<U>& scratch() {
    static thread_local Scratch<U> mine;
    return mine;
}

// Keys and values of all tokens by key-value head. A segment has an even number of rows, the last may be zero: pairs
// never cross segments.
template <class U> struct Packs {
    typedef typename U::unit unit;
    std::vector<long> at;  // first row of each segment
    long rows = 0, width;
    Room memory;
    unit *keys_a, *keys_b, *values_a, *values_b;
    void reserve(const Layout& l, const Shape& s, long wide) {
        rows = 0, width = wide, at.resize(l.num_segments);
        for (long k = 0; k < l.num_segments; k++) at[k] = rows, rows += (l.segments[k].size + 1) / 2 * 2;
        size_t all = s.kv_heads * rows * width / U::P;
        keys_a = (unit*)memory.take(2 * U::P * all), values_a = keys_a + all;
        keys_b = U::P == 1 ? keys_a : values_a + all, values_b = U::P == 1 ? values_a : keys_b + all;
    }
    long first(long group, const Piece& piece) const { return (group * rows + piece.row) * width / U::P; }
    // By all threads of the region that it is called in.
    template <class T> void fill(const Layout& l, const Shape& s, const T* qkv) {
#pragma omp for schedule(dynamic) collapse(2)
        for (long segment = 0; segment < l.num_segments; segment++)
            for (long group = 0; group < s.kv_heads; group++) fill_one(l, s, qkv, segment, group);
    }
    template <class T> void fill_one(const Layout& l, const Shape& s, const T* qkv, long segment, long group) {
        const Segment& g = l.segments[segment];
        long height = (g.size + 1) / 2 * 2, to = (group * rows + at[segment]) * width / U::P;
        const T* from = qkv + g.start * s.stride + (s.heads + group) * s.head_dim;
        pack_rows<U>(from, s.stride, g.size, height, s.head_dim, width, keys_a + to);
        pack_rows<U>(from + s.kv_heads * s.head_dim, s.stride, g.size, height, s.head_dim, width, values_a + to);
        pair_up(keys_a + to, height, width, keys_b + to);
        pair_up(values_a + to, height, width, values_b + to);
    }
    // `work(piece)` for all keys that segment g may see, in order of position.
    template <class Work> void each_piece(const Layout& l, const Segment& g, Work work) const {
        for (const int64_t* part = l.paths + g.first_part; part < l.paths + g.first_part + g.num_parts; part++) {
            const Segment& m = l.segments[*part];
            for (long from = 0; from < m.size; from += PIECE)
                work(Piece{std::min(PIECE, m.size - from), m.depth + from, at[*part] + from}, m.start + from);
        }
    }
};
template <class U> static Packs<U>& packs() {  // of the thread that calls; its helpers are handed it
    static thread_local Packs<U> mine;
    return mine;
}

// The keys [low, high) of a piece that some of these queries may see; low is even.
struct Seen {
    long low, high;
    Seen(const Shape& s, const Piece& piece, const Queries& q) {
        low = s.window ? std::max(0L, q.first - s.window + 1 - piece.position) / 2 * 2 : 0;
        high = std::min(piece.size, q.first + q.rows - piece.position);
    }
};

// scores[k, q] = k . q for the piece's keys [k0, k1), still to be multiplied by what is returned. Where a cap or a mask is
// needed they are scaled, capped, and -inf where a query must not look; `slope` keeps d capped / d score.
template <class U>
static float some_scores(const Shape& s, const Piece& piece, const typename U::unit* keys, long k0, long k1,
                         const Queries& q, long width, const typename U::unit* query_t, float* scores, float* slope) {
    long row = width / U::P;
    product<U, false>(k1 - k0, q.wide, row, keys + k0 * row, row, 1, query_t, q.wide, scores, q.wide);
    bool seen_by_all = piece.position + k1 - 1 <= q.first && k1 <= piece.size &&
                       (!s.window || piece.position + k0 > q.first + q.wide - 1 - s.window);
    if (seen_by_all && s.softcap <= 0) return s.scale;
    vf lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (long k = k0; k < k1; k++)
        for (long v = 0; v < q.wide; v += LANES) {
            long at = (k - k0) * q.wide + v;
            vf z = load(scores + at) * s.scale;
            if (s.softcap > 0) {
                vf th = hyperbolic_tangent(z * (1.0f / s.softcap));
                z = s.softcap * th;
                if (slope) store(slope + at, 1.0f - th * th);
            }
            vf ago = lane + (float)(q.first + v - piece.position - k);
            z = ago < 0.0f ? splat(-INFINITY) : z;
            if (s.window) z = ago >= (float)s.window ? splat(-INFINITY) : z;
            if (k >= piece.size) z = splat(-INFINITY);  // the row that fills up the pair
            store(scores + at, z);
        }
    return 1.0f;
}

// One block of queries over some pieces, at most PIECE keys together: its maximum, sum and output go on from what
// earlier pieces left.
template <class U>
static void forward_pieces(const Shape& s, const Packs<U>& packs, const std::vector<Piece>& pieces, long group,
                           const Queries& q, long width, const typename U::unit* query_t, float* top, float* total,
                           float* out) {
    Scratch<U>& b = scratch<U>();
    b.blocks.clear();
    float now[Q], *scores = b.scores;
    std::copy(top, top + q.wide, now);
    for (const Piece& piece : pieces) {
        Seen seen(s, piece, q);
        for (long k0 = seen.low; k0 < seen.high; k0 += KEYS) {
            long k1 = std::min(k0 + KEYS, (seen.high + 1) / 2 * 2);
            float scale = some_scores<U>(s, piece, packs.keys_a + packs.first(group, piece), k0, k1, q, width, query_t,
                                         scores, nullptr);
            for (long v = 0; v < q.wide; v += LANES) {
                vf most = load(scores + v);
                for (long k = 1; k < k1 - k0; k++) most = larger(load(scores + k * q.wide + v), most);
                store(now + v, larger(most * scale, load(now + v)));
            }
            b.blocks.push_back(Block{&piece, k0, k1, scores, scale});
            scores += (k1 - k0) * q.wide;
        }
    }
    for (long v = 0; v < q.wide; v += LANES) {
        vf factor = exponential(load(top + v) - load(now + v));
        store(top + v, load(now + v)), store(total + v, load(total + v) * factor);
        for (int i = 0; i < LANES && v + i < q.rows; i++) {
            if (factor[i] == 1.0f) continue;
            for (long c = 0; c < width; c += LANES) {
                float* at = out + (v + i) * width + c;
                store(at, load(at) * factor[i]);
            }
        }
    }
    for (const Block& block : b.blocks) {
        long keys = block.k1 - block.k0;
        for (long v = 0; v < q.wide; v += LANES) {
            vf most = load(now + v), sum = load(total + v);
            for (long k = 0; k < keys; k += U::P) {
                vf p[2] = {};
                for (int i = 0; i < U::P; i++) {
                    p[i] = exponential(load(block.scores + (k + i) * q.wide + v) * block.scale - most);
                    sum += p[i];
                }
                U::put_pair(b.p + k / U::P * q.wide + v, p[0], p[1]);
            }
            store(total + v, sum);
        }
        const typename U::unit* values = packs.values_b + packs.first(group, *block.piece) + block.k0 / U::P * width;
        product<U, true>(q.rows, width, keys / U::P, b.p, 1, q.wide, values, width, out, width);
    }
}

// Queries [q0, q1) of a segment, for the heads of one group.
template <class U, class T>
static void forward_span(const Layout& l, const Shape& s, const Packs<U>& packs, const Segment& g, long q0, long q1,
                         long group, long width, const T* qkv, T* out, float* lse) {
    Scratch<U>& b = scratch<U>();
    long n = s.head_dim, share = s.heads / s.kv_heads;
    for (long head = group * share; head < (group + 1) * share; head++) {
        for (long at = q0; at < q1; at += Q) {
            Queries q(g, at, q1);
            const T* from = qkv + (g.start + at) * s.stride + head * n;
            pack_rows<U>(from, s.stride, q.rows, q.wide, n, width, b.block_a);
            turn(b.block_a, q.wide, width / U::P, b.query_t + (at - q0) * width / U::P);
        }
        std::fill(b.out, b.out + (q1 - q0 + Q - 1) / Q * Q * width, 0.0f);
        std::fill(b.total, b.total + (q1 - q0 + Q - 1) / Q * Q, 0.0f);
        std::fill(b.top, b.top + (q1 - q0 + Q - 1) / Q * Q, -1e30f);  // finite, for lanes without a query
        std::vector<Piece>& pieces = b.pieces;
        long keys = 0;
        auto pass = [&] {
            for (long at = 0; at < q1 - q0; at += Q)
                forward_pieces<U>(s, packs, pieces, group, Queries(g, q0 + at, q1), width,
                                  b.query_t + at * width / U::P, b.top + at, b.total + at, b.out + at * width);
            pieces.clear(), keys = 0;
        };
        packs.each_piece(l, g, [&](const Piece& piece, long) {
            if (keys + piece.size > PIECE) pass();
            pieces.push_back(piece), keys += (piece.size + 1) / 2 * 2;
        });
        pass();
        for (long q = q0; q < q1; q++) {
            float sum = b.total[q - q0];
            long at = (g.start + q) * s.heads + head;
            lse[at] = b.top[q - q0] + std::log(sum);
            for (long i = 0; i < n; i += LANES)
                store(out + at * n + i, load(b.out + (q - q0) * width + i) * (1.0f / sum), n - i);
        }
    }
}

// A segment's queries and gradients of its output as the products of backward read them; delta = dout . out.
template <class U, class T>
static void prepare_queries(const Shape& s, const Segment& g, long head, long width, const T* dout, const T* qkv,
                            const T* out, const float* lse) {
    Scratch<U>& b = scratch<U>();
    long n = s.head_dim, stride = s.heads * n;
    for (long q0 = 0; q0 < g.size; q0 += Q) {
        Queries q(g, q0, g.size);
        long at = g.start + q0, to = q0 * width / U::P;
        pack_rows<U>(qkv + at * s.stride + head * n, s.stride, q.rows, q.wide, n, width, b.block_a);
        turn(b.block_a, q.wide, width / U::P, b.query_t + to);
        copy_pairs(b.block_a, q.wide, width, b.query_b + to);
        pack_rows<U>(dout + at * stride + head * n, stride, q.rows, q.wide, n, width, b.block_a);
        turn(b.block_a, q.wide, width / U::P, b.dout_t + to);
        copy_pairs(b.block_a, q.wide, width, b.dout_b + to);
        for (long r = 0; r < q.wide; r++) {
            b.level[q0 + r] = r < q.rows ? lse[(at + r) * s.heads + head] : INFINITY;
            vf dots{};
            for (long i = 0; r < q.rows && i < n; i += LANES) {
                long from = (at + r) * stride + head * n + i;
                dots += load(dout + from, n - i) * load(out + from, n - i);
            }
            b.delta[q0 + r] = sum(dots);
        }
    }
}

// One block of queries over one piece: adds to the gradients of its keys and values and of the queries.
template <class U>
static void backward_piece(const Shape& s, const Packs<U>& packs, const Piece& piece, long group, const Queries& q,
                           long width, float* dkeys, float* dvalues, float* dquery) {
    Scratch<U>& b = scratch<U>();
    typedef typename U::unit unit;
    long row = width / U::P;
    const unit *keys_a = packs.keys_a + packs.first(group, piece), *keys_b = packs.keys_b + packs.first(group, piece),
               *values_a = packs.values_a + packs.first(group, piece), *query_t = b.query_t + q.q0 * row,
               *query_b = b.query_b + q.q0 * row, *dout_t = b.dout_t + q.q0 * row, *dout_b = b.dout_b + q.q0 * row;
    unit *p = b.p, *ds_a = b.ds_a, *ds_b = b.ds_b;
    const float *scores = b.scores, *dscores = b.dscores;
    float slope[KEYS * Q];
    Seen seen(s, piece, q);
    for (long k0 = seen.low; k0 < seen.high; k0 += KEYS) {
        long keys = std::min(KEYS, seen.high - k0), even = (keys + 1) / 2 * 2;
        bool capped = s.softcap > 0;
        float scale = some_scores<U>(s, piece, keys_a, k0, k0 + even, q, width, query_t, b.scores,
                                     capped ? slope : nullptr);
        product<U, false>(even, q.wide, row, values_a + k0 * row, row, 1, dout_t, q.wide, b.dscores, q.wide);
        for (long v = 0; v < q.wide; v += LANES) {
            vf level = load(b.level + q.q0 + v), delta = load(b.delta + q.q0 + v), down = splat(s.scale);
            for (long k = 0; k < even; k += U::P) {
                vf x[2] = {}, dx[2] = {};
                for (int i = 0; i < U::P; i++) {
                    long j = (k + i) * q.wide + v;
                    x[i] = exponential(load(scores + j) * scale - level);
                    dx[i] = x[i] * (load(dscores + j) - delta) * down;
                    if (capped) dx[i] *= load(slope + j);
                }
                long j = (k * q.wide + v) / U::P, next = j + (U::P - 1) * q.wide / U::P;
                U::put(p + j, x[0]);
                if (U::P == 2) U::put(p + next, x[1]);
                U::put_both(ds_a + j, ds_a + next, ds_b + k / U::P * q.wide + v, dx[0], dx[1]);
            }
        }
        long wide = q.wide / U::P;
        product<U, true>(keys, width, wide, p, wide, 1, dout_b, width, dvalues + k0 * width, width);
        product<U, true>(keys, width, wide, ds_a, wide, 1, query_b, width, dkeys + k0 * width, width);
        product<U, true>(q.rows, width, even / U::P, ds_b, 1, q.wide, keys_b + k0 / U::P * width, width, dquery, width);
    }
}

template <class T>
static void forward(const Layout& l, const Shape& s, const T* qkv, T* out, float* lse) {
    typedef typename Units<T>::type U;
    long width = (s.head_dim + LANES - 1) / LANES * LANES;
    Packs<U>& shared = packs<U>();
    shared.reserve(l, s, width);
    std::vector<std::pair<long, long>> spans;  // segment and first query
    for (long k = 0; k < l.num_segments; k++)
        for (long q0 = 0; q0 < l.segments[k].size; q0 += SPAN) spans.emplace_back(k, q0);
#pragma omp parallel
    {
        scratch<U>().reserve(SPAN, width);
        shared.fill(l, s, qkv);
#pragma omp for schedule(dynamic) collapse(2)
        for (long i = (long)spans.size() - 1; i >= 0; i--)  // a row's last queries see most: they come first
            for (long group = 0; group < s.kv_heads; group++) {
                const Segment& g = l.segments[spans[i].first];
                long q0 = spans[i].second, q1 = std::min(q0 + SPAN, g.size);
                forward_span<U>(l, s, shared, g, q0, q1, group, width, qkv, out, lse);
            }
    }
}

// One head of a tree, and those pieces of its keys that are this part's. `mine`: [keys, values, queries of each part],
// each of [tokens, width].
template <class U, class T>
static void backward_task(const Layout& l, const Shape& s, const Packs<U>& shared, const Tree& t, long head, long part,
                          long parts, long tokens, long width, const T* dout, const T* qkv, const T* out,
                          const float* lse, float* mine) {
    long plane = tokens * width, group = head / (s.heads / s.kv_heads);
    float *dkeys = mine, *dvalues = mine + plane, *dquery = mine + (2 + part) * plane;
    auto is_mine = [&](const Piece& piece) { return piece.position / PIECE % parts == part; };
    std::fill(dquery + t.start * width, dquery + (t.start + t.size) * width, 0.0f);
    for (const Segment* g = l.segments + t.first_segment; g < l.segments + t.first_segment + t.num_segments; g++) {
        shared.each_piece(l, *g, [&](const Piece& piece, long token) {
            if (!is_mine(piece) || token < g->start) return;  // its own keys: those before it are filled by now
            std::fill(dkeys + token * width, dkeys + (token + piece.size) * width, 0.0f);
            std::fill(dvalues + token * width, dvalues + (token + piece.size) * width, 0.0f);
        });
        prepare_queries<U>(s, *g, head, width, dout, qkv, out, lse);
        shared.each_piece(l, *g, [&](const Piece& piece, long token) {
            for (long q0 = 0; is_mine(piece) && q0 < g->size; q0 += Q)
                backward_piece<U>(s, shared, piece, group, Queries(*g, q0, g->size), width, dkeys + token * width,
                                  dvalues + token * width, dquery + (g->start + q0) * width);
        });
    }
}

// `sums` is scratch of [heads, 2 + parts, tokens, width]: gradients of keys and values by query head, and of queries by
// the part of the keys that they come from; summed at the end.
template <class T>
static void backward(const Layout& l, const Shape& s, const T* dout, const T* qkv, const T* out, const float* lse,
                     T* dqkv, long dstride, float* sums, long tokens, long parts) {
    typedef typename Units<T>::type U;
    long width = (s.head_dim + LANES - 1) / LANES * LANES, share = s.heads / s.kv_heads, n = s.head_dim, largest = 0;
    long plane = tokens * width, own = (2 + parts) * plane;
    for (long k = 0; k < l.num_segments; k++) largest = std::max<long>(largest, l.segments[k].size);
    Packs<U>& shared = packs<U>();
    shared.reserve(l, s, width);
#pragma omp parallel
    {
        scratch<U>().reserve(largest, width);
        shared.fill(l, s, qkv);
#pragma omp for schedule(dynamic) collapse(3)
        for (long tree = 0; tree < l.num_trees; tree++)
            for (long head = 0; head < s.heads; head++)
                for (long part = 0; part < parts; part++)
                    backward_task<U>(l, s, shared, l.trees[tree], head, part, parts, tokens, width, dout, qkv, out, lse,
                                     sums + head * own);
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++) {
            T* to = dqkv + t * dstride;
            for (long head = 0; head < s.heads; head++)
                for (long c = 0; c < n; c += LANES) {
                    vf total{};
                    for (long part = 0; part < parts; part++)
                        total += load(sums + head * own + (2 + part) * plane + t * width + c);
                    store(to + head * n + c, total, n - c);
                }
            for (long group = 0; group < s.kv_heads; group++)
                for (long half = 0; half < 2; half++)
                    for (long c = 0; c < n; c += LANES) {
                        vf total{};
                        for (long head = group * share; head < (group + 1) * share; head++)
                            total += load(sums + head * own + half * plane + t * width + c);
                        store(to + (s.heads + half * s.kv_heads + group) * n + c, total, n - c);
                    }
        }
    }
}

#define ATTENTION(T, suffix)                                                                                           \
    HIVETUNE_API void attention_##suffix(const Shape* s, const Layout* l, const T* qkv, T* out, float* lse) {          \
        forward(*l, *s, qkv, out, lse);                                                                                \
    }                                                                                                                  \
    HIVETUNE_API void attention_backward_##suffix(const Shape* s, const Layout* l, const T* dout, const T* qkv,        \
                                                  const T* out, const float* lse, T* dqkv, long dstride, float* sums,  \
                                                  long tokens, long parts) {                                           \
        backward(*l, *s, dout, qkv, out, lse, dqkv, dstride, sums, tokens, parts);                                     \
    }
ATTENTION(float, f32)
ATTENTION(bf16, bf16)
