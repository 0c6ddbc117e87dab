// What forward (attention.cpp) and backward (attention_backward.cpp) share: the layout, packed keys and values, and
// which keys 16 queries see.
//
// Scores are kept transposed, [keys, 32 queries]: the softmax of all queries then runs along the lanes, keys are read
// as they lie, and only queries are ever turned. Everything is cut into cells of 16 keys and 16 queries; those that a
// mask hides entirely are left out, but that scores are multiplied for 32 queries at a time (tiles of 16 take 1.4 times
// as long for each). Sums and softmax are fp32; bf16 is multiplied as bf16 where the processor can (units.h). What tasks
// write never overlaps, so results are the same whatever the number of threads and the order in which they finish.
#pragma once
#include <algorithm>
#include <vector>

#include "units.h"

constexpr long FILLED = 64;  // rows of keys that are packed by one task
constexpr long PIECE = 256;  // keys that all queries pass over before the next ones are touched: they stay in L2

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
template <class U> struct Packs {
    typedef typename U::unit unit;
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
        size_t all = s.kv_heads * rows * width / U::P;
        keys_a = (unit*)memory.take(3 * all), values_a = keys_a + all;
        keys_b = values_b = values_a + all;  // forward needs values_b, backward keys_b
    }
    long first(long group, const Piece& piece) const { return (group * rows + piece.row) * width / U::P; }
    // By all threads of the region that it is called in.
    template <class T> void fill(const Layout& l, const Shape& s, const T* qkv, bool backward) {
#pragma omp for schedule(dynamic)
        for (long i = 0; i < (long)fillings.size(); i++)
            for (long group = 0; group < s.kv_heads; group++) {
                const Segment& g = l.segments[fillings[i].first];
                long from = fillings[i].second, size = std::min(FILLED, g.size - from), height = whole(size, LANES);
                long n = s.head_dim, to = (group * rows + at[fillings[i].first] + from) * width / U::P;
                const T* keys = qkv + (g.start + from) * s.stride + (s.heads + group) * n;
                const T* values = keys + s.kv_heads * n;
                pack_rows<U>(keys, s.stride, size, height, n, width, keys_a + to);
                if (backward) pack_rows<U>(values, s.stride, size, height, n, width, values_a + to);
                pack_pairs<U>(backward ? keys : values, s.stride, size, height, n, width, values_b + to);
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
template <class U> Packs<U>& packs() {  // of the thread that calls; its helpers are handed it
    static thread_local Packs<U> mine;
    return mine;
}

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
