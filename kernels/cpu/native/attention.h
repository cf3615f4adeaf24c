/* Paged attention for one element type E with suffix S; included once a type.
 *
 * Prefill and decode are the same arithmetic: for every query row the keys it sees are taken in tiles of at most 16
 * tokens at absolute positions, in order; a tile updates a running maximum, sum and weighted value (online softmax,
 * Milakov and Gimelshein 2018). Every SEGMENT tokens the running state is merged into the row's total. Rows are
 * independent, so a row's bits do not depend on its neighbours, on how queries are tiled, or on which thread does it:
 * a long context may be split over threads at the segment borders and merged in the same order.
 *
 * K of a (block, head) is [head_dim, block_size] (k_token_stride 1) or [block_size, head_dim]; V is the latter.
 */

/* A tile of K as floats, [head_dim][16], tokens in lanes, and of V, [tokens][width]. */
INLINE void FN(load_tile)(const E *k, int64_t k_token_stride, int64_t k_dim_stride, const E *v, int64_t v_token_stride,
                          int head_dim, int width, int tokens, float *kt, float *vt) {
    if (k_token_stride == 1 && tokens == LANES) {
        for (int d = 0; d < head_dim; d++) store16_f32(kt + d * LANES, LOAD16(k + d * k_dim_stride));
    } else {
        memset(kt, 0, sizeof(float) * head_dim * LANES);
        for (int t = 0; t < tokens; t++)
            for (int d = 0; d < head_dim; d++)
                kt[d * LANES + t] = LOAD1(k + t * k_token_stride + d * k_dim_stride);
    }
    for (int t = 0; t < tokens; t++) {
        const E *row = v + t * v_token_stride;
        int d = 0;
        for (; d + LANES <= head_dim; d += LANES) store16_f32(vt + t * width + d, LOAD16(row + d));
        if (d < head_dim) store16_f32(vt + t * width + d, LOAD_TAIL(row + d, head_dim - d));
    }
}

/* One tile for all rows of an item. Lanes outside [low, high) of a row do not exist for it. */
static void FN(attend_tile)(const Row *rows, int num_rows, int start, int tokens, int head_dim, int width,
                            const float *kt, const float *vt) {
    for (int first = 0; first < num_rows; first += ROW_GROUP) {
        int count = num_rows - first < ROW_GROUP ? num_rows - first : ROW_GROUP;
        const Row *group = rows + first;
        switch (count) {
            case 1: attend_rows(group, 1, start, tokens, head_dim, width, kt, vt); break;
            case 2: attend_rows(group, 2, start, tokens, head_dim, width, kt, vt); break;
            case 3: attend_rows(group, 3, start, tokens, head_dim, width, kt, vt); break;
            default: attend_rows(group, 4, start, tokens, head_dim, width, kt, vt); break;
        }
    }
}

/* Rows of one query tile against segments [first_segment, last_segment) of their context. */
static void FN(run_item)(const AttentionCall *call, const Item *item, const E *q, const E *k_cache, const E *v_cache,
                         Row *rows, float *scratch) {
    const int head_dim = call->head_dim, block_size = call->block_size, width = padded(head_dim);
    const int group = call->heads / call->kv_heads;
    const int tile = block_size < LANES ? block_size : LANES;
    const int sequence = item->sequence;
    const int32_t *table = call->block_tables + sequence * call->table_stride;
    const int num_rows = item->queries * group;
    const int first_position = call->context_lens[sequence] - call->query_lens[sequence] + item->first_query;
    float *kt = scratch, *vt = kt + head_dim * LANES, *queries = vt + LANES * width;

    for (int r = 0; r < num_rows; r++) {
        const int64_t token = call->query_starts[sequence] + item->first_query + r / group;
        const E *source = q + token * call->q_token_stride + (int64_t)(item->kv_head * group + r % group) * head_dim;
        float *row = queries + r * head_dim;
        for (int d = 0; d < head_dim; d++) row[d] = LOAD1(source + d) * call->scale;
        const int position = first_position + r / group;
        rows[r].query = row;
        rows[r].high = position + 1;
        rows[r].low = call->window > 0 && position + 1 > call->window ? position + 1 - call->window : 0;
        clear(&rows[r].running, width);
        rows[r].total.sum = -1.0f; /* nothing merged yet */
    }
    const int high = rows[num_rows - 1].high, low = rows[0].low;
    int begin = item->first_segment * SEGMENT, end = item->last_segment * SEGMENT;
    if (begin < low / tile * tile) begin = low / tile * tile;
    if (end > high) end = high;
    for (int start = begin; start < end; start += tile) {
        if (start % SEGMENT == 0 && start > begin)
            for (int r = 0; r < num_rows; r++) flush(&rows[r], width);
        const int64_t block = table[start / block_size];
        const int offset = start % block_size;
        const E *k = k_cache + block * call->block_stride + item->kv_head * call->k_head_stride;
        const E *v = v_cache + block * call->block_stride + item->kv_head * call->v_head_stride;
        if (start + tile < end) { /* the next tile's lines arrive while this one is computed */
            const int next = start + tile;
            const int64_t next_block = table[next / block_size];
            const char *nk = (const char *)(k_cache + next_block * call->block_stride +
                                            item->kv_head * call->k_head_stride + (next % block_size) * call->k_token_stride);
            const char *nv = (const char *)(v_cache + next_block * call->block_stride +
                                            item->kv_head * call->v_head_stride + (next % block_size) * call->v_token_stride);
            const int64_t bytes = (int64_t)tile * head_dim * sizeof(E);
            if (tile == block_size || call->k_token_stride != 1)
                for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(nk + b);
            for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(nv + b);
        }
        const int tokens = end - start < tile ? end - start : tile;
        FN(load_tile)(k + offset * call->k_token_stride, call->k_token_stride, call->k_dim_stride,
                      v + offset * call->v_token_stride, call->v_token_stride, head_dim, width,
                      k_lanes(call, tokens, tile), kt, vt);
        FN(attend_tile)(rows, num_rows, start, tokens, head_dim, width, kt, vt);
    }
    for (int r = 0; r < num_rows; r++) flush(&rows[r], width);
}

