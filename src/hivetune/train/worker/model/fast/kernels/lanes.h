// Sixteen floats at a time, in the compiler's own vector types: AVX-512, AVX2 or NEON; intrinsics only for bf16's own
// and for exp, where comparisons and blends cost a third of it.
// Reads and writes fp32 and bf16; everything is computed in fp32. A library is compiled for one dtype, T.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int LANES = 16;
#ifdef __AVX512F__
constexpr bool WIDE = true;  // 32 registers of 16 floats; else 16 of 8, or 32 of 4
#else
constexpr bool WIDE = false;
#endif
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};
#ifdef HIVETUNE_BF16
typedef bf16 T;
#else
typedef float T;
#endif

// A kernel has the arguments of its operation in ops.py; backend.py passes a tensor as a Matrix, None as an empty one.
#define KERNEL extern "C" __attribute__((visibility("default"))) void
template <class N> struct Matrix {
    N* at;
    int64_t stride, rows, columns;  // numbers from row to row; a vector is one of `rows` numbers
    N* row(long r) const { return at + r * stride; }
};

static inline vu widen(vh x) {  // GCC 12 makes four instructions of its own form
#ifdef __AVX512F__
    return (vu)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, vu);
#endif
}

// Lane i of x below lane i of y, as one number.
static inline vu interleave(vh x, vh y) {
#ifdef __AVX512BW__
    vu order;
    for (int i = 0; i < LANES; i++) order[i] = i | (32 + i) << 16;
    return (vu)_mm512_permutex2var_epi16(_mm512_castsi256_si512((__m256i)x), (__m512i)order,
                                         _mm512_castsi256_si512((__m256i)y));
#else
    return widen(x) | widen(y) << 16;
#endif
}

static inline vf splat(float x) { return x - vf{}; }
static inline vf as_float(vu x) { vf y; std::memcpy(&y, &x, 64); return y; }
static inline vu as_bits(vf x) { vu y; std::memcpy(&y, &x, 64); return y; }

static inline float scalar(float x) { return x; }
static inline float scalar(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

static inline vf load(const float* p) { vf x; std::memcpy(&x, p, 64); return x; }
static inline vf load(const bf16* p) {
    vh x;
    std::memcpy(&x, p, 32);
    return as_float(widen(x) << 16);
}
static inline void store(float* p, vf x) { std::memcpy(p, &x, 64); }
static inline void store(bf16* p, vf x) {  // to nearest, ties to even
#ifdef __AVX512BF16__
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = as_bits(x);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vh half = __builtin_convertvector(bits, vh);
#endif
    std::memcpy(p, &half, 32);
}

// Memory that stays and grows, aligned to cache lines: a load of 64 bytes that crosses one costs two.
class Room {
    std::vector<float> memory;

public:
    float* take(size_t size) {  // what is in it is undefined
        if (memory.size() < size + LANES) memory.resize(size + LANES);
        return (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    }
};

// The first n of 16 (none below 1); the rest reads as zero and is not written.
template <class T> static inline vf load(const T* p, long n) {
    if (n >= LANES) return load(p);
    if (n <= 0) return vf{};
    T part[LANES];
    std::memset(part, 0, sizeof part);
    std::memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T> static inline void store(T* p, vf x, long n) {
    if (n >= LANES) return store(p, x);
    if (n <= 0) return;
    T part[LANES];
    store(part, x);
    std::memcpy(p, part, n * sizeof(T));
}

// The first n numbers of a row whose memory goes on to a multiple of 16, multiplied.
template <class T> static inline void store_row(T* to, const float* from, float scale, long n) {
    for (long i = 0; i < n; i += LANES) store(to + i, load(from + i) * scale, n - i);
}

static inline float sum(vf x) {
    float y = 0;
    for (int i = 0; i < LANES; i++) y += x[i];
    return y;
}
static inline uint32_t lanes_unlike(vf x, float y) {  // a bit for each
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)x, (__m512)splat(y), _CMP_NEQ_UQ);
#else
    uint32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= (uint32_t)(x[i] != y) << i;
    return found;
#endif
}
static inline vf larger(vf a, vf b) { return a > b ? a : b; }
static inline float largest(vf x) {
    float y = x[0];
    for (int i = 1; i < LANES; i++) y = x[i] > y ? x[i] : y;
    return y;
}

// exp of numbers up to 88, to 2 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (1 + r + r^2 times a minimax polynomial
// of degree 4, 3e-9 off). Exactly 0 below -87; NaN stays NaN. Several at a time, because each is a chain of dependent
// operations: one after another they take 9 cycles each, four side by side 8.
template <int N> static inline void exponentials(vf (&x)[N]) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const float factors[] = {8.3687165752e-3f, 4.1668388993e-2f, 1.6666521132e-1f, 4.9999994040e-1f, 1.0f, 1.0f};
    vf shifted[N], n[N], r[N], p[N];
    for (int i = 0; i < N; i++) {
#ifdef __AVX512F__
        shifted[i] = x[i] * 1.44269504f + magic;
#else
        shifted[i] = (x[i] < -87.0f ? splat(-87.0f) : x[i]) * 1.44269504f + magic;
#endif
    }
    for (int i = 0; i < N; i++) n[i] = shifted[i] - magic;
    for (int i = 0; i < N; i++) r[i] = x[i] - n[i] * 0.693359375f;
    for (int i = 0; i < N; i++) r[i] = r[i] + n[i] * 2.12194440e-4f;
    for (int i = 0; i < N; i++) p[i] = splat(1.3814598788e-3f);
    for (float factor : factors)
        for (int i = 0; i < N; i++) p[i] = p[i] * r[i] + factor;
    for (int i = 0; i < N; i++) {
#ifdef __AVX512F__
        const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x[i], (__m512)splat(-87.0f), _CMP_NLT_UQ);
        x[i] = (vf)_mm512_maskz_scalef_ps(counts, (__m512)p[i], (__m512)n[i]);
#else
        vf y = p[i] * as_float((as_bits(shifted[i]) + 127u - 0x4b400000u) << 23);
        x[i] = x[i] < -87.0f ? splat(0.0f) : y;
#endif
    }
}
static inline vf exponential(vf x) {  // above 88: that of 88
#ifdef __AVX512F__
    vf one[1] = {(vf)_mm512_min_ps((__m512)splat(88.0f), (__m512)x)};  // of NaN and a number the second
#else
    vf one[1] = {x > 88.0f ? splat(88.0f) : x};
#endif
    exponentials(one);
    return one[0];
}
template <int N> static inline void sigmoids(vf (&x)[N]) {
    for (int i = 0; i < N; i++) x[i] = -x[i] > 88.0f ? splat(88.0f) : -x[i];
    exponentials(x);
    for (int i = 0; i < N; i++) x[i] = 1.0f / (1.0f + x[i]);
}
static inline vf hyperbolic_tangent(vf x) {
    vf q = x * x;  // near 0 its series: 1 - 2 / (e + 1) would lose the small value in the 1
    vf near = x + x * q * (-1.0f / 3 + q * (2.0f / 15 + q * (-17.0f / 315 + q * (62.0f / 2835))));
    return q < 0.0625f ? near : 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
}
