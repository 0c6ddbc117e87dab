// The products of merged matrices, over the tiles of units.h: bf16 is multiplied as bf16 where the processor can, and
// summed in fp32. What is summed has the same order whatever the number of threads.
#include <omp.h>

#include "units.h"

// An adapter inside a merged matrix. Mirrored by backend.MemberArguments.
struct Member {
    int64_t start, size, rank_at, rank;
    const T* up;    // [rank, size], already scaled
    float* d_down;  // [rank, inputs]; the members of a matrix lie one after the other
    float* d_up;    // [size, rank]
};
// A merged matrix: `outputs` rows of the base, then the adapters' up to `width`. Mirrored by backend.GroupArguments.
struct Group {
    const T *weight, *bias;  // no bias: null
    const Member* members;
    int64_t count, outputs, width, inputs, ranks;  // ranks: columns behind the outputs that are in use
    const Member* begin() const { return members; }
    const Member* end() const { return members + count; }
};

constexpr long PANEL = 2 * LANES;
constexpr long ROWS = 32;  // of a block of the thin products

// Of a thread, and of the thread that calls for its whole team.
static thread_local Room own, shared;

// The large products, one for each frozen matrix and way: c = a b, and forward what else those columns get, the bias
// and the adapters' S B', in the same sums, which are rounded once.
//
// b is packed in panels of 32 columns, each by the thread that multiplies with it, so that a panel stays in its caches
// and there is never a second copy of a matrix. While a thread multiplies it asks for the next panel, which else comes
// from main memory. Threads divide [panels x rows] evenly, wherever that cuts. Each number is one sum in the order of
// the inner dimension, so it does not depend on the other rows nor on the number of threads.
constexpr long TALL = WIDE ? 8 : 2;  // rows of sums that fit the registers
constexpr long DEEP = 2048;          // units of a panel that are packed at a time: 256 KB, a quarter of L2

// a [rows, depth] times b [depth, columns]; `turned`: b lies as [columns, depth].
struct Factors {
    const T *a, *b;
    long a_stride, b_stride, rows, columns, depth;
    bool turned;
};
// What is added to the columns of a product: the bias and S B' of a group. s null: nothing.
struct Added {
    Group group;
    const T* s;
    long s_stride;
};

// Rows of a, `step` units apart, by a panel of b.
struct Term {
    const unit *a, *b;
    long step, depth;
};

// c[M, NV vectors] = first + the terms. A function of its own, for the registers.
template <int M, int NV, class C>
__attribute__((noinline)) static void block(const Term* terms, long count, const float* first, long first_step, C* c,
                                            long c_stride) {
    vf sums[M][NV];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) sums[m][v] = load(first + m * first_step + v * LANES);
    const Term* t = terms;
    do {
        const unit *a = t->a, *b = t->b;
        long step = t->step, depth = t->depth;
        if (depth < 1) __builtin_unreachable();  // as in `tile`, and why there is one term at least
        for (long k = 0; k < depth; k++) {
            vec row[NV];
            for (int v = 0; v < NV; v++) row[v] = get(b + k * PANEL + v * LANES);
            for (int m = 0; m < M; m++)
                for (int v = 0; v < NV; v++) sums[m][v] = mac(sums[m][v], a[m * step + k], row[v]);
        }
    } while (++t < terms + count);
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) store(c + m * c_stride + v * LANES, sums[m][v]);
}

// The same for up to TALL rows.
template <int NV, class C>
static void blocks(long rows, Term* terms, long count, const float* first, long first_step, C* c, long c_stride) {
    if (rows == TALL) return block<TALL, NV>(terms, count, first, first_step, c, c_stride);
    for (long m = 0; m < rows; m++) {
        block<1, NV>(terms, count, first + m * first_step, first_step, c + m * c_stride, c_stride);
        for (Term* t = terms; t < terms + count; t++) t->a += t->step;
    }
}

// Rows [k0, k1) of `n` columns of b from column n0 on.
static void pack_panel(const Factors& f, long n0, long n, long k0, long k1, unit* to,
                       unit* room) {
    if (!f.turned)
        return pack_pairs(f.b + k0 * f.b_stride + n0, f.b_stride, k1 - k0, whole(k1 - k0, P), n, PANEL, to);
    long units = whole(k1 - k0, P) / P, width = whole(k1 - k0, LANES);
    for (long i = 0; i < n; i += LANES) {
        const T* from = f.b + (n0 + i) * f.b_stride + k0;
        if (i + LANES <= n && lies_in_units(f.b_stride, k0, k1)) {
            turn((const unit*)from, f.b_stride / P, units, to + i, PANEL);
            continue;
        }
        pack_rows(from, f.b_stride, std::min<long>(LANES, n - i), LANES, k1 - k0, width, room);
        turn(room, width / P, units, to + i, PANEL);
    }
}

