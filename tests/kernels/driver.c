/* The native kernels of one library against plain loops in double, without Python: for processors that are emulated and
 * for the compiler's sanitizers. Linked with the library; exits with 1 and a line for each check that fails. The last line
 * has a digest of all that the kernels computed: equal for one instruction set, however it was compiled. */

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interface.h"

typedef struct {
    const char *name;
    size_t size;
    float tolerance; /* relative to values of about 1 */
    float (*get)(const void *, int64_t);
    void (*put)(void *, int64_t, float);
    void (*rms_norm)(const void *, int64_t, float *, const void *, void *, int64_t, int64_t, float, int);
    void (*silu_mul)(const void *, void *, int64_t, int64_t, int);
    void (*rope_and_cache)(void *, int64_t, const void *, int64_t, const void *, int64_t, const float *, const float *,
                           const int64_t *, void *, void *, const CacheLayout *, int64_t, int, int, int, int);
    int (*argmax)(const void *, int64_t, const void *, const void *, int64_t *, int64_t, int64_t, int64_t, int);
    int (*attention)(const AttentionCall *, const void *, const void *, const void *, void *);
} Type;

static int failures, checks;

static void check(int passed, const char *format, ...) {
    checks++;
    if (passed) return;
    failures++;
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
}

static uint64_t digest = 14695981039346656037u;
static void take(const void *p, size_t size) { /* FNV-1a */
    for (size_t i = 0; i < size; i++) digest = (digest ^ ((const uint8_t *)p)[i]) * 1099511628211u;
}

static float f32_get(const void *p, int64_t i) { return ((const float *)p)[i]; }
static void f32_put(void *p, int64_t i, float x) { ((float *)p)[i] = x; }
static float bf16_get(const void *p, int64_t i) {
    const uint32_t u = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}
static void bf16_put(void *p, int64_t i, float x) { /* cut off: inputs only need to be some number of this type */
    uint32_t u;
    memcpy(&u, &x, 4);
    ((uint16_t *)p)[i] = (uint16_t)(u >> 16);
}
#ifdef __FLT16_MANT_DIG__
static float f16_get(const void *p, int64_t i) { return (float)((const _Float16 *)p)[i]; }
static void f16_put(void *p, int64_t i, float x) { ((_Float16 *)p)[i] = (_Float16)x; }
#endif

/* About normal: the sum of four uniform numbers. */
static float noise(void) {
    static uint64_t state = 1;
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(state >> 40) / (1 << 24) - 0.5f;
    }
    return 1.7f * sum;
}

static void *filled(const Type *t, int64_t count, float (*value)(void)) {
    void *p = malloc(count * t->size);
    if (!p) exit(2);
    for (int64_t i = 0; i < count; i++) t->put(p, i, value());
    return p;
}
static float nothing(void) { return NAN; }
static float coarse(void) { return roundf(noise()); } /* many are equal */

static int close_to(const Type *t, float found, double expected) {
    return fabs(found - expected) <= t->tolerance * fmax(1.0, fabs(expected));
}

static void check_rms_norm(const Type *t, int64_t size) {
    const int64_t rows = 3, stride = size + 5;
    void *x = filled(t, rows * stride, noise), *weight = filled(t, size, noise), *out = filled(t, rows * size, nothing);
    float *residual = malloc(rows * size * sizeof(float)), *before = malloc(rows * size * sizeof(float));
    for (int64_t i = 0; i < rows * size; i++) residual[i] = before[i] = noise();
    for (int with_residual = 0; with_residual < 2; with_residual++) {
        t->rms_norm(x, stride, with_residual ? residual : NULL, weight, out, rows, size, 1e-5f, 2);
        int good = 1;
        for (int64_t r = 0; r < rows; r++) {
            double squares = 0;
            for (int64_t i = 0; i < size; i++) {
                const double v = t->get(x, r * stride + i) + (with_residual ? (double)before[r * size + i] : 0.0);
                squares += v * v;
            }
            for (int64_t i = 0; i < size; i++) {
                const float sum = t->get(x, r * stride + i) + (with_residual ? before[r * size + i] : 0.0f);
                const double expected = sum / sqrt(squares / size + 1e-5) * t->get(weight, i);
                good &= close_to(t, t->get(out, r * size + i), expected);
                if (with_residual) good &= residual[r * size + i] == sum;
            }
        }
        take(out, rows * size * t->size);
        check(good, "rms_norm %s, size %d, residual %d", t->name, (int)size, with_residual);
    }
    free(x), free(weight), free(out), free(residual), free(before);
}

