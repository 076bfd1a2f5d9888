/* Attention of one layer over runs of a pool of keys and values, on CPUs: new keys and values are written to
 * their slots, then each task takes up to ROWS query rows of a piece through the keys in blocks, with a running
 * maximum and sum (online softmax, arXiv 1805.02867); results of tokens in several pieces are merged by their
 * sums (log-sum-exp). All in float32, whatever the pool holds.
 *
 * Plain C with the vectors of GCC and Clang, no library but libm: one copy of the tasks for each kind of
 * processor, chosen when called. Threads are those of whoever hands in `parallel`. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* Queries of `spans` against the keys in `runs`, as in runtime/attention/layout.py. Token i of a span sees the
 * keys j of its runs with j <= lead + i, and with j > lead + i - window where there is a window.
 *
 * base  where its results go in `parts`, in tokens; -1: it is all that its tokens see, and they go to `out`
 * task  the number of its first task */
typedef struct {
    int64_t first_span, spans, first_run, runs, keys, lead, window, base, tokens, task;
} Piece;

typedef struct {
    int64_t first, size;
} Range; /* of new tokens, or of slots */

/* One pass under one window. */
typedef struct {
    int64_t tokens, kv_heads, group, dim, slots;
    int64_t short_queries, short_pool; /* whether numbers are bfloat16, else float32 */
    int64_t pieces, tasks, places, merged, part_tokens, threads;
    int64_t work_size; /* floats of `work` for each thread */
    const Piece *piece;
    const Range *span, *run;
    const Range *place;                 /* where the new tokens' keys and values go, in their order */
    const Range *merge;                 /* tokens of several parts; of those of merge[i] the first has the parts */
    const int64_t *first_part, *part;   /* part[first_part[i]] .. part[first_part[i + 1] - 1], the next ones those behind */
    float *parts, *sums;                /* [kv_heads, part_tokens, group, dim]; the same, of (maximum, sum) */
    float *work;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */
    float scale, softcap;               /* softcap 0: none */
} Pass;

/* One layer's. */
typedef struct {
    const Pass *pass;
    const void *qkv;    /* [tokens, heads + 2 * kv_heads, dim] */
    void *pool;         /* [2 * kv_heads, slots, dim] */
    void *out;          /* [tokens, heads, dim], of the queries' type */
    const float *sinks; /* [heads], or none */
    int64_t next, thread; /* the next task, and the next thread's number */
} Layer;

/* Of a task: query rows (a row is one head of one token), and keys that are looked at together. FEW: up to so
 * many rows a product of two vectors is faster than one of matrices. AHEAD: keys and values are asked of the
 * memory so many keys before they are needed. */
enum { ROWS = 128, KEYS = 64, FEW = 4, AHEAD = 6 };

#if defined(__clang__)
#define SHUFFLE(type, x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define SHUFFLE(type, x, ...) __builtin_shuffle(x, (type){__VA_ARGS__})
#endif

INLINE int clip(int x, int most) { return x < 0 ? 0 : x > most ? most : x; }

/* Number d of a key or value will be wanted. */
INLINE void fetch(const void *row, int d, int is_short) { __builtin_prefetch((const char *)row + d * (is_short ? 2 : 4)); }

/* to[0 .. count - 1] = from[at ...], which is bfloat16 where `is_short`. */
INLINE void widen(float *to, const void *from, int64_t at, int count, int is_short) {
    if (is_short) {
        const uint16_t *bits = (const uint16_t *)from + at;
        for (int i = 0; i < count; i++) {
            uint32_t all = (uint32_t)bits[i] << 16;
            memcpy(to + i, &all, 4);
        }
    } else {
        memcpy(to, (const float *)from + at, sizeof(float) * count);
    }
}

/* The other way, to the nearest number, ties to even. */
INLINE void narrow(void *to, int64_t at, const float *from, int count, int is_short) {
    if (is_short) {
        uint16_t *bits = (uint16_t *)to + at;
        for (int i = 0; i < count; i++) {
            uint32_t all;
            memcpy(&all, from + i, 4);
            uint32_t rounded = (all + 0x7fff + (all >> 16 & 1)) >> 16;
            bits[i] = from[i] != from[i] ? 0x7fc0 : rounded;
        }
    } else {
        memcpy((float *)to + at, from, sizeof(float) * count);
    }
}

#if defined(__x86_64__)
#define WIDE_KINDS 1
#else
#define WIDE_KINDS 0
#endif

