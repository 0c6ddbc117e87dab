// Causal attention over segments (attention.py says what they are), forward and backward, by blocks of 32 queries.
//
// Scores are kept transposed, [keys, 32 queries]: the softmax of all 32 then runs along the lanes, keys are read as they
// lie, and only the small block of queries is ever transposed. Everything is computed in fp32.
// One task is one head of one tree of segments: what tasks write never overlaps, so results are the same whatever the
// number of threads and whoever comes first.
#include <algorithm>
#include <vector>

#include "lanes.h"

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

// c[M, N] (+)= a[M, K] b[K, N]; a is read at a[m * am + k * ak], N is NV vectors.
template <int M, int NV, bool ADD>
static inline void tile(long K, const float* a, long am, long ak, const float* b, long bk, float* c, long cm) {
    vf acc[M][NV];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) acc[m][v] = ADD ? load(c + m * cm + v * LANES) : vf{};
    for (long k = 0; k < K; k++) {
        vf row[NV];
        for (int v = 0; v < NV; v++) row[v] = load(b + k * bk + v * LANES);
        for (int m = 0; m < M; m++)
            for (int v = 0; v < NV; v++) acc[m][v] += a[m * am + k * ak] * row[v];
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) store(c + m * cm + v * LANES, acc[m][v]);
}

template <int NV, bool ADD>
static inline void strip(long M, long K, const float* a, long am, long ak, const float* b, long bk, float* c, long cm) {
    constexpr int T = !WIDE ? 4 : NV == 4 ? 6 : 8;  // accumulators that fit the registers
    long m = 0;
    for (; m + T <= M; m += T) tile<T, NV, ADD>(K, a + m * am, am, ak, b, bk, c + m * cm, cm);
    for (; m < M; m++) tile<1, NV, ADD>(K, a + m * am, am, ak, b, bk, c + m * cm, cm);
}

// N any multiple of 16.
template <bool ADD>
static void product(long M, long N, long K, const float* a, long am, long ak, const float* b, long bk, float* c,
                    long cm) {
    long n = 0;
    for (; WIDE && n + 64 <= N; n += 64) strip<4, ADD>(M, K, a, am, ak, b + n, bk, c + n, cm);
    for (; WIDE && n + 32 <= N; n += 32) strip<2, ADD>(M, K, a, am, ak, b + n, bk, c + n, cm);
    for (; n < N; n += 16) strip<1, ADD>(M, K, a, am, ak, b + n, bk, c + n, cm);
}

// A thread's buffers; they grow to the longest path and stay.
struct Scratch {
    std::vector<float> memory;
    float *keys, *values, *dkeys, *dvalues, *scores, *dscores, *query, *query_t, *dout, *dout_t, *out;
    void reserve(long longest, long width) {
        size_t per_key = 4 * width + 2 * Q, per_block = 5 * Q * width;
        if (memory.size() < longest * per_key + per_block) memory.resize(longest * per_key + per_block);
        float* at = memory.data();
        for (float** p : {&keys, &values, &dkeys, &dvalues}) *p = at, at += longest * width;
        for (float** p : {&scores, &dscores}) *p = at, at += longest * Q;
        for (float** p : {&query, &query_t, &dout, &dout_t, &out}) *p = at, at += Q * width;
    }
};
static thread_local Scratch scratch;

template <class T> static void copy_rows(const T* from, long stride, long rows, long n, long width, float* to) {
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < width; i += LANES) store(to + r * width + i, load(from + r * stride + i, n - i));
}

// A block of at most 32 rows, times `scale`, as rows and transposed; missing rows are zero.
template <class T>
static void copy_block(const T* from, long stride, long rows, long n, long width, float scale, float* to, float* to_t) {
    copy_rows(from, stride, rows, n, width, to);
    std::fill(to + rows * width, to + Q * width, 0.0f);
    for (long i = 0; i < Q * width; i += LANES) store(to + i, load(to + i) * scale);
    for (long i = 0; i < width; i++)
        for (long r = 0; r < Q; r++) to_t[i * Q + r] = to[r * width + i];
}

// The first position of a path that a block of queries beginning at position `first` may see; the last is its own.
static long lowest(const Shape& s, long first) { return s.window ? std::max(0L, first - s.window + 1) : 0; }

