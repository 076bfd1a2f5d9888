/* Vectors of W floats and what is computed with them. No operation is reassociated, so that each kind of processor
 * gives the same result every time. */

typedef float NAME(VF) __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t NAME(VI) __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t NAME(VU) __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int8_t NAME(VB) __attribute__((vector_size(W), aligned(1), may_alias));
typedef int16_t NAME(VP) __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef int8_t NAME(VBP) __attribute__((vector_size(2 * W), aligned(1), may_alias));
typedef uint16_t NAME(VS) __attribute__((vector_size(2 * W), aligned(2), may_alias));
#define VF NAME(VF)
#define VI NAME(VI)
#define VU NAME(VU)
#define LOAD(p) (*(const VF *)(p))
#define STORE(p, x) (*(VF *)(p) = (x))

INLINE VF NAME(all)(float x) { return x - (VF){0}; }

INLINE VF NAME(either)(VI mask, VF yes, VF no) { return (VF)((mask & (VI)yes) | (~mask & (VI)no)); }

INLINE VF NAME(most)(VF a, VF b) { return NAME(either)(b > a, b, a); }

/* e^x, at most 2 units of the last place off; 0 below -87; NaN stays NaN. The polynomial is Cephes'. */
INLINE VF NAME(exp)(VF x) {
    const VF magic = NAME(all)(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    VI tiny = x < NAME(all)(-87.0f);
    x = NAME(either)(tiny, NAME(all)(-87.0f), x);
    x = NAME(either)(x > NAME(all)(88.0f), NAME(all)(88.0f), x);
    VF shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    VF r = x - n * 0.693359375f + n * 2.12194440e-4f;
    VF p = NAME(all)(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    VI power = ((VI)shifted << 23) + 0x3f800000;
    return (VF)((VI)(p * (VF)power) & ~tiny);
}

/* cap * tanh(x / cap) */
INLINE VF NAME(capped)(VF x, float cap) {
    VF e = NAME(exp)(x * (2.0f / cap));
    return (1.0f - 2.0f / (e + 1.0f)) * cap;
}

INLINE float NAME(sum)(VF x) {
#if W == 16
    x += SHUFFLE(NAME(VI), x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += SHUFFLE(NAME(VI), x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += SHUFFLE(NAME(VI), x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x += SHUFFLE(NAME(VI), x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif W == 8
    x += SHUFFLE(NAME(VI), x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += SHUFFLE(NAME(VI), x, 2, 3, 0, 1, 6, 7, 4, 5);
    x += SHUFFLE(NAME(VI), x, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    x += SHUFFLE(NAME(VI), x, 2, 3, 0, 1);
    x += SHUFFLE(NAME(VI), x, 1, 0, 3, 2);
#endif
    return x[0];
}

/* W numbers of a row, from number d on, which are bfloat16 where `is_short`. */
INLINE VF NAME(read)(const void *row, int64_t d, int is_short) {
    if (!is_short) return LOAD((const float *)row + d);
    return (VF)(__builtin_convertvector(*(const NAME(VS) *)((const uint16_t *)row + d), VI) << 16);
}

/* x as it is kept: rounded to the nearest bfloat16, ties to even, where `is_short`. */
INLINE VF NAME(rounded)(VF x, int is_short) {
    if (!is_short) return x;
    VU bits = (VU)x;
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return NAME(either)(x != x, x, (VF)bits);
}

/* To number d of a row and the next ones. */
INLINE void NAME(write)(void *row, int64_t d, VF x, int is_short) {
    if (!is_short)
        STORE((float *)row + d, x);
    else
        *(NAME(VS) *)((uint16_t *)row + d) = __builtin_convertvector((VU)NAME(rounded)(x, 1) >> 16, NAME(VS));
}
