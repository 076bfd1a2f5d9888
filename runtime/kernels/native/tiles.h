/* Products with the tile registers of x86 processors that have AMX: 16 outputs and 16 rows at a time, straight from
 * weights as they are. Bfloat16 into float32, or integers of 8 bits into 32 (Intel's manual, volume 1, chapter 18). */

enum { TILE = 16, TILE_BYTES = 64 }; /* rows of a tile, and bytes of one */

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* 16 vectors of 16. */
INLINE void transpose(VF *x) {
    for (int i = 0; i < TILE; i++)
        if (!(i & 8)) {
            VF a = x[i], b = x[i + 8];
            x[i] = SHUFFLE_BOTH(VI, a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
            x[i + 8] = SHUFFLE_BOTH(VI, a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        }
    for (int i = 0; i < TILE; i++)
        if (!(i & 4)) {
            VF a = x[i], b = x[i + 4];
            x[i] = SHUFFLE_BOTH(VI, a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            x[i + 4] = SHUFFLE_BOTH(VI, a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int i = 0; i < TILE; i++)
        if (!(i & 2)) {
            VF a = x[i], b = x[i + 2];
            x[i] = SHUFFLE_BOTH(VI, a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            x[i + 2] = SHUFFLE_BOTH(VI, a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int i = 0; i < TILE; i++)
        if (!(i & 1)) {
            VF a = x[i], b = x[i + 1];
            x[i] = SHUFFLE_BOTH(VI, a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
            x[i + 1] = SHUFFLE_BOTH(VI, a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
        }
}

/* The tiles' sums of outputs from `output` on, the first `skip` of them aside, for rows from `row0` on. */
INLINE void write_tile(const Product *job, const float *sums, int64_t output, int64_t skip, int64_t row0) {
    const int64_t rows = job->rows - row0 < TILE ? job->rows - row0 : TILE, width = job->is_short ? 2 : 4;
    VF made[TILE];
    for (int o = 0; o < TILE; o++) {
        VF sum = LOAD(sums + o * TILE);
        if (job->scale) {
            sum = __builtin_convertvector((VI)sum, VF) * job->scale[output + o] * LOAD(job->row_scale + row0);
            if (job->bias) sum += ((const float *)job->bias)[output + o];
        } else if (job->bias) {
            float bias;
            widen(&bias, job->bias, output + o, 1, 1);
            sum += bias;
        }
        made[o] = sum;
    }
    transpose(made);
    for (int64_t r = 0; r < rows; r++) {
        char row[TILE * sizeof(float)], *out = (char *)job->out + ((row0 + r) * job->outputs + output) * width;
        NAME(write)(skip ? row : out, 0, made[r], job->is_short);
        if (skip) memcpy(out + skip * width, row + skip * width, (TILE - skip) * width);
    }
}

/* 32 outputs of up to 32 rows. Of the next outputs' weights this asks the memory for bytes fetch_from to fetch_to of each. */
#define MULTIPLY(MULTIPLIED)                                                                                          \
    for (int64_t at = 0; at < wide; at += TILE_BYTES) {                                                                \
        if (at >= fetch_from && at < fetch_to)                                                                         \
            for (int64_t o = 0; o < TILE; o++) {                                                                       \
                __builtin_prefetch(one + o * wide + at + 2 * TILE * wide);                                             \
                __builtin_prefetch(two + o * wide + at + 2 * TILE * wide);                                             \
            }                                                                                                          \
        _tile_loadd(4, one + at, wide);                                                                                \
        _tile_loadd(6, x + at * TILE, TILE_BYTES);                                                                     \
        MULTIPLIED(0, 4, 6);                                                                                           \
        _tile_loadd(5, two + at, wide);                                                                                \
        MULTIPLIED(1, 5, 6);                                                                                           \
        if (both) {                                                                                                    \
            _tile_loadd(7, y + at * TILE, TILE_BYTES);                                                                 \
            MULTIPLIED(2, 4, 7);                                                                                       \
            MULTIPLIED(3, 5, 7);                                                                                       \
        }                                                                                                              \
    }

INLINE void tiles_at(const Product *job, int64_t output, int64_t row0, int both, int whole) {
    const int64_t wide = job->inputs * (job->scale ? 1 : 2), outputs = job->outputs;
    const int64_t fetch_from = wide * row0 / job->rows, fetch_to = wide * (row0 + 2 * TILE) / job->rows;
    /* Where too few are left, those before are computed once more. */
    const int64_t first = output + TILE <= outputs ? output : outputs - TILE;
    const int64_t second = output + 2 * TILE <= outputs ? output + TILE : outputs - TILE;
    const char *one = (const char *)job->weight + first * wide, *two = (const char *)job->weight + second * wide;
    const char *x = (const char *)job->x + row0 * wide, *y = x + TILE * wide;
    float sums[4][TILE * TILE] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    if (whole) {
        MULTIPLY(_tile_dpbssd)
    } else {
        MULTIPLY(_tile_dpbf16ps)
    }
    _tile_stored(0, sums[0], TILE_BYTES);
    _tile_stored(1, sums[1], TILE_BYTES);
    write_tile(job, sums[0], first, output - first, row0);
    if (second > first) write_tile(job, sums[1], second, output + TILE - second, row0);
    if (both) {
        _tile_stored(2, sums[2], TILE_BYTES);
        _tile_stored(3, sums[3], TILE_BYTES);
        write_tile(job, sums[2], first, output - first, row0 + TILE);
        if (second > first) write_tile(job, sums[3], second, output + TILE - second, row0 + TILE);
    }
}

static void tiles(void *given) {
    Product *job = given;
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = TILE_BYTES, shapes.rows[i] = TILE;
    _tile_loadconfig(&shapes);
    for (int64_t from; (from = next_of(&job->share)) >= 0;) {
        const int64_t to = from + job->share.step < job->outputs ? from + job->share.step : job->outputs;
        for (int64_t output = from; output < to; output += 2 * TILE)
            for (int64_t row = 0; row < job->rows; row += 2 * TILE) {
                const int both = job->rows - row > TILE;
                if (job->scale) tiles_at(job, output, row, both, 1);
                else tiles_at(job, output, row, both, 0);
            }
    }
    _tile_release();
}

/* Rows as tiles take them: in groups of 16, of each group four bytes of every row side by side, then the next four. */
static void pack_rows(uint32_t *to, const uint32_t *from, int64_t rows, int64_t words) {
    for (int64_t row0 = 0; row0 < rows; row0 += TILE, to += TILE * words, from += TILE * words) {
        const int64_t count = rows - row0 < TILE ? rows - row0 : TILE;
        if (count < TILE) memset(to, 0, sizeof(uint32_t) * TILE * words);
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = 0; i < words; i++) to[i * TILE + r] = from[r * words + i];
    }
}
