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

/* A tile of at most 16 tokens: where its K and V lie, and room for them as floats, K as [head_dim][16] with tokens in
 * lanes and V as [tokens][width]. With few rows to serve the floats are not worth making. */
typedef struct {
    const E *k, *v;
    int64_t k_token_stride, k_dim_stride, v_token_stride;
    float *kt, *vt;
} FN(Tile);

INLINE void FN(load_tile)(const FN(Tile) *tile, int head_dim, int width, int tokens) {
    if (tile->k_token_stride == 1 && tokens == LANES) {
        for (int d = 0; d < head_dim; d++) store16_f32(tile->kt + d * LANES, LOAD16(tile->k + d * tile->k_dim_stride));
    } else {
        memset(tile->kt, 0, sizeof(float) * head_dim * LANES);
        for (int t = 0; t < tokens; t++)
            for (int d = 0; d < head_dim; d++)
                tile->kt[d * LANES + t] = LOAD1(tile->k + t * tile->k_token_stride + d * tile->k_dim_stride);
    }
    for (int t = 0; t < tokens; t++) {
        const E *row = tile->v + t * tile->v_token_stride;
        int d = 0;
        for (; d + LANES <= head_dim; d += LANES) store16_f32(tile->vt + t * width + d, LOAD16(row + d));
        if (d < head_dim) store16_f32(tile->vt + t * width + d, LOAD_TAIL(row + d, head_dim - d));
    }
}

#define K_VECTOR(d) (direct ? LOAD16(tile->k + (d) * tile->k_dim_stride) : load16_f32(tile->kt + (d) * LANES))
#define V_VECTOR(t, d) (direct ? LOAD16(tile->v + (t) * tile->v_token_stride + (d)) : load16_f32(tile->vt + (t) * width + (d)))

/* `count` rows against one tile, count a constant where it is inlined. Each row's operations are the same for any
 * count: two chains over head_dim for its 16 scores, then its softmax, then its values token by token.
 * `direct`, a constant too: K and V are read where they lie, not from the tile's floats. */
INLINE void FN(attend_rows)(const Row *rows, const int count, const int direct, int start, int tokens, int head_dim,
                            int width, const FN(Tile) *tile) {
    vf even[ROW_GROUP], odd[ROW_GROUP];
    float weights[ROW_GROUP][LANES], correction[ROW_GROUP];
    int seen = 0;
    UNROLL for (int r = 0; r < count; r++) {
        even[r] = odd[r] = splat(0.0f);
        seen |= rows[r].high > start && rows[r].low < start + tokens;
    }
    if (!seen) return;
    for (int d = 0; d + 1 < head_dim; d += 2) {
        const vf k0 = K_VECTOR(d), k1 = K_VECTOR(d + 1);
        UNROLL for (int r = 0; r < count; r++) {
            even[r] += k0 * rows[r].query[d];
            odd[r] += k1 * rows[r].query[d + 1];
        }
    }
    if (head_dim & 1)
        UNROLL for (int r = 0; r < count; r++)
            even[r] += K_VECTOR(head_dim - 1) * rows[r].query[head_dim - 1];
    const vi positions = LANE_INDEX + start;
    UNROLL for (int r = 0; r < count; r++) {
        State *state = (State *)&rows[r].running;
        const vi visible = (positions < rows[r].high) & (positions >= rows[r].low) & (LANE_INDEX < tokens);
        const vf scores = select_(visible, even[r] + odd[r], splat(-INFINITY));
        const float highest = lane_max(scores);
        const float maximum = state->maximum > highest ? state->maximum : highest;
        if (maximum == -INFINITY) { /* nothing seen so far */
            correction[r] = 1.0f;
            memset(weights[r], 0, sizeof weights[r]);
            continue;
        }
        const vf p = select_(visible, vexp(scores - maximum), splat(0.0f));
        correction[r] = state->maximum == -INFINITY ? 0.0f : exp1(state->maximum - maximum);
        state->sum = state->sum * correction[r] + lane_sum(p);
        state->maximum = maximum;
        store16_f32(weights[r], p);
    }
    int d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) { /* two columns at a time, so that enough sums are under way */
        vf left[ROW_GROUP], right[ROW_GROUP];
        UNROLL for (int r = 0; r < count; r++) {
            left[r] = load16_f32(rows[r].running.values + d) * correction[r];
            right[r] = load16_f32(rows[r].running.values + d + LANES) * correction[r];
        }
        for (int t = 0; t < tokens; t++) {
            const vf v0 = V_VECTOR(t, d), v1 = V_VECTOR(t, d + LANES);
            UNROLL for (int r = 0; r < count; r++) {
                left[r] += v0 * weights[r][t];
                right[r] += v1 * weights[r][t];
            }
        }
        UNROLL for (int r = 0; r < count; r++) {
            store16_f32(rows[r].running.values + d, left[r]);
            store16_f32(rows[r].running.values + d + LANES, right[r]);
        }
    }
    if (d < width) {
        vf values[ROW_GROUP];
        UNROLL for (int r = 0; r < count; r++) values[r] = load16_f32(rows[r].running.values + d) * correction[r];
        for (int t = 0; t < tokens; t++) {
            const vf v = V_VECTOR(t, d);
            UNROLL for (int r = 0; r < count; r++) values[r] += v * weights[r][t];
        }
        UNROLL for (int r = 0; r < count; r++) store16_f32(rows[r].running.values + d, values[r]);
    }
}

