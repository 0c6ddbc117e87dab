// Causal attention over segments (attention.py says what they are), forward and backward, by blocks of 32 queries.
//
// Scores are kept transposed, [keys, 32 queries]: the softmax of all 32 then runs along the lanes, keys are read as they
// lie, and only the small block of queries is ever turned. Sums and softmax are fp32; bf16 is multiplied as bf16 where
// the processor can (units.h).
// One task is one head of one tree of segments: what tasks write never overlaps, so results are the same whatever the
// number of threads and the order in which they finish.
#include <vector>

#include "units.h"

constexpr long Q = 32;
constexpr int QV = Q / LANES;
constexpr long KEYS = 64;  // keys of a block: with what is done to their scores they stay in L1

// Mirrored by native.AttentionArguments.
struct Shape {
    int64_t heads, kv_heads, head_dim, stride, window;  // window 0: none
    float scale, softcap;                               // softcap 0: none
};
struct Segment {
    int64_t start, size, depth, first_range, num_ranges;  // its keys: these ranges, its own the last
};
struct Range {
    int64_t start, size;
};
struct Tree {
    int64_t first_segment, num_segments, start, size;
};

// A thread's buffers; they grow to the longest path and stay. _a row-wise, _b pair-wise (units.h), _t turned.
template <class U> struct Scratch {
    typedef typename U::unit unit;
    std::vector<float> memory;
    float *dkeys, *dvalues, *scores, *dscores, *out;
    unit *keys_a, *keys_b, *values_a, *values_b, *query_a, *query_b, *query_t, *dout_a, *dout_b, *dout_t, *p, *ds_a, *ds_b;
    void reserve(long longest, long width) {
        long keys = (longest + KEYS) * width, block = Q * width, scored = KEYS * Q;
        size_t size = 6 * keys + (longest + KEYS) * Q + 7 * block + 4 * scored;
        if (memory.size() < size) memory.resize(size);
        float* at = memory.data();
        auto take = [&](long n) { return at += n, at - n; };
        for (float** x : {&dkeys, &dvalues}) *x = take(keys);
        for (unit** x : {&keys_a, &keys_b, &values_a, &values_b}) *x = (unit*)take(keys);
        scores = take((longest + KEYS) * Q);
        for (unit** x : {&query_a, &query_b, &query_t, &dout_a, &dout_b, &dout_t}) *x = (unit*)take(block);
        out = take(block), dscores = take(scored);
        for (unit** x : {&p, &ds_a, &ds_b}) *x = (unit*)take(scored);
    }
};
template <class U> static Scratch<U>& scratch() {
    static thread_local Scratch<U> mine;
    return mine;
}

// Keys and values of a segment's path, in order of position; what lies behind them is zero for a block.
template <class U, class T>
static void gather(const Shape& s, const T* qkv, const Segment& g, const Range* ranges, long group, long width) {
    Scratch<U>& b = scratch<U>();
    long k_at = (s.heads + group) * s.head_dim, v_at = k_at + s.kv_heads * s.head_dim, row = width / U::P, from = 0;
    for (const Range* r = ranges + g.first_range; r < ranges + g.first_range + g.num_ranges; r++) {
        long height = r + 1 == ranges + g.first_range + g.num_ranges ? r->size + KEYS : r->size;
        const T* at = qkv + r->start * s.stride;
        pack_rows<U>(at + k_at, s.stride, r->size, height, s.head_dim, width, b.keys_a + from * row);
        pack_rows<U>(at + v_at, s.stride, r->size, height, s.head_dim, width, b.values_a + from * row);
        from += r->size;
    }
}

// The first position of a path that a block of queries beginning at position `first` may see; the last is its own.
static long lowest(const Shape& s, long first) { return s.window ? std::max(0L, first - s.window + 1) / 2 * 2 : 0; }

