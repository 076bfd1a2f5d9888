/* The tasks of attention in one layer. */

/* -- a few rows: a product at a time, scores [row][KEYS] ------------------------------------------------ */

INLINE void NAME(dots)(int rows, int dim, const float *q, const void *const *key, int keys, float *score,
                       int is_short) {
    const int line = is_short ? 32 : 16; /* numbers that the memory gives at once */
    for (int k = 0; k < keys; k++) {
        VF acc[FEW];
        for (int i = 0; i < rows; i++) acc[i] = (VF){0};
        for (int d = 0; d < dim; d += line) fetch(key[k < keys - AHEAD ? k + AHEAD : k], d, is_short);
        for (int d = 0; d < dim; d += W) {
            VF kd = NAME(read)(key[k], d, is_short);
            for (int i = 0; i < rows; i++) acc[i] += kd * LOAD(q + i * dim + d);
        }
        for (int i = 0; i < rows; i++) score[i * KEYS + k] = NAME(sum)(acc[i]);
    }
}

/* Scores of one row to weights, in place; `first` and `last`: which of the keys it sees. */
static void NAME(soften)(float *score, int keys, int first, int last, float cap, float *m, float *l, float *fade) {
    int whole = (keys + W - 1) / W * W;
    for (int k = keys; k < whole; k++) score[k] = 0.0f;
    if (cap > 0)
        for (int k = 0; k < whole; k += W) STORE(score + k, NAME(capped)(LOAD(score + k), cap));
    for (int k = 0; k < first; k++) score[k] = -INFINITY;
    for (int k = last; k < whole; k++) score[k] = -INFINITY;
    VF high = NAME(all)(*m);
    for (int k = 0; k < whole; k += W) high = NAME(most)(high, LOAD(score + k));
    float top = *m;
    for (int i = 0; i < W; i++)
        if (high[i] > top) top = high[i];
    float base = top == -INFINITY ? 0.0f : top;
    VF total = {0};
    for (int k = 0; k < whole; k += W) {
        VF w = NAME(exp)(LOAD(score + k) - base);
        STORE(score + k, w);
        total += w;
    }
    *fade = NAME(exp)(NAME(all)(*m - base))[0];
    *l = *l * *fade + NAME(sum)(total);
    *m = top;
}

/* -- many rows: scores [key][lane], a lane a row ------------------------------------------------------- */

INLINE void NAME(products)(int wide, int dim, const float *q, const void *const *key, int keys, float *score) {
    for (int k = 0; k < keys; k += KEYS_AT_ONCE) {
        VF acc[KEYS_AT_ONCE][2];
        for (int i = 0; i < KEYS_AT_ONCE; i++)
            for (int v = 0; v < wide; v++) acc[i][v] = (VF){0};
        for (int d = 0; d < dim; d++) {
            VF qd[2];
            for (int v = 0; v < wide; v++) qd[v] = LOAD(q + (d * wide + v) * W);
            for (int i = 0; i < KEYS_AT_ONCE; i++) {
                float kd = ((const float *)key[k + i])[d];
                for (int v = 0; v < wide; v++) acc[i][v] += kd * qd[v];
            }
        }
        for (int i = 0; i < KEYS_AT_ONCE; i++)
            for (int v = 0; v < wide; v++) STORE(score + ((k + i) * wide + v) * W, acc[i][v]);
    }
}