/* Where the tile that starts at a position lies, of one kv head. */
INLINE FN(Tile) FN(tile_at)(const AttentionCall *call, const E *k_cache, const E *v_cache, const int32_t *table,
                            int start, int head, float *kt, float *vt) {
    const int64_t block = table[start / call->block_size], offset = start % call->block_size;
    return (FN(Tile)){
        k_cache + block * call->block_stride + head * call->k_head_stride + offset * call->k_token_stride,
        v_cache + block * call->block_stride + head * call->v_head_stride + offset * call->v_token_stride,
        call->k_token_stride, call->k_dim_stride, call->v_token_stride, kt, vt};
}

/* One tile for all rows of a kv head. Lanes outside [low, high) of a row do not exist for it. */
static void FN(attend_tile)(const Row *rows, int num_rows, int direct, int start, int tokens, int head_dim, int width,
                            const FN(Tile) *tile) {
    for (int first = 0; first < num_rows; first += ROW_GROUP) {
        const int count = num_rows - first < ROW_GROUP ? num_rows - first : ROW_GROUP;
        const Row *group = rows + first;
        switch (count + (direct ? ROW_GROUP : 0)) {
            case 1: FN(attend_rows)(group, 1, 0, start, tokens, head_dim, width, tile); break;
            case 2: FN(attend_rows)(group, 2, 0, start, tokens, head_dim, width, tile); break;
            case 3: FN(attend_rows)(group, 3, 0, start, tokens, head_dim, width, tile); break;
            case 4: FN(attend_rows)(group, 4, 0, start, tokens, head_dim, width, tile); break;
            case 5: FN(attend_rows)(group, 1, 1, start, tokens, head_dim, width, tile); break;
            case 6: FN(attend_rows)(group, 2, 1, start, tokens, head_dim, width, tile); break;
            case 7: FN(attend_rows)(group, 3, 1, start, tokens, head_dim, width, tile); break;
            default: FN(attend_rows)(group, 4, 1, start, tokens, head_dim, width, tile); break;
        }
    }
}

#undef K_VECTOR
#undef V_VECTOR

/* Rows of one query tile, of some kv heads, against segments [first_segment, last_segment) of their context.
 * Rows are ordered by (kv head, token, head of the group). */