// scores[k, q] = scale * k . q for keys [k0, k1), capped, and -inf where query first + q must not look; `slope` keeps
// d capped / d score.
template <class U>
static void masked_scores(const Shape& s, long k0, long k1, long first, long width, float* scores, float* slope) {
    Scratch<U>& b = scratch<U>();
    long row = width / U::P;
    product<U, false>(k1 - k0, Q, row, b.keys_a + k0 * row, row, 1, b.query_t, Q, scores, Q);
    vf lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (long k = k0; k < k1; k++)
        for (int v = 0; v < QV; v++) {
            long at = (k - k0) * Q + v * LANES;
            vf z = load(scores + at) * s.scale;
            if (s.softcap > 0) {
                vf th = hyperbolic_tangent(z * (1.0f / s.softcap));
                z = s.softcap * th;
                if (slope) store(slope + at, 1.0f - th * th);
            }
            long oldest = first + v * LANES;  // position of this vector's first query
            if (k > oldest || (s.window && k <= oldest + LANES - 1 - s.window)) {
                vf ago = lane + (float)(oldest - k);
                z = ago < 0.0f ? splat(-INFINITY) : z;
                if (s.window) z = ago >= (float)s.window ? splat(-INFINITY) : z;
            }
            store(scores + at, z);
        }
}

template <class U, class T>
static void forward_block(const Shape& s, const Segment& g, long q0, long head, long width, const T* qkv,
                          const typename U::unit* values, T* out, float* lse) {
    Scratch<U>& b = scratch<U>();
    long rows = std::min(Q, g.size - q0), first = g.depth + q0, n = s.head_dim;
    long low = lowest(s, first), high = first + rows, even = (high + 1) / 2 * 2;
    pack_rows<U>(qkv + (g.start + q0) * s.stride + head * n, s.stride, rows, Q, n, width, b.query_a);
    turn(b.query_a, Q, width / U::P, b.query_t);
    vf top[QV], total[QV] = {};
    for (int v = 0; v < QV; v++) top[v] = splat(-1e30f);  // finite, for lanes without a query
    for (long k0 = low; k0 < even; k0 += KEYS) {
        long k1 = std::min(k0 + KEYS, even);
        masked_scores<U>(s, k0, k1, first, width, b.scores + k0 * Q, nullptr);
        for (long k = k0; k < k1; k++)
            for (int v = 0; v < QV; v++) top[v] = larger(load(b.scores + k * Q + v * LANES), top[v]);
    }
    std::fill(b.out, b.out + Q * width, 0.0f);
    for (long k0 = low; k0 < even; k0 += KEYS) {
        long keys = std::min(KEYS, even - k0);
        for (long k = 0; k < keys; k += U::P)
            for (int v = 0; v < QV; v++) {
                vf p[2] = {};
                for (int i = 0; i < U::P; i++) {
                    p[i] = exponential(load(b.scores + (k0 + k + i) * Q + v * LANES) - top[v]);
                    total[v] += p[i];
                }
                U::put_pair(b.p + k / U::P * Q + v * LANES, p[0], p[1]);
            }
        product<U, true>(rows, width, keys / U::P, b.p, 1, Q, values + k0 / U::P * width, width, b.out, width);
    }
    for (long r = 0; r < rows; r++) {
        float sum = total[r / LANES][r % LANES];
        long at = g.start + q0 + r;
        lse[at * s.heads + head] = top[r / LANES][r % LANES] + std::log(sum);
        for (long i = 0; i < n; i += LANES)
            store(out + (at * s.heads + head) * n + i, load(b.out + r * width + i) * (1.0f / sum), n - i);
    }
}

