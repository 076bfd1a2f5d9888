/* Products with matrices in panels of PANEL outputs: of each input the panel's numbers lie side by side, so that a sum is
 * kept in a register for each output and row, and the weights are read once, in their order (as in GotoBLAS, doi
 * 10.1145/1356052.1356053). A panel holds, for each input:
 *
 * float32    PANEL numbers
 * bfloat16   PANEL / 2 words: number j in the low half, number j + PANEL / 2 in the high one
 * integers   for two inputs at a time, PANEL pairs of bytes
 *
 * Numbers of outputs behind the last are 0. A row's sums go through the inputs in their order, whatever other rows there
 * are. */

/* W numbers of a panel. */
INLINE VF NAME(column)(const char *numbers, int column, int is_short) {
    if (!is_short) return LOAD((const float *)numbers + column * W);
    const int half = PANEL / 2 / W;
    VU words = *(const VU *)((const uint32_t *)numbers + column % half * W);
    return column < half ? (VF)(words << 16) : (VF)(words & 0xffff0000u);
}

/* sums [rows, PANEL]: of `rows`, ROWS_AT_ONCE() at most, over `inputs` of a panel; fresh: they begin here. With each input
 * the memory is asked for `ahead` bytes of what is at `next`, where that is a line at most. */
INLINE void NAME(add_floats)(int rows, const float *x, int64_t stride, const char *panel, int64_t inputs, float *sums,
                             int fresh, int is_short, const char *next, int64_t ahead) {
    const int width = PANEL * (is_short ? 2 : 4), columns = COLUMNS(rows);
    for (int first = 0; first < PANEL / W; first += columns) {
        VF sum[MOST_ROWS][MOST_COLUMNS];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) sum[r][c] = fresh ? (VF){0} : LOAD(sums + r * PANEL + (first + c) * W);
        for (int64_t i = 0; i < inputs; i++) {
            VF one[MOST_COLUMNS];
            for (int c = 0; c < columns; c++) one[c] = NAME(column)(panel + i * width, first + c, is_short);
            if (!first) __builtin_prefetch(next + i * ahead);
            for (int r = 0; r < rows; r++) {
                VF given = NAME(all)(x[r * stride + i]);
                for (int c = 0; c < columns; c++) sum[r][c] += one[c] * given;
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) STORE(sums + r * PANEL + (first + c) * W, sum[r][c]);
    }
}

/* 2 W bytes as numbers of 16 bits. */
INLINE NAME(VP) NAME(widened)(const char *bytes) {
#if W == 16
    return (NAME(VP))_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
#elif W == 8
    return (NAME(VP))_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)bytes));
#else
    return __builtin_convertvector(*(const NAME(VBP) *)bytes, NAME(VP));
#endif
}