/* The same for lanes side by side. first, last: per lane which keys it sees, where `cut`. */
INLINE void NAME(soften_lanes)(int wide, float *score, int keys, int cut, const int32_t *first,
                               const int32_t *last, float cap, float *m, float *l, float *fade) {
    for (int v = 0; v < wide; v++) {
        float *mine = score + v * W;
        VF before = LOAD(m + v * W), top = before;
        VI from = *(const VI *)(first + v * W), to = *(const VI *)(last + v * W);
        for (int k = 0; k < keys; k++) {
            VF s = LOAD(mine + k * wide * W);
            if (cap > 0) s = NAME(capped)(s, cap);
            if (cut) s = NAME(either)((from <= k) & (to > k), s, NAME(all)(-INFINITY));
            if (cut || cap > 0) STORE(mine + k * wide * W, s);
            top = NAME(most)(top, s);
        }
        VF base = NAME(either)(top == NAME(all)(-INFINITY), (VF){0}, top), total = {0};
        for (int k = 0; k < keys; k++) {
            VF w = NAME(exp)(LOAD(mine + k * wide * W) - base);
            STORE(mine + k * wide * W, w);
            total += w;
        }
        VF less = NAME(exp)(before - base);
        STORE(fade + v * W, less);
        STORE(l + v * W, LOAD(l + v * W) * less + total);
        STORE(m + v * W, top);
    }
}

/* -- weights times values ------------------------------------------------------------------------------ */

/* sum [rows][dim], `vectors` of them from d on. Row i's weight of key k is weight[i * by_row + k * by_key]. */
INLINE void NAME(add_block)(int rows, int vectors, int dim, int d, const void *const *value, int keys,
                            const float *weight, int by_row, int by_key, const float *fade, float *sum,
                            int is_short) {
    VF acc[4][DIMS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) acc[i][v] = LOAD(sum + i * dim + d + v * W) * fade[i];
    for (int k = 0; k < keys; k++) {
        VF x[DIMS];
        const void *later = value[k < keys - AHEAD ? k + AHEAD : k];
        if (by_key == 1) /* else they lie in the cache */
            for (int v = 0; v < vectors; v++) fetch(later, d + v * W, is_short);
        for (int v = 0; v < vectors; v++) x[v] = NAME(read)(value[k], d + v * W, is_short);
        for (int i = 0; i < rows; i++) {
            float w = weight[i * by_row + k * by_key];
            for (int v = 0; v < vectors; v++) acc[i][v] += w * x[v];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) STORE(sum + i * dim + d + v * W, acc[i][v]);
}

INLINE void NAME(add_rows)(int rows, int dim, const void *const *value, int keys, const float *weight, int by_row,
                           int by_key, const float *fade, float *sum, int is_short) {
    int d = 0;
    for (; d + DIMS * W <= dim; d += DIMS * W)
        NAME(add_block)(rows, DIMS, dim, d, value, keys, weight, by_row, by_key, fade, sum, is_short);
    for (; d < dim; d += W)
        NAME(add_block)(rows, 1, dim, d, value, keys, weight, by_row, by_key, fade, sum, is_short);
}

static void NAME(add)(int rows, int dim, const void *const *value, int keys, const float *weight, int by_row,
                      int by_key, const float *fade, float *sum) {
    for (; rows >= 4; rows -= 4, weight += 4 * by_row, fade += 4, sum += 4 * dim)
        NAME(add_rows)(4, dim, value, keys, weight, by_row, by_key, fade, sum, 0);
    switch (rows) {
    case 3: NAME(add_rows)(3, dim, value, keys, weight, by_row, by_key, fade, sum, 0); break;
    case 2: NAME(add_rows)(2, dim, value, keys, weight, by_row, by_key, fade, sum, 0); break;
    case 1: NAME(add_rows)(1, dim, value, keys, weight, by_row, by_key, fade, sum, 0); break;
    }
}

/* -- a task: up to ROWS query rows of one piece and one key head ---------------------------------------- */

INLINE void NAME(few_rows)(int rows, int dim, const float *q, const void *const *key, const void *const *value,
                           int keys, int at, const int32_t *first, const int32_t *last, float cap, float *score,
                           float *m, float *l, float *sum, int is_short) {
    float fade[FEW];
    NAME(dots)(rows, dim, q, key, keys, score, is_short);
    for (int i = 0; i < rows; i++)
        NAME(soften)(score + i * KEYS, keys, clip(first[i] - at, keys), clip(last[i] - at, keys), cap, m + i,
                     l + i, fade + i);
    NAME(add_rows)(rows, dim, value, keys, score, KEYS, 1, fade, sum, is_short);
}

static void NAME(few)(int rows, int dim, const float *q, const void *const *key, const void *const *value, int keys,
                      int at, const int32_t *first, const int32_t *last, float cap, float *score, float *m,
                      float *l, float *sum, int is_short) {
#define CASE(rows, is_short)                                                                                   \
    case 2 * rows + is_short:                                                                                  \
        NAME(few_rows)(rows, dim, q, key, value, keys, at, first, last, cap, score, m, l, sum, is_short);      \
        break;
    switch (2 * rows + is_short) {
        CASE(1, 0) CASE(2, 0) CASE(3, 0) CASE(4, 0)
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1)
    }
#undef CASE
}

