/* Row-wise kernels for one element type E with suffix S; included once a type. Rows are independent. */

/* out = (x + residual) / rms(x + residual) * weight; residual, float, becomes x + residual. Without a residual: of x.
 * x rows are x_stride elements apart, out rows are dense. */
EXPORT void FN(rms_norm)(const E *x, int64_t x_stride, float *residual, const E *weight, E *out, int64_t rows,
                         int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++) {
        const E *source = x + row * x_stride;
        float *sums = residual ? residual + row * size : NULL;
        E *target = out + row * size;
        vf squares = splat(0.0f);
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) {
            vf value = LOAD16(source + i);
            if (sums) {
                value = add(value, load16_f32(sums + i));
                store16_f32(sums + i, value);
            }
            squares = add_product(squares, value, value);
        }
        if (i < size) {
            vf value = LOAD_TAIL(source + i, (int)(size - i));
            if (sums) {
                value = add(value, load_tail_f32(sums + i, (int)(size - i)));
                store_tail_f32(sums + i, value, (int)(size - i));
            }
            squares = add_product(squares, value, value);
        }
        const float inverse = 1.0f / sqrtf(lane_sum(squares) / (float)size + eps);
        for (i = 0; i + LANES <= size; i += LANES) {
            const vf value = sums ? load16_f32(sums + i) : LOAD16(source + i);
            STORE16(target + i, mul(scale(value, inverse), LOAD16(weight + i)));
        }
        if (i < size) {
            const int n = (int)(size - i);
            const vf value = sums ? load_tail_f32(sums + i, n) : LOAD_TAIL(source + i, n);
            STORE_TAIL(target + i, mul(scale(value, inverse), LOAD_TAIL(weight + i, n)), n);
        }
    }
}

/* out = silu(gate) * up; x rows are [gate | up], `size` elements each. */
EXPORT void FN(silu_mul)(const E *x, E *out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++) {
        const E *gate = x + row * 2 * size, *up = gate + size;
        E *target = out + row * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) STORE16(target + i, mul(silu(LOAD16(gate + i)), LOAD16(up + i)));
        if (i < size) {
            const int n = (int)(size - i);
            STORE_TAIL(target + i, mul(silu(LOAD_TAIL(gate + i, n)), LOAD_TAIL(up + i, n)), n);
        }
    }
}

/* x[0 : half], x[half : 2 half] rotated by the angles; out may be x. */
INLINE void FN(rotate)(const E *x, E *out, int64_t out_stride, const float *cos_, const float *sin_, int half) {
    for (int i = 0; i < half; i++) {
        const float a = LOAD1(x + i), b = LOAD1(x + half + i);
        STORE1(out + i * out_stride, fma1(a, cos_[i], -(b * sin_[i])));
        STORE1(out + (half + i) * out_stride, fma1(b, cos_[i], a * sin_[i]));
    }
}

/* Rotate q in place, rotate k and store it with v in the cache at slots; a slot below 0 stores nothing. */
EXPORT void FN(rope_and_cache)(E *q, int64_t q_stride, const E *k, int64_t k_stride, const E *v, int64_t v_stride,
                               const float *cos_, const float *sin_, const int64_t *slots, E *k_cache, E *v_cache,
                               const CacheLayout *at, int64_t tokens, int heads, int kv_heads, int head_dim,
                               int threads) {
    const int half = head_dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * (heads + kv_heads) * head_dim > PARALLEL_WORK)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = cos_ + token * half, *s = sin_ + token * half;
        for (int h = 0; h < heads; h++) {
            E *row = q + token * q_stride + h * head_dim;
            FN(rotate)(row, row, 1, c, s, half);
        }
        const int64_t slot = slots[token];
        if (slot < 0) continue;
        const int64_t block = slot / at->block_size, offset = slot % at->block_size;
        for (int h = 0; h < kv_heads; h++) {
            E *kt = k_cache + block * at->block_stride + h * at->k_head_stride + offset * at->k_token_stride;
            E *vt = v_cache + block * at->block_stride + h * at->v_head_stride + offset * at->v_token_stride;
            FN(rotate)(k + token * k_stride + h * head_dim, kt, at->k_dim_stride, c, s, half);
            memcpy(vt, v + token * v_stride + h * head_dim, sizeof(E) * head_dim);
        }
    }
}
