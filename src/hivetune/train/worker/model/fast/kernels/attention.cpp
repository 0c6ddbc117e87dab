// Causal attention over segments (ops.py says what they are), forward; attention.h says how both ways are cut.
// 32 queries pass over 128 keys at a time and their softmax runs along (the maximum so far, and what was summed under
// it), as in FlashAttention (arXiv 2205.14135): scores never leave L1. A task is some queries of a segment, for the
// heads that share keys and values.
#include "attention.h"

constexpr long KEYS = 128;  // keys of a block: with their values and scores they stay in L1
constexpr long SPAN = 512;  // queries of a task

// A thread's buffers; they stay.
template <class U> struct Scratch {
    typedef typename U::unit unit;
    Room memory;
    float *scores, *out, *top, *total;
    unit *rows_a, *query_t, *p;
    void reserve(long width) {
        float* at = memory.take(KEYS * (PAIR + LANES) + LANES * width + 2 * SPAN * width + 2 * SPAN);
        auto take = [&](long n) { return at += n, at - n; };
        scores = take(KEYS * PAIR), out = take(SPAN * width), top = take(SPAN), total = take(SPAN);
        p = (unit*)take(KEYS * LANES), rows_a = (unit*)take(LANES * width), query_t = (unit*)take(SPAN * width);
    }
};
template <class U> static Scratch<U>& scratch() {
    static thread_local Scratch<U> mine;
    return mine;
}

// The softmax of `keys` more scores of a strip: their exponentials pair-wise to p, the maximum and the sum so far to
// top and total; what was summed before is to be multiplied by the result. A function of its own: in a large one it
// would get too few registers.
template <class U>
__attribute__((noinline)) static vf soften(const float* scores, long keys, float scale, float* top, float* total,
                                           typename U::unit* p) {
    vf most[4], x[4];
    for (int i = 0; i < 4; i++) most[i] = load(scores + i * PAIR);
    for (long k = 4; k < keys; k += 4)
        for (int i = 0; i < 4; i++) most[i] = larger(load(scores + (k + i) * PAIR), most[i]);
    vf before = load(top), now = larger(larger(larger(most[0], most[1]), larger(most[2], most[3])) * scale, before);
    vf factor = exponential(before - now), sums[2] = {load(total) * factor, vf{}};
    for (long k = 0; k < keys; k += 4, p += 4 * LANES / U::P) {
        for (int i = 0; i < 4; i++) x[i] = load(scores + (k + i) * PAIR) * scale - now;
        exponentials(x);
        for (int i = 0; i < 4; i++) sums[i % 2] += x[i];
        for (int i = 0; i < 4; i += U::P) U::put_pair(p + i * LANES / U::P, x[i], x[i + U::P - 1]);
    }
    store(top, now), store(total, sums[0] + sums[1]);
    return factor;
}

// A strip over some keys of a piece, from their products on: its output goes on from what earlier keys left.
template <class U>
static void forward_strip(const Shape& s, const Packs<U>& packs, const Piece& piece, long first, const Strip& q,
                          Range r, float* scores, typename U::unit* p, float* top, float* total, float* out) {
    long width = packs.width, keys = r.high - r.low;
    float scale = finish(s, piece, q, r, scores, nullptr);
    vf factor = soften<U>(scores, keys, scale, top, total, p);
    for (uint32_t left = lanes_unlike(factor, 1.0f); left; left &= left - 1) {
        int i = __builtin_ctz(left);
        for (long c = 0; c < width; c += LANES) store(out + i * width + c, load(out + i * width + c) * factor[i]);
    }
    product<U, true>(LANES, width, keys / U::P, p, 1, LANES, packs.values_b + first + r.low / U::P * width, width, out,
                     width);
}

// Queries [q0, q1) of a segment, for the heads of one group.
template <class U, class T>
static void forward_span(const Layout& l, const Shape& s, const Packs<U>& packs, const Segment& g, long q0, long q1,
                         long group, const T* qkv, T* out, float* lse) {
    Scratch<U>& b = scratch<U>();
    long n = s.head_dim, share = s.heads / s.kv_heads, width = packs.width, rows = whole(q1 - q0, LANES);
    for (long head = group * share; head < (group + 1) * share; head++) {
        for (long at = 0; at < rows; at += LANES) {
            const T* from = qkv + (g.start + q0 + at) * s.stride + head * n;
            pack_rows<U>(from, s.stride, std::min<long>(LANES, q1 - q0 - at), LANES, n, width, b.rows_a);
            turn(b.rows_a, width / U::P, width / U::P, b.query_t + turned(at, width / U::P), PAIR);
        }
        std::fill(b.out, b.out + rows * width, 0.0f);
        std::fill(b.total, b.total + rows, 0.0f);
        std::fill(b.top, b.top + rows, -1e30f);  // finite, for lanes without a query
        packs.each_piece(l, g, [&](const Piece& piece, long) {
            long row = width / U::P, first = packs.first(group, piece);
            for (long k0 = 0; k0 < piece.size; k0 += KEYS)
                for (long pair = 0; pair < rows; pair += PAIR) {
                    Range ranges[2] = {}, both{};
                    long end = std::min(rows, pair + PAIR);
                    for (long at = pair; at < end; at += LANES) {
                        Range r = seen(s, piece, Strip(g, q0 + at)).within(k0, k0 + KEYS);
                        ranges[(at - pair) / LANES] = r, both = both.with(r);
                    }
                    if (both.empty()) continue;
                    const auto* keys = packs.keys_a + first + both.low * row;
                    product<U, false>(both.high - both.low, end - pair, row, keys, row, 1, b.query_t + pair * row, PAIR,
                                      b.scores, PAIR);
                    for (long at = pair; at < end; at += LANES) {
                        Range r = ranges[(at - pair) / LANES];
                        float* scores = b.scores + (r.low - both.low) * PAIR + at - pair;
                        if (!r.empty())
                            forward_strip<U>(s, packs, piece, first, Strip(g, q0 + at), r, scores, b.p, b.top + at,
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

template <class T>
static void forward(const Layout& l, const Shape& s, const T* qkv, T* out, float* lse) {
    typedef typename Units<T>::type U;
    struct Task {
        long segment, q0, q1, group, work;
    };
    Packs<U>& shared = packs<U>();
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
        scratch<U>().reserve(shared.width);
        shared.fill(l, s, qkv, false);
#pragma omp for schedule(dynamic)
        for (long i = 0; i < (long)tasks.size(); i++) {
            const Task& t = tasks[i];
            forward_span<U>(l, s, shared, l.segments[t.segment], t.q0, t.q1, t.group, qkv, out, lse);
        }
    }
}

#define ATTENTION(T, suffix)                                                                                           \
    HIVETUNE_API void attention_##suffix(const Shape* s, const Layout* l, const T* qkv, T* out, float* lse) {          \
        forward(*l, *s, qkv, out, lse);                                                                                \
    }
ATTENTION(float, f32)
ATTENTION(bf16, bf16)
