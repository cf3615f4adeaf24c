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

/* A tile of at most 16 tokens: K with tokens side by side where attend_rows reads it, V with its dimensions. */
typedef struct {
    const E *k, *v;
    int64_t k_token_stride, k_dim_stride, v_token_stride;
    int64_t k_ahead, v_ahead; /* elements from here to the tile that is read next, whose lines are fetched meanwhile */
} FN(Tile);

/* Where the tile at position `start` of one kv head lies, the tile at `next` being read after it. */
INLINE FN(Tile) FN(tile_at)(const AttentionCall *call, const E *k_cache, const E *v_cache, const int32_t *table,
                            int start, int next, int head) {
    const int block_size = call->cache.block_size;
    const int64_t block = table[start / block_size], offset = start % block_size;
    const int64_t blocks_ahead = table[next / block_size] - block, tokens_ahead = next % block_size - offset;
    return (FN(Tile)){
        k_cache + block * call->cache.block_stride + head * call->cache.k_head_stride + offset * call->cache.k_token_stride,
        v_cache + block * call->cache.block_stride + head * call->cache.v_head_stride + offset * call->cache.v_token_stride,
        call->cache.k_token_stride,
        call->cache.k_dim_stride,
        call->cache.v_token_stride,
        blocks_ahead * call->cache.block_stride + tokens_ahead * call->cache.k_token_stride,
        blocks_ahead * call->cache.block_stride + tokens_ahead * call->cache.v_token_stride,
    };
}

/* The tile's first `tokens` tokens as floats, K as [head_dim][16] with tokens in lanes, V as [tokens][width]. */
static Tile_f32 FN(load_tile)(const FN(Tile) *tile, int head_dim, int width, int tokens, float *kt, float *vt) {
    if (tile->k_token_stride == 1 && tokens == LANES) {
        for (int d = 0; d < head_dim; d++) {
            const E *k = tile->k + d * tile->k_dim_stride;
            __builtin_prefetch(k + tile->k_ahead);
            store16_f32(kt + d * LANES, LOAD16(k));
        }
    } else {
        memset(kt, 0, sizeof(float) * head_dim * LANES);
        for (int t = 0; t < tokens; t++)
            for (int d = 0; d < head_dim; d++)
                kt[d * LANES + t] = LOAD1(tile->k + t * tile->k_token_stride + d * tile->k_dim_stride);
    }
    for (int t = 0; t < tokens; t++) {
        const E *row = tile->v + t * tile->v_token_stride;
        int d = 0;
        for (; d + LANES <= head_dim; d += LANES) {
            __builtin_prefetch(row + d + tile->v_ahead);
            store16_f32(vt + t * width + d, LOAD16(row + d));
        }
        if (d < head_dim) store16_f32(vt + t * width + d, LOAD_TAIL(row + d, head_dim - d));
    }
    return (Tile_f32){kt, vt, 1, LANES, width, 0, 0};
}

/* `count` rows against the tokens [first, last) of one tile, count a constant where it is inlined. Each row's operations
 * are the same for any count: two chains over head_dim for its scores, then its softmax, then its values token by token.
 * Tokens outside [first, last) do not exist: K is read in whole vectors of tokens, but only their scores count. As in
 * any softmax, one score that is no number, or +infinity, makes the row's output none. */
