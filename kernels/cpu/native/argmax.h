/* The largest logit of each row, for one element type E with suffix S; included once a type. */

#ifndef FERRY_BEST
#define FERRY_BEST
#define CHUNK 1024 /* logits whose largest is found before any is looked at alone */

/* The best token of a part of a row. */
typedef struct {
    float value; /* its logit; NaN where one is no number or +infinity */
    float product; /* its logit unrounded, where that is known */
    int64_t token; /* -1: there is none */
} Best;

INLINE Best better(Best earlier, Best later) {
    if (earlier.value != earlier.value) return earlier;
    if (later.value != later.value || later.value > earlier.value) return later;
    return later.value == earlier.value && later.product > earlier.product ? later : earlier;
}
#endif

INLINE float FN(dot)(const E *a, const E *b, int64_t size) {
    vf sum = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum = add_product(sum, LOAD16(a + i), LOAD16(b + i));
    if (i < size) sum = add_product(sum, LOAD_TAIL(a + i, (int)(size - i)), LOAD_TAIL(b + i, (int)(size - i)));
    return lane_sum(sum);
}

/* The best of the tokens [begin, end) of one row, in one pass. */
static Best FN(best_of)(const E *logits, int64_t begin, int64_t end, const E *x, const E *weight, int64_t size) {
    Best best = {-INFINITY, 0.0f, -1};
    for (int64_t at = begin; at < end; at += CHUNK) {
        const int64_t stop = end - at < CHUNK ? end : at + CHUNK;
        vf lanes = splat(-INFINITY);
        int64_t i = at;
        for (; i + LANES <= stop; i += LANES) lanes = max_or_nan(lanes, LOAD16(logits + i));
        float highest = lane_max_or_nan(lanes);
        for (; i < stop; i++) {
            const float value = LOAD1(logits + i);
            if (value > highest || value != value) highest = value;
        }
        if (!(highest < INFINITY)) return (Best){NAN, 0.0f, -1};
        if (highest == -INFINITY || highest < best.value) continue;
        for (i = at; i < stop; i++) {
            if (LOAD1(logits + i) != highest) continue;
            const Best found = {highest, weight ? FN(dot)(x, weight + i * size, size) : 0.0f, i};
            best = better(best, found);
            if (!weight) break;
        }
    }
    return best;
}

/* The largest logit's index of each row; -1 where any is no number or +infinity, or all are -infinity. Of equal ones the
 * first, or, with x and weight given, the one of the largest product: logits are x . weight rounded to E, x [rows, size]
 * and weight [vocab, size] are dense. A row is divided where threads would have nothing to do, which changes nothing:
 * its parts are compared in order. */
EXPORT int FN(argmax)(const E *logits, int64_t stride, const E *x, const E *weight, int64_t *out, int64_t rows,
                      int64_t vocab, int64_t size, int threads) {
    if (rows * vocab <= PARALLEL_WORK) threads = 1;
    const int64_t parts = rows > 0 && rows < threads ? (threads + rows - 1) / rows : 1;
    Best *found = malloc(sizeof(Best) * (rows * parts + 1));
    if (!found) return -1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows * parts; i++) {
        const int64_t row = i / parts, part = i % parts;
        found[i] = FN(best_of)(logits + row * stride, vocab * part / parts, vocab * (part + 1) / parts,
                               x ? x + row * size : NULL, weight, size);
    }
    for (int64_t row = 0; row < rows; row++) {
        Best best = found[row * parts];
        for (int64_t part = 1; part < parts; part++) best = better(best, found[row * parts + part]);
        out[row] = best.token;
    }
    free(found);
    return 0;
}