// B' of the members that have some of the columns [n0, n0 + n), zeros beside; the first of their rank columns, a
// multiple of a unit's, and how many.
struct Ranks {
    long first, count;
};
static Ranks pack_ranks(const Added& added, long n0, long n, unit* to) {
    long first = INT64_MAX, last = 0;
    auto meets = [&](const Member& m) { return m.start < n0 + n && n0 < m.start + m.size; };
    for (const Member& m : added.group)
        if (meets(m)) first = std::min<long>(first, m.rank_at), last = std::max<long>(last, m.rank_at + m.rank);
    if (last == 0) return {0, 0};
    first = first / P * P;
    std::memset(to, 0, whole(last - first, P) / P * PANEL * sizeof *to);
    for (const Member& m : added.group) {
        if (!meets(m)) continue;
        long from = std::max<long>(n0, m.start), until = std::min<long>(n0 + n, m.start + m.size);
        for (long j = 0; j < m.rank; j++) {
            const T* row = m.up + j * m.size - m.start;
            long at = m.rank_at + j - first;
            for (long i = from; i < until; i++) put_one(to + at / P * PANEL + i - n0, at % P, row[i]);
        }
    }
    return {first, last - first};
}

// Rows [from, until) of those that hold the panel from column n0 on, to the caches.
static void ask_for_panel(const Factors& f, long n0, long from, long until) {
    long width = f.turned ? f.depth : std::min(PANEL, f.columns - n0);
    for (long r = from; r < until; r++) {
        const T* row = f.turned ? f.b + (n0 + r) * f.b_stride : f.b + r * f.b_stride + n0;
        for (long i = 0; i < width; i += 64 / (long)sizeof(T)) __builtin_prefetch(row + i, 0, 2);
    }
}

// Rows of a left factor as units, some at a time: where they lie, or packed.
struct Left {
    const T* numbers;
    long stride, count;
    unit* room;
    bool lie = lies_in_units(stride, 0, count);
    long step = lie ? stride / P : whole(count, LANES) / P;
    const unit* next(long rows) {
        const T* from = numbers;
        numbers += rows * stride;
        if (lie) return (const unit*)from;
        pack_rows(from, stride, rows, rows, count, step * P, room);
        return room;
    }
};

// By all threads of the region that it is called in, each with its own part; none waits.
static void multiply_part(const Factors& f, const Added& added, T* c, long c_stride) {
    long tiles = (f.rows + TALL - 1) / TALL, panels = (f.columns + PANEL - 1) / PANEL;
    long me = omp_get_thread_num(), threads = omp_get_num_threads();
    long at = tiles * panels * me / threads, end = tiles * panels * (me + 1) / threads;
    long ranks = whole(added.group.ranks, LANES);
    long wide = std::min(whole(f.depth, LANES), DEEP * P) / P;
    float* sums = own.take(tiles * TALL * PANEL + PANEL + (PANEL + LANES + TALL) * (wide + ranks));
    float* bias = sums + tiles * TALL * PANEL;
    unit *b = (unit*)bias + PANEL, *up = b + PANEL * wide, *room = up + PANEL * ranks;
    unit *a_room = room + LANES * wide, *s_room = a_room + TALL * wide;
    for (long from, until; at < end; at += until - from) {  // tiles [from, until) of a panel
        long n0 = at / tiles * PANEL, n = std::min(PANEL, f.columns - n0);
        from = at % tiles, until = std::min(tiles, from + end - at);
        bool more = at + until - from < end;
        long asked = f.turned ? std::min(PANEL, f.columns - n0 - PANEL) : f.depth, each = asked / (until - from) + 1;
        for (long i = 0; i < PANEL; i += LANES)
            store(bias + i, added.group.bias ? load(added.group.bias + n0 + i, n - i) : vf{});
        Ranks of_panel = pack_ranks(added, n0, n, up);
        for (long k0 = 0; k0 < f.depth; k0 += DEEP * P) {
            long k1 = std::min(f.depth, k0 + DEEP * P), row = from * TALL;
            bool first = k0 == 0, last = k1 == f.depth;
            pack_panel(f, n0, n, k0, k1, b, room);
            Left a{f.a + row * f.a_stride + k0, f.a_stride, k1 - k0, a_room};
            Left s{added.s + row * added.s_stride + of_panel.first, added.s_stride, of_panel.count, s_room};
            Term terms[2] = {{nullptr, b, a.step, whole(a.count, P) / P},
                                {nullptr, up, s.step, whole(s.count, P) / P}};
            long count = last && s.count ? 2 : 1, step = first ? 0 : PANEL;
            for (float* before = sums; row < std::min(f.rows, until * TALL); row += TALL, before += TALL * PANEL) {
                long rows = std::min(TALL, f.rows - row), number = row / TALL - from;
                if (last && more) ask_for_panel(f, n0 + PANEL, number * each, std::min(asked, (number + 1) * each));
                terms[0].a = a.next(rows);
                if (count == 2) terms[1].a = s.next(rows);
                const float* start = first ? bias : before;
                T* to = c + row * c_stride + n0;
                if (last && n == PANEL) {
                    blocks<2>(rows, terms, count, start, step, to, c_stride);
                    continue;
                }
                if (n <= LANES)
                    blocks<1>(rows, terms, count, start, step, before, PANEL);
                else
                    blocks<2>(rows, terms, count, start, step, before, PANEL);
                for (long r = 0; last && r < rows; r++) store_row(to + r * c_stride, before + r * PANEL, 1.0f, n);
            }
        }
    }
}