INLINE void FN(attend_rows)(const Row *rows, const int count, int first, int last, int head_dim, int width,
                            const FN(Tile) *tile) {
    vf even[ROW_GROUP], odd[ROW_GROUP];
    float weights[ROW_GROUP][LANES], correction[ROW_GROUP];
    UNROLL for (int r = 0; r < count; r++) even[r] = odd[r] = splat(0.0f);
    const E *k = tile->k;
    for (int d = 0; d < head_dim; d += 2, k += 2 * tile->k_dim_stride) {
        const vf k0 = LOAD16(k), k1 = LOAD16(k + tile->k_dim_stride);
        __builtin_prefetch(k + tile->k_ahead); /* among the arithmetic: in one burst they would wait for each other */
        if (sizeof(E) > 2 || tile->k_dim_stride > LANES) __builtin_prefetch(k + tile->k_dim_stride + tile->k_ahead);
        UNROLL for (int r = 0; r < count; r++) {
            even[r] = add_scaled(even[r], k0, rows[r].query[d]);
            odd[r] = add_scaled(odd[r], k1, rows[r].query[d + 1]);
        }
    }
    const vi visible = lanes_between(first, last);
    UNROLL for (int r = 0; r < count; r++) {
        State *state = (State *)&rows[r].running;
        const vf scores = select_(visible, add(even[r], odd[r]), splat(-INFINITY));
        const float highest = lane_max(scores), maximum = state->maximum > highest ? state->maximum : highest;
        /* relative to 0 as long as all scores are -infinity: their difference is no number, those that are none stay */
        const vf p = select_(visible, exp_below(scores, maximum == -INFINITY ? 0.0f : maximum), splat(0.0f));
        correction[r] = rescale(state->maximum, maximum);
        state->sum = fma1(state->sum, correction[r], lane_sum(p));
        state->maximum = maximum;
        state->seen = 1;
        store16_f32(weights[r], p);
    }
    int d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) { /* two columns at a time, so that enough sums are under way */
        vf left[ROW_GROUP], right[ROW_GROUP];
        UNROLL for (int r = 0; r < count; r++) {
            left[r] = scale(load16_f32(rows[r].running.values + d), correction[r]);
            right[r] = scale(load16_f32(rows[r].running.values + d + LANES), correction[r]);
        }
        const E *v = tile->v + first * tile->v_token_stride + d;
        for (int t = first; t < last; t++, v += tile->v_token_stride) {
            const vf v0 = LOAD16(v), v1 = LOAD16(v + LANES);
            __builtin_prefetch(v + tile->v_ahead);
            if (sizeof(E) > 2) __builtin_prefetch(v + LANES + tile->v_ahead);
            UNROLL for (int r = 0; r < count; r++) {
                left[r] = add_scaled(left[r], v0, weights[r][t]);
                right[r] = add_scaled(right[r], v1, weights[r][t]);
            }
        }
        UNROLL for (int r = 0; r < count; r++) {
            store16_f32(rows[r].running.values + d, left[r]);
            store16_f32(rows[r].running.values + d + LANES, right[r]);
        }
    }
    if (d < width) {
        vf values[ROW_GROUP];
        UNROLL for (int r = 0; r < count; r++)
            values[r] = scale(load16_f32(rows[r].running.values + d), correction[r]);
        const E *v = tile->v + first * tile->v_token_stride + d;
        for (int t = first; t < last; t++, v += tile->v_token_stride) {
            const vf v0 = LOAD16(v);
            __builtin_prefetch(v + tile->v_ahead);
            UNROLL for (int r = 0; r < count; r++) values[r] = add_scaled(values[r], v0, weights[r][t]);
        }
        UNROLL for (int r = 0; r < count; r++) store16_f32(rows[r].running.values + d, values[r]);
    }
}

/* attend_rows for each count, in functions of their own: a switch over inlined copies takes compilers far longer. */
#define DEFINE_ATTEND(count)                                                                              \
    NOINLINE void FN(PASTE2(attend, count))(const Row *rows, int first, int last, int head_dim, int width, \
                                            const FN(Tile) *tile) {                                       \
        FN(attend_rows)(rows, count, first, last, head_dim, width, tile);                                 \
    }
DEFINE_ATTEND(1)
DEFINE_ATTEND(2)
DEFINE_ATTEND(3)
DEFINE_ATTEND(4)
#undef DEFINE_ATTEND

