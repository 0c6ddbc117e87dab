// Small matrix products of attention's blocks, over units of 4 bytes: one float, or two bf16 that are multiplied
// pairwise and summed in fp32 (AVX512-BF16: twice the rate). P numbers to a unit.
//
//   row-wise    [rows][columns / P]    pairs along the columns: the left side of a product
//   pair-wise   [rows / P][columns]    pairs along the rows: the right side of a product over rows
#pragma once
#include <algorithm>

#include "lanes.h"

static inline long whole(long n, long part) { return (n + part - 1) / part * part; }

#if defined(HIVETUNE_BF16) && defined(__AVX512BF16__)
typedef uint32_t unit;
typedef __m512bh vec;
constexpr int P = 2;
static inline vec get(const unit* p) { return (vec)_mm512_loadu_si512(p); }
static inline vec get_row(const T* p, long n) {  // the first n of 32 numbers
    __mmask32 mask = n >= P * LANES ? 0xffffffffu : (1u << (n < 0 ? 0 : n)) - 1;
    return (vec)_mm512_maskz_loadu_epi16(mask, p);
}
static inline vf mac(vf total, vec a, vec b) { return (vf)_mm512_dpbf16_ps((__m512)total, a, b); }
static inline vf mac(vf total, unit a, vec b) { return mac(total, (vec)_mm512_set1_epi32(a), b); }
static inline vh half(vf x) { return (vh)_mm512_cvtneps_pbh((__m512)x); }
static inline void put_pair(unit* to, vh x, vh y) {
    vu both = interleave(x, y);
    std::memcpy(to, &both, 64);
}
static inline void put_pair(unit* to, vf x, vf y) { put_pair(to, half(x), half(y)); }
static inline void put(unit* to, vf x) { store((T*)to, x); }
// Two rows row-wise, and their pairs.
static inline void put_both(unit* row, unit* next, unit* pair, vf x, vf y) {
    vh a = half(x), b = half(y);
    std::memcpy(row, &a, 32), std::memcpy(next, &b, 32);
    put_pair(pair, a, b);
}
static inline void put_one(unit* to, int place, T x) { std::memcpy((T*)to + place, &x, sizeof x); }
// 16 numbers of a row are 8 units.
static inline void pack(const T* row, long n, unit* to) {
    if (n >= LANES)
        std::memcpy(to, row, LANES * sizeof(T));
    else
        store((T*)to, load(row, n));
}
// 16 numbers of two rows; no second row: zeros.
static inline void pack_pair(const T* row, const T* next, long n, unit* to) {
    if (n < LANES || !next) return put_pair(to, load(row, n), next ? load(next, n) : vf{});
    vh a, b;
    std::memcpy(&a, row, 32), std::memcpy(&b, next, 32);
    put_pair(to, a, b);
}
// Row-wise to pair-wise, an even number of rows.
static inline void copy_pairs(const unit* rows_a, long rows, long width, unit* to) {
    const T* from = (const T*)rows_a;
    for (long r = 0; r < rows; r += 2)
        for (long i = 0; i < width; i += LANES)
            pack_pair(from + r * width + i, from + (r + 1) * width + i, LANES, to + r / 2 * width + i);
}
#else
typedef float unit;
typedef vf vec;
constexpr int P = 1;
static inline vec get(const unit* p) { return load(p); }
static inline vec get_row(const T* p, long n) { return load(p, n); }
static inline vf mac(vf total, vec a, vec b) { return total + a * b; }
static inline vf mac(vf total, unit a, vec b) { return total + a * b; }
static inline void put_pair(unit* to, vf x, vf) { store(to, x); }
static inline void put(unit* to, vf x) { store(to, x); }
static inline void put_both(unit* row, unit*, unit* pair, vf x, vf) { store(row, x), store(pair, x); }
static inline void put_one(unit* to, int, T x) { *to = scalar(x); }
static inline void pack(const T* row, long n, unit* to) { store(to, load(row, n)); }
static inline void pack_pair(const T* row, const T*, long n, unit* to) { store(to, load(row, n)); }
static inline void copy_pairs(const unit* rows_a, long rows, long width, unit* to) {
    std::copy(rows_a, rows_a + rows * width, to);
}
#endif

// Rows of 16 numbers lie in memory as units do: columns [from, to) of rows that are `stride` numbers apart.
static inline bool lies_in_units(long stride, long from, long to) {
    return sizeof(T) * P == sizeof(unit) && stride % P == 0 && from % P == 0 && to % P == 0;
}

// c[M, N] (+)= a[M, K] b[K, N], K in units; a is read at a[m * am + k * ak], N is NV vectors. C may be bf16: one
// rounding at the end.
template <int M, int NV, bool ADD, class C>
static inline void tile(long K, const unit* a, long am, long ak, const unit* b, long bk, C* c,
                        long cm) {
    vf acc[M][NV];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) acc[m][v] = ADD ? load(c + m * cm + v * LANES) : vf{};
    if (K < 1) __builtin_unreachable();  // else GCC 12 passes the accumulators through memory: an eighth of the time
    for (long k = 0; k < K; k++) {
        vec row[NV];
        for (int v = 0; v < NV; v++) row[v] = get(b + k * bk + v * LANES);
        for (int m = 0; m < M; m++)
            for (int v = 0; v < NV; v++) acc[m][v] = mac(acc[m][v], a[m * am + k * ak], row[v]);
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) store(c + m * cm + v * LANES, acc[m][v]);
}

