// Causal attention over segments, backward; attention.h says how both ways are cut. A task is one tree of segments, the
// heads that share keys and values, and in few or long trees a share of the keys: gradients of keys and values are
// summed in one buffer of the thread and leave it once.
#include "attention.h"

constexpr long Q = 64;     // queries of a block: with fewer, gradients of keys are read and written more often
constexpr long KEYS = 64;  // keys of a block

// A thread's buffers; they stay. _a row-wise, _b pair-wise (units.h), _t turned.
template <class U> struct Scratch {
    typedef typename U::unit unit;
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
template <class U> static Scratch<U>& scratch() {
    static thread_local Scratch<U> mine;
    return mine;
}

// A segment's queries and gradients of its output as the products read them; delta = dout . out.
template <class U, class T>
static void prepare_queries(const Shape& s, const Segment& g, long head, long width, const T* dout, const T* qkv,
                            const T* out, const float* lse, Scratch<U>& b) {
    long n = s.head_dim, stride = s.heads * n;
    for (long q0 = 0; q0 < g.size; q0 += LANES) {
        long rows = std::min<long>(LANES, g.size - q0), at = g.start + q0, to = q0 * width / U::P;
        pack_rows<U>(qkv + at * s.stride + head * n, s.stride, rows, LANES, n, width, b.rows_a);
        turn(b.rows_a, width / U::P, width / U::P, b.query_t + turned(q0, width / U::P), PAIR);
        copy_pairs(b.rows_a, LANES, width, b.query_b + to);
        pack_rows<U>(dout + at * stride + head * n, stride, rows, LANES, n, width, b.rows_a);
        turn(b.rows_a, width / U::P, width / U::P, b.dout_t + turned(q0, width / U::P), PAIR);
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
template <class U>
__attribute__((noinline)) static void weigh(const float* scores, const float* dscores, long keys, float scale,
                                            const float* level_of, const float* delta_of, typename U::unit* p,
                                            typename U::unit* ds_a, typename U::unit* ds_b) {
    constexpr long NEXT = (U::P - 1) * Q / U::P;
    vf level = load(level_of), delta = load(delta_of), x[4];
    for (long k = 0; k < keys; k += 4, p += 4 * Q / U::P, ds_a += 4 * Q / U::P, ds_b += 4 * Q / U::P) {
        for (int i = 0; i < 4; i++) x[i] = load(scores + (k + i) * PAIR) * scale - level;
        exponentials(x);
        for (int i = 0; i < 4; i += U::P) {
            long at = i * Q / U::P;
            vf one = x[i], two = x[i + U::P - 1];
            U::put(p + at, one);
            if (U::P == 2) U::put(p + at + NEXT, two);
            one *= load(dscores + (k + i) * PAIR) - delta, two *= load(dscores + (k + i + U::P - 1) * PAIR) - delta;
            U::put_both(ds_a + at, ds_a + at + NEXT, ds_b + at, one, two);
        }
    }
}

// One strip over some keys of a piece, from their products on: its part of a block's P and dS, whose first key is k0.
template <class U>
static void backward_strip(const Shape& s, const Piece& piece, const Strip& q, Range r, long k0, long q0, long v,
                           long scored, Scratch<U>& b) {
    bool capped = s.softcap > 0;
    float *scores = b.scores + scored, *dscores = b.dscores + scored, *slope = b.slope + scored;
    float scale = finish(s, piece, q, r, scores, capped ? slope : nullptr);
    for (long k = 0; capped && k < r.high - r.low; k++) {  // dS = x slope (dscore - delta)
        vf delta = load(b.delta + q0 + v);
        float* at = dscores + k * PAIR;
        store(at, (load(at) - delta) * load(slope + k * PAIR) + delta);
    }
    long at = ((r.low - k0) * Q + v) / U::P;
    weigh<U>(scores, dscores, r.high - r.low, scale, b.level + q0 + v, b.delta + q0 + v, b.p + at, b.ds_a + at,
             b.ds_b + (r.low - k0) / U::P * Q + v);
}

// Queries [q0, q0 + Q) of a segment over the keys [k0, k0 + KEYS) of a piece: adds to the gradients of all three.
template <class U>
static void backward_block(const Shape& s, const Packs<U>& packs, const Piece& piece, long group, const Segment& g,
                           long q0, long k0, float* dkeys, float* dvalues, float* dquery, Scratch<U>& b) {
    long width = packs.width, row = width / U::P, first = packs.first(group, piece);
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
        product<U, false>(keys, n, row, packs.keys_a + at, row, 1, b.query_t + query, PAIR, b.scores, PAIR);
        product<U, false>(keys, n, row, packs.values_a + at, row, 1, b.dout_t + query, PAIR, b.dscores, PAIR);
        for (long v = pair; v < end; v++)
            if (!ranges[v].empty())
                backward_strip<U>(s, piece, Strip(g, q0 + v * LANES), ranges[v], k0, q0, v * LANES,
                                  (ranges[v].low - both.low) * PAIR + (v - pair) * LANES, b);
    }
    for (long k = k0; k < k0 + KEYS; k += LANES) {  // those strips that see them lie side by side
        auto sees = [&](long v) { return ranges[v].low <= k && k < ranges[v].high; };
        long from = 0, to = strips;
        while (from < to && !sees(from)) from++;
        while (to > from && !sees(to - 1)) to--;
        if (from == to) continue;
        long j = ((k - k0) * Q + from * LANES) / U::P, query = (q0 + from * LANES) / U::P * width;
        long depth = (to - from) * LANES / U::P, c = k * width;
        product<U, true>(LANES, width, depth, b.p + j, Q / U::P, 1, b.dout_b + query, width, dvalues + c, width);
        product<U, true>(LANES, width, depth, b.ds_a + j, Q / U::P, 1, b.query_b + query, width, dkeys + c, width);
    }
    for (long v = 0; v < strips; v++) {
        Range r = ranges[v];
        if (r.empty()) continue;
        product<U, true>(LANES, width, (r.high - r.low) / U::P, b.ds_b + (r.low - k0) / U::P * Q + v * LANES, 1, Q,
                         packs.keys_b + first + r.low / U::P * width, width, dquery + v * LANES * width, width);
    }
}

// Where gradients go: of keys and values to dqkv, of queries as well, unless there are more parts: then to
// [parts, heads, tokens, width], summed at the end.
template <class T> struct Target {
    T* dqkv;
    long stride, tokens, parts;
    float* sums;
};

// One group of heads of a tree, and those pieces of its keys that are this part's.
template <class U, class T>
static void backward_task(const Layout& l, const Shape& s, const Packs<U>& packs, const Tree& t, long group, long part,
                          const T* dout, const T* qkv, const T* out, const float* lse, const Target<T>& to) {
    Scratch<U>& b = scratch<U>();
    long n = s.head_dim, width = packs.width, share = s.heads / s.kv_heads, base = packs.at[t.first_segment];
    const Segment *begin = l.segments + t.first_segment, *end = begin + t.num_segments;
    auto is_mine = [&](const Piece& piece) { return piece.position / PIECE % to.parts == part; };
    long keys = packs.at[t.first_segment + t.num_segments - 1] - base + whole(end[-1].size, LANES);
    std::fill(b.dkeys, b.dkeys + keys * width, 0.0f);
    std::fill(b.dvalues, b.dvalues + keys * width, 0.0f);
    for (const Segment* g = begin; g < end; g++)
        for (long head = group * share; head < (group + 1) * share; head++) {
            prepare_queries<U>(s, *g, head, width, dout, qkv, out, lse, b);
            std::fill(b.dquery, b.dquery + whole(g->size, LANES) * width, 0.0f);
            packs.each_piece(l, *g, [&](const Piece& piece, long) {
                long at = (piece.row - base) * width;
                for (long q0 = 0; is_mine(piece) && q0 < g->size; q0 += Q)
                    for (long k0 = 0; k0 < piece.size; k0 += KEYS)
                        backward_block<U>(s, packs, piece, group, *g, q0, k0, b.dkeys + at, b.dvalues + at,
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

template <class T>
static void backward(const Layout& l, const Shape& s, const T* dout, const T* qkv, const T* out, const float* lse,
                     const Target<T>& to) {
    typedef typename Units<T>::type U;
    Packs<U>& shared = packs<U>();
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
        scratch<U>().reserve(queries, keys, width);
        shared.fill(l, s, qkv, true);
#pragma omp for schedule(dynamic) collapse(3)
        for (long tree = 0; tree < l.num_trees; tree++)
            for (long part = 0; part < to.parts; part++)
                for (long group = 0; group < s.kv_heads; group++)
                    backward_task<U>(l, s, shared, l.trees[trees[tree].second], group, part, dout, qkv, out, lse, to);
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

#define ATTENTION(T, suffix)                                                                                           \
    HIVETUNE_API void attention_backward_##suffix(const Shape* s, const Layout* l, const T* dout, const T* qkv,        \
                                                  const T* out, const float* lse, T* dqkv, long dstride, float* sums,  \
                                                  long tokens, long parts) {                                           \
        backward(*l, *s, dout, qkv, out, lse, Target<T>{dqkv, dstride, tokens, parts, sums});                          \
    }
ATTENTION(float, f32)
ATTENTION(bf16, bf16)
