// The large products, one for each frozen matrix and way: c = a b, and forward what else those columns get, the bias
// and the adapters' S B', in the same sums, which are rounded once.
//
// b is packed in panels of 32 columns, each by the thread that multiplies with it, so that a panel stays in its caches
// and there is never a second copy of a matrix. While a thread multiplies it asks for the next panel, which else comes
// from main memory. Threads divide [panels x rows] evenly, wherever that cuts. Each number is one sum in the order of
// the inner dimension, so it does not depend on the other rows nor on the number of threads.
#include <omp.h>

#include "ranks.h"

constexpr long PANEL = 2 * LANES;
constexpr long TALL = WIDE ? 8 : 2;  // rows of sums that fit the registers
constexpr long DEEP = 2048;          // units of a panel that are packed at a time: 256 KB, a quarter of L2

// a [rows, depth] times b [depth, columns]; `turned`: b lies as [columns, depth].
template <class T> struct Factors {
    const T *a, *b;
    long a_stride, b_stride, rows, columns, depth;
    bool turned;
};
// What is added to the columns of a product: `bias`, none if null, and S B' of each member of theirs.
template <class T> struct Added {
    const T *bias, *s;
    long s_stride;
    const Member *members, *end;
};

// Rows of a, `step` units apart, by a panel of b.
template <class U> struct Term {
    const typename U::unit *a, *b;
    long step, depth;
};

// c[M, NV vectors] = first + the terms. A function of its own, for the registers.
template <class U, int M, int NV, class C>
__attribute__((noinline)) static void block(const Term<U>* terms, long count, const float* first, long first_step, C* c,
                                            long c_stride) {
    vf sums[M][NV];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) sums[m][v] = load(first + m * first_step + v * LANES);
    const Term<U>* t = terms;
    do {
        const typename U::unit *a = t->a, *b = t->b;
        long step = t->step, depth = t->depth;
        if (depth < 1) __builtin_unreachable();  // as in `tile`, and why there is one term at least
        for (long k = 0; k < depth; k++) {
            typename U::vec row[NV];
            for (int v = 0; v < NV; v++) row[v] = U::get(b + k * PANEL + v * LANES);
            for (int m = 0; m < M; m++)
                for (int v = 0; v < NV; v++) sums[m][v] = U::mac(sums[m][v], a[m * step + k], row[v]);
        }
    } while (++t < terms + count);
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) store(c + m * c_stride + v * LANES, sums[m][v]);
}

// The same for up to TALL rows.
template <class U, int NV, class C>
static void blocks(long rows, Term<U>* terms, long count, const float* first, long first_step, C* c, long c_stride) {
    if (rows == TALL) return block<U, TALL, NV>(terms, count, first, first_step, c, c_stride);
    for (long m = 0; m < rows; m++) {
        block<U, 1, NV>(terms, count, first + m * first_step, first_step, c + m * c_stride, c_stride);
        for (Term<U>* t = terms; t < terms + count; t++) t->a += t->step;
    }
}

template <class T> static bool lies_in_units(long stride, long from, long to) {
    typedef Units<T> Of;
    constexpr long P = Of::type::P;
    return sizeof(T) * P == sizeof(typename Of::type::unit) && stride % P == 0 && from % P == 0 && to % P == 0;
}

// Rows [k0, k1) of `n` columns of b from column n0 on.
template <class T>
static void pack_panel(const Factors<T>& f, long n0, long n, long k0, long k1, typename Units<T>::type::unit* to,
                       typename Units<T>::type::unit* room) {
    typedef typename Units<T>::type U;
    if (!f.turned)
        return pack_pairs<U>(f.b + k0 * f.b_stride + n0, f.b_stride, k1 - k0, whole(k1 - k0, U::P), n, PANEL, to);
    long units = whole(k1 - k0, U::P) / U::P, width = whole(k1 - k0, LANES);
    for (long i = 0; i < n; i += LANES) {
        const T* from = f.b + (n0 + i) * f.b_stride + k0;
        if (i + LANES <= n && lies_in_units<T>(f.b_stride, k0, k1)) {
            turn((const typename U::unit*)from, f.b_stride / U::P, units, to + i, PANEL);
            continue;
        }
        pack_rows<U>(from, f.b_stride, std::min<long>(LANES, n - i), LANES, k1 - k0, width, room);
        turn(room, width / U::P, units, to + i, PANEL);
    }
}