static void check_silu_mul(const Type *t, int64_t size) {
    const int64_t rows = 3;
    void *x = filled(t, rows * 2 * size, noise), *out = filled(t, rows * size, nothing);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < size; i++) t->put(x, r * 2 * size + i, 8 * t->get(x, r * 2 * size + i));
    t->silu_mul(x, out, rows, size, 2);
    int good = 1;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < size; i++) {
            const double gate = t->get(x, r * 2 * size + i), up = t->get(x, r * 2 * size + size + i);
            good &= close_to(t, t->get(out, r * size + i), gate / (1 + exp(-gate)) * up);
        }
    take(out, rows * size * t->size);
    check(good, "silu_mul %s, size %d", t->name, (int)size);
    free(x), free(out);
}

static void check_argmax(const Type *t, int64_t size) {
    const int64_t rows = 6, hidden = 40;
    void *logits = filled(t, rows * size, coarse), *x = filled(t, rows * hidden, noise);
    void *weight = filled(t, size * hidden, noise);
    int64_t found[6], tied[6];
    t->put(logits, 4 * size + size - 1, NAN);
    t->put(logits, 5 * size + size / 2, INFINITY);
    int failed = t->argmax(logits, size, NULL, NULL, found, rows, size, 0, 2);
    failed |= t->argmax(logits, size, x, weight, tied, rows, size, hidden, 2);
    for (int64_t r = 0; r < rows; r++) {
        int64_t first = 0, best = 0;
        double product = -INFINITY;
        for (int64_t i = 1; i < size; i++)
            if (t->get(logits, r * size + i) > t->get(logits, r * size + first)) first = i;
        for (int64_t i = 0; i < size; i++) {
            double sum = 0;
            for (int64_t d = 0; d < hidden; d++)
                sum += (double)t->get(x, r * hidden + d) * t->get(weight, i * hidden + d);
            const int equal = t->get(logits, r * size + i) == t->get(logits, r * size + first);
            if (equal && sum > product) product = sum, best = i;
        }
        if (r >= 4) first = best = -1; /* no number, or infinity, among them */
        check(!failed && found[r] == first, "argmax %s, size %d: %d for %d", t->name, (int)size, (int)found[r], (int)first);
        check(tied[r] == best, "head_argmax %s, size %d: %d for %d", t->name, (int)size, (int)tied[r], (int)best);
    }
    free(logits), free(x), free(weight);
}

/* Blocks in falling order of a cache whose blocks hold K, V and room for others between. */
typedef struct {
    CacheLayout at;
    void *k, *v;
    int64_t blocks;
} Cache;

static Cache make_cache(const Type *t, int64_t blocks, int64_t block_size, int kv_heads, int head_dim, int transposed) {
    const int64_t part = block_size * kv_heads * head_dim, k_token = transposed ? 1 : head_dim;
    char *slab = filled(t, 3 * part * blocks, nothing);
    const CacheLayout at = {block_size, 3 * part,           block_size * head_dim, k_token, transposed ? block_size : 1,
                            block_size * head_dim, head_dim};
    return (Cache){at, slab, slab + part * t->size, blocks};
}
static int64_t k_index(const CacheLayout *at, int64_t block, int64_t offset, int head, int d) {
    return block * at->block_stride + head * at->k_head_stride + offset * at->k_token_stride + d * at->k_dim_stride;
}
static int64_t v_index(const CacheLayout *at, int64_t block, int64_t offset, int head, int d) {
    return block * at->block_stride + head * at->v_head_stride + offset * at->v_token_stride + d;
}

