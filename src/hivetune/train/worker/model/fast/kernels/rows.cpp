// Work on single rows: norms, rotary positions, gated activations, dropout, cross-entropy. ops.py says what each computes.
#include "lanes.h"

KERNEL add_norm(Matrix<float> x, Matrix<T> delta, Matrix<float> sum_out, Matrix<float> w, double eps, Matrix<T> y,
                Matrix<float> rstd) {
    long n = x.columns;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < x.rows; t++) {
        const float *from = x.row(t), *weight = w.at;
        const T* added = delta.at ? delta.row(t) : nullptr;
        float* to = sum_out.row(t);
        T* normed = y.row(t);
        vf squares{};
        for (long i = 0; i < n; i += LANES) {
            vf v = load(from + i, n - i);
            if (added) {
                v += load(added + i, n - i);
                store(to + i, v, n - i);
            }
            squares += v * v;
        }
        float r = 1.0f / std::sqrt(sum(squares) / n + (float)eps);
        rstd.at[t] = r;
        const float* read = added ? to : from;
        for (long i = 0; i < n; i += LANES) store(normed + i, load(read + i, n - i) * r * load(weight + i, n - i), n - i);
    }
}

KERNEL norm_backward(Matrix<T> dy, Matrix<float> x, Matrix<float> rstd, Matrix<float> w, Matrix<float> dx, Matrix<T> y) {
    long n = x.columns;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < x.rows; t++) {
        const T* dnormed = dy.row(t);
        const float *from = x.row(t), *weights = w.at;
        float *to = dx.row(t), r = rstd.at[t];
        T* again = y.at ? y.row(t) : nullptr;
        vf dots{};
        for (long i = 0; i < n; i += LANES)
            dots += load(dnormed + i, n - i) * load(weights + i, n - i) * load(from + i, n - i);
        float mean = sum(dots) * r / n;
        for (long i = 0; i < n; i += LANES) {
            vf weight = load(weights + i, n - i), unit = load(from + i, n - i) * r;
            vf grad = load(dnormed + i, n - i) * weight - unit * mean;
            store(to + i, load(to + i, n - i) + grad * r, n - i);
            if (again) store(again + i, unit * weight, n - i);
        }
    }
}

KERNEL rope(Matrix<T> x, Matrix<float> cos, Matrix<float> sin, int64_t head_dim, int64_t inverse) {
    long half = cos.columns, heads = x.columns / head_dim;
    float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < x.rows; t++) {
        const float *cos_t = cos.row(t), *sin_t = sin.row(t);
        for (long h = 0; h < heads; h++) {
            T *first = x.row(t) + h * head_dim, *second = first + half;
            for (long i = 0; i < half; i += LANES) {
                vf c = load(cos_t + i, half - i), s = load(sin_t + i, half - i) * sign;
                vf a = load(first + i, half - i), b = load(second + i, half - i);
                store(first + i, a * c - b * s, half - i);
                store(second + i, b * c + a * s, half - i);
            }
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
static inline void activate(bool is_gelu, const T* gate, long n, Activated (&out)[SIDE]) {
    vf x[SIDE];
    for (int j = 0; j < SIDE; j++) x[j] = load(gate + j * LANES, n - j * LANES);
    if (is_gelu) {
        for (int j = 0; j < SIDE; j++) out[j] = gelu(x[j]);
        return;
    }
    vf s[SIDE];
    for (int j = 0; j < SIDE; j++) s[j] = x[j];
    sigmoids(s);
    for (int j = 0; j < SIDE; j++) out[j] = {x[j] * s[j], s[j] * (1.0f + x[j] * (1.0f - s[j]))};
}

KERNEL glu(Matrix<T> gate_up, Matrix<T> h, int64_t is_gelu) {
    long n = h.columns;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < h.rows; t++) {
        const T *gate = gate_up.row(t), *up = gate + n;
        T* to = h.row(t);
        for (long i = 0; i < n; i += SIDE * LANES) {
            Activated a[SIDE];
            activate(is_gelu, gate + i, n - i, a);
            for (int j = 0; j < SIDE; j++) {
                long at = i + j * LANES;
                store(to + at, a[j].value * load(up + at, n - at), n - at);
            }
        }
    }
}

KERNEL glu_backward(Matrix<T> dh, Matrix<T> gate_up, Matrix<T> dgate_up, Matrix<T> h, int64_t is_gelu) {
    long n = h.columns;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < h.rows; t++) {
        const T *gate = gate_up.row(t), *up = gate + n, *dh_t = dh.row(t);
        T *dgate = dgate_up.row(t), *dup = dgate + n, *to = h.row(t);
        for (long i = 0; i < n; i += SIDE * LANES) {
            Activated a[SIDE];
            activate(is_gelu, gate + i, n - i, a);
            for (int j = 0; j < SIDE; j++) {
                long at = i + j * LANES;
                vf d = load(dh_t + at, n - at), u = load(up + at, n - at);
                store(dgate + at, d * u * a[j].slope, n - at);
                store(dup + at, d * a[j].value, n - at);
                store(to + at, a[j].value * u, n - at);
            }
        }
    }
}

KERNEL cross_entropy(Matrix<T> logits, Matrix<int64_t> target, Matrix<float> count, double cap, Matrix<float> nll,
                     int64_t gradient) {
    long n = logits.columns;
    float softcap = (float)cap;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < logits.rows; t++) {
        T* z = logits.row(t);
        long hit_at = target.at[t];
        float weight = count.at[t];
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
        float hit = scalar(z[hit_at]);
        if (softcap > 0) hit = softcap * std::tanh(hit / softcap);
        nll.at[t] = lse - hit;
        if (!gradient) continue;
        float slope = 1 - (softcap > 0 ? hit / softcap * (hit / softcap) : 0);
        T at_target[LANES];
        store(at_target, splat((std::exp(hit - lse) - 1.0f) * slope * weight));
        for (long i = 0; i < n; i += LANES) {
            vf v = capped(i), p = exponential(v - lse) * weight;
            if (softcap > 0) p *= 1.0f - v * v * (1.0f / (softcap * softcap));
            store(z + i, p, n - i);
        }
        z[hit_at] = at_target[0];
    }
}

// lowbias32 (Chris Wellons, "Prospecting for hash functions", 2018), for one number or sixteen.
template <class N> static inline N mix(N x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

KERNEL drop(Matrix<T> x, Matrix<int64_t> keys, int64_t salt, double rate, Matrix<T> out) {
    vu lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    uint32_t below = (uint32_t)std::llrint(rate * 4294967296.0);
    float scale = (float)(1 / (1 - rate));
    long n = x.columns;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < x.rows; t++) {
        const T* from = x.row(t);
        T* to = out.row(t);
        uint64_t key = (uint64_t)keys.at[t] ^ (uint64_t)salt;
        uint32_t low = mix((uint32_t)key), high = (uint32_t)(key >> 32);
        for (long i = 0; i < n; i += LANES) {
            vu number = mix(mix((lanes + (uint32_t)i) * 0x9e3779b9u + low) ^ high);
            vf value = load(from + i, n - i) * scale;
            store(to + i, number >= below ? value : vf{}, n - i);
        }
    }
}