/* One tile for all rows of a kv head. Rows in succession that see the same of it are computed together. */
static void FN(attend_tile)(const Row *rows, int num_rows, int start, int tokens, int head_dim, int width,
                            const FN(Tile) *tile) {
    for (int count; num_rows > 0; rows += count, num_rows -= count) {
        int first, last, next_first, next_last;
        visible_to(rows, start, tokens, &first, &last);
        for (count = 1; count < ROW_GROUP && count < num_rows; count++) {
            visible_to(rows + count, start, tokens, &next_first, &next_last);
            if (next_first != first || next_last != last) break;
        }
        if (first < last) switch (count) {
            case 1: FN(attend_1)(rows, first, last, head_dim, width, tile); break;
            case 2: FN(attend_2)(rows, first, last, head_dim, width, tile); break;
            case 3: FN(attend_3)(rows, first, last, head_dim, width, tile); break;
            default: FN(attend_4)(rows, first, last, head_dim, width, tile); break;
        }
    }
}

/* Rows of one query tile, of some kv heads, against segments [first_segment, last_segment) of their context.
 * Rows are ordered by (kv head, token, head of the group). */
static void FN(run_item)(const AttentionCall *call, const Item *item, const E *q, const E *k_cache, const E *v_cache,
                         Row *rows, float *scratch) {
    const int head_dim = call->head_dim, block_size = call->cache.block_size, width = padded(head_dim);
    const int group = call->heads / call->kv_heads;
    const int tile = block_size < LANES ? block_size : LANES;
    const int32_t *table = call->block_tables + item->sequence * call->table_stride;
    const int per_head = item->queries * group, num_rows = item->num_heads * per_head;
    const int direct = per_head <= ROW_GROUP && call->cache.k_token_stride == 1 && tile == LANES && head_dim % LANES == 0;
    const int cached = call->context_lens[item->sequence] - call->query_lens[item->sequence];
    const int first_position = cached + item->first_query;
    float *kt = scratch, *vt = kt + head_dim * LANES, *queries = vt + LANES * width;

    for (int r = 0; r < num_rows; r++) {
        const int query = r % per_head / group;
        const int64_t token = row_token(call, item, r), head = row_head(call, item, r);
        const E *source = q + token * call->q_token_stride + head * head_dim;
        float *row = queries + r * head_dim;
        for (int d = 0; d < head_dim; d++) row[d] = LOAD1(source + d) * call->scale;
        rows[r].query = row;
        rows[r].high = first_position + query + 1;
        rows[r].low = call->window > 0 && rows[r].high > call->window ? rows[r].high - call->window : 0;
        clear(&rows[r].running, width);
        rows[r].total.seen = 0;
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
            const FN(Tile) data = FN(tile_at)(call, k_cache, v_cache, table, start, next, head);
            const Row *group_rows = rows + h * per_head;
            if (direct) {
                FN(attend_tile)(group_rows, per_head, start, tokens, head_dim, width, &data);
            } else {
                const Tile_f32 floats = FN(load_tile)(&data, head_dim, width, k_lanes(call, tokens, tile), kt, vt);
                attend_tile_f32(group_rows, per_head, start, tokens, head_dim, width, &floats);
            }
        }
    }
    for (int r = 0; r < num_rows; r++) flush(&rows[r], width);
}

static void FN(store_rows)(const AttentionCall *call, const Item *item, const Row *rows, E *out) {
    const int head_dim = call->head_dim, num_rows = item_rows(call, item);
    for (int r = 0; r < num_rows; r++) {
        E *target = out + (row_token(call, item, r) * call->heads + row_head(call, item, r)) * head_dim;
        const State *state = &rows[r].total;
        const float inverse = 1.0f / state->sum; /* of 0, where all scores are -infinity, no number comes */
        int d = 0;
        for (; d + LANES <= head_dim; d += LANES) STORE16(target + d, scale(load16_f32(state->values + d), inverse));
        if (d < head_dim) STORE_TAIL(target + d, scale(load16_f32(state->values + d), inverse), head_dim - d);
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
            for (int r = 0; r < num_rows; r++) rows[r].total.seen = 0;
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
