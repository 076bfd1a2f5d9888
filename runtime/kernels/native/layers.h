/* What lies between attention and attention. A job's parts are numbered; each thread takes the next one. */

/* `rows`, ROWS_AT_ONCE at most, of OUTPUTS_AT_ONCE outputs; of the next outputs' weights this
 * asks the memory for those of inputs from fetch_from to fetch_to. The order of a row's sums does not depend on what other rows there are. */
INLINE void NAME(block)(const Product *job, int rows, const float *x, int64_t row0, int64_t output, int64_t fetch_from,
                        int64_t fetch_to, int is_short) {
    const int64_t inputs = job->inputs, left = job->outputs - output, width = inputs * (is_short ? 2 : 4);
    const char *weight[OUTPUTS_AT_ONCE];
    VF sum[ROWS_AT_ONCE][OUTPUTS_AT_ONCE];
    for (int o = 0; o < OUTPUTS_AT_ONCE; o++) /* those behind the last are computed like it, and not used */
        weight[o] = (const char *)job->weight + (output + (o < left ? o : left - 1)) * width;
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < OUTPUTS_AT_ONCE; o++) sum[r][o] = (VF){0};
    for (int64_t i = 0; i < inputs; i += W) {
        VF one[OUTPUTS_AT_ONCE];
        for (int o = 0; o < OUTPUTS_AT_ONCE; o++) one[o] = NAME(read)(weight[o], i, is_short);
        if (i >= fetch_from && i < fetch_to)
            for (int o = 0; o < OUTPUTS_AT_ONCE; o++)
                __builtin_prefetch(weight[o] + i * (is_short ? 2 : 4) + OUTPUTS_AT_ONCE * width);
        for (int r = 0; r < rows; r++) {
            VF given = LOAD(x + r * inputs + i);
            for (int o = 0; o < OUTPUTS_AT_ONCE; o++) sum[r][o] += one[o] * given;
        }
    }
#if W == 16
    float made_of[ROWS_AT_ONCE * OUTPUTS_AT_ONCE];
    if (rows == ROWS_AT_ONCE) STORE(made_of, NAME(sums)(sum[0]));
#endif
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < OUTPUTS_AT_ONCE && o < left; o++) {
            float made, bias = 0.0f;
#if W == 16
            if (rows == ROWS_AT_ONCE) made = made_of[r * OUTPUTS_AT_ONCE + o];
            else
#endif
                made = NAME(sum)(sum[r][o]);
            if (job->bias) widen(&bias, job->bias, output + o, 1, is_short);
            made += bias;
            narrow(job->out, (row0 + r) * job->outputs + output + o, &made, 1, is_short);
        }
}

INLINE void NAME(linears_of)(const Product *job, int64_t from, int64_t to, int is_short) {
    for (int64_t output = from; output < to; output += OUTPUTS_AT_ONCE)
        for (int64_t row = 0; row < job->rows; row += ROWS_AT_ONCE) {
            const float *x = job->x + row * job->inputs;
            const int64_t rows = job->rows - row, fetch = job->inputs * row / job->rows;
            const int64_t fetched = job->inputs * (row + ROWS_AT_ONCE) / job->rows;
            if (rows >= ROWS_AT_ONCE) NAME(block)(job, ROWS_AT_ONCE, x, row, output, fetch, fetched, is_short);
            else if (rows == 1) NAME(block)(job, 1, x, row, output, fetch, fetched, is_short);
#if ROWS_AT_ONCE > 2
            else if (rows == 2) NAME(block)(job, 2, x, row, output, fetch, fetched, is_short);
            else NAME(block)(job, 3, x, row, output, fetch, fetched, is_short);
#endif
        }
}

static void NAME(linears)(void *given) {
    Product *job = given;
    for (int64_t from; (from = next_of(&job->share)) >= 0;) {
        int64_t to = from + job->share.step < job->outputs ? from + job->share.step : job->outputs;
        if (job->is_short) NAME(linears_of)(job, from, to, 1);
        else NAME(linears_of)(job, from, to, 0);
    }
}