INLINE void NAME(panel)(int wide, int rows, int dim, const float *q, const void *const *key,
                        const void *const *value, int keys, int at, const int32_t *first, const int32_t *last,
                        float cap, float *score, float *m, float *l, float *sum) {
    float fade[2 * W];
    int32_t from[2 * W], to[2 * W];
    int cut = 0, end = 0;
    for (int i = 0; i < wide * W; i++) {
        from[i] = i < rows ? clip(first[i] - at, keys) : 0;
        to[i] = i < rows ? clip(last[i] - at, keys) : keys;
        if (i < rows) {
            cut |= from[i] > 0 || to[i] < keys;
            if (from[i] < to[i] && to[i] > end) end = to[i];
        }
    }
    if (end == 0) return; /* none of them sees any */
    NAME(products)(wide, dim, q, key, end, score);
    NAME(soften_lanes)(wide, score, end, cut, from, to, cap, m, l, fade);
    NAME(add)(rows, dim, value, end, score, 1, wide * W, fade, sum);
}

static void NAME(task)(const Layer *layer, const Piece *piece, int head, int row0, float *work) {
    const Pass *pass = layer->pass;
    const int dim = pass->dim, group = pass->group, total = piece->tokens * group;
    const int rows = total - row0 < ROWS ? total - row0 : ROWS;
    const int few = rows <= FEW;
    int32_t token[ROWS], first[ROWS], last[ROWS], begin = piece->keys, end = 0;
    float m[ROWS + 2 * W], l[ROWS + 2 * W];
    float *q = work, *sum = q + (ROWS + 2 * W) * dim, *score = sum + ROWS * dim;
    float *keys = score + (KEYS + 8) * 2 * W, *values = keys + KEYS * dim;
    const void *key[KEYS + 8], *value[KEYS];

    const Range *span = pass->span + piece->first_span;
    for (int r = 0, at = row0 / group, passed = 0; r < rows; r++) {
        at = (row0 + r) / group;
        while (at - passed >= span->size) passed += (span++)->size;
        int64_t sees = piece->lead + (at - passed) + 1;
        token[r] = span->first + at - passed;
        last[r] = sees < piece->keys ? sees : piece->keys;
        first[r] = piece->window && sees > piece->window ? sees - piece->window : 0;
        if (first[r] < begin) begin = first[r];
        if (last[r] > end) end = last[r];
    }
    /* Queries: as they are, or a panel of lanes behind the other, each [dim][lanes]. */
    const int heads = pass->kv_heads * group, width = heads + 2 * pass->kv_heads;
    for (int r = 0; r < rows; r++) {
        int64_t from = ((int64_t)token[r] * width + head * group + (row0 + r) % group) * dim;
        float *row = sum; /* nothing lies there yet */
        widen(row, layer->qkv, from, dim, pass->short_queries);
        if (few) {
            for (int d = 0; d < dim; d++) q[r * dim + d] = row[d] * pass->scale;
        } else {
            int panel = r / (2 * W) * (2 * W), lanes = rows - panel > W ? 2 * W : W;
            for (int d = 0; d < dim; d++) q[panel * dim + d * lanes + r - panel] = row[d] * pass->scale;
        }
    }
    if (!few) { /* lanes of no row */
        int panel = (rows - 1) / (2 * W) * (2 * W), lanes = rows - panel > W ? 2 * W : W;
        for (int r = rows; r < panel + lanes; r++)
            for (int d = 0; d < dim; d++) q[panel * dim + d * lanes + r - panel] = 0.0f;
    }
    for (int r = 0; r < ROWS + 2 * W; r++) m[r] = -INFINITY, l[r] = 0.0f;
    memset(sum, 0, sizeof(float) * rows * dim);

    const Range *run = pass->run + piece->first_run;
    const int bytes = pass->short_pool ? 2 : 4;
    const char *all_keys = (const char *)layer->pool + (int64_t)head * pass->slots * dim * bytes;
    const char *all_values = all_keys + pass->kv_heads * pass->slots * dim * bytes;
    int64_t in_run = begin;
    for (int at = begin; at < end; at += KEYS) {
        int count = end - at < KEYS ? end - at : KEYS;
        for (int k = 0; k < count; k++, in_run++) {
            while (in_run >= run->size) in_run -= (run++)->size;
            int64_t slot = (run->first + in_run) * dim;
            key[k] = all_keys + slot * bytes, value[k] = all_values + slot * bytes;
            if (pass->short_pool && !few) { /* each is read for many rows: widened once */
                for (int d = AHEAD * dim; d < (AHEAD + 1) * dim; d += 32) fetch(key[k], d, 1), fetch(value[k], d, 1);
                for (int d = 0; d < dim; d += W) {
                    STORE(keys + k * dim + d, NAME(read)(key[k], d, 1));
                    STORE(values + k * dim + d, NAME(read)(value[k], d, 1));
                }
                key[k] = keys + k * dim, value[k] = values + k * dim;
            }
        }
        for (int k = count; k < count + 8; k++) key[k] = key[count - 1]; /* computed with, never used */
        if (few) {
            NAME(few)(rows, dim, q, key, value, count, at, first, last, pass->softcap, score, m, l, sum,
                      pass->short_pool);
            continue;
        }
        for (int r = 0; r < rows; r += 2 * W) {
            int mine = rows - r < 2 * W ? rows - r : 2 * W;
            if (mine > W)
                NAME(panel)(2, mine, dim, q + r * dim, key, value, count, at, first + r, last + r, pass->softcap,
                            score, m + r, l + r, sum + r * dim);
            else
                NAME(panel)(1, mine, dim, q + r * dim, key, value, count, at, first + r, last + r, pass->softcap,
                            score, m + r, l + r, sum + r * dim);
        }
    }
    for (int r = 0; r < rows; r++) {
        int of = (row0 + r) % group;
        if (piece->base < 0) {
            float sink = layer->sinks ? expf(layer->sinks[head * group + of] - m[r]) : 0.0f;
            float part = 1.0f / (l[r] + sink);
            for (int d = 0; d < dim; d++) sum[r * dim + d] *= part;
            narrow(layer->out, ((int64_t)token[r] * heads + head * group + of) * dim, sum + r * dim, dim,
                   pass->short_queries);
        } else {
            int64_t place = ((int64_t)head * pass->part_tokens + piece->base) * group + row0 + r;
            memcpy(pass->parts + place * dim, sum + r * dim, sizeof(float) * dim);
            pass->sums[2 * place] = m[r], pass->sums[2 * place + 1] = l[r];
        }
    }
}

/* What one thread does: tasks, as long as there are any. */
static void NAME(tasks)(void *given) {
    Layer *layer = given;
    const Pass *pass = layer->pass;
    float *work = pass->work + __atomic_fetch_add(&layer->thread, 1, __ATOMIC_RELAXED) * pass->work_size;
    const Piece *piece = pass->piece, *end = piece + pass->pieces;
    for (;;) {
        int64_t task = __atomic_fetch_add(&layer->next, 1, __ATOMIC_RELAXED);
        if (task >= pass->tasks) return;
        while (piece + 1 < end && piece[1].task <= task) piece++;
        int64_t tile = (task - piece->task) / pass->kv_heads, head = (task - piece->task) % pass->kv_heads;
        NAME(task)(layer, piece, head, tile * ROWS, work);
    }
}