template <class U, class T>
static void backward_block(const Shape& s, const Segment& g, long q0, long head, long width, const T* dout,
                           const T* qkv, const typename U::unit* keys_b, const T* out, const float* lse, T* dqkv,
                           long dstride) {
    Scratch<U>& b = scratch<U>();
    long rows = std::min(Q, g.size - q0), first = g.depth + q0, n = s.head_dim, stride = s.heads * n;
    long at = g.start + q0, low = lowest(s, first), high = (first + rows + 1) / 2 * 2, row = width / U::P;
    pack_rows<U>(qkv + at * s.stride + head * n, s.stride, rows, Q, n, width, b.query_a);
    pack_rows<U>(dout + at * stride + head * n, stride, rows, Q, n, width, b.dout_a);
    turn(b.query_a, Q, row, b.query_t);
    turn(b.dout_a, Q, row, b.dout_t);
    auto query_b = pair_up(b.query_a, Q, width, b.query_b), dout_b = pair_up(b.dout_a, Q, width, b.dout_b);
    float delta[Q] = {}, level[Q], slope[KEYS * Q];
    for (long r = 0; r < Q; r++) level[r] = r < rows ? lse[(at + r) * s.heads + head] : INFINITY;
    for (long r = 0; r < rows; r++) {
        vf dots{};
        for (long i = 0; i < n; i += LANES) {
            long from = (at + r) * stride + head * n + i;
            dots += load(dout + from, n - i) * load(out + from, n - i);
        }
        delta[r] = sum(dots);
    }
    std::fill(b.out, b.out + Q * width, 0.0f);
    for (long k0 = low; k0 < high; k0 += KEYS) {
        long keys = std::min(KEYS, high - k0);
        masked_scores<U>(s, k0, k0 + keys, first, width, b.scores, s.softcap > 0 ? slope : nullptr);
        product<U, false>(keys, Q, row, b.values_a + k0 * row, row, 1, b.dout_t, Q, b.dscores, Q);
        for (long k = 0; k < keys; k += U::P)
            for (int v = 0; v < QV; v++) {
                vf ds[2] = {};
                for (int i = 0; i < U::P; i++) {
                    long j = (k + i) * Q + v * LANES;
                    vf p = exponential(load(b.scores + j) - load(level + v * LANES));
                    ds[i] = p * (load(b.dscores + j) - load(delta + v * LANES)) * s.scale;
                    if (s.softcap > 0) ds[i] *= load(slope + j);
                    U::put(b.p + j / U::P, p);
                    U::put(b.ds_a + j / U::P, ds[i]);
                }
                U::put_pair(b.ds_b + k / U::P * Q + v * LANES, ds[0], ds[1]);
            }
        product<U, true>(keys, width, Q / U::P, b.p, Q / U::P, 1, dout_b, width, b.dvalues + k0 * width, width);
        product<U, true>(keys, width, Q / U::P, b.ds_a, Q / U::P, 1, query_b, width, b.dkeys + k0 * width, width);
        product<U, true>(rows, width, keys / U::P, b.ds_b, 1, Q, keys_b + k0 / U::P * width, width, b.out, width);
    }
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < n; i += LANES)
            store(dqkv + (at + r) * dstride + head * n + i, load(b.out + r * width + i), n - i);
}

static long longest_path(const Segment* segments, const Tree* trees, long num_trees) {
    long longest = 0;
    const Tree& last = trees[num_trees - 1];
    for (const Segment* g = segments; g < segments + last.first_segment + last.num_segments; g++)
        longest = std::max<long>(longest, g->depth + g->size);
    return longest;
}

template <class T>
static void forward(const Shape& s, const Segment* segments, const Range* ranges, const Tree* trees, long num_trees,
                    const T* qkv, T* out, float* lse) {
    typedef typename Units<T>::type U;
    long width = (s.head_dim + LANES - 1) / LANES * LANES, share = s.heads / s.kv_heads;
    long longest = longest_path(segments, trees, num_trees), num_segments =
        trees[num_trees - 1].first_segment + trees[num_trees - 1].num_segments;
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (long segment = 0; segment < num_segments; segment++)
        for (long group = 0; group < s.kv_heads; group++) {
            const Segment& g = segments[segment];
            scratch<U>().reserve(longest, width);
            gather<U>(s, qkv, g, ranges, group, width);
            auto values = pair_up(scratch<U>().values_a, g.depth + g.size + 1, width, scratch<U>().values_b);
            for (long head = group * share; head < (group + 1) * share; head++)
                for (long q0 = 0; q0 < g.size; q0 += Q) forward_block<U>(s, g, q0, head, width, qkv, values, out, lse);
        }
}

