// Causal attention over segments (ops.py says what they are), forward and backward: the layout, packed keys and values,
// and which keys 16 queries see, are common to both.
//
// Scores are kept transposed, [keys, 32 queries]: the softmax of all queries then runs along the lanes, keys are read
// as they lie, and only queries are ever turned. Everything is cut into cells of 16 keys and 16 queries; those that a
// mask hides entirely are left out, but that scores are multiplied for 32 queries at a time (tiles of 16 take 1.4 times
// as long for each). Sums and softmax are fp32; bf16 is multiplied as bf16 where the processor can (units.h). What tasks
// write never overlaps, so results are the same whatever the number of threads and the order in which they finish.
#include <algorithm>
#include <vector>

#include "units.h"

constexpr long FILLED = 64;  // rows of keys that are packed by one task
constexpr long PIECE = 256;  // keys that all queries pass over before the next ones are touched: they stay in L2

// Mirrored by backend.AttentionArguments.
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

// `size` keys of one segment from `position` on; `row` in the packs.
struct Piece {
    long size, position, row;
};

constexpr long PAIR = 2 * LANES;  // queries of two strips

// 16 queries; `rows` of them are real, the first one is at position `first`.
struct Strip {
    long first, rows;
    Strip(const Segment& g, long q0) : first(g.depth + q0), rows(std::min<long>(LANES, g.size - q0)) {}
};

// Keys [low, high) of a piece, multiples of 16.
struct Range {
    long low, high;
    Range within(long k0, long k1) const { return {std::max(low, k0), std::min(high, k1)}; }
    bool empty() const { return low >= high; }
    Range with(Range r) const {  // from the first of both to the last
        return r.empty() ? *this : empty() ? r : Range{std::min(low, r.low), std::max(high, r.high)};
    }
};

// Those that some query of a strip may see.
static inline Range seen(const Shape& s, const Piece& piece, const Strip& q) {
    long low = s.window ? std::max(0L, q.first - s.window + 1 - piece.position) / LANES * LANES : 0;
    return {low, whole(std::min(piece.size, q.first + q.rows - piece.position), LANES)};
}

// Keys and values of all tokens by key-value head, each segment from a multiple of 16 rows on, zeros in between.
struct Packs {
    std::vector<long> at;                         // first row of each segment
    std::vector<std::pair<long, long>> fillings;  // segment and first of the rows that one task packs
    long rows = 0, width;
    Room memory;
    unit *keys_a, *keys_b, *values_a, *values_b;
    void reserve(const Layout& l, const Shape& s) {
        rows = 0, width = whole(s.head_dim, LANES), at.resize(l.num_segments), fillings.clear();
        for (long k = 0; k < l.num_segments; k++) {
            at[k] = rows, rows += whole(l.segments[k].size, LANES);
            for (long from = 0; from < l.segments[k].size; from += FILLED) fillings.emplace_back(k, from);
        }
        size_t all = s.kv_heads * rows * width / P;
        keys_a = (unit*)memory.take(3 * all), values_a = keys_a + all;
        keys_b = values_b = values_a + all;  // forward needs values_b, backward keys_b
    }
    long first(long group, const Piece& piece) const { return (group * rows + piece.row) * width / P; }
    // By all threads of the region that it is called in.
    void fill(const Layout& l, const Shape& s, const T* qkv, bool backward) {
#pragma omp for schedule(dynamic)
        for (long i = 0; i < (long)fillings.size(); i++)
            for (long group = 0; group < s.kv_heads; group++) {
                const Segment& g = l.segments[fillings[i].first];
                long from = fillings[i].second, size = std::min(FILLED, g.size - from), height = whole(size, LANES);
                long n = s.head_dim, to = (group * rows + at[fillings[i].first] + from) * width / P;
                const T* keys = qkv + (g.start + from) * s.stride + (s.heads + group) * n;
                const T* values = keys + s.kv_heads * n;
                pack_rows(keys, s.stride, size, height, n, width, keys_a + to);
                if (backward) pack_rows(values, s.stride, size, height, n, width, values_a + to);
                pack_pairs(backward ? keys : values, s.stride, size, height, n, width, values_b + to);
            }
    }
    // `work(piece, token)` for all keys that segment g may see, in order of position; token: the first one's.
    template <class Work> void each_piece(const Layout& l, const Segment& g, Work work) const {
        for (const int64_t* part = l.paths + g.first_part; part < l.paths + g.first_part + g.num_parts; part++) {
            const Segment& m = l.segments[*part];
            for (long from = 0; from < m.size; from += PIECE)
                work(Piece{std::min(PIECE, m.size - from), m.depth + from, at[*part] + from}, m.start + from);
        }
    }
};
static thread_local Packs of_caller;  // of the thread that calls; its helpers are handed it

