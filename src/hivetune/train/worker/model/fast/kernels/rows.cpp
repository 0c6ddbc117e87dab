// Work on single rows: norms, rotary positions, gated activations, dropout, cross-entropy. Strides are in elements.
#include "lanes.h"

template <class T>
static void add_norm(const float* x, const T* delta, long delta_stride, float* sum_out, const float* w, float eps, T* y,
                     float* rstd, long rows, long n) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        const float* from = x + t * n;
        float* to = sum_out + t * n;
        vf squares{};
        for (long i = 0; i < n; i += LANES) {
            vf v = load(from + i, n - i);
            if (delta) {
                v += load(delta + t * delta_stride + i, n - i);
                store(to + i, v, n - i);
            }
            squares += v * v;
        }
        float r = 1.0f / std::sqrt(sum(squares) / n + eps);
        rstd[t] = r;
        const float* read = delta ? to : from;
        for (long i = 0; i < n; i += LANES)
            store(y + t * n + i, load(read + i, n - i) * r * load(w + i, n - i), n - i);
    }
}

template <class T>
static void norm_backward(const T* dy, const float* x, const float* rstd, const float* w, float* dx, T* y, long rows,
                          long n) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        float r = rstd[t];
        vf dots{};
        for (long i = 0; i < n; i += LANES)
            dots += load(dy + t * n + i, n - i) * load(w + i, n - i) * load(x + t * n + i, n - i);
        float mean = sum(dots) * r / n;
        for (long i = 0; i < n; i += LANES) {
            vf weight = load(w + i, n - i), unit = load(x + t * n + i, n - i) * r;
            vf grad = load(dy + t * n + i, n - i) * weight - unit * mean;
            store(dx + t * n + i, load(dx + t * n + i, n - i) + grad * r, n - i);
            if (y) store(y + t * n + i, unit * weight, n - i);
        }
    }
}

template <class T>
static void rope(T* x, long stride, const float* cos, const float* sin, float sign, long rows, long heads,
                 long head_dim, long half) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++)
        for (long h = 0; h < heads; h++) {
            T *first = x + t * stride + h * head_dim, *second = first + half;
            for (long i = 0; i < half; i += LANES) {
                vf c = load(cos + t * half + i, half - i), s = load(sin + t * half + i, half - i) * sign;
                vf a = load(first + i, half - i), b = load(second + i, half - i);
                store(first + i, a * c - b * s, half - i);
                store(second + i, b * c + a * s, half - i);
            }
        }
}

struct Activated {
    vf value, slope;
};
static inline Activated gelu(vf x) {  // the tanh form
    const float k = 0.7978845608f, c = 0.044715f;
    vf th = hyperbolic_tangent(k * (x + c * x * x * x));
    vf slope = 0.5f * (1.0f + th) + 0.5f * x * (1.0f - th * th) * k * (1.0f + 3.0f * c * x * x);
    return {0.5f * x * (1.0f + th), slope};
}
constexpr int SIDE = 4;  // vectors side by side, see `exponentials`
template <class T> static inline void activate(int kind, const T* gate, long n, Activated (&out)[SIDE]) {
    vf x[SIDE];
    for (int j = 0; j < SIDE; j++) x[j] = load(gate + j * LANES, n - j * LANES);
    if (kind) {
        for (int j = 0; j < SIDE; j++) out[j] = gelu(x[j]);
        return;
    }
    vf s[SIDE];
    for (int j = 0; j < SIDE; j++) s[j] = x[j];
    sigmoids(s);
    for (int j = 0; j < SIDE; j++) out[j] = {x[j] * s[j], s[j] * (1.0f + x[j] * (1.0f - s[j]))};
}

template <class T> static void glu(const T* gate_up, long stride, T* h, int kind, long rows, long n) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        const T *gate = gate_up + t * stride, *up = gate + n;
        for (long i = 0; i < n; i += SIDE * LANES) {
            Activated a[SIDE];
            activate(kind, gate + i, n - i, a);
            for (int j = 0; j < SIDE; j++) {
                long at = i + j * LANES;
                store(h + t * n + at, a[j].value * load(up + at, n - at), n - at);
            }
        }
    }
}

template <class T>
static void glu_backward(const T* dh, const T* gate_up, long stride, T* dgate_up, long dstride, T* h, int kind,
                         long rows, long n) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        const T *gate = gate_up + t * stride, *up = gate + n;
        T *dgate = dgate_up + t * dstride, *dup = dgate + n;
        for (long i = 0; i < n; i += SIDE * LANES) {
            Activated a[SIDE];
            activate(kind, gate + i, n - i, a);
            for (int j = 0; j < SIDE; j++) {
                long at = i + j * LANES;
                vf d = load(dh + t * n + at, n - at), u = load(up + at, n - at);
                store(dgate + at, d * u * a[j].slope, n - at);
                store(dup + at, d * a[j].value, n - at);
                store(h + t * n + at, a[j].value * u, n - at);
            }
        }
    }
}