static void check_rope_and_cache(const Type *t, int head_dim, int transposed) {
    enum { TOKENS = 4, HEADS = 3, KV_HEADS = 2 };
    const int64_t slots[TOKENS] = {17, -1, 0, 15}, row = (HEADS + 2 * KV_HEADS) * head_dim;
    const int half = head_dim / 2;
    Cache cache = make_cache(t, 2, 16, KV_HEADS, head_dim, transposed);
    char *qkv = filled(t, TOKENS * row, noise), *before = malloc(TOKENS * row * t->size);
    memcpy(before, qkv, TOKENS * row * t->size);
    float *angles = malloc(sizeof(float) * 2 * TOKENS * half), *cosines = angles, *sines = angles + TOKENS * half;
    for (int i = 0; i < TOKENS * half; i++) cosines[i] = noise(), sines[i] = noise();
    const int64_t k_at = HEADS * head_dim, v_at = k_at + KV_HEADS * head_dim;
    t->rope_and_cache(qkv, row, qkv + k_at * t->size, row, qkv + v_at * t->size, row, cosines, sines, slots, cache.k,
                      cache.v, &cache.at, TOKENS, HEADS, KV_HEADS, head_dim, 2);
    int good = 1, written = 0;
    for (int token = 0; token < TOKENS; token++)
        for (int h = 0; h < HEADS + KV_HEADS; h++)
            for (int d = 0; d < head_dim; d++) {
                const int64_t at = token * row + h * head_dim, block = slots[token] / 16, offset = slots[token] % 16;
                const double a = t->get(before, at + d % half), b = t->get(before, at + half + d % half);
                const double c = cosines[token * half + d % half], s = sines[token * half + d % half];
                const double expected = d < half ? a * c - b * s : b * c + a * s;
                if (h < HEADS) {
                    good &= close_to(t, t->get(qkv, at + d), expected);
                } else if (slots[token] >= 0) {
                    const int head = h - HEADS;
                    const float k = t->get(cache.k, k_index(&cache.at, block, offset, head, d));
                    const float v = t->get(cache.v, v_index(&cache.at, block, offset, head, d));
                    good &= close_to(t, k, expected) && v == t->get(before, token * row + v_at + head * head_dim + d);
                }
            }
    for (int64_t i = 0; i < cache.blocks * cache.at.block_stride; i++) written += !isnan(t->get(cache.k, i));
    take(qkv, TOKENS * row * t->size);
    check(good, "rope_and_cache %s, head_dim %d, transposed %d", t->name, head_dim, transposed);
    check(written == 3 * 2 * KV_HEADS * head_dim, "rope_and_cache %s wrote %d values", t->name, written);
    free(cache.k), free(qkv), free(before), free(angles);
}

