/* Sixteen lanes of float, and the element types of weights and caches.
 *
 * GNU vector extensions: the same source becomes AVX-512, AVX2 or plain C, whatever -march says. No -ffast-math: every
 * result is the one order of operations written here, so it cannot depend on how much work surrounds it.
 */
#ifndef FERRY_VECTORS_H
#define FERRY_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

static const vi LANE_INDEX = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#define INLINE static inline __attribute__((always_inline))

INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf select_(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf vmax(vf a, vf b) { return select_(a > b, a, b); }

/* Sums and maxima over the lanes, always in the same tree: lane i with i + 8, then + 4, + 2, + 1. */
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define SHUFFLE(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define SHUFFLE(x, ...) __builtin_shuffle(x, (vi){__VA_ARGS__})
#endif
#define FOLD8(x) SHUFFLE(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define FOLD4(x) SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define FOLD2(x) SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define FOLD1(x) SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
INLINE float lane_sum(vf x) {
    x += FOLD8(x);
    x += FOLD4(x);
    x += FOLD2(x);
    x += FOLD1(x);
    return x[0];
}
INLINE float lane_max(vf x) {
    x = vmax(x, FOLD8(x));
    x = vmax(x, FOLD4(x));
    x = vmax(x, FOLD2(x));
    x = vmax(x, FOLD1(x));
    return x[0];
}

/* exp for x <= 0 (and small positive x): 2^n * p(r), |error| < 2 ulp; exp(0) is exactly 1; below -87 it is 0.
 * Coefficients: Cephes expf, S. Moshier. */
INLINE vf vexp(vf x) {
    vi tiny = x < splat(-87.0f);
    x = vmax(x, splat(-87.0f));
    vf n = x * 1.44269504088896341f;
    n = (n + splat(12582912.0f)) - splat(12582912.0f); /* round to nearest */
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    return select_(tiny, splat(0.0f), p * (vf)e);
}
INLINE float exp1(float x) { return vexp(splat(x))[0]; }

/* One element type: how 16 and 1 of its values become floats and come back. */
INLINE vf load16_f32(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store16_f32(float *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE float load1_f32(const float *p) { return *p; }
INLINE void store1_f32(float *p, float x) { *p = x; }

INLINE vf load16_bf16(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
INLINE void store16_bf16(uint16_t *p, vf x) { /* round to nearest even; a NaN stays one */
    vu u = (vu)x;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu nan = (u >> 16) | 0x40u;
    vi is_nan = x != x;
    vu r = ((vu)is_nan & nan) | (~(vu)is_nan & rounded);
    vh h = __builtin_convertvector(r, vh);
    memcpy(p, &h, sizeof h);
}
INLINE float load1_bf16(const uint16_t *p) {
    uint32_t u = (uint32_t)*p << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
INLINE void store1_bf16(uint16_t *p, float x) {
    uint16_t h[LANES];
    store16_bf16(h, splat(x));
    *p = h[0];
}

#ifdef __FLT16_MANT_DIG__
#define HAVE_F16 1
typedef _Float16 v16h __attribute__((vector_size(32)));
INLINE vf load16_f16(const _Float16 *p) {
    v16h h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, vf);
}
INLINE void store16_f16(_Float16 *p, vf x) {
    v16h h = __builtin_convertvector(x, v16h);
    memcpy(p, &h, sizeof h);
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
