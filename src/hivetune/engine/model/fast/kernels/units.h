// Small matrix products of attention's blocks, over units of 4 bytes: one float, or two bf16 that are multiplied
// pairwise and summed in fp32 (AVX512-BF16: twice the rate). P numbers to a unit.
//
//   row-wise    [rows][columns / P]    pairs along the columns: the left side of a product
//   pair-wise   [rows / P][columns]    pairs along the rows: the right side of a product over rows
#pragma once
#include <algorithm>

#include "lanes.h"

struct Full {
    typedef float unit;
    typedef vf vec;
    static constexpr int P = 1;
    static inline vec get(const unit* p) { return load(p); }
    static inline vf mac(vf total, unit a, vec b) { return total + a * b; }
    template <class T> static inline void pack(const T* row, long n, unit* to) { store(to, load(row, n)); }
    static inline void put(unit* to, vf x) { store(to, x); }
    static inline void put_pair(unit* to, vf x, vf) { store(to, x); }
};

#ifdef __AVX512BF16__
struct Half {
    typedef uint32_t unit;
    typedef __m512bh vec;
    static constexpr int P = 2;
    static inline vec get(const unit* p) { return (vec)_mm512_loadu_si512(p); }
    static inline vf mac(vf total, unit a, vec b) {
        return (vf)_mm512_dpbf16_ps((__m512)total, (vec)_mm512_set1_epi32(a), b);
    }
    // 16 numbers of a row are 8 units.
    static inline void pack(const bf16* row, long n, unit* to) {
        if (n >= LANES)
            std::memcpy(to, row, LANES * sizeof(bf16));
        else
            store((bf16*)to, load(row, n));
    }
    static inline void put(unit* to, vf x) { store((bf16*)to, x); }
    static inline void put_pair(unit* to, vf x, vf y) {
        vu low = rounded(as_bits(x)) >> 16, high = rounded(as_bits(y)) & 0xffff0000u;
        low |= high;
        std::memcpy(to, &low, 64);
    }

private:
    static inline vu rounded(vu bits) { return bits + 0x7fff + ((bits >> 16) & 1); }
};
#endif

// What a dtype is computed in.
template <class T> struct Units {
    typedef Full type;
};
#ifdef __AVX512BF16__
template <> struct Units<bf16> {
    typedef Half type;
};
#endif

// c[M, N] (+)= a[M, K] b[K, N], K in units; a is read at a[m * am + k * ak], N is NV vectors.
template <class U, int M, int NV, bool ADD>
static inline void tile(long K, const typename U::unit* a, long am, long ak, const typename U::unit* b, long bk,
                        float* c, long cm) {
    vf acc[M][NV];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) acc[m][v] = ADD ? load(c + m * cm + v * LANES) : vf{};
    for (long k = 0; k < K; k++) {
        typename U::vec row[NV];
        for (int v = 0; v < NV; v++) row[v] = U::get(b + k * bk + v * LANES);
        for (int m = 0; m < M; m++)
            for (int v = 0; v < NV; v++) acc[m][v] = U::mac(acc[m][v], a[m * am + k * ak], row[v]);
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) store(c + m * cm + v * LANES, acc[m][v]);
}

template <class U, int NV, bool ADD>
static inline void strip(long M, long K, const typename U::unit* a, long am, long ak, const typename U::unit* b,
                         long bk, float* c, long cm) {
    constexpr int T = !WIDE ? 4 : NV == 4 ? 6 : 8;  // accumulators that fit the registers
    long m = 0;
    for (; m + T <= M; m += T) tile<U, T, NV, ADD>(K, a + m * am, am, ak, b, bk, c + m * cm, cm);
    for (; m < M; m++) tile<U, 1, NV, ADD>(K, a + m * am, am, ak, b, bk, c + m * cm, cm);
}

// N any multiple of 16.
template <class U, bool ADD>
static void product(long M, long N, long K, const typename U::unit* a, long am, long ak, const typename U::unit* b,
                    long bk, float* c, long cm) {
    long n = 0;
    for (; WIDE && n + 64 <= N; n += 64) strip<U, 4, ADD>(M, K, a, am, ak, b + n, bk, c + n, cm);
    for (; WIDE && n + 32 <= N; n += 32) strip<U, 2, ADD>(M, K, a, am, ak, b + n, bk, c + n, cm);
    for (; n < N; n += 16) strip<U, 1, ADD>(M, K, a, am, ak, b + n, bk, c + n, cm);
}

// `rows` rows of n numbers row-wise, zeros up to `width` and zero rows up to `height`.
template <class U, class T>
static void pack_rows(const T* from, long stride, long rows, long height, long n, long width, typename U::unit* to) {
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < width; i += LANES) U::pack(from + r * stride + i, n - i, to + (r * width + i) / U::P);
    if (height > rows) std::memset(to + rows * width / U::P, 0, (height - rows) * width / U::P * 4);
}

// Row-wise to pair-wise, an even number of rows; what is already pair-wise is used as it is.
static inline const float* pair_up(const float* rows_a, long, long, float*) { return rows_a; }
static inline const uint32_t* pair_up(const uint32_t* rows_a, long rows, long width, uint32_t* to) {
    const uint16_t* from = (const uint16_t*)rows_a;
    for (long r = 0; r < rows; r += 2)
        for (long i = 0; i < width; i += LANES) {
            vh low, high;
            std::memcpy(&low, from + r * width + i, 32);
            std::memcpy(&high, from + (r + 1) * width + i, 32);
            vu both = __builtin_convertvector(low, vu) | __builtin_convertvector(high, vu) << 16;
            std::memcpy(to + r / 2 * width + i, &both, 64);
        }
    return to;
}

// [rows][columns] to [columns][rows], units as they are.
template <class unit> static void turn(const unit* from, long rows, long columns, unit* to) {
    for (long c = 0; c < columns; c++)
        for (long r = 0; r < rows; r++) to[c * rows + r] = from[r * columns + c];
}
