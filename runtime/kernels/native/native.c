/* What a decoder computes on CPUs, and what its grammars allow. token_mask.h: tokens that may follow. panels.h:
 * products with matrices. tiles.h: those with AMX. layers.h: norms, rotary embedding, SiLU. gumbel.h: draws. decoder.h: all layers of a decoder. tasks.h:
 * attention of one layer over runs of a pool of keys and values: new keys and values are written to their slots, then each
 * task takes up to ROWS query rows of a piece through the keys in blocks, with a running maximum and sum (online softmax,
 * arXiv 1805.02867); results of tokens in several pieces are merged by their sums (log-sum-exp). All in float32, whatever
 * the pool holds.
 *
 * Plain C with the vectors of GCC and Clang, no library but libm: one copy of the tasks for each kind of
 * processor, chosen when called. Threads are those of whoever hands in `parallel`. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
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
#define SHUFFLE_BOTH(type, x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(type, x, ...) __builtin_shuffle(x, (type){__VA_ARGS__})
#define SHUFFLE_BOTH(type, x, y, ...) __builtin_shuffle(x, y, (type){__VA_ARGS__})
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

/* Parts 0 .. total - 1 of a job, taken `step` at a time. */
typedef struct {
    int64_t next, total, step;
} Share;

/* The first of the next parts; -1: there are none left. */
INLINE int64_t next_of(Share *share) {
    int64_t from = __atomic_fetch_add(&share->next, share->step, __ATOMIC_RELAXED);
    return from < share->total ? from : -1;
}

/* Outputs that lie side by side in a panel; rows that are computed together, and inputs of a panel that fit into the first
 * cache. */
enum { PANEL = 32, CHUNK = 96, DEPTH = 256 };
/* Rows, and vectors of outputs, whose sums are kept in registers: of 32 where there are vectors of 16, else of 16. Where
 * there are few of these, float32 weights are read in whole lines all the same, and fewer rows are computed at once. */
enum { MOST_ROWS = 8, MOST_COLUMNS = 4, FETCHING_ROWS = 16, LINE = 64 };
#define COLUMNS(rows) (W == 16 ? 2 : (rows) <= 3 ? 4 : 2)
#define ROWS_AT_ONCE(bytes) (W == 16 ? 8 : (bytes) < 4 ? 6 : 3)

/* How rows go through panels: through so many panels at once, `visit` bytes of each in turn, and so many rows at once. Some
 * processors read memory a third faster in several places at once, others at half the speed, so it is measured
 * (tuning.py). No sum depends on it. */
typedef struct {
    int32_t streams, visit, rows;
} Setting;

/* Of numbers of 1, 2 and 4 bytes, by the rows; the last one is of all larger numbers of rows. streams 0: not measured. */
enum { SETTINGS = 17, LEAST_VISIT = 256 };
static Setting settings[3][SETTINGS + 1];

/* Of `rows` rows that are computed together, CHUNK at most. */
INLINE Setting setting_of(int64_t bytes, int64_t rows) {
    Setting found = settings[bytes / 2][rows < SETTINGS ? rows : SETTINGS];
    if (!found.streams) return (Setting){1, LEAST_VISIT, MOST_ROWS};
    if (found.streams * rows > CHUNK) found.streams = CHUNK / rows;
    return found;
}

/* out [rows, outputs] = x [rows, inputs] weight^T + bias, which are bfloat16 where `is_short`. Where there is a scale,
 * weight and x are integers: then a number of x stands for row_scale, one of the weights for its output's scale, and bias
 * is float32. weight: in panels, see panels.h, and x in float32 or integers of 16 bits; for tiles.h the weights are as they
 * are, and x is as pack_rows() makes it. */
typedef struct {
    const void *x, *weight;
    const float *scale, *row_scale;
    const void *bias;
    void *out;
    int64_t rows, outputs, inputs;
    int is_short;
    Share share;
} Product;

/* As runtime/kernels/rms_norm.py. `each`: every row of a token has a weight of its own. */
typedef struct {
    const void *x, *weight;
    void *residual, *out;
    int64_t tokens, rows, size, stride, residual_stride;
    float eps;
    int each, is_short, short_weight, wide;
    Share share;
} Norm;

/* As runtime/kernels/rotary.py. */
typedef struct {
    void *x;
    const void *cosine, *sine;
    int64_t tokens, heads, dim, turned, stride;
    int is_short;
    Share share;
} Rotation;

/* As runtime/kernels/silu_mul.py. */
typedef struct {
    const void *both;
    void *out;
    int64_t rows, size, stride;
    int is_short;
    Share share;
} Gate;