static void FN(store_rows)(const AttentionCall *call, const Item *item, const Row *rows, E *out) {
    const int head_dim = call->head_dim, group = call->heads / call->kv_heads;
    for (int r = 0; r < item->queries * group; r++) {
        const int64_t token = call->query_starts[item->sequence] + item->first_query + r / group;
        E *target = out + (token * call->heads + item->kv_head * group + r % group) * head_dim;
        const State *state = &rows[r].total;
        const float inverse = state->sum > 0.0f ? 1.0f / state->sum : 0.0f;
        int d = 0;
        for (; d + LANES <= head_dim; d += LANES) STORE16(target + d, load16_f32(state->values + d) * inverse);
        if (d < head_dim) STORE_TAIL(target + d, load16_f32(state->values + d) * inverse, head_dim - d);
    }
}

EXPORT int FN(attention)(const AttentionCall *call, const E *q, const E *k_cache, const E *v_cache, E *out) {
    const int width = padded(call->head_dim), group = call->heads / call->kv_heads;
    const int tile_queries = group >= MAX_ROWS ? 1 : MAX_ROWS / group;
    const int max_rows = tile_queries * group;
    int num_items = 0;
    Item *items = make_items(call, tile_queries, &num_items);
    if (!items) return -1;
    const size_t state = (size_t)2 * width;
    const size_t per_thread = (size_t)max_rows * state + (size_t)call->head_dim * LANES + (size_t)LANES * width +
                              (size_t)max_rows * call->head_dim + LANES;
    float *partials = NULL; /* of split items: per row maximum, sum and values */
    const size_t partial = (size_t)max_rows * (width + LANES);
    int num_parts = 0;
    for (int i = 0; i < num_items; i++)
        if (items[i].part >= 0) num_parts = items[i].part + 1;
    if (num_parts && posix_memalign((void **)&partials, 64, sizeof(float) * partial * num_parts)) {
        free(items);
        return -1;
    }
    int failed = 0;
    const int threads = num_items < call->threads ? num_items : call->threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *memory = NULL;
        Row *rows = malloc(sizeof(Row) * max_rows);
        if (!rows || posix_memalign((void **)&memory, 64, sizeof(float) * per_thread)) {
#pragma omp atomic write
            failed = 1;
            free(rows);
            rows = NULL;
        }
        if (rows)
            for (int r = 0; r < max_rows; r++) {
                rows[r].running.values = memory + r * state;
                rows[r].total.values = memory + r * state + width;
            }
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < num_items; i++) {
            if (!rows) continue;
            FN(run_item)(call, &items[i], q, k_cache, v_cache, rows, memory + max_rows * state);
            if (items[i].part < 0)
                FN(store_rows)(call, &items[i], rows, out);
            else
                save_rows(rows, items[i].queries * group, width, partials + items[i].part * partial);
        }
        /* The first part of each split item merges all of them, in order. */
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < num_items; i++) {
            if (!rows || items[i].part < 0 || items[i].parts == 0) continue;
            const int num_rows = items[i].queries * group;
            for (int r = 0; r < num_rows; r++) rows[r].total.sum = -1.0f;
            for (int p = 0; p < items[i].parts; p++) {
                load_rows(rows, num_rows, width, partials + (items[i].part + p) * partial);
                for (int r = 0; r < num_rows; r++) flush(&rows[r], width);
            }
            FN(store_rows)(call, &items[i], rows, out);
        }
        if (rows) free(memory);
        free(rows);
    }
    free(partials);
    free(items);
    return failed ? -1 : 0;
}