// nll of each row; with `gradient` the logits become count * (softmax - one hot) in place. softcap 0: none.
template <class T>
static void cross_entropy(T* logits, const int64_t* target, const float* count, float softcap, float* nll, int gradient,
                          long rows, long n) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        T* z = logits + t * n;
        auto capped = [&](long i) {
            vf v = load(z + i, n - i);
            if (softcap > 0) v = softcap * hyperbolic_tangent(v * (1.0f / softcap));
            for (long j = n - i; j < LANES; j++) v[j] = -INFINITY;
            return v;
        };
        vf tops = splat(-INFINITY);
        for (long i = 0; i < n; i += LANES) tops = larger(capped(i), tops);
        float top = largest(tops);
        vf total{};
        for (long i = 0; i < n; i += LANES) total += exponential(capped(i) - top);
        float lse = top + std::log(sum(total));
        float hit = scalar(z[target[t]]);
        if (softcap > 0) hit = softcap * std::tanh(hit / softcap);
        nll[t] = lse - hit;
        if (!gradient) continue;
        float slope = 1 - (softcap > 0 ? hit / softcap * (hit / softcap) : 0);
        T at_target[LANES];
        store(at_target, splat((std::exp(hit - lse) - 1.0f) * slope * count[t]));
        for (long i = 0; i < n; i += LANES) {
            vf v = capped(i), p = exponential(v - lse) * count[t];
            if (softcap > 0) p *= 1.0f - v * v * (1.0f / (softcap * softcap));
            store(z + i, p, n - i);
        }
        z[target[t]] = at_target[0];
    }
}

// lowbias32 (Chris Wellons, "Prospecting for hash functions", 2018), for one number or sixteen.
template <class U> static inline U mix(U x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

template <class T>
static void drop(const T* x, const int64_t* keys, uint64_t salt, uint32_t below, float scale, T* out, long rows,
                 long n) {
    vu lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        uint64_t key = (uint64_t)keys[t] ^ salt;
        uint32_t low = mix((uint32_t)key), high = (uint32_t)(key >> 32);
        for (long i = 0; i < n; i += LANES) {
            vu number = mix(mix((lanes + (uint32_t)i) * 0x9e3779b9u + low) ^ high);
            vf value = load(x + t * n + i, n - i) * scale;
            store(out + t * n + i, number >= below ? value : vf{}, n - i);
        }
    }
}

#define ROWS(T, suffix)                                                                                                \
    HIVETUNE_API void add_norm_##suffix(const float* x, const T* d, long ds, float* s, const float* w, float eps,      \
                                        T* y, float* r, long rows, long n) {                                           \
        add_norm(x, d, ds, s, w, eps, y, r, rows, n);                                                                  \
    }                                                                                                                  \
    HIVETUNE_API void norm_backward_##suffix(const T* dy, const float* x, const float* r, const float* w, float* dx,   \
                                             T* y, long rows, long n) {                                                \
        norm_backward(dy, x, r, w, dx, y, rows, n);                                                                    \
    }                                                                                                                  \
    HIVETUNE_API void rope_##suffix(T* x, long stride, const float* c, const float* s, float sign, long rows,          \
                                    long heads, long head_dim, long half) {                                            \
        rope(x, stride, c, s, sign, rows, heads, head_dim, half);                                                      \
    }                                                                                                                  \
    HIVETUNE_API void glu_##suffix(const T* gu, long stride, T* h, int kind, long rows, long n) {                      \
        glu(gu, stride, h, kind, rows, n);                                                                             \
    }                                                                                                                  \
    HIVETUNE_API void glu_backward_##suffix(const T* dh, const T* gu, long stride, T* dgu, long dstride, T* h,         \
                                            int kind, long rows, long n) {                                             \
        glu_backward(dh, gu, stride, dgu, dstride, h, kind, rows, n);                                                  \
    }                                                                                                                  \
    HIVETUNE_API void cross_entropy_##suffix(T* z, const int64_t* target, const float* count, float softcap,           \
                                             float* nll, int gradient, long rows, long n) {                            \
        cross_entropy(z, target, count, softcap, nll, gradient, rows, n);                                              \
    }                                                                                                                  \
    HIVETUNE_API void drop_##suffix(const T* x, const int64_t* keys, long salt, long below, float scale, T* out,       \
                                    long rows, long n) {                                                               \
        drop(x, keys, salt, below, scale, out, rows, n);                                                               \
    }
ROWS(float, f32)
ROWS(bf16, bf16)