// Query-key pairs of the segments [first, first + count), for tasks of like size: the largest come first.
static inline long work_of(const Layout& l, long first, long count) {
    long pairs = 0;
    for (const Segment* g = l.segments + first; g < l.segments + first + count; g++)
        pairs += g->size * (2 * g->depth + g->size);
    return pairs;
}

// Where the turned queries of the strip at q0 are: two strips share rows of [width / P][32].
static inline long turned(long q0, long row) { return q0 / PAIR * PAIR * row + q0 % PAIR; }

// What a strip's scores, those of r.low first, are still to be multiplied by. A cap is put on them in place, and -inf
// where a query must not look; `slope` keeps d capped / d score.
static inline float finish(const Shape& s, const Piece& piece, const Strip& q, Range r, float* scores, float* slope) {
    bool capped = s.softcap > 0;
    for (long k = r.low; capped && k < r.high; k++) {
        float* at = scores + (k - r.low) * PAIR;
        vf th = hyperbolic_tangent(load(at) * (s.scale / s.softcap));
        store(at, s.softcap * th);
        if (slope) store(slope + (k - r.low) * PAIR, 1.0f - th * th);
    }
    vf lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    auto hide = [&](long from, long to) {
        for (long k = std::max(from, r.low); k < std::min(to, r.high); k++) {
            float* at = scores + (k - r.low) * PAIR;
            vf z = load(at), ago = lane + (float)(q.first - piece.position - k);
            z = ago < 0.0f ? splat(-INFINITY) : z;
            if (s.window) z = ago >= (float)s.window ? splat(-INFINITY) : z;
            if (k >= piece.size) z = splat(-INFINITY);  // the rows that fill up
            store(at, z);
        }
    };
    long after = std::min(piece.size, q.first + 1 - piece.position);  // not before the first query
    long inside = s.window ? std::min(after, q.first + LANES - s.window - piece.position) : r.low;
    hide(r.low, inside);
    hide(std::max(after, inside), r.high);
    return capped ? 1.0f : s.scale;
}

// ---- forward
constexpr long FORWARD_KEYS = 128;  // keys of a block: with their values and scores they stay in L1
constexpr long SPAN = 512;  // queries of a task

// A thread's buffers; they stay.
struct ForwardRoom {
    Room memory;
    float *scores, *out, *top, *total;
    unit *rows_a, *query_t, *p;
    void reserve(long width) {
        float* at = memory.take(FORWARD_KEYS * (PAIR + LANES) + LANES * width + 2 * SPAN * width + 2 * SPAN);
        auto take = [&](long n) { return at += n, at - n; };
        scores = take(FORWARD_KEYS * PAIR), out = take(SPAN * width), top = take(SPAN), total = take(SPAN);
        p = (unit*)take(FORWARD_KEYS * LANES), rows_a = (unit*)take(LANES * width), query_t = (unit*)take(SPAN * width);
    }
};
static thread_local ForwardRoom forward_room;

// The softmax of `keys` more scores of a strip: their exponentials pair-wise to p, the maximum and the sum so far to
// top and total; what was summed before is to be multiplied by the result. A function of its own: in a large one it
// would get too few registers.
__attribute__((noinline)) static vf soften(const float* scores, long keys, float scale, float* top, float* total,
                                           unit* p) {
    vf most[4], x[4];
    for (int i = 0; i < 4; i++) most[i] = load(scores + i * PAIR);
    for (long k = 4; k < keys; k += 4)
        for (int i = 0; i < 4; i++) most[i] = larger(load(scores + (k + i) * PAIR), most[i]);
    vf before = load(top), now = larger(larger(larger(most[0], most[1]), larger(most[2], most[3])) * scale, before);
    vf factor = exponential(before - now), sums[2] = {load(total) * factor, vf{}};
    for (long k = 0; k < keys; k += 4, p += 4 * LANES / P) {
        for (int i = 0; i < 4; i++) x[i] = load(scores + (k + i) * PAIR) * scale - now;
        exponentials(x);
        for (int i = 0; i < 4; i++) sums[i % 2] += x[i];
        for (int i = 0; i < 4; i += P) put_pair(p + i * LANES / P, x[i], x[i + P - 1]);
    }
    store(top, now), store(total, sums[0] + sums[1]);
    return factor;
}

