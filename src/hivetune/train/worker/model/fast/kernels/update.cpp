// What the end of a step does to all adapter weights at once: the gradient's norm, clipping and AdamW. N weights.
// Each is one pass over memory, which is what it costs: as ten operations of torch it would be ten passes.
#include <omp.h>

#include <algorithm>

#include "lanes.h"

constexpr long BLOCK = 1 << 14;  // weights of one task

// The gradient's norm, summed in fp64 in the same order whatever the number of threads.
HIVETUNE_API void norm_of(const float* grad, long n, double* norm) {
    typedef double vd __attribute__((vector_size(128)));
    std::vector<double> sums((n + BLOCK - 1) / BLOCK);
#pragma omp parallel for schedule(static)
    for (long b = 0; b < (long)sums.size(); b++) {
        vd total{};
        for (long i = b * BLOCK; i < std::min(n, (b + 1) * BLOCK); i += LANES) {
            vd x = __builtin_convertvector(load(grad + i, n - i), vd);
            total += x * x;
        }
        for (int lane = 0; lane < LANES; lane++) sums[b] += total[lane];
    }
    double total = 0;
    for (double sum : sums) total += sum;
    *norm = std::sqrt(total);
}

// One update as optimizer.AdamW makes it; `terms` are its five, in its order. The gradient is multiplied by `shrink`
// first and left so; where `ok` is false nothing but the gradient changes, which becomes zero.
HIVETUNE_API void adamw(float* master, float* grad, float* average, float* square, long n, const float* terms,
                        float own_square, float epsilon, const double* shrink, const bool* ok) {
    const float share = terms[0], kept = terms[1], root = terms[2], decay = terms[3], rate = terms[4];
    const float factor = *shrink;
    if (!*ok) {
        std::fill(grad, grad + n, 0.0f);
        return;
    }
#pragma omp parallel for schedule(static)
    for (long b = 0; b < n; b += BLOCK)
        for (long i = b; i < std::min(n, b + BLOCK); i += LANES) {
            long left = n - i;
            vf g = load(grad + i, left) * factor, m = load(average + i, left), v = load(square + i, left);
            m += share * (g - m);
            v = v * kept + own_square * g * g;
            vf size;
            for (int lane = 0; lane < LANES; lane++) size[lane] = std::sqrt(v[lane]);
            vf w = load(master + i, left) * decay + rate * (m / (size / root + epsilon));
            store(grad + i, g, left), store(average + i, m, left), store(square + i, v, left);
            store(master + i, w, left);
        }
}
