/* Attention of single queries over runs of slots, in one pass over keys and values (online softmax, arXiv
 * 2205.14135): no copy, no score matrix. Compiled for the processor it runs on; in vectors of 16 floats, which
 * the compiler splits where the processor's are shorter. Head sizes are multiples of 16. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 32 /* keys whose scores are computed before their values are added up */
#define MOST_DIM 256
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

/* The pool of one layer: keys of head h at data[(h * slots + slot) * dim], values `kv_heads` heads later.
 * half: numbers are bfloat16. */
struct pool {
    const void *data;
    int64_t slots, kv_heads, dim, half;
};

/* `count` consecutive slots from `start` on. */
struct run {
    int32_t start, count;
};

/* One query token, which sees `count` runs from runs[first] on. */
struct job {
    int32_t token, first, count;
};

INLINE vec load(const float *from) {
    vec made;
    memcpy(&made, from, sizeof made);
    return made;
}

INLINE void store(float *to, vec value) { memcpy(to, &value, sizeof value); }

INLINE vec widen(const uint16_t *from) {
    hvec given;
    memcpy(&given, from, sizeof given);
    ivec bits = __builtin_convertvector(given, ivec) << 16;
    vec made;
    memcpy(&made, &bits, sizeof made);
    return made;
}

INLINE float sum(vec value) {
    float lanes[LANES];
    memcpy(lanes, &value, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* e^x for x <= 0, to 2 units in the last place (the polynomial of Cephes' expf). */
INLINE vec exponential(vec x) {
    ivec low = x < -87.0f;
    vec least = (vec){0} - 87.0f;
    ivec bits, floor_bits;
    memcpy(&bits, &x, sizeof bits);
    memcpy(&floor_bits, &least, sizeof bits);
    bits = (bits & ~low) | (floor_bits & low);
    memcpy(&x, &bits, sizeof x);
    ivec whole = __builtin_convertvector(x * 1.44269504f - 0.5f, ivec);
    vec n = __builtin_convertvector(whole, vec);
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (whole + 127) << 23;
    vec scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

/* A block's scores of one query -> its weights, relative to the greatest score so far. */
INLINE void weigh(float *scores, int count, float *most, float *total, float *kept) {
    float top = *most;
    for (int key = 0; key < count; key++) top = scores[key] > top ? scores[key] : top;
    for (int key = count; key < BLOCK; key++) scores[key] = -INFINITY;
    *kept = *most == -INFINITY ? 0.0f : expf(*most - top);
    vec added = {0};
    for (int key = 0; key < BLOCK; key += LANES) {
        vec weight = exponential(load(scores + key) - top);
        store(scores + key, weight);
        added += weight;
    }
    *total = *total * *kept + sum(added);
    *most = top;
}

/* One query token and the `group` query heads of one key head. query, out: [group, dim]; lse: [group]. */
INLINE void attend_head(const struct pool *pool, int64_t head, const struct run *runs, int32_t count,
                        const float *query, int64_t group, const int64_t dim, float scale, float *out,
                        float *lse) {
    float scores[BLOCK] __attribute__((aligned(64)));
    float key_block[BLOCK * MOST_DIM] __attribute__((aligned(64)));
    float value_block[BLOCK * MOST_DIM] __attribute__((aligned(64)));
    float most[group], total[group];
    for (int64_t g = 0; g < group; g++) most[g] = -INFINITY, total[g] = 0.0f;
    memset(out, 0, sizeof(float) * group * dim);
    for (int32_t r = 0; r < count; r++) {
        for (int32_t first = 0; first < runs[r].count; first += BLOCK) {
            int size = runs[r].count - first < BLOCK ? runs[r].count - first : BLOCK;
            int64_t slot = (int64_t)runs[r].start + first;
            int64_t at_key = (head * pool->slots + slot) * dim;
            int64_t at_value = ((head + pool->kv_heads) * pool->slots + slot) * dim;
            const float *keys = key_block, *values = value_block;
            if (pool->half) {
                const uint16_t *data = pool->data;
                for (int64_t i = 0; i < size * dim; i += LANES) {
                    store(key_block + i, widen(data + at_key + i));
                    store(value_block + i, widen(data + at_value + i));
                }
            } else {
                keys = (const float *)pool->data + at_key;
                values = (const float *)pool->data + at_value;
            }
            for (int64_t g = 0; g < group; g++) {
                const float *mine = query + g * dim;
                for (int key = 0; key < size; key++) {
                    vec dots = {0};
                    for (int64_t i = 0; i < dim; i += LANES)
                        dots += load(mine + i) * load(keys + key * dim + i);
                    scores[key] = sum(dots) * scale;
                }
                float kept;
                weigh(scores, size, most + g, total + g, &kept);
                float *sums = out + g * dim;
                for (int64_t part = 0; part < dim; part += 4 * LANES) {
                    int vectors = dim - part < 4 * LANES ? (int)(dim - part) / LANES : 4;
                    vec added[4];
                    for (int v = 0; v < vectors; v++) added[v] = load(sums + part + v * LANES) * kept;
                    for (int key = 0; key < size; key++)
                        for (int v = 0; v < vectors; v++)
                            added[v] += scores[key] * load(values + key * dim + part + v * LANES);
                    for (int v = 0; v < vectors; v++) store(sums + part + v * LANES, added[v]);
                }
            }
        }
    }
    for (int64_t g = 0; g < group; g++) {
        for (int64_t i = 0; i < dim; i += LANES)
            store(out + g * dim + i, load(out + g * dim + i) / total[g]);
        lse[g] = most[g] + logf(total[g]);
    }
}

/* queries: rows of `stride` floats, query heads first, [heads, dim]. out: [tokens, heads, dim]; lse: [tokens,
 * heads]; both written at the jobs' tokens alone. */
void attend(const void *data, int64_t slots, int64_t kv_heads, int64_t dim, int64_t half, int64_t group,
            const float *queries, int64_t stride, const struct job *jobs, int64_t count,
            const struct run *runs, float scale, float *out, float *lse) {
    struct pool pool = {data, slots, kv_heads, dim, half};
    for (int64_t number = 0; number < count; number++) {
        const struct job *job = jobs + number;
        for (int64_t head = 0; head < kv_heads; head++) {
            const float *query = queries + job->token * stride + head * group * dim;
            int64_t place = (job->token * kv_heads + head) * group;
            const struct run *mine = runs + job->first;
            float *made = out + place * dim, *sums = lse + place;
            if (dim == 64)
                attend_head(&pool, head, mine, job->count, query, group, 64, scale, made, sums);
            else if (dim == 128)
                attend_head(&pool, head, mine, job->count, query, group, 128, scale, made, sums);
            else
                attend_head(&pool, head, mine, job->count, query, group, dim, scale, made, sums);
        }
    }
}

/* kv: rows of `stride` numbers of `width` bytes, [2 * kv_heads, dim], into the slots of a layer's pool. */
void put(char *data, int64_t slots, int64_t heads, int64_t dim, int64_t width, const char *kv, int64_t stride,
         const int64_t *places, int64_t tokens) {
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            memcpy(data + (head * slots + places[token]) * dim * width,
                   kv + (token * stride + head * dim) * width, dim * width);
}
