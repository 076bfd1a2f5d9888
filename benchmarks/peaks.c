/* The most that one core does, by loops that compute nothing of use: multiplications in registers, as many sums side by
 * side as it takes to keep the processor busy, and memory that is read from end to end. Compiled for this machine alone. */

#include <stdint.h>

#if defined(__AVX512F__)
enum { BYTES = 64, SUMS = 24 }; /* of a vector; of 32 registers */
#elif defined(__AVX__)
enum { BYTES = 32, SUMS = 12 };
#else
enum { BYTES = 16, SUMS = 12 };
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define UNKNOWN(x) __asm__ volatile("" : "+x"(x)) /* may have changed: is computed with each time */
#else
#define UNKNOWN(x)
#endif

typedef float Floats __attribute__((vector_size(BYTES)));
typedef uint64_t Words __attribute__((vector_size(BYTES), may_alias, aligned(8)));

static volatile float kept;

/* These return the operations of `rounds` rounds, additions and multiplications; 0: the processor has no such instruction,
 * or this file does not know it. */

int64_t multiply_float32(int64_t rounds) {
    Floats sum[SUMS], by = (Floats){0} + 0.999f, and = (Floats){0} + 0.5f;
    for (int i = 0; i < SUMS; i++) sum[i] = (Floats){0} + (float)i;
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < SUMS; i++) sum[i] = sum[i] * by + and;
    for (int i = 0; i < SUMS; i++) kept = sum[i][0];
    return rounds * SUMS * (BYTES / 4) * 2;
}

int64_t multiply_bfloat16(int64_t rounds) {
#if defined(__AVX512BF16__)
    __m512 sum[SUMS];
    __m512bh one = (__m512bh)_mm512_set1_epi16(0x3c00), other = (__m512bh)_mm512_set1_epi16(0x3c00);
    for (int i = 0; i < SUMS; i++) sum[i] = _mm512_setzero_ps();
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < SUMS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], one, other);
    for (int i = 0; i < SUMS; i++) kept = sum[i][0];
    return rounds * SUMS * 32 * 2;
#else
    return 0 * rounds;
#endif
}

int64_t multiply_int8(int64_t rounds) {
#if defined(__AVX512VNNI__)
    __m512i sum[SUMS], one = _mm512_set1_epi8(3), other = _mm512_set1_epi8(5);
    for (int i = 0; i < SUMS; i++) sum[i] = _mm512_setzero_si512();
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < SUMS; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], one, other);
#elif defined(__AVXVNNI__)
    __m256i sum[SUMS], one = _mm256_set1_epi8(3), other = _mm256_set1_epi8(5);
    for (int i = 0; i < SUMS; i++) sum[i] = _mm256_setzero_si256();
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < SUMS; i++) sum[i] = _mm256_dpbusd_avx_epi32(sum[i], one, other);
#elif defined(__AVX2__)
    __m256i sum[SUMS], one = _mm256_set1_epi8(3), other = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < SUMS; i++) sum[i] = _mm256_setzero_si256();
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < SUMS; i++) {
            UNKNOWN(one);
            sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(_mm256_maddubs_epi16(one, other), ones));
        }
#else
    return 0 * rounds;
#endif
#if defined(__AVX2__)
    for (int i = 0; i < SUMS; i++) kept = (float)((Words)sum[i])[0];
    return rounds * SUMS * (int64_t)sizeof(sum[0]) * 2;
#endif
}

/* Read `bytes` bytes in `streams` places at once, a few lines of each in turn; bytes: a multiple of 512 * streams. */
void read_memory(const char *memory, int64_t bytes, int64_t streams) {
    enum { AT_ONCE = 8 };
    const int64_t part = bytes / streams;
    Words sum[AT_ONCE] = {{0}};
    for (int64_t at = 0; at < part; at += AT_ONCE * BYTES)
        for (int64_t stream = 0; stream < streams; stream++)
            for (int k = 0; k < AT_ONCE; k++) sum[k] += *(const Words *)(memory + stream * part + at + k * BYTES);
    for (int k = 0; k < AT_ONCE; k++) kept = (float)sum[k][0];
}