// b lies as [columns, depth] where it is turned.
KERNEL multiply(Matrix<T> a, Matrix<T> b, int64_t turned, Matrix<T> c) {
    Factors f{a.at, b.at, a.stride, b.stride, a.rows, c.columns, a.columns, turned != 0};
#pragma omp parallel
    multiply_part(f, Added{}, c.at, c.stride);
}

KERNEL project(Matrix<T> x, Group g, Matrix<T> y) {
    Factors down{x.at, g.weight + g.outputs * g.inputs, x.stride, g.inputs, x.rows, g.width - g.outputs, g.inputs, true};
    Factors base{x.at, g.weight, x.stride, g.inputs, x.rows, g.outputs, g.inputs, true};
    T* s = y.at + g.outputs;
#pragma omp parallel
    {
        multiply_part(down, Added{}, s, y.stride);
#pragma omp barrier
        multiply_part(base, Added{g, s, y.stride}, y.at, y.stride);
    }
}

// The adapters' thin products: y += S B', dS = dY B', dA += dS^T X, dB += dY^T S. One parallel region for all modules of
// a merged matrix, because the call would cost more than the work.

// y += bias, then each member's columns += S B'; S lies in the rank columns of y itself.
KERNEL adapt(Matrix<T> y, Group g, int64_t adapter) {
    const T* bias = g.bias;
    long stride = y.stride, rows = y.rows, outputs = g.outputs;
    if (!adapter) g.count = 0;
    long packed = 0, widest = 0;  // units of B' pair-wise, the most rank columns of a member
    for (const Member& m : g) {
        packed += whole(m.rank, P) / P * whole(m.size, PANEL);
        widest = std::max(widest, whole(m.rank, LANES));
    }
    unit* up_b = (unit*)shared.take(packed);
#pragma omp parallel
    {
        unit* at = up_b;
        for (const Member& m : g) {
            long width = whole(m.size, PANEL);
#pragma omp for schedule(static) nowait
            for (long j = 0; j < m.rank; j += P)
                pack_pairs(m.up + j * m.size, m.size, std::min<long>(P, m.rank - j), P, m.size,
                              width, at + j / P * width);
            at += whole(m.rank, P) / P * width;
        }
#pragma omp barrier
        unit* s_a = (unit*)own.take(ROWS * widest + ROWS * PANEL);
        float* rest = (float*)s_a + ROWS * widest;
#pragma omp for schedule(static)
        for (long t = 0; t < rows; t += ROWS) {
            long height = std::min(ROWS, rows - t);
            T* block = y.row(t);
            for (long r = 0; bias && r < height; r++)
                for (long i = 0; i < outputs; i += LANES) {
                    T* to = block + r * stride + i;
                    store(to, load(to, outputs - i) + load(bias + i, outputs - i), outputs - i);
                }
            const unit* b = up_b;
            for (const Member& m : g) {
                long width = whole(m.size, PANEL), wide = whole(m.rank, LANES), depth = whole(m.rank, P) / P;
                pack_rows(block + outputs + m.rank_at, stride, height, height, m.rank, wide, s_a);
                for (long i = 0; i < m.size; i += PANEL) {
                    T* to = block + m.start + i;
                    if (i + PANEL <= m.size) {
                        product<true>(height, PANEL, depth, s_a, wide / P, 1, b + i, width, to, stride);
                        continue;
                    }
                    product<false>(height, PANEL, depth, s_a, wide / P, 1, b + i, width, rest, PANEL);
                    for (long r = 0; r < height; r++)
                        for (long v = 0; v < PANEL; v += LANES) {
                            long n = m.size - i - v;
                            vf sums = load(to + r * stride + v, n) + load(rest + r * PANEL + v);
                            store(to + r * stride + v, sums, n);
                        }
                }
                b += depth * width;
            }
        }
    }
}

