// The adapters' thin products: y += S B', dS = dY B', dA += dS^T X, dB += dY^T S. One parallel region for all modules of
// a merged matrix, because the call would cost more than the work. Strides are in elements.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "lanes.h"

// Mirrored by native.MemberArguments.
struct Member {
    int64_t start, size, rank_at, rank;
    const void* up;  // [rank, size], already scaled
    float* d_down;   // [rank, inputs]; the members of a matrix lie one after the other
    float* d_up;     // [size, rank]
};

// y[ROWS, i : i + 32] += s[ROWS, rank] up[rank, i : i + 32]
template <int ROWS, class T>
static inline void update_block(T* y, long stride, const float* s, long ranks, const Member& m, long i) {
    const T* up = (const T*)m.up + i;
    long width = m.size - i;
    vf acc[ROWS][2];
    for (int t = 0; t < ROWS; t++)
        for (int v = 0; v < 2; v++) acc[t][v] = load(y + t * stride + i + v * LANES, width - v * LANES);
    for (long j = 0; j < m.rank; j++) {
        vf b[2];
        for (int v = 0; v < 2; v++) b[v] = load(up + j * m.size + v * LANES, width - v * LANES);
        for (int t = 0; t < ROWS; t++)
            for (int v = 0; v < 2; v++) acc[t][v] += s[t * ranks + j] * b[v];
    }
    for (int t = 0; t < ROWS; t++)
        for (int v = 0; v < 2; v++) store(y + t * stride + i + v * LANES, acc[t][v], width - v * LANES);
}

constexpr long UPDATE_ROWS = WIDE ? 6 : 2;

template <class T>
static void adapt(T* y, long stride, long rows, long outputs, const T* bias, const Member* members, long count,
                  long ranks) {
#pragma omp parallel
    {
        std::vector<float> s(UPDATE_ROWS * std::max(ranks, 1L));
#pragma omp for schedule(static)
        for (long t = 0; t < rows; t += UPDATE_ROWS) {
            long height = std::min(UPDATE_ROWS, rows - t);
            for (long r = 0; r < height; r++) {
                T* row = y + (t + r) * stride;
                for (long j = 0; j < ranks; j++) s[r * ranks + j] = scalar(row[outputs + j]);
                for (long i = 0; bias && i < outputs; i += LANES)
                    store(row + i, load(row + i, outputs - i) + load(bias + i, outputs - i), outputs - i);
            }
            for (const Member* m = members; m < members + count; m++)
                for (long i = 0; i < m->size; i += 2 * LANES) {
                    T* at = y + t * stride + m->start;
                    const float* from = s.data() + m->rank_at;
                    if (height == UPDATE_ROWS)
                        update_block<UPDATE_ROWS>(at, stride, from, ranks, *m, i);
                    else
                        for (long r = 0; r < height; r++)
                            update_block<1>(at + r * stride, stride, from + r * ranks, ranks, *m, i);
                }
        }
    }
}

// ds[ROWS, RANKS] = dy[ROWS, size] . up[RANKS, size]
template <int ROWS, int RANKS, class T>
static inline void project_block(const T* dy, long stride, const T* up, long size, T* ds) {
    typedef Dot<T> D;
    vf acc[ROWS][RANKS] = {};
    for (long i = 0; i < size; i += D::W) {
        typename D::vec a[ROWS];
        for (int t = 0; t < ROWS; t++) a[t] = D::get(dy + t * stride + i, size - i);
        for (int j = 0; j < RANKS; j++) {
            typename D::vec b = D::get(up + j * size + i, size - i);
            for (int t = 0; t < ROWS; t++) acc[t][j] = D::mac(acc[t][j], a[t], b);
        }
    }
    for (int t = 0; t < ROWS; t++) {
        vf sums{};
        for (int j = 0; j < RANKS; j++) sums[j] = sum(acc[t][j]);
        store(ds + t * stride, sums, RANKS);
    }
}