// A function of its own: in a large one the tiles would get too few registers.
template <int NV, bool ADD, class C>
__attribute__((noinline)) static void strip(long M, long K, const unit* a, long am, long ak,
                                            const unit* b, long bk, C* c, long cm) {
    constexpr int TALL = WIDE ? 16 / NV : 4;  // rows of accumulators that fit the registers, and hide each other's wait
    long m = 0;
    for (; m + TALL <= M; m += TALL) tile<TALL, NV, ADD>(K, a + m * am, am, ak, b, bk, c + m * cm, cm);
    for (; TALL > 8 && m + 8 <= M; m += 8) tile<8, NV, ADD>(K, a + m * am, am, ak, b, bk, c + m * cm, cm);
    for (; m + 2 <= M; m += 2) tile<2, NV, ADD>(K, a + m * am, am, ak, b, bk, c + m * cm, cm);
    for (; m < M; m++) tile<1, NV, ADD>(K, a + m * am, am, ak, b, bk, c + m * cm, cm);
}

// N any multiple of 16.
template <bool ADD, class C>
static void product(long M, long N, long K, const unit* a, long am, long ak, const unit* b,
                    long bk, C* c, long cm) {
    long n = 0;
    for (; WIDE && n + 64 <= N; n += 64) strip<4, ADD>(M, K, a, am, ak, b + n, bk, c + n, cm);
    for (; WIDE && n + 32 <= N; n += 32) strip<2, ADD>(M, K, a, am, ak, b + n, bk, c + n, cm);
    for (; n < N; n += 16) strip<1, ADD>(M, K, a, am, ak, b + n, bk, c + n, cm);
}

// Rows that lie far apart come in no stream that the processor would see: each one asks for that 16 rows on.
static inline void ask_ahead(const T* at, long stride) { __builtin_prefetch(at + LANES * stride); }

// `rows` rows of n numbers row-wise, zeros up to `width` and zero rows up to `height`.
static void pack_rows(const T* from, long stride, long rows, long height, long n, long width, unit* to) {
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < width; i += LANES) {
            ask_ahead(from + r * stride + i, stride);
            pack(from + r * stride + i, n - i, to + (r * width + i) / P);
        }
    if (height > rows) std::memset(to + rows * width / P, 0, (height - rows) * width / P * 4);
}

// The same pair-wise.
static void pack_pairs(const T* from, long stride, long rows, long height, long n, long width, unit* to) {
    for (long r = 0; r < rows; r += P)
        for (long i = 0; i < width; i += LANES) {
            const T* row = from + r * stride + i;
            for (int p = 0; p < P; p++) ask_ahead(row + p * stride, stride);
            pack_pair(row, r + 1 < rows ? row + stride : nullptr, n - i, to + r / P * width + i);
        }
    long packed = whole(rows, P);
    if (height > packed) std::memset(to + packed / P * width, 0, (height - packed) / P * width * 4);
}

#ifdef __AVX512F__
// 16 rows of 16, `stride` apart, turned.
static inline void turn_square(const float* from, long stride, float* to, long step) {
    __m512d two[16];
    __m512 four[16];
    for (int i = 0; i < 16; i += 2) {
        __m512 a = _mm512_loadu_ps(from + i * stride), b = _mm512_loadu_ps(from + (i + 1) * stride);
        two[i] = (__m512d)_mm512_unpacklo_ps(a, b), two[i + 1] = (__m512d)_mm512_unpackhi_ps(a, b);
    }
    for (int i = 0; i < 16; i += 4)  // then: column j of each quarter of rows i to i + 3
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = (__m512)_mm512_unpacklo_pd(two[i + j], two[i + j + 2]);
            four[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(two[i + j], two[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        __m512 even[2], odd[2];
        for (int h = 0; h < 2; h++) {
            even[h] = _mm512_shuffle_f32x4(four[8 * h + j], four[8 * h + 4 + j], 0x88);
            odd[h] = _mm512_shuffle_f32x4(four[8 * h + j], four[8 * h + 4 + j], 0xdd);
        }
        _mm512_storeu_ps(to + j * step, _mm512_shuffle_f32x4(even[0], even[1], 0x88));
        _mm512_storeu_ps(to + (j + 4) * step, _mm512_shuffle_f32x4(odd[0], odd[1], 0x88));
        _mm512_storeu_ps(to + (j + 8) * step, _mm512_shuffle_f32x4(even[0], even[1], 0xdd));
        _mm512_storeu_ps(to + (j + 12) * step, _mm512_shuffle_f32x4(odd[0], odd[1], 0xdd));
    }
}
#endif

// 16 rows of `columns` units, `stride` apart, to [columns][16], units as they are; rows of the result are `step` apart.
template <class N> static void turn(const N* from, long stride, long columns, N* to, long step) {
    long c = 0;
#ifdef __AVX512F__
    for (; c + LANES <= columns; c += LANES) turn_square((const float*)from + c, stride, (float*)to + c * step, step);
#endif
    for (; c < columns; c++)
        for (long r = 0; r < LANES; r++) to[c * step + r] = from[r * stride + c];
}