constexpr long FEW = 8;  // ranks whose sums of two rows stay in registers

// out[r * FEW + j] = dy[r] . up[j], of one or two rows and at most FEW ranks: both as they lie, 16 sums along memory. A
// tile of 16 rows by 16 lanes would read one number for each multiplication, and half of its lanes would be nobody's.
__attribute__((noinline)) static void few_dots(const T* dy, long stride, long rows, const T* up, long size, long ranks,
                                               float* out) {
    const T *y[2] = {dy, dy + (rows - 1) * stride}, *b[FEW];
    for (long j = 0; j < FEW; j++) b[j] = up + std::min(j, ranks - 1) * size;
    vf sums[2 * FEW];
    for (long j = 0; j < 2 * FEW; j++) sums[j] = vf{};
    if (size < 1) __builtin_unreachable();  // as in `tile`
    for (long i = 0; i < size; i += P * LANES) {
        vec one = get_row(y[0] + i, size - i), two = get_row(y[1] + i, size - i);
#pragma GCC unroll 8
        for (long j = 0; j < FEW; j++) {
            vec other = get_row(b[j] + i, size - i);
            sums[j] = mac(sums[j], one, other), sums[FEW + j] = mac(sums[FEW + j], two, other);
        }
    }
    float square[LANES * LANES], turned[LANES * LANES];
    for (long i = 0; i < LANES; i++) store(square + i * LANES, sums[i]);
    turn(square, LANES, LANES, turned, LANES);
    vf total{};
    for (long i = 0; i < LANES; i++) total += load(turned + i * LANES);
    store(out, total);
}

