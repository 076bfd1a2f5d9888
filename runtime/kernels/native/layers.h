/* What lies between attention and attention. A job's parts are numbered; each thread takes the next one. */

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
