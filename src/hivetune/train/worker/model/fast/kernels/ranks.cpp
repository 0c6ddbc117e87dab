// The adapters' thin products: y += S B', dS = dY B', dA += dS^T X, dB += dY^T S. One parallel region for all modules of
// a merged matrix, because the call would cost more than the work. Strides are in elements.
//
// All go through the tiles of units.h: bf16 is multiplied as bf16 where the processor can, and summed in fp32. What is
// summed has the same order whatever the number of threads.
#include "ranks.h"

constexpr long COLUMNS = 2 * LANES;  // of a chunk, whose packed rows stay in L1
constexpr long ROWS = 32;            // of a block, of y and dY

static inline long num_chunks(long columns) { return (columns + COLUMNS - 1) / COLUMNS; }

// Of a thread, and of the thread that calls for its whole team.
static thread_local Room own, shared;

// y += bias, then each member's columns += S B'; S lies in the rank columns of y itself.
template <class T>
static void adapt(T* y, long stride, long rows, long outputs, const T* bias, const Member* members, long count) {
    typedef typename Units<T>::type U;
    typedef typename U::unit unit;
    long packed = 0, widest = 0;  // units of B' pair-wise, the most rank columns of a member
    for (const Member* m = members; m < members + count; m++) {
        packed += whole(m->rank, U::P) / U::P * whole(m->size, COLUMNS);
        widest = std::max(widest, whole(m->rank, LANES));
    }
    unit* up_b = (unit*)shared.take(packed);
#pragma omp parallel
    {
        unit* at = up_b;
        for (const Member* m = members; m < members + count; m++) {
            long width = whole(m->size, COLUMNS);
#pragma omp for schedule(static) nowait
            for (long j = 0; j < m->rank; j += U::P)
                pack_pairs<U>((const T*)m->up + j * m->size, m->size, std::min<long>(U::P, m->rank - j), U::P, m->size,
                              width, at + j / U::P * width);
            at += whole(m->rank, U::P) / U::P * width;
        }
#pragma omp barrier
        unit* s_a = (unit*)own.take(ROWS * widest + ROWS * COLUMNS);
        float* rest = (float*)s_a + ROWS * widest;
#pragma omp for schedule(static)
        for (long t = 0; t < rows; t += ROWS) {
            long height = std::min(ROWS, rows - t);
            T* block = y + t * stride;
            for (long r = 0; bias && r < height; r++)
                for (long i = 0; i < outputs; i += LANES) {
                    T* to = block + r * stride + i;
                    store(to, load(to, outputs - i) + load(bias + i, outputs - i), outputs - i);
                }
            const unit* b = up_b;
            for (const Member* m = members; m < members + count; m++) {
                long width = whole(m->size, COLUMNS), wide = whole(m->rank, LANES), depth = (m->rank + U::P - 1) / U::P;
                pack_rows<U>(block + outputs + m->rank_at, stride, height, height, m->rank, wide, s_a);
                for (long i = 0; i < m->size; i += COLUMNS) {
                    T* to = block + m->start + i;
                    if (i + COLUMNS <= m->size) {
                        product<U, true>(height, COLUMNS, depth, s_a, wide / U::P, 1, b + i, width, to, stride);
                        continue;
                    }
                    product<U, false>(height, COLUMNS, depth, s_a, wide / U::P, 1, b + i, width, rest, COLUMNS);
                    for (long r = 0; r < height; r++)
                        for (long v = 0; v < COLUMNS; v += LANES) {
                            long n = m->size - i - v;
                            vf sums = load(to + r * stride + v, n) + load(rest + r * COLUMNS + v);
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
template <class T>
__attribute__((noinline)) static void few_dots(const T* dy, long stride, long rows, const T* up, long size, long ranks,
                                               float* out) {
    typedef Dot<T> D;
    const T *y[2] = {dy, dy + (rows - 1) * stride}, *b[FEW];
    for (long j = 0; j < FEW; j++) b[j] = up + std::min(j, ranks - 1) * size;
    vf sums[2 * FEW];
    for (long j = 0; j < 2 * FEW; j++) sums[j] = vf{};
    if (size < 1) __builtin_unreachable();  // as in `tile`
    for (long i = 0; i < size; i += D::W) {
        typename D::vec one = D::get(y[0] + i, size - i), two = D::get(y[1] + i, size - i);
#pragma GCC unroll 8
        for (long j = 0; j < FEW; j++) {
            typename D::vec other = D::get(b[j] + i, size - i);
            sums[j] = D::mac(sums[j], one, other), sums[FEW + j] = D::mac(sums[FEW + j], two, other);
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
template <class T>
static void adapt_backward(T* dy, long stride, long rows, long outputs, long width, const Member* members, long count) {
    typedef typename Units<T>::type U;
    typedef typename U::unit unit;
    long packed = 0, longest = 0, widest = 0;
    auto few = [](const Member* m) { return m->rank <= 2 * FEW; };
    for (const Member* m = members; m < members + count; m++) {
        if (few(m)) continue;
        long depth = whole(m->size, LANES) / U::P;
        packed += depth * whole(m->rank, LANES);
        longest = std::max(longest, depth), widest = std::max(widest, whole(m->rank, LANES));
    }
    unit* up_t = (unit*)shared.take(packed);
#pragma omp parallel
    {
        unit* dy_a = (unit*)own.take(ROWS * longest + LANES * longest + ROWS * widest);
        unit* up_a = dy_a + ROWS * longest;
        float* ds = (float*)up_a + LANES * longest;
        unit* at = up_t;
        for (const Member* m = members; m < members + count; m++) {
            long depth = whole(m->size, LANES) / U::P, ranks = few(m) ? 0 : whole(m->rank, LANES);
#pragma omp for schedule(static) nowait
            for (long j = 0; j < ranks; j += LANES) {
                const T* from = (const T*)m->up + j * m->size;
                pack_rows<U>(from, m->size, std::min<long>(LANES, m->rank - j), LANES, m->size, depth * U::P, up_a);
                for (long k = 0; k < depth; k++)
                    for (long r = 0; r < LANES; r++) at[k * ranks + j + r] = up_a[r * depth + k];
            }
            at += depth * ranks;
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (long t = 0; t < rows; t += ROWS) {
            long height = std::min(ROWS, rows - t);
            T* block = dy + t * stride;
            for (long r = 0; r < height; r++) std::fill(block + r * stride + outputs, block + r * stride + width, T{});
            const unit* b = up_t;
            for (const Member* m = members; m < members + count; m++) {
                for (long j = 0; few(m) && j < m->rank; j += FEW)
                    for (long r = 0; r < height; r += 2) {
                        float sums[2 * FEW];
                        long ranks = std::min(FEW, m->rank - j), two = std::min(2L, height - r);
                        T* row = block + r * stride;
                        few_dots(row + m->start, stride, two, (const T*)m->up + j * m->size, m->size, ranks, sums);
                        for (long i = 0; i < two; i++)
                            store(row + i * stride + outputs + m->rank_at + j, load(sums + i * FEW, ranks), ranks);
                    }
                if (few(m)) continue;
                long depth = whole(m->size, LANES) / U::P, ranks = whole(m->rank, LANES);
                const unit* from = (const unit*)(block + m->start);
                long step = stride / U::P;
                bool as_it_lies = sizeof(T) * U::P == sizeof(unit) && stride % U::P == 0 && m->start % U::P == 0 &&
                                  m->size % LANES == 0;
                if (!as_it_lies) {
                    pack_rows<U>(block + m->start, stride, height, height, m->size, depth * U::P, dy_a);
                    from = dy_a, step = depth;
                }
                product<U, false>(height, ranks, depth, from, step, 1, b, ranks, ds, ranks);
                for (long r = 0; r < height; r++)
                    for (long j = 0; j < m->rank; j += LANES)
                        store(block + r * stride + outputs + m->rank_at + j, load(ds + r * ranks + j), m->rank - j);
                b += depth * ranks;
            }
        }
    }
}

// out[j, i] += scale * sum_t p[t, first + j] q[t, i], for `ranks` columns j of p and n of q.
template <class T> struct Outer {
    long first, ranks;
    const T* q;
    long n;
    float* out;
    long out_j, out_i;
};

// By chunks of columns of q, all rows of it.
template <class T>
static void outer(const T* p, long p_stride, long all_ranks, long q_stride, long rows, const std::vector<Outer<T>>& parts,
                  float scale) {
    typedef typename Units<T>::type U;
    typedef typename U::unit unit;
    constexpr long DEEP = 256 * U::P;
    long chunks = 0, most = 0;
    for (const Outer<T>& part : parts) chunks += num_chunks(part.n), most = std::max(most, part.ranks);
    long wide = whole(all_ranks, LANES);
    unit* p_b = (unit*)shared.take(whole(rows, U::P) / U::P * wide);
#pragma omp parallel
    {
        float* sums = own.take(most * COLUMNS + DEEP / U::P * COLUMNS);
        unit* q_b = (unit*)sums + most * COLUMNS;
#pragma omp for schedule(static)
        for (long t = 0; t < rows; t += U::P)
            pack_pairs<U>(p + t * p_stride, p_stride, std::min<long>(U::P, rows - t), U::P, all_ranks, wide,
                          p_b + t / U::P * wide);
#pragma omp for schedule(static)
        for (long chunk = 0; chunk < chunks; chunk++) {
            const Outer<T>* part = parts.data();
            long at = chunk;
            for (; at >= num_chunks(part->n); part++) at -= num_chunks(part->n);
            long i = at * COLUMNS, n = std::min(COLUMNS, part->n - i);
            std::fill(sums, sums + part->ranks * COLUMNS, 0.0f);
            for (long t = 0; t < rows; t += DEEP) {
                long height = std::min(DEEP, rows - t);
                pack_pairs<U>(part->q + t * q_stride + i, q_stride, height, whole(height, U::P), n, COLUMNS, q_b);
                product<U, true>(part->ranks, COLUMNS, whole(height, U::P) / U::P, p_b + t / U::P * wide + part->first, 1,
                                 wide, q_b, COLUMNS, sums, COLUMNS);
            }
            float* out = part->out + i * part->out_i;
            if (part->out_i == 1)
                for (long j = 0; j < part->ranks; j++)
                    for (long k = 0; k < n; k++) out[j * part->out_j + k] += scale * sums[j * COLUMNS + k];
            else
                for (long k = 0; k < n; k++)
                    for (long j = 0; j < part->ranks; j++)
                        out[k * part->out_i + j * part->out_j] += scale * sums[j * COLUMNS + k];
        }
    }
}

template <class T>
static void up_gradient(const T* dy, long stride, const T* s, long s_stride, long rows, const Member* members,
                        long count, float scale) {
    std::vector<Outer<T>> parts;
    long ranks = 0;
    for (const Member* m = members; m < members + count; m++) {
        parts.push_back({m->rank_at, m->rank, dy + m->start, m->size, m->d_up, 1, m->rank});
        ranks = std::max<long>(ranks, m->rank_at + m->rank);
    }
    outer(s, s_stride, ranks, stride, rows, parts, scale);
}

template <class T>
static void down_gradient(const T* ds, long stride, const T* x, long inputs, long rows, const Member* members,
                          long ranks, float scale) {
    outer(ds, stride, ranks, inputs, rows, std::vector<Outer<T>>{{0, ranks, x, inputs, members->d_down, inputs, 1}}, scale);
}

#define RANKS(T, suffix)                                                                                               \
    HIVETUNE_API void adapt_##suffix(T* y, long stride, long rows, long outputs, const T* bias, const Member* m,       \
                                     long count) {                                                                     \
        adapt(y, stride, rows, outputs, bias, m, count);                                                               \
    }                                                                                                                  \
    HIVETUNE_API void adapt_backward_##suffix(T* dy, long stride, long rows, long outputs, long width,                 \
                                              const Member* m, long count) {                                           \
        adapt_backward(dy, stride, rows, outputs, width, m, count);                                                    \
    }                                                                                                                  \
    HIVETUNE_API void up_gradient_##suffix(const T* dy, long stride, const T* s, long s_stride, long rows,             \
                                           const Member* m, long count, float scale) {                                 \
        up_gradient(dy, stride, s, s_stride, rows, m, count, scale);                                                   \
    }                                                                                                                  \
    HIVETUNE_API void down_gradient_##suffix(const T* ds, long stride, const T* x, long inputs, long rows,             \
                                             const Member* m, long ranks, float scale) {                               \
        down_gradient(ds, stride, x, inputs, rows, m, ranks, scale);                                                   \
    }
RANKS(float, f32)
RANKS(bf16, bf16)