static void FN(run_item)(const AttentionCall *call, const Item *item, const E *q, const E *k_cache, const E *v_cache,
                         Row *rows, float *scratch) {
    const int head_dim = call->head_dim, block_size = call->block_size, width = padded(head_dim);
    const int group = call->heads / call->kv_heads;
    const int tile = block_size < LANES ? block_size : LANES;
    const int32_t *table = call->block_tables + item->sequence * call->table_stride;
    const int per_head = item->queries * group, num_rows = item->num_heads * per_head;
    const int direct = per_head <= ROW_GROUP && call->k_token_stride == 1 && tile == LANES && head_dim % LANES == 0;
    const int first_position = call->context_lens[item->sequence] - call->query_lens[item->sequence] + item->first_query;
    float *kt = scratch, *vt = kt + head_dim * LANES, *queries = vt + LANES * width;

    for (int r = 0; r < num_rows; r++) {
        const int query = r % per_head / group;
        const E *source = q + row_token(call, item, r) * call->q_token_stride + (int64_t)row_head(call, item, r) * head_dim;
        float *row = queries + r * head_dim;
        for (int d = 0; d < head_dim; d++) row[d] = LOAD1(source + d) * call->scale;
        rows[r].query = row;
        rows[r].high = first_position + query + 1;
        rows[r].low = call->window > 0 && rows[r].high > call->window ? rows[r].high - call->window : 0;
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
        const int tokens = end - start < tile ? end - start : tile;
        const int next = start + tile < end ? start + tile : start;
        for (int h = 0; h < item->num_heads; h++) {
            const int head = item->first_head + h;
            const FN(Tile) data = FN(tile_at)(call, k_cache, v_cache, table, start, head, kt, vt);
            const FN(Tile) soon = FN(tile_at)(call, k_cache, v_cache, table, next, head, kt, vt);
            const int64_t bytes = (int64_t)tile * head_dim * sizeof(E);
            for (int64_t b = 0; b < bytes; b += 64) { /* the next tile's lines arrive while this one is computed */
                __builtin_prefetch((const char *)soon.k + b);
                __builtin_prefetch((const char *)soon.v + b);
            }
            if (!direct) FN(load_tile)(&data, head_dim, width, k_lanes(call, tokens, tile));
            FN(attend_tile)(rows + h * per_head, per_head, direct, start, tokens, head_dim, width, &data);
        }
    }
    for (int r = 0; r < num_rows; r++) flush(&rows[r], width);
}

static void FN(store_rows)(const AttentionCall *call, const Item *item, const Row *rows, E *out) {
    const int head_dim = call->head_dim, num_rows = item_rows(call, item);
    for (int r = 0; r < num_rows; r++) {
        E *target = out + (row_token(call, item, r) * call->heads + row_head(call, item, r)) * head_dim;
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
    const int max_rows = tile_queries * group > call->heads ? tile_queries * group : call->heads;
    int num_items = 0;
    Item *items = make_items(call, tile_queries, &num_items);
    if (!items) return -1;
    const size_t state = (size_t)2 * width;
    const size_t per_thread = (size_t)max_rows * state + (size_t)call->head_dim * LANES + (size_t)LANES * width +
                              (size_t)max_rows * call->head_dim + LANES;
    float *partials = NULL; /* of split items: per row maximum, sum and values */
    int num_parts = 0, part_rows = 0;
    for (int i = 0; i < num_items; i++)
        if (items[i].part >= 0) {
            num_parts = items[i].part + 1;
            if (item_rows(call, &items[i]) > part_rows) part_rows = item_rows(call, &items[i]);
        }
    const size_t partial = (size_t)part_rows * (width + LANES);
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
                save_rows(rows, item_rows(call, &items[i]), width, partials + items[i].part * partial);
        }
        /* The first part of each split item merges all of them, in order. */
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < num_items; i++) {
            if (!rows || items[i].part < 0 || items[i].parts == 0) continue;
            const int num_rows = item_rows(call, &items[i]);
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