/* ids: which token each column is, ascending; none: its own number. weights: columns of less than `least` are left out.
 * best: the first column of the greatest score, which is finite. lower, upper: the halves of the key. */
typedef struct {
    const float *scores, *weights;
    const int64_t *ids;
    int64_t count, best;
    float least, temperature;
    uint32_t lower, upper;
} Draw;

#if defined(__x86_64__)
#define WIDE_KINDS 1
#else
#define WIDE_KINDS 0
#endif

/* Compilers that know AMX; Linux lends its registers to those that ask. */
#if WIDE_KINDS && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 13 : __GNUC__ >= 11)
#define TILES 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define TILES 0
#endif

#if WIDE_KINDS
#include <immintrin.h>
#if defined(__clang__) && TILES
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,amx-tile,amx-bf16,amx-int8"))), apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))), apply_to = function)
#elif TILES
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,amx-tile,amx-bf16,amx-int8,prefer-vector-width=512")
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#endif
#define W 16
#define KEYS_AT_ONCE 8
#define DIMS 4
#define NAME(x) x##_512
#include "kind.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define W 8
#define KEYS_AT_ONCE 6
#define DIMS 2
#define NAME(x) x##_256
#include "kind.h"
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
#include "kind.h"

#include "token_mask.h"

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

/* Goes up with every change of a function that is called from outside, or of a struct that it is given. */
int native_version(void) { return 6; }

/* Use vectors of at most so many floats; gives how many are used. */
int attend_lanes(int most) { return chosen = lanes_here(most); }

/* From now on products of first_row to last_row rows, with numbers of so many bytes, go so through their panels. */
void set_product(int bytes, int first_row, int last_row, int streams, int visit, int rows) {
    if (visit < LEAST_VISIT) visit = LEAST_VISIT;
    const Setting made = {clip(streams, CHUNK), visit / LEAST_VISIT * LEAST_VISIT, rows < 1 ? 1 : rows};
    for (int row = clip(first_row, SETTINGS); row <= clip(last_row, SETTINGS); row++) settings[bytes / 2][row] = made;
}

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

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */
typedef void (*Work)(void *);

#if WIDE_KINDS
#define BY_KIND(name) (kind() == 16 ? name##_512 : kind() == 8 ? name##_256 : name##_128)
#else
#define BY_KIND(name) name##_128
#endif

static int kind(void) {
    if (!chosen) chosen = lanes_here(16);
    return chosen;
}

static void share_out(Work work, void *job, Parallel parallel, int64_t threads) {
    if (threads > 1 && parallel)
        parallel(work, job, threads, 0);
    else
        work(job);
}

/* An even number at a time, no fewer than `least`. */
static Share shared(int64_t total, int64_t threads, int64_t least) {
    int64_t step = threads > 1 ? total / (4 * threads) : total;
    if (step < least) step = least;
    return (Share){0, total, step + (step & 1)};
}

/* Write one layer's new keys and values, then attend. */
void attend(const Pass *pass, const void *qkv, void *pool, void *out, const float *sinks) {
    Layer layer = {pass, qkv, pool, out, sinks, 0, 0};
    write_new(&layer);
    share_out(BY_KIND(tasks), &layer, pass->parallel, pass->tasks > 1 ? pass->threads : 1);
    merge(&layer);
}

/* x -> whole numbers of so many bytes each, and their scales. */
static void round_rows(char *whole, float *row_scale, const void *x, const Product *job, int bytes) {
    float (*round)(void *, const void *, int64_t, int, int) = BY_KIND(rounded_row);
    for (int64_t r = 0, inputs = job->inputs; r < job->rows; r++)
        row_scale[r] = round(whole + r * inputs * bytes, (const char *)x + r * inputs * (job->is_short ? 2 : 4), inputs,
                             job->is_short, bytes);
}

#if TILES
/* Whether this processor has AMX, and this process may use it. */
static int tiles_asked(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (1u << 22 | 1u << 24 | 1u << 25)) return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
}

static int tiles_wanted = 0;

/* Use tiles, or do not; gives whether they are used. */
int use_tiles(int wanted) {
    static int asked = -1;
    if (asked < 0) asked = tiles_asked();
    return tiles_wanted = wanted && asked && kind() == 16;
}