// A strip over some keys of a piece, from their products on: its output goes on from what earlier keys left.
static void forward_strip(const Shape& s, const Packs& packs, const Piece& piece, long first, const Strip& q,
                          Range r, float* scores, unit* p, float* top, float* total, float* out) {
    long width = packs.width, keys = r.high - r.low;
    float scale = finish(s, piece, q, r, scores, nullptr);
    vf factor = soften(scores, keys, scale, top, total, p);
    for (uint32_t left = lanes_unlike(factor, 1.0f); left; left &= left - 1) {
        int i = __builtin_ctz(left);
        for (long c = 0; c < width; c += LANES) store(out + i * width + c, load(out + i * width + c) * factor[i]);
    }
    product<true>(LANES, width, keys / P, p, 1, LANES, packs.values_b + first + r.low / P * width, width, out,
                     width);
}

// Queries [q0, q1) of a segment, for the heads of one group.
static void forward_span(const Layout& l, const Shape& s, const Packs& packs, const Segment& g, long q0, long q1,
                         long group, const T* qkv, T* out, float* lse) {
    ForwardRoom& b = forward_room;
    long n = s.head_dim, share = s.heads / s.kv_heads, width = packs.width, rows = whole(q1 - q0, LANES);
    for (long head = group * share; head < (group + 1) * share; head++) {
        for (long at = 0; at < rows; at += LANES) {
            const T* from = qkv + (g.start + q0 + at) * s.stride + head * n;
            pack_rows(from, s.stride, std::min<long>(LANES, q1 - q0 - at), LANES, n, width, b.rows_a);
            turn(b.rows_a, width / P, width / P, b.query_t + turned(at, width / P), PAIR);
        }
        std::fill(b.out, b.out + rows * width, 0.0f);
        std::fill(b.total, b.total + rows, 0.0f);
        std::fill(b.top, b.top + rows, -1e30f);  // finite, for lanes without a query
        packs.each_piece(l, g, [&](const Piece& piece, long) {
            long row = width / P, first = packs.first(group, piece);
            for (long k0 = 0; k0 < piece.size; k0 += FORWARD_KEYS)
                for (long pair = 0; pair < rows; pair += PAIR) {
                    Range ranges[2] = {}, both{};
                    long end = std::min(rows, pair + PAIR);
                    for (long at = pair; at < end; at += LANES) {
                        Range r = seen(s, piece, Strip(g, q0 + at)).within(k0, k0 + FORWARD_KEYS);
                        ranges[(at - pair) / LANES] = r, both = both.with(r);
                    }
                    if (both.empty()) continue;
                    const auto* keys = packs.keys_a + first + both.low * row;
                    product<false>(both.high - both.low, end - pair, row, keys, row, 1, b.query_t + pair * row, PAIR,
                                      b.scores, PAIR);
                    for (long at = pair; at < end; at += LANES) {
                        Range r = ranges[(at - pair) / LANES];
                        float* scores = b.scores + (r.low - both.low) * PAIR + at - pair;
                        if (!r.empty())
                            forward_strip(s, packs, piece, first, Strip(g, q0 + at), r, scores, b.p, b.top + at,
                                             b.total + at, b.out + at * width);
                    }
                }
        });
        for (long q = q0; q < q1; q++) {
            float sum = b.total[q - q0];
            long at = (g.start + q) * s.heads + head;
            lse[at] = b.top[q - q0] + std::log(sum);
            for (long i = 0; i < n; i += LANES)
                store(out + at * n + i, load(b.out + (q - q0) * width + i) * (1.0f / sum), n - i);
        }
    }
}

KERNEL attention(Shape s, Layout l, Matrix<T> qkv, Matrix<T> out, Matrix<float> lse) {
    struct Task {
        long segment, q0, q1, group, work;
    };
    Packs& shared = of_caller;
    shared.reserve(l, s);
    std::vector<Task> tasks;
    for (long k = 0; k < l.num_segments; k++)
        for (long q0 = 0; q0 < l.segments[k].size; q0 += SPAN)
            for (long group = 0; group < s.kv_heads; group++) {
                const Segment& g = l.segments[k];
                long q1 = std::min<long>(q0 + SPAN, g.size);
                tasks.push_back({k, q0, q1, group, (q1 - q0) * (2 * g.depth + q0 + q1)});
            }
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work > b.work; });
#pragma omp parallel
    {
        forward_room.reserve(shared.width);
        shared.fill(l, s, qkv.at, false);
#pragma omp for schedule(dynamic)
        for (long i = 0; i < (long)tasks.size(); i++) {
            const Task& t = tasks[i];
            forward_span(l, s, shared, l.segments[t.segment], t.q0, t.q1, t.group, qkv.at, out.at, lse.at);
        }
    }
}