// B' of the members that have some of the columns [n0, n0 + n), zeros beside; the first of their rank columns, a
// multiple of a unit's, and how many.
struct Ranks {
    long first, count;
};
template <class T>
static Ranks pack_ranks(const Added<T>& added, long n0, long n, typename Units<T>::type::unit* to) {
    typedef typename Units<T>::type U;
    long first = INT64_MAX, last = 0;
    auto meets = [&](const Member* m) { return m->start < n0 + n && n0 < m->start + m->size; };
    for (const Member* m = added.members; m < added.end; m++)
        if (meets(m)) first = std::min<long>(first, m->rank_at), last = std::max<long>(last, m->rank_at + m->rank);
    if (last == 0) return {0, 0};
    first = first / U::P * U::P;
    std::memset(to, 0, whole(last - first, U::P) / U::P * PANEL * sizeof *to);
    for (const Member* m = added.members; m < added.end; m++) {
        if (!meets(m)) continue;
        long from = std::max<long>(n0, m->start), until = std::min<long>(n0 + n, m->start + m->size);
        for (long j = 0; j < m->rank; j++) {
            const T* row = (const T*)m->up + j * m->size - m->start;
            long at = m->rank_at + j - first;
            for (long i = from; i < until; i++) U::put_one(to + at / U::P * PANEL + i - n0, at % U::P, row[i]);
        }
    }
    return {first, last - first};
}

// Rows [from, until) of those that hold the panel from column n0 on, to the caches.
template <class T> static void ask_for_panel(const Factors<T>& f, long n0, long from, long until) {
    long width = f.turned ? f.depth : std::min(PANEL, f.columns - n0);
    for (long r = from; r < until; r++) {
        const T* row = f.turned ? f.b + (n0 + r) * f.b_stride : f.b + r * f.b_stride + n0;
        for (long i = 0; i < width; i += 64 / (long)sizeof(T)) __builtin_prefetch(row + i, 0, 2);
    }
}

// Rows of a left factor as units, some at a time: where they lie, or packed.
template <class T> struct Left {
    typedef typename Units<T>::type U;
    typedef typename U::unit unit;
    const T* numbers;
    long stride, count;
    unit* room;
    bool lie = lies_in_units<T>(stride, 0, count);
    long step = lie ? stride / U::P : whole(count, LANES) / U::P;
    const unit* next(long rows) {
        const T* from = numbers;
        numbers += rows * stride;
        if (lie) return (const unit*)from;
        pack_rows<U>(from, stride, rows, rows, count, step * U::P, room);
        return room;
    }
};