/* The last `queries` tokens of a sequence of `context`, beside a sequence of one query and half the context. */
static void check_attention(const Type *t, int queries, int context, int heads, int kv_heads, int head_dim,
                            int block_size, int window, int threads, int transposed) {
    const int32_t query_lens[2] = {1, queries}, context_lens[2] = {(context + 1) / 2, context}, starts[2] = {0, 1};
    const int table_size = (context + block_size - 1) / block_size, tokens = 1 + queries;
    Cache cache = make_cache(t, 2 * table_size + 1, block_size, kv_heads, head_dim, transposed);
    int32_t *tables = malloc(sizeof(int32_t) * 2 * table_size);
    for (int i = 0; i < 2 * table_size; i++) tables[i] = 2 * table_size - i;
    for (int s = 0; s < 2; s++)
        for (int p = 0; p < context_lens[s]; p++)
            for (int h = 0; h < kv_heads; h++)
                for (int d = 0; d < head_dim; d++) {
                    const int64_t block = tables[s * table_size + p / block_size], offset = p % block_size;
                    t->put(cache.k, k_index(&cache.at, block, offset, h, d), noise());
                    t->put(cache.v, v_index(&cache.at, block, offset, h, d), noise());
                }
    const int64_t q_stride = heads * head_dim + 8;
    void *q = filled(t, tokens * q_stride, noise), *out = filled(t, tokens * heads * head_dim, nothing);
    const AttentionCall call = {
        .num_sequences = 2, .heads = heads, .kv_heads = kv_heads, .head_dim = head_dim, .window = window,
        .threads = threads, .scale = 1 / sqrtf(head_dim), .q_token_stride = q_stride, .cache = cache.at,
        .table_stride = table_size, .block_tables = tables, .query_lens = query_lens, .context_lens = context_lens, .query_starts = starts};
    const int failed = t->attention(&call, q, cache.k, cache.v, out);
    take(out, tokens * heads * head_dim * t->size);
    double *scores = malloc(sizeof(double) * context), worst = 0;
    for (int token = 0; token < tokens; token++) {
        const int s = token > 0, high = context_lens[s] - query_lens[s] + (token - starts[s]) + 1;
        const int low = window > 0 && high > window ? high - window : 0;
        for (int h = 0; h < heads; h++) {
            const int kv = h / (heads / kv_heads);
            double total = 0, largest = -INFINITY;
            for (int p = low; p < high; p++) {
                const int64_t block = tables[s * table_size + p / block_size], offset = p % block_size;
                scores[p] = 0;
                for (int d = 0; d < head_dim; d++)
                    scores[p] += (double)t->get(q, token * q_stride + h * head_dim + d) *
                                 t->get(cache.k, k_index(&cache.at, block, offset, kv, d)) * call.scale;
                largest = fmax(largest, scores[p]);
            }
            for (int p = low; p < high; p++) total += scores[p] = exp(scores[p] - largest);
            for (int d = 0; d < head_dim; d++) {
                double expected = 0;
                for (int p = low; p < high; p++) {
                    const int64_t block = tables[s * table_size + p / block_size], offset = p % block_size;
                    expected += scores[p] / total * t->get(cache.v, v_index(&cache.at, block, offset, kv, d));
                }
                const float found = t->get(out, ((int64_t)token * heads + h) * head_dim + d);
                const double error = fabs(found - expected) / fmax(1.0, fabs(expected)); /* as close_to has it */
                if (!(error <= worst)) worst = error; /* also where it is no number */
            }
        }
    }
    check(!failed && worst <= t->tolerance,
          "attention %s: %d queries of %d, heads %d/%d of %d, block %d, window %d, %d threads, transposed %d: %g off",
          t->name, queries, context, heads, kv_heads, head_dim, block_size, window, threads, transposed, worst);
    free(cache.k), free(tables), free(q), free(out), free(scores);
}

/* A sequence at once, by one thread, and some of its positions alone, their contexts split over two: the same bits. */
static void check_bits(const Type *t, int heads, int kv_heads, int head_dim, int block_size) {
    enum { CONTEXT = 270 }; /* states are merged at 256 */
    static const int positions[] = {0, 15, 16, 100, 254, 255, 256, 257, 269};
    const int32_t blocks = (CONTEXT + block_size - 1) / block_size, starts = 0;
    const int64_t row = heads * head_dim;
    Cache cache = make_cache(t, blocks, block_size, kv_heads, head_dim, 1);
    for (int p = 0; p < CONTEXT; p++)
        for (int h = 0; h < kv_heads; h++)
            for (int d = 0; d < head_dim; d++) {
                t->put(cache.k, k_index(&cache.at, p / block_size, p % block_size, h, d), noise());
                t->put(cache.v, v_index(&cache.at, p / block_size, p % block_size, h, d), noise());
            }
    int32_t *table = malloc(sizeof(int32_t) * blocks), queries = CONTEXT, context = CONTEXT;
    for (int i = 0; i < blocks; i++) table[i] = i;
    char *q = filled(t, CONTEXT * row, noise), *whole = filled(t, CONTEXT * row, nothing), *one = filled(t, row, nothing);
    for (int i = 0; i < CONTEXT * row; i++) t->put(q, i, 6 * t->get(q, i)); /* sharp: every sum's rounding shows */
    AttentionCall call = {
        .num_sequences = 1, .heads = heads, .kv_heads = kv_heads, .head_dim = head_dim, .threads = 1,
        .scale = 1 / sqrtf(head_dim), .q_token_stride = row, .cache = cache.at, .table_stride = blocks,
        .block_tables = table, .query_lens = &queries, .context_lens = &context, .query_starts = &starts};
    int failed = t->attention(&call, q, cache.k, cache.v, whole), different = 0;
    queries = 1;
    for (int i = 0; i < 2 * 9; i++) {
        const int position = positions[i / 2];
        context = position + 1;
        call.threads = 1 + i % 2;
        failed |= t->attention(&call, q + position * row * t->size, cache.k, cache.v, one);
        different += memcmp(one, whole + position * row * t->size, row * t->size) != 0;
    }
    check(!failed && !different, "attention %s, heads %d/%d of %d, block %d: decode differs from prefill at %d positions",
          t->name, heads, kv_heads, head_dim, block_size, different);
    free(cache.k), free(table), free(q), free(whole), free(one);
}