// ---- backward
constexpr long Q = 64;     // queries of a block: with fewer, gradients of keys are read and written more often
constexpr long KEYS = 64;  // keys of a block

// A thread's buffers; they stay. _a row-wise, _b pair-wise (units.h), _t turned.
struct BackwardRoom {
    Room memory;
    float *scores, *dscores, *slope, *level, *delta, *dquery, *dkeys, *dvalues;
    unit *rows_a, *query_b, *query_t, *dout_b, *dout_t, *p, *ds_a, *ds_b;
    // `queries`: of the largest segment, `keys`: of the largest tree, both whole strips.
    void reserve(long queries, long keys, long width) {
        long cells = KEYS * PAIR, block = KEYS * Q, units = queries * width;
        float* at = memory.take(3 * cells + 3 * block + 2 * queries + LANES * width + 5 * units + 2 * keys * width);
        auto take = [&](long n) { return at += n, at - n; };
        for (float** x : {&scores, &dscores, &slope}) *x = take(cells);
        for (unit** x : {&p, &ds_a, &ds_b}) *x = (unit*)take(block);
        for (float** x : {&level, &delta}) *x = take(queries);
        rows_a = (unit*)take(LANES * width), dquery = take(units);
        for (unit** x : {&query_t, &query_b, &dout_t, &dout_b}) *x = (unit*)take(units);
        for (float** x : {&dkeys, &dvalues}) *x = take(keys * width);
    }
};
static thread_local BackwardRoom backward_room;

// A segment's queries and gradients of its output as the products read them; delta = dout . out.
static void prepare_queries(const Shape& s, const Segment& g, long head, long width, const T* dout, const T* qkv,
                            const T* out, const float* lse, BackwardRoom& b) {
    long n = s.head_dim, stride = s.heads * n;
    for (long q0 = 0; q0 < g.size; q0 += LANES) {
        long rows = std::min<long>(LANES, g.size - q0), at = g.start + q0, to = q0 * width / P;
        pack_rows(qkv + at * s.stride + head * n, s.stride, rows, LANES, n, width, b.rows_a);
        turn(b.rows_a, width / P, width / P, b.query_t + turned(q0, width / P), PAIR);
        copy_pairs(b.rows_a, LANES, width, b.query_b + to);
        pack_rows(dout + at * stride + head * n, stride, rows, LANES, n, width, b.rows_a);
        turn(b.rows_a, width / P, width / P, b.dout_t + turned(q0, width / P), PAIR);
        copy_pairs(b.rows_a, LANES, width, b.dout_b + to);
        for (long r = 0; r < LANES; r++) {
            b.level[q0 + r] = r < rows ? lse[(at + r) * s.heads + head] : INFINITY;
            vf dots{};
            for (long i = 0; r < rows && i < n; i += LANES) {
                long from = (at + r) * stride + head * n + i;
                ask_ahead(out + from, stride);
                dots += load(dout + from, n - i) * load(out + from, n - i);
            }
            b.delta[q0 + r] = sum(dots);
        }
    }
}

// P and dS of a strip from the products of `keys` keys: x = exp(score - level), x (dscore - delta). The scale that dS
// lacks comes to its sums. A function of its own: in a large one it would get too few registers.
__attribute__((noinline)) static void weigh(const float* scores, const float* dscores, long keys, float scale,
                                            const float* level_of, const float* delta_of, unit* p,
                                            unit* ds_a, unit* ds_b) {
    constexpr long NEXT = (P - 1) * Q / P;
    vf level = load(level_of), delta = load(delta_of), x[4];
    for (long k = 0; k < keys; k += 4, p += 4 * Q / P, ds_a += 4 * Q / P, ds_b += 4 * Q / P) {
        for (int i = 0; i < 4; i++) x[i] = load(scores + (k + i) * PAIR) * scale - level;
        exponentials(x);
        for (int i = 0; i < 4; i += P) {
            long at = i * Q / P;
            vf one = x[i], two = x[i + P - 1];
            put(p + at, one);
            if (P == 2) put(p + at + NEXT, two);
            one *= load(dscores + (k + i) * PAIR) - delta, two *= load(dscores + (k + i + P - 1) * PAIR) - delta;
            put_both(ds_a + at, ds_a + at + NEXT, ds_b + at, one, two);
        }
    }
}