#if WIDE_KINDS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#endif
#define W 16
#define KEYS_AT_ONCE 8
#define DIMS 4
#define NAME(x) x##_512
#include "tasks.h"
#undef W
#undef KEYS_AT_ONCE
#undef DIMS
#undef NAME
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define W 8
#define KEYS_AT_ONCE 4
#define DIMS 2
#define NAME(x) x##_256
#include "tasks.h"
#undef W
#undef KEYS_AT_ONCE
#undef DIMS
#undef NAME
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#define W 4
#define KEYS_AT_ONCE 4
#define DIMS 2
#define NAME(x) x##_128
#include "tasks.h"

/* Floats that lie side by side in this processor's vectors. `most`: no more than so many. */
static int lanes_here(int most) {
#if WIDE_KINDS
    __builtin_cpu_init();
    if (most >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 16;
    if (most >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 8;
#endif
    (void)most;
    return 4;
}

static int chosen = 0; /* 0: not chosen yet */

/* Use vectors of at most so many floats; gives how many are used. */
int attend_lanes(int most) { return chosen = lanes_here(most); }

/* Floats of working memory for each thread. */
int64_t attend_work(int64_t dim) {
    return (int64_t)(ROWS + 32) * dim + (int64_t)ROWS * dim + (KEYS + 8) * 32 + 2 * (int64_t)KEYS * dim + 16;
}

static void write_new(const Layer *layer) {
    const Pass *pass = layer->pass;
    const int64_t dim = pass->dim, heads = pass->kv_heads * pass->group, kv = 2 * pass->kv_heads;
    int64_t token = 0;
    for (const Range *place = pass->place; place < pass->place + pass->places; place++)
        for (int64_t i = 0; i < place->size; i++, token++)
            for (int64_t head = 0; head < kv; head++) {
                int64_t from = (token * (heads + kv) + heads + head) * dim;
                int64_t to = (head * pass->slots + place->first + i) * dim;
                if (pass->short_queries == pass->short_pool) {
                    int size = pass->short_pool ? 2 : 4;
                    memcpy((char *)layer->pool + to * size, (const char *)layer->qkv + from * size, dim * size);
                } else if (pass->short_pool) {
                    narrow(layer->pool, to, (const float *)layer->qkv + from, dim, 1);
                } else {
                    widen((float *)layer->pool + to, layer->qkv, from, dim, 1);
                }
            }
}

/* One token of several parts: `offset` behind those in `part`. */
static void merge_token(const Layer *layer, int64_t token, const int64_t *part, int64_t count, int64_t offset) {
    const Pass *pass = layer->pass;
    const int64_t group = pass->group, heads = pass->kv_heads * group, dim = pass->dim;
    float *sum = pass->work;
    for (int64_t head = 0; head < heads; head++) {
        const int64_t row0 = (head / group * pass->part_tokens + offset) * group + head % group;
        const float *sink = layer->sinks ? layer->sinks + head : 0;
        float top = sink ? *sink : -INFINITY, total = 0.0f;
        for (int64_t p = 0; p < count; p++) {
            float m = pass->sums[2 * (row0 + part[p] * group)];
            if (m > top) top = m;
        }
        for (int64_t d = 0; d < dim; d++) sum[d] = 0.0f;
        for (int64_t p = 0; p < count; p++) {
            const int64_t row = row0 + part[p] * group;
            const float weight = expf(pass->sums[2 * row] - top);
            total += weight * pass->sums[2 * row + 1];
            for (int64_t d = 0; d < dim; d++) sum[d] += weight * pass->parts[row * dim + d];
        }
        if (sink) total += expf(*sink - top);
        for (int64_t d = 0; d < dim; d++) sum[d] /= total;
        narrow(layer->out, (token * heads + head) * dim, sum, dim, pass->short_queries);
    }
}

static void merge(const Layer *layer) {
    const Pass *pass = layer->pass;
    for (int64_t i = 0; i < pass->merged; i++) {
        const int64_t *part = pass->part + pass->first_part[i];
        const int64_t count = pass->first_part[i + 1] - pass->first_part[i];
        for (int64_t j = 0; j < pass->merge[i].size; j++)
            merge_token(layer, pass->merge[i].first + j, part, count, j);
    }
}

/* Write one layer's new keys and values, then attend. */
void attend(const Pass *pass, const void *qkv, void *pool, void *out, const float *sinks) {
    Layer layer = {pass, qkv, pool, out, sinks, 0, 0};
    void (*tasks)(void *) = tasks_128;
    if (!chosen) chosen = lanes_here(16);
#if WIDE_KINDS
    if (chosen == 16) tasks = tasks_512;
    if (chosen == 8) tasks = tasks_256;
#endif
    write_new(&layer);
    if (pass->threads > 1 && pass->parallel && pass->tasks > 1)
        pass->parallel(tasks, &layer, pass->threads, 0);
    else
        tasks(&layer);
    merge(&layer);
}
