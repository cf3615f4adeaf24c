/* Sixteen lanes of float, and the element types of weights and caches.
 *
 * A vf is 16 floats in parts as wide as the machine's vectors: one part with AVX-512, two with AVX2, else four. Parts
 * are GNU vectors, so one source serves every instruction set. (One GNU vector of 16 lanes would, too, but compilers
 * keep types wider than a register in memory.) Compilers neither reorder (no -ffast-math) nor fuse operations
 * (-ffp-contract=off): every result is the one order of operations and roundings written here, so it cannot depend on
 * how much work surrounds it.
 */
#ifndef FERRY_VECTORS_H
#define FERRY_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LANES 16
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define PARTS (LANES / WIDTH)

typedef float pf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t pi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t pu __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t ph __attribute__((vector_size(2 * WIDTH)));

typedef struct { pf part[PARTS]; } vf;
typedef struct { pi part[PARTS]; } vi; /* a mask: lanes are 0 or -1 */

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

/* A statement for every part i, i a constant: arrays of parts become registers before any loop is looked at. */
#define AT(n, ...) { enum { i = n }; __VA_ARGS__; }
#if PARTS == 1
#define EACH(...) AT(0, __VA_ARGS__)
#elif PARTS == 2
#define EACH(...) AT(0, __VA_ARGS__) AT(1, __VA_ARGS__)
#else
#define EACH(...) AT(0, __VA_ARGS__) AT(1, __VA_ARGS__) AT(2, __VA_ARGS__) AT(3, __VA_ARGS__)
#endif

INLINE pf splat_part(float x) { return x - (pf){0}; } /* x - 0 is x, also for -0 */
INLINE pf select_part(pi mask, pf yes, pf no) { return (pf)((mask & (pi)yes) | (~mask & (pi)no)); }
INLINE pf max_part(pf a, pf b) { return select_part(a > b, a, b); } /* b where either is no number */
INLINE pf max_or_nan_part(pf a, pf b) { return select_part((a > b) | (a != a), a, b); }

/* a * b + c, rounded once where the machine can, else twice: every multiply-add of the kernels is one of these. */
INLINE pf fma_part(pf a, pf b, pf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}
INLINE float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE vf splat(float x) { vf r; EACH(r.part[i] = splat_part(x)) return r; }
INLINE vf add(vf a, vf b) { EACH(a.part[i] += b.part[i]) return a; }
INLINE vf mul(vf a, vf b) { EACH(a.part[i] *= b.part[i]) return a; }
INLINE vf scale(vf a, float x) { EACH(a.part[i] *= x) return a; }
INLINE vf add_product(vf sum, vf a, vf b) { EACH(sum.part[i] = fma_part(a.part[i], b.part[i], sum.part[i])) return sum; }
INLINE vf add_scaled(vf sum, vf a, float x) {
    EACH(sum.part[i] = fma_part(a.part[i], splat_part(x), sum.part[i]))
    return sum;
}
INLINE vf max_or_nan(vf a, vf b) { EACH(a.part[i] = max_or_nan_part(a.part[i], b.part[i])) return a; }
INLINE vf select_(vi mask, vf yes, vf no) {
    EACH(yes.part[i] = select_part(mask.part[i], yes.part[i], no.part[i]))
    return yes;
}