template <class T>
static void adapt_backward(T* dy, long stride, long rows, long outputs, long width, const Member* members, long count) {
    constexpr long R = WIDE ? 4 : 2, J = WIDE ? 4 : 2;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t += R) {
        long height = std::min(R, rows - t);
        T* at = dy + t * stride;
        for (long r = 0; r < height; r++)
            for (long j = outputs; j < width; j++) at[r * stride + j] = T{};
        for (const Member* m = members; m < members + count; m++) {
            const T *from = at + m->start, *up = (const T*)m->up;
            T* to = at + outputs + m->rank_at;
            for (long j = 0; j < m->rank;) {
                bool whole = height == R && j + J <= m->rank;
                if (whole)
                    project_block<R, J>(from, stride, up + j * m->size, m->size, to + j);
                else
                    for (long r = 0; r < height; r++)
                        project_block<1, 1>(from + r * stride, stride, up + j * m->size, m->size, to + r * stride + j);
                j += whole ? J : 1;
            }
        }
    }
}

// A thread's part of out[j, i] += scale * sum_t p[t, j] q[t, i]: a range of columns i, all rows, in the same order
// whatever the number of threads. Sums of a block of rows stay in L2 while q is read once.
template <int RANKS, class T>
static void outer_block(const T* p, long p_stride, const T* q, long q_stride, long rows, long first, long last, long n,
                        float* sums) {
    constexpr long BLOCK = 64;
    float weight[BLOCK * RANKS];
    long range = (last - first + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    std::fill(sums, sums + RANKS * range, 0.0f);
    for (long t0 = 0; t0 < rows; t0 += BLOCK) {
        long height = std::min(BLOCK, rows - t0);
        for (long t = 0; t < height; t++)
            for (int j = 0; j < RANKS; j++) weight[t * RANKS + j] = scalar(p[(t0 + t) * p_stride + j]);
        for (long i = first; i < last; i += 2 * LANES) {
            vf acc[RANKS][2];
            float* kept = sums + i - first;
            for (int j = 0; j < RANKS; j++)
                for (int v = 0; v < 2; v++) acc[j][v] = load(kept + j * range + v * LANES);
            for (long t = 0; t < height; t++) {
                const T* row = q + (t0 + t) * q_stride + i;
                vf a = load(row, n - i), b = load(row + LANES, n - i - LANES);
                for (int j = 0; j < RANKS; j++) {
                    acc[j][0] += weight[t * RANKS + j] * a;
                    acc[j][1] += weight[t * RANKS + j] * b;
                }
            }
            for (int j = 0; j < RANKS; j++)
                for (int v = 0; v < 2; v++) store(kept + j * range + v * LANES, acc[j][v]);
        }
    }
}

template <class T>
static void outer(const T* p, long p_stride, long ranks, const T* q, long q_stride, long rows, long n, float* out,
                  long out_j, long out_i, float scale) {
    constexpr long R = WIDE ? 8 : 2;
    long blocks = (n + 2 * LANES - 1) / (2 * LANES), threads = omp_get_num_threads(), me = omp_get_thread_num();
    long first = blocks * me / threads * 2 * LANES, last = std::min(n, blocks * (me + 1) / threads * 2 * LANES);
    if (first >= last) return;
    long range = (last - first + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    static thread_local std::vector<float> sums;
    sums.resize(std::max((long)sums.size(), R * range));
    for (long j = 0; j < ranks;) {
        long taken = j + R <= ranks ? R : 1;
        if (taken == R)
            outer_block<R>(p + j, p_stride, q, q_stride, rows, first, last, n, sums.data());
        else
            outer_block<1>(p + j, p_stride, q, q_stride, rows, first, last, n, sums.data());
        for (long i = first; i < last; i++)
            for (long k = 0; k < taken; k++) out[(j + k) * out_j + i * out_i] += scale * sums[k * range + i - first];
        j += taken;
    }
}

template <class T>
static void up_gradient(const T* dy, long stride, const T* s, long s_stride, long rows, const Member* members,
                        long count, float scale) {
#pragma omp parallel
    for (const Member* m = members; m < members + count; m++)
        outer(s + m->rank_at, s_stride, m->rank, dy + m->start, stride, rows, m->size, m->d_up, 1, m->rank, scale);
}

template <class T>
static void down_gradient(const T* ds, long stride, const T* x, long inputs, long rows, const Member* members,
                          long ranks, float scale) {
#pragma omp parallel
    outer(ds, stride, ranks, x, inputs, rows, inputs, members->d_down, inputs, 1, scale);
}

#define RANKS(T, suffix)                                                                                               \
    HIVETUNE_API void adapt_##suffix(T* y, long stride, long rows, long outputs, const T* bias, const Member* m,       \
                                     long count, long ranks) {                                                         \
        adapt(y, stride, rows, outputs, bias, m, count, ranks);                                                        \
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
