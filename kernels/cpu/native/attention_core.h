/* The parts of paged attention that do not depend on the element type. See attention.h for the idea. */
#ifndef FERRY_ATTENTION_CORE_H
#define FERRY_ATTENTION_CORE_H

#include <stdlib.h>

#include "interface.h"
#include "vectors.h"

#define SEGMENT 256   /* tokens; where running states are merged, and where a context may be split over threads */
#define MAX_ROWS 32   /* query rows of one item: tokens x heads of a group */
#define ROW_GROUP 4   /* rows that share a tile's registers */
#define UNROLL _Pragma("GCC unroll 4") /* early, so that small arrays of vectors become registers */

typedef struct {
    int sequence, first_head, num_heads, first_query, queries; /* heads: kv heads */
    int first_segment, last_segment;
    int part, parts; /* part: index of its saved state, -1 if not split; parts: of a split item's first part */
} Item;

typedef struct {
    int seen; /* tokens came; else the rest is that of none */
    float maximum, sum;
    float *values; /* [width] */
} State;

typedef struct {
    const float *query;
    int low, high; /* the positions it sees */
    State running, total;
} Row;

INLINE int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

INLINE void clear(State *state, int width) {
    state->seen = 0;
    state->maximum = -INFINITY;
    state->sum = 0.0f;
    memset(state->values, 0, sizeof(float) * width);
}

/* What becomes of sums and values that were relative to `before` when they are relative to `maximum`. All scores so far
 * may be -infinity, then both are. Once anything was no number, this or what it scales is none, whatever comes. */
INLINE float rescale(float before, float maximum) { return before == maximum ? 1.0f : exp1(before - maximum); }

/* Merge the running state into the total and start a new one. */
static void flush(Row *row, int width) {
    State *a = &row->total, *b = &row->running;
    if (!b->seen) return;
    if (!a->seen) {
        a->seen = 1;
        a->maximum = b->maximum;
        a->sum = b->sum;
        memcpy(a->values, b->values, sizeof(float) * width);
    } else {
        const float maximum = a->maximum > b->maximum ? a->maximum : b->maximum;
        const float x = rescale(a->maximum, maximum), y = rescale(b->maximum, maximum);
        a->sum = fma1(a->sum, x, b->sum * y);
        for (int d = 0; d < width; d += LANES)
            store16_f32(a->values + d, add_scaled(scale(load16_f32(b->values + d), y), load16_f32(a->values + d), x));
        a->maximum = maximum;
    }
    clear(b, width);
}

/* Which of the `tokens` tokens from `start` on a row sees: [first, last). */
INLINE void visible_to(const Row *row, int start, int tokens, int *first, int *last) {
    *first = row->low > start ? row->low - start : 0;
    *last = row->high - start < tokens ? row->high - start : tokens;
}

INLINE int item_rows(const AttentionCall *call, const Item *item) {
    return item->num_heads * item->queries * (call->heads / call->kv_heads);
}
INLINE int64_t row_token(const AttentionCall *call, const Item *item, int row) {
    const int group = call->heads / call->kv_heads;
    return call->query_starts[item->sequence] + item->first_query + row % (item->queries * group) / group;
}
INLINE int row_head(const AttentionCall *call, const Item *item, int row) {
    const int group = call->heads / call->kv_heads;
    return (item->first_head + row / (item->queries * group)) * group + row % group;
}

/* Items of a call: (sequence, kv heads, query tile). A decode takes all kv heads of its sequence, whose tiles lie side
 * by side in memory; where that leaves threads without work, heads are split, and then contexts too. */
static Item *make_items(const AttentionCall *call, int tile_queries, int *num_items) {
    int64_t count = 0, segments = 0;
    for (int s = 0; s < call->num_sequences; s++) {
        const int64_t tiles = (call->query_lens[s] + tile_queries - 1) / tile_queries;
        count += tiles * call->kv_heads;
        segments += tiles * call->kv_heads * ((call->context_lens[s] + SEGMENT - 1) / SEGMENT);
    }
    const int split = call->threads > 1 && count < 4 * call->threads && segments > count;
    const int together = call->threads == 1 || count >= 4 * (int64_t)call->threads * call->kv_heads;
    Item *items = malloc(sizeof(Item) * (split ? segments : count));
    if (!items) return NULL;
    int n = 0, part = 0;
    for (int s = 0; s < call->num_sequences; s++)
        for (int first = 0; first < call->query_lens[s]; first += tile_queries) {
            const int left = call->query_lens[s] - first;
            const int queries = left < tile_queries ? left : tile_queries;
            const int high = call->context_lens[s] - call->query_lens[s] + first + queries;
            const int last = (high + SEGMENT - 1) / SEGMENT;
            const int heads = queries == 1 && together ? call->kv_heads : 1;
            for (int h = 0; h < call->kv_heads; h += heads) {
                if (!split) {
                    items[n++] = (Item){s, h, heads, first, queries, 0, last, -1, 0};
                    continue;
                }
                for (int segment = 0; segment < last; segment++)
                    items[n++] = (Item){s, h, 1, first, queries, segment, segment + 1, part++, segment ? 0 : last};
            }
        }
    *num_items = n;
    return items;
}

/* A split item's rows, kept for the merge: what is seen, maximum and sum, then values. */
static void save_rows(const Row *rows, int num_rows, int width, float *memory) {
    for (int r = 0; r < num_rows; r++, memory += width + LANES) {
        memory[0] = rows[r].total.maximum;
        memory[1] = rows[r].total.sum;
        memory[2] = (float)rows[r].total.seen;
        memcpy(memory + LANES, rows[r].total.values, sizeof(float) * width);
    }
}
static void load_rows(Row *rows, int num_rows, int width, const float *memory) {
    for (int r = 0; r < num_rows; r++, memory += width + LANES) {
        rows[r].running.maximum = memory[0];
        rows[r].running.sum = memory[1];
        rows[r].running.seen = memory[2] != 0.0f;
        memcpy(rows[r].running.values, memory + LANES, sizeof(float) * width);
    }
}

/* How many lanes of a K tile to read: a transposed tile is read whole (its block exists), else only what is written. */
INLINE int k_lanes(const AttentionCall *call, int tokens, int tile) {
    return call->cache.k_token_stride == 1 && tile == LANES ? LANES : tokens;
}

#endif