// The rank columns of dy become dS = dY B', the padding behind them zero.
KERNEL adapt_backward(Matrix<T> dy, Group g) {
    long stride = dy.stride, rows = dy.rows, outputs = g.outputs, width = g.width;
    long packed = 0, longest = 0, widest = 0;
    auto few = [](const Member& m) { return m.rank <= 2 * FEW; };
    for (const Member& m : g) {
        if (few(m)) continue;
        long depth = whole(m.size, LANES) / P;
        packed += depth * whole(m.rank, LANES);
        longest = std::max(longest, depth), widest = std::max(widest, whole(m.rank, LANES));
    }
    unit* up_t = (unit*)shared.take(packed);
#pragma omp parallel
    {
        unit* dy_a = (unit*)own.take(ROWS * longest + LANES * longest + ROWS * widest);
        unit* up_a = dy_a + ROWS * longest;
        float* ds = (float*)up_a + LANES * longest;
        unit* at = up_t;
        for (const Member& m : g) {
            long depth = whole(m.size, LANES) / P, ranks = few(m) ? 0 : whole(m.rank, LANES);
#pragma omp for schedule(static) nowait
            for (long j = 0; j < ranks; j += LANES) {
                const T* from = m.up + j * m.size;
                pack_rows(from, m.size, std::min<long>(LANES, m.rank - j), LANES, m.size, depth * P, up_a);
                for (long k = 0; k < depth; k++)
                    for (long r = 0; r < LANES; r++) at[k * ranks + j + r] = up_a[r * depth + k];
            }
            at += depth * ranks;
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (long t = 0; t < rows; t += ROWS) {
            long height = std::min(ROWS, rows - t);
            T* block = dy.row(t);
            for (long r = 0; r < height; r++) std::fill(block + r * stride + outputs, block + r * stride + width, T{});
            const unit* b = up_t;
            for (const Member& m : g) {
                for (long j = 0; few(m) && j < m.rank; j += FEW)
                    for (long r = 0; r < height; r += 2) {
                        float sums[2 * FEW];
                        long ranks = std::min(FEW, m.rank - j), two = std::min(2L, height - r);
                        T* row = block + r * stride;
                        few_dots(row + m.start, stride, two, m.up + j * m.size, m.size, ranks, sums);
                        for (long i = 0; i < two; i++)
                            store(row + i * stride + outputs + m.rank_at + j, load(sums + i * FEW, ranks), ranks);
                    }
                if (few(m)) continue;
                long depth = whole(m.size, LANES) / P, ranks = whole(m.rank, LANES);
                const unit* from = (const unit*)(block + m.start);
                long step = stride / P;
                if (m.size % LANES || !lies_in_units(stride, m.start, m.start)) {
                    pack_rows(block + m.start, stride, height, height, m.size, depth * P, dy_a);
                    from = dy_a, step = depth;
                }
                product<false>(height, ranks, depth, from, step, 1, b, ranks, ds, ranks);
                for (long r = 0; r < height; r++)
                    for (long j = 0; j < m.rank; j += LANES)
                        store(block + r * stride + outputs + m.rank_at + j, load(ds + r * ranks + j), m.rank - j);
                b += depth * ranks;
            }
        }
    }
}

// out[j, i] += scale * sum_t p[t, first + j] q[t, i], for `ranks` columns j of p and n of q.
struct Outer {
    long first, ranks;
    const T* q;
    long n;
    float* out;
    long out_j, out_i;
};

// By chunks of columns of q, all rows of it.
static void outer(Matrix<T> p, long all_ranks, long q_stride, const std::vector<Outer>& parts, float scale) {
    long rows = p.rows;
    constexpr long DEEP = 256 * P;
    long chunks = 0, most = 0;
    for (const Outer& part : parts) chunks += whole(part.n, PANEL) / PANEL, most = std::max(most, part.ranks);
    long wide = whole(all_ranks, LANES);
    unit* p_b = (unit*)shared.take(whole(rows, P) / P * wide);
#pragma omp parallel
    {
        float* sums = own.take(most * PANEL + DEEP / P * PANEL);
        unit* q_b = (unit*)sums + most * PANEL;
#pragma omp for schedule(static)
        for (long t = 0; t < rows; t += P)
            pack_pairs(p.row(t), p.stride, std::min<long>(P, rows - t), P, all_ranks, wide,
                          p_b + t / P * wide);
#pragma omp for schedule(static)
        for (long chunk = 0; chunk < chunks; chunk++) {
            const Outer* part = parts.data();
            long at = chunk;
            for (; at >= whole(part->n, PANEL) / PANEL; part++) at -= whole(part->n, PANEL) / PANEL;
            long i = at * PANEL, n = std::min(PANEL, part->n - i);
            std::fill(sums, sums + part->ranks * PANEL, 0.0f);
            for (long t = 0; t < rows; t += DEEP) {
                long height = std::min(DEEP, rows - t);
                pack_pairs(part->q + t * q_stride + i, q_stride, height, whole(height, P), n, PANEL, q_b);
                product<true>(part->ranks, PANEL, whole(height, P) / P, p_b + t / P * wide + part->first, 1,
                                 wide, q_b, PANEL, sums, PANEL);
            }
            float* out = part->out + i * part->out_i;
            if (part->out_i == 1)
                for (long j = 0; j < part->ranks; j++)
                    for (long k = 0; k < n; k++) out[j * part->out_j + k] += scale * sums[j * PANEL + k];
            else
                for (long k = 0; k < n; k++)
                    for (long j = 0; j < part->ranks; j++)
                        out[k * part->out_i + j * part->out_j] += scale * sums[j * PANEL + k];
        }
    }
}

KERNEL up_gradient(Matrix<T> dy, Matrix<T> s, Group g, double scale) {
    std::vector<Outer> parts;
    for (const Member& m : g) parts.push_back({m.rank_at, m.rank, dy.at + m.start, m.size, m.d_up, 1, m.rank});
    outer(s, g.ranks, dy.stride, parts, (float)scale);
}

KERNEL down_gradient(Matrix<T> ds, Matrix<T> x, Group g, double scale) {
    if (!g.count) return;
    outer(ds, g.ranks, x.stride, {{0, g.ranks, x.at, g.inputs, g.members->d_down, g.inputs, 1}}, (float)scale);
}