// scores[k, q] = k . q for keys [k0, k1), capped, and -inf where query first + q must not look; `slope` keeps
// d capped / d score. All are addressed by the position of the key.
static void masked_scores(const Shape& s, long k0, long k1, long first, const float* keys, const float* query_t,
                          long width, float* scores, float* slope) {
    product<false>(k1 - k0, Q, width, keys + k0 * width, width, 1, query_t, Q, scores + k0 * Q, Q);
    if (k1 <= first + 1 && !s.window && s.softcap <= 0) return;  // everything is before every query
    vf lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (long k = k0; k < k1; k++)
        for (int v = 0; v < QV; v++) {
            float* at = scores + k * Q + v * LANES;
            vf z = load(at);
            if (s.softcap > 0) {
                vf th = hyperbolic_tangent(z * (1.0f / s.softcap));
                z = s.softcap * th;
                if (slope) store(slope + k * Q + v * LANES, 1.0f - th * th);
            }
            long oldest = first + v * LANES;  // position of this vector's first query
            if (k > oldest || (s.window && k <= oldest + LANES - 1 - s.window)) {
                vf ago = lane + (float)(oldest - k);
                z = ago < 0.0f ? splat(-INFINITY) : z;
                if (s.window) z = ago >= (float)s.window ? splat(-INFINITY) : z;
            }
            store(at, z);
        }
}

template <class T>
static void gather(const Shape& s, const T* qkv, const Range* ranges, long count, long group, long width, float* keys,
                   float* values) {
    long k_at = (s.heads + group) * s.head_dim, v_at = k_at + s.kv_heads * s.head_dim;
    for (const Range* r = ranges; r < ranges + count; r++) {
        copy_rows(qkv + r->start * s.stride + k_at, s.stride, r->size, s.head_dim, width, keys);
        copy_rows(qkv + r->start * s.stride + v_at, s.stride, r->size, s.head_dim, width, values);
        keys += r->size * width, values += r->size * width;
    }
}

template <class T>
static void forward_block(const Shape& s, const Segment& g, long q0, long head, long width, const T* qkv, T* out,
                          float* lse) {
    Scratch& b = scratch;
    long rows = std::min(Q, g.size - q0), first = g.depth + q0, n = s.head_dim;
    long low = lowest(s, first), high = first + rows;
    copy_block(qkv + (g.start + q0) * s.stride + head * n, s.stride, rows, n, width, s.scale, b.query, b.query_t);
    vf top[QV], total[QV] = {};
    for (int v = 0; v < QV; v++) top[v] = splat(-1e30f);  // finite, for lanes without a query
    for (long k0 = low; k0 < high; k0 += KEYS) {
        long k1 = std::min(k0 + KEYS, high);
        masked_scores(s, k0, k1, first, b.keys, b.query_t, width, b.scores, nullptr);
        for (long k = k0; k < k1; k++)
            for (int v = 0; v < QV; v++) top[v] = larger(load(b.scores + k * Q + v * LANES), top[v]);
    }
    std::fill(b.out, b.out + Q * width, 0.0f);
    for (long k0 = low; k0 < high; k0 += KEYS) {
        long k1 = std::min(k0 + KEYS, high);
        for (long k = k0; k < k1; k++)
            for (int v = 0; v < QV; v++) {
                vf p = exponential(load(b.scores + k * Q + v * LANES) - top[v]);
                total[v] += p;
                store(b.scores + k * Q + v * LANES, p);
            }
        product<true>(rows, width, k1 - k0, b.scores + k0 * Q, 1, Q, b.values + k0 * width, width, b.out, width);
    }
    for (long r = 0; r < rows; r++) {
        float sum = total[r / LANES][r % LANES];
        long at = g.start + q0 + r;
        lse[at * s.heads + head] = top[r / LANES][r % LANES] + std::log(sum);
        for (long i = 0; i < n; i += LANES)
            store(out + (at * s.heads + head) * n + i, load(b.out + r * width + i) * (1.0f / sum), n - i);
    }
}