static void check_type(const Type *t) {
    static const int sizes[] = {8, 16, 24, 100, 576}, head_dims[] = {16, 24, 40, 64, 80, 104, 128, 256};
    for (int i = 0; i < 5; i++) check_rms_norm(t, sizes[i]), check_silu_mul(t, sizes[i]), check_argmax(t, sizes[i]);
    check_argmax(t, 40000); /* in parts */
    for (int i = 0; i < 8; i++)
        for (int transposed = 0; transposed < 2; transposed++) {
            check_rope_and_cache(t, head_dims[i], transposed);
            check_attention(t, 5, 35, 4, 2, head_dims[i], 16, 0, 2, transposed); /* floats are made of a tile */
            check_attention(t, 1, 35, 4, 2, head_dims[i], 16, 0, 1, transposed); /* or not */
        }
    for (int group = 1; group < 10; group++) check_attention(t, 3, 20, 2 * group, 2, 16, 16, 0, 1, 1);
    for (int block_size = 8; block_size <= 128; block_size *= 2) {
        check_attention(t, 1, block_size, 3, 1, 16, block_size, 0, 2, 1);
        check_attention(t, 2, block_size + 1, 3, 1, 16, block_size, 0, 2, 1);
        check_attention(t, 1, 300, 3, 1, 16, block_size, 100, 2, 1);
        check_attention(t, 40, 300, 3, 1, 16, block_size, 17, 2, 1);
    }
    check_bits(t, 2, 2, 64, 16);
    check_bits(t, 4, 1, 128, 32);
    check_bits(t, 3, 1, 16, 8);
    check_bits(t, 3, 1, 40, 16);
    check_bits(t, 7, 1, 80, 16);
    check_attention(t, 1, 1500, 3, 1, 64, 16, 0, 1, 1);
    check_attention(t, 2, 1500, 3, 1, 64, 16, 0, 2, 1); /* a context split over threads */
}

#define DECLARE(s)                                                                                                     \
    extern void rms_norm_##s(const void *, int64_t, float *, const void *, void *, int64_t, int64_t, float, int);      \
    extern void silu_mul_##s(const void *, void *, int64_t, int64_t, int);                                             \
    extern void rope_and_cache_##s(void *, int64_t, const void *, int64_t, const void *, int64_t, const float *,       \
                                   const float *, const int64_t *, void *, void *, const CacheLayout *, int64_t, int,  \
                                   int, int, int);                                                                     \
    extern int argmax_##s(const void *, int64_t, const void *, const void *, int64_t *, int64_t, int64_t, int64_t, int); \
    extern int attention_##s(const AttentionCall *, const void *, const void *, const void *, void *);
#define TYPE(s, bytes, tolerance)                                                                                      \
    {#s, bytes, tolerance, s##_get, s##_put, rms_norm_##s, silu_mul_##s, rope_and_cache_##s, \
     argmax_##s, attention_##s}

DECLARE(f32)
DECLARE(bf16)
#ifdef __FLT16_MANT_DIG__
DECLARE(f16)
#endif

int main(void) {
    const Type types[] = {
        TYPE(f32, 4, 4e-6f),
        TYPE(bf16, 2, 1.0f / 256),
#ifdef __FLT16_MANT_DIG__
        TYPE(f16, 2, 1.0f / 2048),
#endif
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) check_type(&types[i]);
    printf("%d of %d checks failed\nbits %016llx\n", failures, checks, (unsigned long long)digest);
    return failures > 0;
}