/* The lanes whose index is in [low, high). */
INLINE vi lanes_between(int low, int high) {
    static const int32_t index[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi r;
    memcpy(&r, index, sizeof r);
    EACH(r.part[i] = (r.part[i] >= low) & (r.part[i] < high))
    return r;
}

/* Sums and maxima over the lanes, always in the same tree: lane i with i + 8, then + 4, + 2, + 1. */
#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(x, ...) __builtin_shuffle(x, (pi){__VA_ARGS__})
#endif
#if WIDTH == 16
#define FOLD8(x) SHUFFLE(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define FOLD4(x) SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define FOLD2(x) SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define FOLD1(x) SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define DEFINE_FOLD(name, combine)                 \
    INLINE float name(vf v) {                      \
        pf x = combine(v.part[0], FOLD8(v.part[0])); \
        x = combine(x, FOLD4(x));                  \
        x = combine(x, FOLD2(x));                  \
        return combine(x, FOLD1(x))[0];            \
    }
#elif WIDTH == 8
#define FOLD4(x) SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3)
#define FOLD2(x) SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5)
#define FOLD1(x) SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6)
#define DEFINE_FOLD(name, combine)                 \
    INLINE float name(vf v) {                      \
        pf x = combine(v.part[0], v.part[1]);      \
        x = combine(x, FOLD4(x));                  \
        x = combine(x, FOLD2(x));                  \
        return combine(x, FOLD1(x))[0];            \
    }
#else
#define FOLD2(x) SHUFFLE(x, 2, 3, 0, 1)
#define FOLD1(x) SHUFFLE(x, 1, 0, 3, 2)
#define DEFINE_FOLD(name, combine)                                                                  \
    INLINE float name(vf v) {                                                                       \
        pf x = combine(combine(v.part[0], v.part[2]), combine(v.part[1], v.part[3]));               \
        x = combine(x, FOLD2(x));                                                                   \
        return combine(x, FOLD1(x))[0];                                                             \
    }
#endif
INLINE pf add_part(pf a, pf b) { return a + b; }
DEFINE_FOLD(lane_sum, add_part)
DEFINE_FOLD(lane_max, max_part) /* a NaN may be lost */
DEFINE_FOLD(lane_max_or_nan, max_or_nan_part)

/* exp for x <= 0 (and small positive x): 2^n * p(r), |error| < 2 ulp; exp(0) is exactly 1; below -87 it is 0;
 * a NaN stays one. Coefficients: Cephes expf, S. Moshier. */
INLINE pf exp_part(pf x) {
    const pf least = splat_part(-87.0f), rounder = splat_part(12582912.0f);
    pi tiny = x < least;
    x = select_part(tiny, least, x); /* keeps a NaN */
    const pf n = fma_part(x, splat_part(1.44269504088896341f), rounder) - rounder; /* rounds to an integer */
    const pf r = fma_part(n, splat_part(2.12194440e-4f), fma_part(n, splat_part(-0.693359375f), x));
    pf p = splat_part(1.9875691500e-4f);
    p = fma_part(p, r, splat_part(1.3981999507e-3f));
    p = fma_part(p, r, splat_part(8.3334519073e-3f));
    p = fma_part(p, r, splat_part(4.1665795894e-2f));
    p = fma_part(p, r, splat_part(1.6666665459e-1f));
    p = fma_part(p, r, splat_part(5.0000001201e-1f));
    p = fma_part(p, r * r, r) + 1.0f;
    pi e = (__builtin_convertvector(n, pi) + 127) << 23;
    return select_part(tiny, splat_part(0.0f), p * (pf)e);
}
/* exp(x - maximum) */
INLINE vf exp_below(vf x, float maximum) { EACH(x.part[i] = exp_part(x.part[i] - maximum)) return x; }
INLINE float exp1(float x) { return exp_part(splat_part(x))[0]; }

INLINE vf silu(vf x) {
    EACH(const pf e = exp_part(select_part(x.part[i] > 0.0f, -x.part[i], x.part[i])); /* exp(-|x|) <= 1 */
         const pf positive = splat_part(1.0f) / (e + 1.0f);
         x.part[i] *= select_part(x.part[i] > 0.0f, positive, e / (e + 1.0f)))
    return x;
}

/* One element type: how 16 and 1 of its values become floats and come back. */
INLINE vf load16_f32(const float *p) {
    vf x;
    EACH(memcpy(&x.part[i], p + i * WIDTH, sizeof(pf)))
    return x;
}
INLINE void store16_f32(float *p, vf x) { EACH(memcpy(p + i * WIDTH, &x.part[i], sizeof(pf))) }
INLINE float load1_f32(const float *p) { return *p; }
INLINE void store1_f32(float *p, float x) { *p = x; }

INLINE vf load16_bf16(const uint16_t *p) {
    vf x;
    EACH(ph h; memcpy(&h, p + i * WIDTH, sizeof h); x.part[i] = (pf)(__builtin_convertvector(h, pu) << 16))
    return x;
}
/* The upper half of the result: rounded to nearest even; a NaN stays one. */
#define ROUND_BF16(u, is_nan) ((is_nan & ((u >> 16) | 0x40u)) | (~is_nan & ((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)))
INLINE void store16_bf16(uint16_t *p, vf x) {
    EACH(const pu u = (pu)x.part[i]; const pu is_nan = (pu)(x.part[i] != x.part[i]);
         const ph h = __builtin_convertvector(ROUND_BF16(u, is_nan), ph); memcpy(p + i * WIDTH, &h, sizeof h))
}
INLINE float load1_bf16(const uint16_t *p) {
    uint32_t u = (uint32_t)*p << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
INLINE void store1_bf16(uint16_t *p, float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    const uint32_t is_nan = x != x ? ~0u : 0u;
    *p = (uint16_t)ROUND_BF16(u, is_nan);
}

#ifdef __FLT16_MANT_DIG__
#define HAVE_F16 1
typedef _Float16 pe __attribute__((vector_size(2 * WIDTH)));
INLINE vf load16_f16(const _Float16 *p) {
    vf x;
    EACH(pe h; memcpy(&h, p + i * WIDTH, sizeof h); x.part[i] = __builtin_convertvector(h, pf))
    return x;
}
INLINE void store16_f16(_Float16 *p, vf x) {
    EACH(const pe h = __builtin_convertvector(x.part[i], pe); memcpy(p + i * WIDTH, &h, sizeof h))
}
INLINE float load1_f16(const _Float16 *p) { return (float)*p; }
INLINE void store1_f16(_Float16 *p, float x) { *p = (_Float16)x; }
#endif

/* The first n < 16 values, the other lanes 0. */
#define DEFINE_TAILS(S, E)                                            \
    INLINE vf load_tail_##S(const E *p, int n) {                      \
        E a[LANES];                                                   \
        memset(a, 0, sizeof a);                                       \
        memcpy(a, p, (size_t)n * sizeof(E));                          \
        return load16_##S(a);                                         \
    }                                                                 \
    INLINE void store_tail_##S(E *p, vf x, int n) {                   \
        E a[LANES];                                                   \
        store16_##S(a, x);                                            \
        memcpy(p, a, (size_t)n * sizeof(E));                          \
    }
DEFINE_TAILS(f32, float)
DEFINE_TAILS(bf16, uint16_t)
#ifdef HAVE_F16
DEFINE_TAILS(f16, _Float16)
#endif

#endif
