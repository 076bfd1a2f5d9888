/* All layers of a decoder in one call: the functions above, in the order in which Python would call them. */

/* See product(). */
typedef struct {
    const void *weight, *bias;
    const float *scale;
} Matrix;

/* A bias, a scale, or the norm of queries and keys, that is 0 the layer has not. rope: which of the pass's rotary embeddings; -1:
 * none. turned: how many numbers of a head that one turns. */
typedef struct {
    const void *attention_norm, *qk_norm, *mlp_norm;
    Matrix qkv, output, gate_up, down;
    int64_t rope, turned;
} DecoderLayer;

/* embedding [ids, hidden]. is_short, short_norms: whether numbers, and the norms' weights, are bfloat16. wide: as of Norm.
 * shared: numbers from which on an operation is shared out among the pass's threads. */
typedef struct {
    const DecoderLayer *layer;
    const void *embedding, *final_norm;
    int64_t layers, hidden, heads, kv_heads, dim, ffn, is_short, short_norms, wide, shared;
    float eps;
} Decoder;

typedef struct {
    const Decoder *model;
    int64_t tokens, threads;
    Parallel parallel;
} Step;

static int64_t threads_of(const Step *step, int64_t numbers) { return numbers >= step->model->shared ? step->threads : 1; }

static int multiply(const Step *step, const void *x, const Matrix *with, void *out, int64_t outputs, int64_t inputs) {
    const int64_t threads = threads_of(step, outputs * inputs);
    return product(x, with->weight, with->scale, with->bias, out, step->tokens, outputs, inputs, step->model->is_short,
                   step->parallel, threads);
}

static void normalise(const Step *step, void *x, const void *weight, void *residual, void *out) {
    const Decoder *model = step->model;
    const int64_t hidden = model->hidden;
    rms_norm(x, weight, residual, out, step->tokens, 1, hidden, hidden, hidden, model->eps, 0, model->is_short,
             model->short_norms, model->wide, step->parallel, threads_of(step, step->tokens * hidden));
}

/* Each head by itself, in place. */
static void normalise_heads(const Step *step, char *qkv, const void *weight, int64_t width, int64_t heads) {
    const Decoder *model = step->model;
    const int64_t bytes = model->is_short ? 2 : 4, dim = model->dim;
    for (int64_t token = 0; token < step->tokens; token++) {
        char *x = qkv + token * width * bytes;
        rms_norm(x, weight, 0, x, 1, heads, dim, width, 0, model->eps, 1, model->is_short, model->short_norms,
                 model->wide, step->parallel, 1);
    }
}

/* cosine, sine [places, turned]: a token's row is at its place. */
static void turn(const Step *step, char *qkv, const DecoderLayer *layer, const char *cosine, const char *sine,
                 const int64_t *place, int64_t width, int64_t heads) {
    const int64_t bytes = step->model->is_short ? 2 : 4;
    for (int64_t token = 0; token < step->tokens; token++) {
        const int64_t row = place[token] * layer->turned * bytes;
        rotate(qkv + token * width * bytes, cosine + row, sine + row, 1, heads, step->model->dim, layer->turned, width,
               step->model->is_short, step->parallel, 1);
    }
}

/* Numbers of `work` that each token needs. */
int64_t decode_work(const Decoder *model) {
    return 3 * model->hidden + (2 * model->heads + 2 * model->kv_heads) * model->dim + 3 * model->ffn;
}

/* out [tokens, hidden]: the final norm's. id, place: of each token. pass, pool, sinks: of each layer. cosine, sine: of each
 * rotary embedding, see turn(). 0: there was no memory for it. */
int decode(const Decoder *model, const int64_t *id, const int64_t *place, const Pass *const *pass, void *const *pool,
           const float *const *sinks, const void *const *cosine, const void *const *sine, void *out, void *work) {
    const Step now = {model, pass[0]->tokens, pass[0]->threads, (Parallel)pass[0]->parallel}, *step = &now;
    const int64_t tokens = step->tokens, bytes = model->is_short ? 2 : 4, hidden = model->hidden, ffn = model->ffn;
    const int64_t turned = model->heads + model->kv_heads; /* heads */
    const int64_t width = (turned + model->kv_heads) * model->dim;
    char *x = work, *normed = x + tokens * hidden * bytes, *more = normed + tokens * hidden * bytes, *qkv = more + tokens * hidden * bytes;
    char *attended = qkv + tokens * width * bytes, *both = attended + tokens * model->heads * model->dim * bytes;
    char *gated = both + tokens * 2 * ffn * bytes;
    int whole = 1;
    for (int64_t token = 0; token < tokens; token++)
        memcpy(x + token * hidden * bytes, (const char *)model->embedding + id[token] * hidden * bytes, hidden * bytes);
    normalise(step, x, model->layer[0].attention_norm, 0, normed);
    for (int64_t i = 0; i < model->layers && whole; i++) {
        const DecoderLayer *layer = model->layer + i;
        const int last = i + 1 == model->layers;
        whole &= multiply(step, normed, &layer->qkv, qkv, width, hidden);
        if (layer->qk_norm) normalise_heads(step, qkv, layer->qk_norm, width, turned);
        if (layer->rope >= 0) turn(step, qkv, layer, cosine[layer->rope], sine[layer->rope], place, width, turned);
        attend(pass[i], qkv, pool[i], attended, sinks[i]);
        whole &= multiply(step, attended, &layer->output, more, hidden, model->heads * model->dim);
        normalise(step, more, layer->mlp_norm, x, normed);
        whole &= multiply(step, normed, &layer->gate_up, both, 2 * ffn, hidden);
        silu_mul(both, gated, tokens, ffn, 2 * ffn, model->is_short, step->parallel, threads_of(step, tokens * ffn));
        whole &= multiply(step, gated, &layer->down, more, hidden, ffn);
        normalise(step, more, last ? model->final_norm : layer[1].attention_norm, x, last ? out : normed);
    }
    return whole;
}