template <class T>
static void backward_block(const Shape& s, const Segment& g, long q0, long head, long width, const T* dout,
                           const T* qkv, const T* out, const float* lse, T* dqkv, long dstride) {
    Scratch& b = scratch;
    long rows = std::min(Q, g.size - q0), first = g.depth + q0, n = s.head_dim, out_stride = s.heads * n;
    long at = g.start + q0, low = lowest(s, first), high = first + rows;
    copy_block(qkv + at * s.stride + head * n, s.stride, rows, n, width, s.scale, b.query, b.query_t);
    copy_block(dout + at * out_stride + head * n, out_stride, rows, n, width, 1.0f, b.dout, b.dout_t);
    float delta[Q] = {}, level[Q], slope[KEYS * Q];
    for (long r = 0; r < Q; r++) level[r] = r < rows ? lse[(at + r) * s.heads + head] : INFINITY;
    for (long r = 0; r < rows; r++) {
        vf dots{};
        for (long i = 0; i < n; i += LANES)
            dots += load(b.dout + r * width + i) * load(out + (at + r) * out_stride + head * n + i, n - i);
        delta[r] = sum(dots);
    }
    std::fill(b.out, b.out + Q * width, 0.0f);
    for (long k0 = low; k0 < high; k0 += KEYS) {
        long k1 = std::min(k0 + KEYS, high), keys = k1 - k0;
        float *p = b.scores + k0 * Q, *ds = b.dscores + k0 * Q;
        masked_scores(s, k0, k1, first, b.keys, b.query_t, width, b.scores, s.softcap > 0 ? slope - k0 * Q : nullptr);
        product<false>(keys, Q, width, b.values + k0 * width, width, 1, b.dout_t, Q, ds, Q);
        for (long i = 0; i < keys * Q; i += LANES) {
            vf weight = exponential(load(p + i) - load(level + i % Q));
            vf change = weight * (load(ds + i) - load(delta + i % Q));
            if (s.softcap > 0) change *= load(slope + i);
            store(p + i, weight);
            store(ds + i, change);
        }
        product<true>(keys, width, Q, p, Q, 1, b.dout, width, b.dvalues + k0 * width, width);
        product<true>(keys, width, Q, ds, Q, 1, b.query, width, b.dkeys + k0 * width, width);
        product<true>(rows, width, keys, ds, 1, Q, b.keys + k0 * width, width, b.out, width);
    }
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < n; i += LANES)
            store(dqkv + (at + r) * dstride + head * n + i, load(b.out + r * width + i) * s.scale, n - i);
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
    long width = (s.head_dim + LANES - 1) / LANES * LANES, share = s.heads / s.kv_heads;
    long longest = longest_path(segments, trees, num_trees), num_segments =
        trees[num_trees - 1].first_segment + trees[num_trees - 1].num_segments;
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (long segment = 0; segment < num_segments; segment++)
        for (long group = 0; group < s.kv_heads; group++) {
            const Segment& g = segments[segment];
            scratch.reserve(longest, width);
            gather(s, qkv, ranges + g.first_range, g.num_ranges, group, width, scratch.keys, scratch.values);
            for (long head = group * share; head < (group + 1) * share; head++)
                for (long q0 = 0; q0 < g.size; q0 += Q) forward_block(s, g, q0, head, width, qkv, out, lse);
        }
}

// dkv is scratch of [tokens, heads, 2, width]: the gradients of keys and values by query head, summed at the end.
template <class T>
static void backward(const Shape& s, const Segment* segments, const Range* ranges, const Tree* trees, long num_trees,
                     const T* dout, const T* qkv, const T* out, const float* lse, T* dqkv, long dstride, float* dkv,
                     long tokens) {
    long width = (s.head_dim + LANES - 1) / LANES * LANES, share = s.heads / s.kv_heads, n = s.head_dim;
    long longest = longest_path(segments, trees, num_trees), row = s.heads * 2 * width;
#pragma omp parallel
    {
        scratch.reserve(longest, width);
        Scratch& b = scratch;
#pragma omp for schedule(dynamic) collapse(2)
        for (long tree = 0; tree < num_trees; tree++)
            for (long head = 0; head < s.heads; head++) {
                const Tree& t = trees[tree];
                for (long r = t.start; r < t.start + t.size; r++)
                    std::fill(dkv + r * row + head * 2 * width, dkv + r * row + (head + 1) * 2 * width, 0.0f);
                for (long k = t.first_segment; k < t.first_segment + t.num_segments; k++) {
                    const Segment& g = segments[k];
                    long keys = g.depth + g.size;
                    gather(s, qkv, ranges + g.first_range, g.num_ranges, head / share, width, b.keys, b.values);
                    std::fill(b.dkeys, b.dkeys + keys * width, 0.0f);
                    std::fill(b.dvalues, b.dvalues + keys * width, 0.0f);
                    for (long q0 = 0; q0 < g.size; q0 += Q)
                        backward_block(s, g, q0, head, width, dout, qkv, out, lse, dqkv, dstride);
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