/* The products of pairs, each pair's two added up. */
INLINE VI NAME(pairs)(NAME(VP) a, NAME(VP) b) {
#if W == 16
    return (VI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif W == 8
    return (VI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    VI x = (VI)a, y = (VI)b;
    return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

/* The same for integers, x [rows, inputs] of 16 bits. The sums are exact. */
INLINE void NAME(add_integers)(int rows, const int16_t *x, int64_t stride, const char *panel, int64_t inputs, int32_t *sums,
                               int fresh, const char *next, int64_t ahead) {
    const int columns = COLUMNS(rows);
    for (int first = 0; first < PANEL / W; first += columns) {
        VI sum[MOST_ROWS][MOST_COLUMNS];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sum[r][c] = fresh ? (VI){0} : *(VI *)(sums + r * PANEL + (first + c) * W);
        for (int64_t i = 0; i < inputs; i += 2) {
            NAME(VP) one[MOST_COLUMNS];
            for (int c = 0; c < columns; c++)
                one[c] = NAME(widened)(panel + i * PANEL + (first + c) * 2 * W);
            if (!first) __builtin_prefetch(next + i * ahead);
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, x + r * stride + i, 4);
                NAME(VP) given = (NAME(VP))(pair - (VI){0});
                for (int c = 0; c < columns; c++) sum[r][c] += NAME(pairs)(one[c], given);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) *(VI *)(sums + r * PANEL + (first + c) * W) = sum[r][c];
    }
}

/* So many rows at once, or as many as there are registers for, in groups of nearly the same size. bytes: of a number of the
 * panel. */
INLINE void NAME(add_panels)(const Product *job, int64_t rows, int64_t row, int64_t input, const char *panel, int64_t inputs,
                             float *sums, int64_t at_once, int bytes, const char *next, int64_t ahead) {
    const int64_t most = at_once < ROWS_AT_ONCE(bytes) ? at_once : ROWS_AT_ONCE(bytes), stride = job->inputs;
#define ADD(rows)                                                                                                        \
    case rows:                                                                                                           \
        if (bytes == 1) NAME(add_integers)(rows, whole, stride, panel, inputs, (int32_t *)sums, !input, next, ahead);    \
        else NAME(add_floats)(rows, x, stride, panel, inputs, sums, !input, bytes == 2, next, ahead);                    \
        break;
    for (int64_t r = 0, count; r < rows; r += count, sums += count * PANEL) {
        const int64_t left = rows - r, groups = (left + most - 1) / most, at = (row + r) * stride + input;
        count = (left + groups - 1) / groups;
        const int16_t *whole = (const int16_t *)job->x + at;
        const float *x = (const float *)job->x + at;
        if (count > ROWS_AT_ONCE(bytes)) __builtin_unreachable();
        switch (count) { ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) ADD(7) ADD(8) }
    }
#undef ADD
}

/* One row's outputs of a panel, `count` of them. */
INLINE void NAME(write_sums)(const Product *job, const float *sums, int64_t row, int64_t output, int64_t count) {
    float made[PANEL];
    const int64_t at = row * job->outputs + output;
    for (int64_t o = 0; o < count; o++) {
        made[o] = sums[o];
        if (job->scale) {
            int32_t whole;
            memcpy(&whole, sums + o, 4);
            made[o] = (float)whole * job->scale[output + o] * job->row_scale[row];
        }
    }
    if (job->bias) {
        float bias[PANEL];
        widen(bias, job->bias, output, count, job->is_short && !job->scale);
        for (int64_t o = 0; o < count; o++) made[o] += bias[o];
    }
    if (count < PANEL) narrow(job->out, at, made, count, job->is_short);
    else
        for (int o = 0; o < PANEL; o += W)
            NAME(write)((char *)job->out + at * (job->is_short ? 2 : 4), o, LOAD(made + o), job->is_short);
}

/* Of a number of a panel. */
INLINE int64_t NAME(bytes_of)(const Product *job) { return job->scale ? 1 : job->is_short ? 2 : 4; }

/* `rows` rows from `row` on, CHUNK at most, by `count` panels, some inputs of each in turn. wide: room for DEPTH inputs of
 * a panel in float32. */
INLINE void NAME(rows_of_panels)(const Product *job, const Setting *how, int64_t panel, int64_t count, int64_t row,
                                 int64_t rows, float *wide) {
    const int is_short = job->is_short && !job->scale;
    const int64_t inputs = job->inputs, bytes = NAME(bytes_of)(job), width = PANEL * bytes;
    const int64_t at_once = how->rows < ROWS_AT_ONCE(bytes) ? how->rows : ROWS_AT_ONCE(bytes);
    const int64_t groups = (rows + at_once - 1) / at_once, visit = how->visit / width;
    const int64_t depth = count > 1 ? (visit < DEPTH ? visit : DEPTH) : groups > 1 ? DEPTH : inputs;
    const int is_wide = is_short && groups > 2;
    /* Few rows leave the memory time: what comes next is asked of it while they are computed. */
    const int few = count == 1 && width / groups <= LINE && rows <= FETCHING_ROWS;
    const int64_t ahead = few ? width / groups : 0;
    float sums[CHUNK * PANEL] __attribute__((aligned(64)));
    for (int64_t input = 0; input < inputs; input += depth)
        for (int64_t p = 0; p < count; p++) {
            const char *numbers = (const char *)job->weight + ((panel + p) * inputs + input) * width;
            const int64_t some = inputs - input < depth ? inputs - input : depth;
            const char *next = few ? numbers + some * width : numbers;
            float *to = sums + p * rows * PANEL;
            if (is_wide) { /* once for all rows */
                for (int64_t i = 0; i < some; i++)
                    for (int c = 0; c < PANEL / W; c++)
                        STORE(wide + i * PANEL + c * W, NAME(column)(numbers + i * PANEL * 2, c, 1));
                numbers = (const char *)wide;
            }
            if (job->scale) NAME(add_panels)(job, rows, row, input, numbers, some, to, at_once, 1, next, ahead);
            else if (is_short && !is_wide) NAME(add_panels)(job, rows, row, input, numbers, some, to, at_once, 2, next, ahead);
            else NAME(add_panels)(job, rows, row, input, numbers, some, to, at_once, 4, next, ahead);
        }
    for (int64_t p = 0; p < count; p++) {
        const int64_t output = (panel + p) * PANEL, left = job->outputs - output;
        for (int64_t r = 0; r < rows; r++)
            NAME(write_sums)(job, sums + (p * rows + r) * PANEL, row + r, output, left < PANEL ? left : PANEL);
    }
}

static void NAME(panels)(void *given) {
    Product *job = given;
    /* Rows that are computed together, so that they stay in the second cache: chunks of nearly the same size. */
    const int64_t chunks = (job->rows + CHUNK - 1) / CHUNK, chunk = (job->rows + chunks - 1) / (chunks ? chunks : 1);
    const Setting how = setting_of(NAME(bytes_of)(job), chunk);
    float wide[DEPTH * PANEL] __attribute__((aligned(64)));
    for (int64_t from; (from = next_of(&job->share)) >= 0;) {
        const int64_t to = from + job->share.step < job->share.total ? from + job->share.step : job->share.total;
        for (int64_t row = 0; row < job->rows; row += chunk)
            for (int64_t panel = from, count; panel < to; panel += count) {
                count = to - panel < how.streams ? to - panel : how.streams;
                NAME(rows_of_panels)(job, &how, panel, count, row, job->rows - row < chunk ? job->rows - row : chunk, wide);
            }
    }
}

/* x [inputs] -> to: whole numbers up to 127 on either side of zero; the result: what one of them stands for, which is no
 * number where x has one that is not finite. */
static float NAME(rounded_row)(void *to, const void *x, int64_t inputs, int is_short, int bytes) {
    VF most = NAME(all)(1e-30f), finite = {0};
    for (int64_t i = 0; i < inputs; i += W) {
        VF one = NAME(read)(x, i, is_short);
        most = NAME(most)(most, NAME(most)(one, -one));
        finite += one - one;
    }
    float largest = 0.0f;
    for (int i = 0; i < W; i++) largest = most[i] > largest ? most[i] : largest;
    const VF magic = NAME(all)(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    for (int64_t i = 0; i < inputs; i += W) {
        VI whole = (VI)(NAME(read)(x, i, is_short) / largest * 127.0f + magic);
        if (bytes == 1) *(NAME(VB) *)((int8_t *)to + i) = __builtin_convertvector(whole, NAME(VB));
        else *(NAME(VS) *)((int16_t *)to + i) = __builtin_convertvector(whole, NAME(VS));
    }
    return largest / 127.0f + NAME(sum)(finite);
}