// One strip over some keys of a piece, from their products on: its part of a block's P and dS, whose first key is k0.
static void backward_strip(const Shape& s, const Piece& piece, const Strip& q, Range r, long k0, long q0, long v,
                           long scored, BackwardRoom& b) {
    bool capped = s.softcap > 0;
    float *scores = b.scores + scored, *dscores = b.dscores + scored, *slope = b.slope + scored;
    float scale = finish(s, piece, q, r, scores, capped ? slope : nullptr);
    for (long k = 0; capped && k < r.high - r.low; k++) {  // dS = x slope (dscore - delta)
        vf delta = load(b.delta + q0 + v);
        float* at = dscores + k * PAIR;
        store(at, (load(at) - delta) * load(slope + k * PAIR) + delta);
    }
    long at = ((r.low - k0) * Q + v) / P;
    weigh(scores, dscores, r.high - r.low, scale, b.level + q0 + v, b.delta + q0 + v, b.p + at, b.ds_a + at,
             b.ds_b + (r.low - k0) / P * Q + v);
}

// Queries [q0, q0 + Q) of a segment over the keys [k0, k0 + KEYS) of a piece: adds to the gradients of all three.
static void backward_block(const Shape& s, const Packs& packs, const Piece& piece, long group, const Segment& g,
                           long q0, long k0, float* dkeys, float* dvalues, float* dquery, BackwardRoom& b) {
    long width = packs.width, row = width / P, first = packs.first(group, piece);
    long strips = whole(std::min(Q, g.size - q0), LANES) / LANES;
    Range ranges[Q / LANES];
    for (long pair = 0; pair < strips; pair += 2) {
        Range both{};
        long end = std::min(strips, pair + 2), query = (q0 + pair * LANES) * row;
        for (long v = pair; v < end; v++) {
            ranges[v] = seen(s, piece, Strip(g, q0 + v * LANES)).within(k0, k0 + KEYS);
            both = both.with(ranges[v]);
        }
        if (both.empty()) continue;
        long keys = both.high - both.low, n = (end - pair) * LANES, at = first + both.low * row;
        product<false>(keys, n, row, packs.keys_a + at, row, 1, b.query_t + query, PAIR, b.scores, PAIR);
        product<false>(keys, n, row, packs.values_a + at, row, 1, b.dout_t + query, PAIR, b.dscores, PAIR);
        for (long v = pair; v < end; v++)
            if (!ranges[v].empty())
                backward_strip(s, piece, Strip(g, q0 + v * LANES), ranges[v], k0, q0, v * LANES,
                                  (ranges[v].low - both.low) * PAIR + (v - pair) * LANES, b);
    }
    for (long k = k0; k < k0 + KEYS; k += LANES) {  // those strips that see them lie side by side
        auto sees = [&](long v) { return ranges[v].low <= k && k < ranges[v].high; };
        long from = 0, to = strips;
        while (from < to && !sees(from)) from++;
        while (to > from && !sees(to - 1)) to--;
        if (from == to) continue;
        long j = ((k - k0) * Q + from * LANES) / P, query = (q0 + from * LANES) / P * width;
        long depth = (to - from) * LANES / P, c = k * width;
        product<true>(LANES, width, depth, b.p + j, Q / P, 1, b.dout_b + query, width, dvalues + c, width);
        product<true>(LANES, width, depth, b.ds_a + j, Q / P, 1, b.query_b + query, width, dkeys + c, width);
    }
    for (long v = 0; v < strips; v++) {
        Range r = ranges[v];
        if (r.empty()) continue;
        product<true>(LANES, width, (r.high - r.low) / P, b.ds_b + (r.low - k0) / P * Q + v * LANES, 1, Q,
                         packs.keys_b + first + r.low / P * width, width, dquery + v * LANES * width, width);
    }
}

// Where gradients go: of keys and values to dqkv, of queries as well, unless there are more parts: then to
// [parts, heads, tokens, width], summed at the end.
struct Target {
    T* dqkv;
    long stride, tokens, parts;
    float* sums;
};