INLINE void NAME(norm_of)(const Norm *job, int64_t token, int64_t row, int is_short, int short_weight) {
    const int64_t size = job->size, width = is_short ? 2 : 4, place = token * job->rows + row;
    const char *x = (const char *)job->x + (token * job->stride + row * size) * width;
    char *residual = job->residual ? (char *)job->residual + token * job->residual_stride * width : 0;
    char *out = (char *)job->out + place * size * width;
    const char *weight = (const char *)job->weight + (job->each ? row * size * (short_weight ? 2 : 4) : 0);
    VF squares = {0};
    for (int64_t i = 0; i < size; i += W) {
        VF one = NAME(read)(x, i, is_short);
        if (residual) {
            one = NAME(rounded)(one + NAME(read)(residual, i, is_short), is_short);
            NAME(write)(residual, i, one, is_short);
        }
        squares += one * one;
    }
    const float scale = 1.0f / sqrtf(NAME(sum)(squares) / size + job->eps);
    if (residual) x = residual;
    for (int64_t i = 0; i < size; i += W) {
        VF one = NAME(read)(x, i, is_short) * scale;
        NAME(write)(out, i, NAME(rounded)(one, is_short && !job->wide) * NAME(read)(weight, i, short_weight), is_short);
    }
}

static void NAME(norms)(void *given) {
    Norm *job = given;
    for (int64_t from; (from = next_of(&job->share)) >= 0;)
        for (int64_t token = from; token < from + job->share.step && token < job->tokens; token++)
            for (int64_t row = 0; row < job->rows; row++) {
                if (!job->is_short) NAME(norm_of)(job, token, row, 0, 0);
                else if (job->short_weight) NAME(norm_of)(job, token, row, 1, 1);
                else NAME(norm_of)(job, token, row, 1, 0);
            }
}

INLINE void NAME(rotation_of)(const Rotation *job, int64_t token, int is_short) {
    const int64_t half = job->turned / 2, width = is_short ? 2 : 4;
    const char *cosine = (const char *)job->cosine + token * job->turned * width;
    const char *sine = (const char *)job->sine + token * job->turned * width;
    char *x = (char *)job->x + token * job->stride * width;
    for (int64_t head = 0; head < job->heads; head++, x += job->dim * width)
        for (int64_t i = 0; i < half; i += W) {
            VF one = NAME(read)(x, i, is_short), two = NAME(read)(x, i + half, is_short);
            VF first = one * NAME(read)(cosine, i, is_short) + two * NAME(read)(sine, i, is_short);
            VF second = two * NAME(read)(cosine, i + half, is_short) + one * NAME(read)(sine, i + half, is_short);
            NAME(write)(x, i, first, is_short);
            NAME(write)(x, i + half, second, is_short);
        }
}

static void NAME(rotations)(void *given) {
    Rotation *job = given;
    for (int64_t from; (from = next_of(&job->share)) >= 0;)
        for (int64_t token = from; token < from + job->share.step && token < job->tokens; token++) {
            if (job->is_short) NAME(rotation_of)(job, token, 1);
            else NAME(rotation_of)(job, token, 0);
        }
}

INLINE void NAME(gate_of)(const Gate *job, int64_t row, int is_short) {
    const int64_t size = job->size, width = is_short ? 2 : 4;
    const char *gate = (const char *)job->both + row * job->stride * width, *up = gate + size * width;
    char *out = (char *)job->out + row * size * width;
    for (int64_t i = 0; i < size; i += W) {
        VF one = NAME(read)(gate, i, is_short);
        one = NAME(rounded)(one / (1.0f + NAME(exp)(-one)), is_short);
        NAME(write)(out, i, one * NAME(read)(up, i, is_short), is_short);
    }
}

static void NAME(gates)(void *given) {
    Gate *job = given;
    for (int64_t from; (from = next_of(&job->share)) >= 0;)
        for (int64_t row = from; row < from + job->share.step && row < job->rows; row++) {
            if (job->is_short) NAME(gate_of)(job, row, 1);
            else NAME(gate_of)(job, row, 0);
        }
}
