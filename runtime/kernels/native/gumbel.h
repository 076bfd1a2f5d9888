/* A draw from scores by Gumbel noise, as runtime/kernels/gumbel.py defines it, to the last bit: no product is fused with a
 * sum, so that all processors give the same. */

#ifndef UNFUSED
#if defined(__x86_64__)
#define UNFUSED(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define UNFUSED(x) __asm__("" : "+w"(x))
#else
#define UNFUSED(x) __asm__("" : "+m"(x))
#endif
enum { DRAW_BLOCK = 64 };
#endif

INLINE VF NAME(times)(VF a, VF b) {
    VF product = a * b;
    UNFUSED(product);
    return product;
}

INLINE VF NAME(series)(VF f) {
    VF p = NAME(times)(f, NAME(all)(0.09004202485084534f)) - 0.14257794618606567f;
    p = NAME(times)(p, f) + 0.14806459844112396f;
    p = NAME(times)(p, f) - 0.16575047373771667f;
    p = NAME(times)(p, f) + 0.19973105192184448f;
    p = NAME(times)(p, f) - 0.25001609325408936f;
    p = NAME(times)(p, f) + 0.33333659172058105f;
    p = NAME(times)(p, f) - 0.4999999403953552f;
    return NAME(times)(NAME(times)(f, f), p) + f;
}

/* x = (1 + fraction) * 2^power */
INLINE VF NAME(fraction)(VF x, VI *power) {
    *power = ((VI)x - 0x3f3504f3) >> 23;
    return (VF)((VI)x - (*power << 23)) - 1.0f;
}

INLINE VF NAME(minus_log)(VF fraction, VI power) {
    return -(NAME(times)(__builtin_convertvector(power, VF), NAME(all)(0.693147182464599609375f)) + NAME(series)(fraction));
}

/* 31 random bits. */
INLINE VI NAME(random)(VU id, uint32_t lower, uint32_t upper) {
    VU x = id * 0x9e3779b1u + lower;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u + upper;
    x = (x ^ x >> 16) * 0x2c1b3c6du;
    x = (x ^ x >> 15) * 0x297a2d39u;
    return (VI)((x ^ x >> 15) >> 1);
}

INLINE VF NAME(share)(VI random) { return (__builtin_convertvector(random, VF) + 0.5f) * 0x1p-31f; }

INLINE VF NAME(gumbel)(VI random) {
    VI power, near = NAME(share)(random) < NAME(all)(0.25f);
    VF fraction = NAME(fraction)(NAME(share)(0x7fffffff - random), &power);
    VF exponential = NAME(minus_log)(NAME(either)(near, -NAME(share)(random), fraction), power & ~near);
    fraction = NAME(fraction)(exponential, &power);
    return NAME(minus_log)(fraction, power);
}

/* No less than gumbel(), rounding aside: an exponential variate is no less than its share, whose bits are no more than its
 * logarithm. */
INLINE VF NAME(gumbel_at_most)(VI random) {
    return 88.02969f - __builtin_convertvector((VI)NAME(share)(random), VF) * 8.2629582e-8f;
}

INLINE float NAME(greatest)(VF x) {
    float found = x[0];
    for (int i = 1; i < W; i++) found = x[i] > found ? x[i] : found;
    return found;
}

static int64_t NAME(drawn)(const Draw *job) {
    const float *weights = job->weights, best = job->scores[job->best], inverse = 1.0f / job->temperature;
    const int64_t *ids = job->ids;
    const uint32_t lower = job->lower, upper = job->upper;
    float kept[DRAW_BLOCK], value[DRAW_BLOCK];
    uint32_t id[DRAW_BLOCK];
    int32_t random[DRAW_BLOCK];
    int64_t chosen = job->best;
    float top = NAME(gumbel)(NAME(random)((VU){0} + (uint32_t)(ids ? ids[chosen] : chosen), lower, upper))[0];
    for (int64_t first = 0; first < job->count; first += DRAW_BLOCK) {
        const float *from = job->scores + first;
        const int size = job->count - first < DRAW_BLOCK ? (int)(job->count - first) : DRAW_BLOCK;
        if (weights || size < DRAW_BLOCK) {
            for (int i = 0; i < size; i++) kept[i] = !weights || weights[first + i] >= job->least ? from[i] : -INFINITY;
            for (int i = size; i < DRAW_BLOCK; i++) kept[i] = -INFINITY;
            from = kept;
        }
        VF most = LOAD(from);
        for (int i = W; i < DRAW_BLOCK; i += W) most = NAME(most)(most, LOAD(from + i));
        if ((NAME(greatest)(most) - best) * inverse + 22.26f < top) continue; /* no noise is more than 22.19 */
        for (int i = 0; i < DRAW_BLOCK; i++) id[i] = (uint32_t)(first + i);
        for (int i = 0; ids && i < size; i++) id[i] = (uint32_t)ids[first + i];
        most = NAME(all)(-INFINITY);
        for (int i = 0; i < DRAW_BLOCK; i += W) {
            VI bits = NAME(random)(*(const VU *)(id + i), lower, upper);
            *(VI *)(random + i) = bits;
            most = NAME(most)(most, (LOAD(from + i) - best) * inverse + NAME(gumbel_at_most)(bits));
        }
        if (NAME(greatest)(most) + 0.01f < top) continue;
        for (int i = 0; i < DRAW_BLOCK; i += W)
            STORE(value + i, (LOAD(from + i) - best) / job->temperature + NAME(gumbel)(*(const VI *)(random + i)));
        for (int i = 0; i < size; i++)
            if (value[i] > top || (value[i] == top && first + i < chosen)) top = value[i], chosen = first + i;
    }
    return chosen;
}