// One group of heads of a tree, and those pieces of its keys that are this part's.
static void backward_task(const Layout& l, const Shape& s, const Packs& packs, const Tree& t, long group, long part,
                          const T* dout, const T* qkv, const T* out, const float* lse, const Target& to) {
    BackwardRoom& b = backward_room;
    long n = s.head_dim, width = packs.width, share = s.heads / s.kv_heads, base = packs.at[t.first_segment];
    const Segment *begin = l.segments + t.first_segment, *end = begin + t.num_segments;
    auto is_mine = [&](const Piece& piece) { return piece.position / PIECE % to.parts == part; };
    long keys = packs.at[t.first_segment + t.num_segments - 1] - base + whole(end[-1].size, LANES);
    std::fill(b.dkeys, b.dkeys + keys * width, 0.0f);
    std::fill(b.dvalues, b.dvalues + keys * width, 0.0f);
    for (const Segment* g = begin; g < end; g++)
        for (long head = group * share; head < (group + 1) * share; head++) {
            prepare_queries(s, *g, head, width, dout, qkv, out, lse, b);
            std::fill(b.dquery, b.dquery + whole(g->size, LANES) * width, 0.0f);
            packs.each_piece(l, *g, [&](const Piece& piece, long) {
                long at = (piece.row - base) * width;
                for (long q0 = 0; is_mine(piece) && q0 < g->size; q0 += Q)
                    for (long k0 = 0; k0 < piece.size; k0 += KEYS)
                        backward_block(s, packs, piece, group, *g, q0, k0, b.dkeys + at, b.dvalues + at,
                                          b.dquery + q0 * width, b);
            });
            for (long q = 0; q < g->size; q++) {
                const float* from = b.dquery + q * width;
                long token = g->start + q;
                float* sum = to.sums + ((part * s.heads + head) * to.tokens + token) * width;
                if (to.parts > 1)
                    store_row(sum, from, s.scale, width);
                else
                    store_row(to.dqkv + token * to.stride + head * n, from, s.scale, n);
            }
        }
    for (const Segment* g = begin; g < end; g++)
        packs.each_piece(l, *g, [&](const Piece& piece, long token) {
            for (long k = 0; is_mine(piece) && token >= g->start && k < piece.size; k++) {  // its own
                T* row = to.dqkv + (token + k) * to.stride + (s.heads + group) * n;
                store_row(row, b.dkeys + (piece.row - base + k) * width, s.scale, n);
                store_row(row + s.kv_heads * n, b.dvalues + (piece.row - base + k) * width, 1.0f, n);
            }
        });
}

KERNEL attention_backward(Shape s, Layout l, Matrix<T> dout, Matrix<T> qkv, Matrix<T> out, Matrix<float> lse,
                          Matrix<T> dqkv, Matrix<float> sums, int64_t parts) {
    Target to{dqkv.at, dqkv.stride, qkv.rows, parts, sums.at};
    Packs& shared = of_caller;
    shared.reserve(l, s);
    long queries = 0, keys = 0, width = shared.width, n = s.head_dim;
    for (long k = 0; k < l.num_segments; k++) queries = std::max(queries, whole(l.segments[k].size, PAIR));
    std::vector<std::pair<long, long>> trees;  // work and number
    for (long k = 0; k < l.num_trees; k++) {
        const Tree& t = l.trees[k];
        keys = std::max(keys, whole(t.size, LANES) + t.num_segments * LANES);
        trees.emplace_back(-work_of(l, t.first_segment, t.num_segments), k);
    }
    std::sort(trees.begin(), trees.end());
#pragma omp parallel
    {
        backward_room.reserve(queries, keys, width);
        shared.fill(l, s, qkv.at, true);
#pragma omp for schedule(dynamic) collapse(3)
        for (long tree = 0; tree < l.num_trees; tree++)
            for (long part = 0; part < to.parts; part++)
                for (long group = 0; group < s.kv_heads; group++)
                    backward_task(l, s, shared, l.trees[trees[tree].second], group, part, dout.at, qkv.at, out.at, lse.at,
                                  to);
#pragma omp for schedule(static)
        for (long t = 0; t < (to.parts > 1 ? to.tokens : 0); t++)
            for (long head = 0; head < s.heads; head++)
                for (long c = 0; c < n; c += LANES) {
                    vf total{};
                    for (long part = 0; part < to.parts; part++)
                        total += load(to.sums + ((part * s.heads + head) * to.tokens + t) * width + c);
                    store(to.dqkv + t * to.stride + head * n + c, total, n - c);
                }
    }
}