/* x is packed here, into integers where there is a scale. */
static int by_tiles(const void *x, Product job, Parallel parallel, int64_t threads) {
    const int64_t rows = job.rows, wide = job.inputs * (job.scale ? 1 : 2);
    const int64_t padded = (rows + 2 * TILE - 1) / (2 * TILE) * (2 * TILE);
    const int64_t more = job.scale ? rows * wide + 4 * padded : 0; /* rounded rows, and their scales */
    char *packed = aligned_alloc(64, (padded * wide + more + 63) / 64 * 64);
    if (!packed) return 0;
    float *row_scale = (float *)(packed + padded * wide);
    char *whole = (char *)(row_scale + padded);
    if (job.scale) {
        memset(row_scale, 0, 4 * padded);
        round_rows(whole, row_scale, x, &job, 1);
    }
    pack_rows((uint32_t *)packed, job.scale ? (const void *)whole : x, rows, wide / 4);
    job.x = packed, job.row_scale = row_scale, job.share = shared(job.outputs, threads, 2 * TILE);
    job.share.step = (job.share.step + 2 * TILE - 1) / (2 * TILE) * (2 * TILE);
    share_out(tiles, &job, parallel, threads);
    free(packed);
    return 1;
}
#else
int use_tiles(int wanted) { return 0 & wanted; }
#endif

/* Whether product() takes such a matrix as it is, else in panels. bytes: of a number. */
int reads_rows(int64_t outputs, int64_t inputs, int bytes) {
#if TILES
    return tiles_wanted && outputs >= TILE && bytes < 4 && inputs * bytes % TILE_BYTES == 0;
#else
    return 0 & (int)(outputs + inputs + bytes);
#endif
}

/* x is made float32, or integers of 16 bits, here. */
static int by_panels(const void *x, Product job, Parallel parallel, int64_t threads) {
    const int64_t numbers = job.rows * job.inputs;
    char *made = 0;
    job.x = x;
    if (job.scale || job.is_short) {
        made = malloc(numbers * (job.scale ? 2 : 4) + 4 * job.rows + 4);
        if (!made) return 0;
        job.x = made;
        if (job.scale) {
            job.row_scale = (float *)(made + (numbers * 2 + 3) / 4 * 4);
            round_rows(made, (float *)job.row_scale, x, &job, 2);
        } else {
            widen((float *)made, x, 0, numbers, 1);
        }
    }
    job.share = shared((job.outputs + PANEL - 1) / PANEL, threads, 1);
    share_out(BY_KIND(panels), &job, parallel, threads);
    free(made);
    return 1;
}

/* x and out: bfloat16 where `is_short`, else float32; weight and bias, too, but where there is a scale: then the weights
 * are integers of 8 bits, one of which stands for scale [outputs], bias is float32, and inputs are a multiple of 16. How
 * weights lie: see reads_rows(). 0: there was no memory for it. */
int product(const void *x, const void *weight, const float *scale, const void *bias, void *out, int64_t rows,
            int64_t outputs, int64_t inputs, int is_short, Parallel parallel, int64_t threads) {
    const Product job = {x, weight, scale, 0, bias, out, rows, outputs, inputs, is_short, {0, 0, 0}};
#if TILES
    if (reads_rows(outputs, inputs, scale ? 1 : is_short ? 2 : 4)) return by_tiles(x, job, parallel, threads);
#endif
    return by_panels(x, job, parallel, threads);
}

void rms_norm(const void *x, const void *weight, void *residual, void *out, int64_t tokens, int64_t rows, int64_t size,
              int64_t stride, int64_t residual_stride, float eps, int each, int is_short, int short_weight, int wide,
              Parallel parallel, int64_t threads) {
    Norm job = {x,    weight,   residual,     out,  tokens, rows, size, stride, residual_stride, eps,
                each, is_short, short_weight, wide, shared(tokens, threads, 1)};
    share_out(BY_KIND(norms), &job, parallel, threads);
}

void rotate(void *x, const void *cosine, const void *sine, int64_t tokens, int64_t heads, int64_t dim, int64_t turned,
            int64_t stride, int is_short, Parallel parallel, int64_t threads) {
    Rotation job = {x, cosine, sine, tokens, heads, dim, turned, stride, is_short, shared(tokens, threads, 1)};
    share_out(BY_KIND(rotations), &job, parallel, threads);
}

void silu_mul(const void *both, void *out, int64_t rows, int64_t size, int64_t stride, int is_short, Parallel parallel,
              int64_t threads) {
    Gate job = {both, out, rows, size, stride, is_short, shared(rows, threads, 1)};
    share_out(BY_KIND(gates), &job, parallel, threads);
}

/* The column whose score / temperature + noise is greatest. */
int64_t draw(const float *scores, const int64_t *ids, const float *weights, float least, int64_t count, int64_t best,
             float temperature, int64_t lower, int64_t upper) {
    const Draw job = {scores, weights, ids, count, best, least, temperature, (uint32_t)lower, (uint32_t)upper};
    return BY_KIND(drawn)(&job);
}

#include "decoder.h"