// By all threads of the region that it is called in, each with its own part; none waits.
template <class T> static void multiply(const Factors<T>& f, const Added<T>& added, T* c, long c_stride) {
    typedef typename Units<T>::type U;
    typedef typename U::unit unit;
    static thread_local Room mine;
    long tiles = (f.rows + TALL - 1) / TALL, panels = (f.columns + PANEL - 1) / PANEL;
    long me = omp_get_thread_num(), threads = omp_get_num_threads();
    long at = tiles * panels * me / threads, end = tiles * panels * (me + 1) / threads, ranks = 0;
    for (const Member* m = added.members; m < added.end; m++) ranks = std::max<long>(ranks, m->rank_at + m->rank);
    ranks = whole(ranks, LANES);
    long wide = std::min(whole(f.depth, LANES), DEEP * U::P) / U::P;
    float* sums = mine.take(tiles * TALL * PANEL + PANEL + (PANEL + LANES + TALL) * (wide + ranks));
    float* bias = sums + tiles * TALL * PANEL;
    unit *b = (unit*)bias + PANEL, *up = b + PANEL * wide, *room = up + PANEL * ranks;
    unit *a_room = room + LANES * wide, *s_room = a_room + TALL * wide;
    for (long from, until; at < end; at += until - from) {  // tiles [from, until) of a panel
        long n0 = at / tiles * PANEL, n = std::min(PANEL, f.columns - n0);
        from = at % tiles, until = std::min(tiles, from + end - at);
        bool more = at + until - from < end;
        long asked = f.turned ? std::min(PANEL, f.columns - n0 - PANEL) : f.depth, each = asked / (until - from) + 1;
        for (long i = 0; i < PANEL; i += LANES)
            store(bias + i, added.bias ? load(added.bias + n0 + i, n - i) : vf{});
        Ranks of_panel = pack_ranks(added, n0, n, up);
        for (long k0 = 0; k0 < f.depth; k0 += DEEP * U::P) {
            long k1 = std::min(f.depth, k0 + DEEP * U::P), row = from * TALL;
            bool first = k0 == 0, last = k1 == f.depth;
            pack_panel(f, n0, n, k0, k1, b, room);
            Left<T> a{f.a + row * f.a_stride + k0, f.a_stride, k1 - k0, a_room};
            Left<T> s{added.s + row * added.s_stride + of_panel.first, added.s_stride, of_panel.count, s_room};
            Term<U> terms[2] = {{nullptr, b, a.step, whole(a.count, U::P) / U::P},
                                {nullptr, up, s.step, whole(s.count, U::P) / U::P}};
            long count = last && s.count ? 2 : 1, step = first ? 0 : PANEL;
            for (float* before = sums; row < std::min(f.rows, until * TALL); row += TALL, before += TALL * PANEL) {
                long rows = std::min(TALL, f.rows - row), number = row / TALL - from;
                if (last && more) ask_for_panel(f, n0 + PANEL, number * each, std::min(asked, (number + 1) * each));
                terms[0].a = a.next(rows);
                if (count == 2) terms[1].a = s.next(rows);
                const float* start = first ? bias : before;
                T* to = c + row * c_stride + n0;
                if (last && n == PANEL) {
                    blocks<U, 2>(rows, terms, count, start, step, to, c_stride);
                    continue;
                }
                if (n <= LANES)
                    blocks<U, 1>(rows, terms, count, start, step, before, PANEL);
                else
                    blocks<U, 2>(rows, terms, count, start, step, before, PANEL);
                for (long r = 0; last && r < rows; r++) store_row(to + r * c_stride, before + r * PANEL, 1.0f, n);
            }
        }
    }
}

// [Y | S] = X weight'^T with S = X A^T in the columns behind, then Y += bias + S B'.
template <class T>
static void project(const T* x, long x_stride, const T* weight, T* y, long y_stride, long rows, long outputs,
                    long width, long inputs, const T* bias, const Member* members, long count) {
    Factors<T> down{x, weight + outputs * inputs, x_stride, inputs, rows, width - outputs, inputs, true};
    Factors<T> base{x, weight, x_stride, inputs, rows, outputs, inputs, true};
    Added<T> nothing{}, added{bias, y + outputs, y_stride, members, members + count};
#pragma omp parallel
    {
        multiply(down, nothing, y + outputs, y_stride);
#pragma omp barrier
        multiply(base, added, y, y_stride);
    }
}

#define PRODUCTS(T, suffix)                                                                                            \
    HIVETUNE_API void multiply_##suffix(const T* a, long a_stride, const T* b, long b_stride, int turned, T* c,        \
                                        long c_stride, long rows, long columns, long depth) {                          \
        Factors<T> f{a, b, a_stride, b_stride, rows, columns, depth, turned != 0};                                     \
        _Pragma("omp parallel") multiply(f, Added<T>{}, c, c_stride);                                                  \
    }                                                                                                                  \
    HIVETUNE_API void project_##suffix(const T* x, long x_stride, const T* weight, T* y, long y_stride, long rows,     \
                                       long outputs, long width, long inputs, const T* bias, const Member* members,    \
                                       long count) {                                                                   \
        project(x, x_stride, weight, y, y_stride, rows, outputs, width, inputs, bias, members, count);                 \
    }
PRODUCTS(float, f32)
PRODUCTS(bf16, bf16)
