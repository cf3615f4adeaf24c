/* The structs that callers fill in; kernels/cpu/native_ops.py mirrors them. Strides are in elements. */
#ifndef FERRY_INTERFACE_H
#define FERRY_INTERFACE_H

#include <stdint.h>

/* Where a layer's K and V lie. */
typedef struct {
    int64_t block_size, block_stride, k_head_stride, k_token_stride, k_dim_stride, v_head_stride, v_token_stride;
} CacheLayout;

/* The arguments of attention that are the same for all layers of a step. */
typedef struct {
    int32_t num_sequences, heads, kv_heads, head_dim, window, threads;
    float scale;
    CacheLayout cache;
    int64_t q_token_stride, table_stride;
    const int32_t *block_tables, *query_lens, *context_lens, *query_starts;
} AttentionCall;

#endif