// dkv is scratch of [tokens, heads, 2, width]: the gradients of keys and values by query head, summed at the end.
template <class T>
static void backward(const Shape& s, const Segment* segments, const Range* ranges, const Tree* trees, long num_trees,
                     const T* dout, const T* qkv, const T* out, const float* lse, T* dqkv, long dstride, float* dkv,
                     long tokens) {
    typedef typename Units<T>::type U;
    long width = (s.head_dim + LANES - 1) / LANES * LANES, share = s.heads / s.kv_heads, n = s.head_dim;
    long longest = longest_path(segments, trees, num_trees), row = s.heads * 2 * width;
#pragma omp parallel
    {
        scratch<U>().reserve(longest, width);
        Scratch<U>& b = scratch<U>();
#pragma omp for schedule(dynamic) collapse(2)
        for (long tree = 0; tree < num_trees; tree++)
            for (long head = 0; head < s.heads; head++) {
                const Tree& t = trees[tree];
                for (long r = t.start; r < t.start + t.size; r++)
                    std::fill(dkv + r * row + head * 2 * width, dkv + r * row + (head + 1) * 2 * width, 0.0f);
                for (long k = t.first_segment; k < t.first_segment + t.num_segments; k++) {
                    const Segment& g = segments[k];
                    long keys = g.depth + g.size;
                    gather<U>(s, qkv, g, ranges, head / share, width);
                    auto keys_b = pair_up(b.keys_a, keys + 1, width, b.keys_b);
                    std::fill(b.dkeys, b.dkeys + (keys + 1) * width, 0.0f);
                    std::fill(b.dvalues, b.dvalues + (keys + 1) * width, 0.0f);
                    for (long q0 = 0; q0 < g.size; q0 += Q)
                        backward_block<U>(s, g, q0, head, width, dout, qkv, keys_b, out, lse, dqkv, dstride);
                    long from = 0;
                    for (const Range* r = ranges + g.first_range; r < ranges + g.first_range + g.num_ranges; r++)
                        for (long i = 0; i < r->size; i++, from++) {
                            float* to = dkv + (r->start + i) * row + head * 2 * width;
                            for (long c = 0; c < width; c += LANES) {
                                store(to + c, load(to + c) + load(b.dkeys + from * width + c));
                                store(to + width + c, load(to + width + c) + load(b.dvalues + from * width + c));
                            }
                        }
                }
            }
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++)
            for (long group = 0; group < s.kv_heads; group++)
                for (long half = 0; half < 2; half++)
                    for (long c = 0; c < n; c += LANES) {
                        vf total{};
                        for (long head = group * share; head < (group + 1) * share; head++)
                            total += load(dkv + t * row + (head * 2 + half) * width + c);
                        store(dqkv + t * dstride + (s.heads + half * s.kv_heads + group) * n + c, total, n - c);
                    }
    }
}

#define ATTENTION(T, suffix)                                                                                           \
    HIVETUNE_API void attention_##suffix(const Shape* s, const Segment* segments, const Range* ranges,                 \
                                         const Tree* trees, long num_trees, const T* qkv, T* out, float* lse) {        \
        forward(*s, segments, ranges, trees, num_trees, qkv, out, lse);                                                \
    }                                                                                                                  \
    HIVETUNE_API void attention_backward_##suffix(const Shape* s, const Segment* segments, const Range* ranges,        \
                                                  const Tree* trees, long num_trees, const T* dout, const T* qkv,      \
                                                  const T* out, const float* lse, T* dqkv, long dstride, float* dkv,   \
                                                  long tokens) {                                                       \
        backward(*s, segments, ranges, trees, num_trees, dout, qkv, out, lse, dqkv, dstride, dkv, tokens);             \
    }
ATTENTION(float, f32)
ATTENTION(bf16, bf16)
