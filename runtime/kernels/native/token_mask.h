/* Which tokens may follow a state of an automaton over bytes: what runtime/grammar/masks/ computes with numpy, in one
 * walk. Whoever calls has checked that a node's children lie behind each other in the tree, and below no other node. */

/* As TokenTrie, or as MergedTrie (without `token`, with `node_of`). A walk goes at most `levels` nodes deep. */
typedef struct {
    int64_t nodes, levels, roots, words, twins;
    const int32_t *byte, *child_start, *child_count;
    const int32_t *token;   /* [nodes]: the id that ends there, or -1 */
    const int32_t *twin;    /* [twins, 2]: an id, and the one of equal text that a node names */
    const int32_t *node_of; /* [32 * words]: where an id ends, `nodes` for nowhere */
} TokenTree;

/* As ByteDfa. */
typedef struct {
    int64_t states, nodes, width;
    const int32_t *delta, *utf8;    /* [states, width], [nodes, 256] */
    const uint8_t *open;            /* [patterns, nodes] */
    const int64_t *pattern;         /* [states] */
} ByteTable;

/* Nodes below one node that are still to be looked at, and the state above them. */
typedef struct {
    int64_t node, end, state, inner;
} Siblings;

/* Set `found` [nodes] of each node that is come to from `first`, or, where there is no `found`, the bit of its token. */
static void walk_tokens(const TokenTree *tree, const ByteTable *table, Siblings first, Siblings *level, uint8_t *found,
                        uint32_t *bits) {
    int64_t depth = 0;
    level[0] = first;
    while (depth >= 0) {
        if (level[depth].node >= level[depth].end) {
            depth--;
            continue;
        }
        const int64_t node = level[depth].node++, above = level[depth].state;
        const int64_t entry = table->utf8[level[depth].inner * 256 + (tree->byte[node] & 255)];
        int64_t state = above;
        if (entry < 0) {
            if (~entry >= table->width) continue;
            state = table->delta[above * table->width + ~entry];
            if (state < 0 || state >= table->states) continue;
        } else if (entry >= table->nodes || !table->open[table->pattern[above] * table->nodes + entry]) {
            continue;
        }
        if (found)
            found[node] = 1;
        else if (tree->token[node] >= 0)
            bits[tree->token[node] >> 5] |= (uint32_t)1 << (tree->token[node] & 31);
        const int64_t start = tree->child_start[node], count = tree->child_count[node];
        if (count && depth + 1 < tree->levels)
            level[++depth] = (Siblings){start, start + count, state, entry < 0 ? 0 : entry};
    }
}

/* Into `bits` [words], which are 0, the ids whose bytes `table` allows from chain[0]. chain [length]: of a MergedTrie
 * the states after 0, 1 ... characters of its run, at most `roots`; of a TokenTrie one state. 0: there was no memory. */
int token_mask(const TokenTree *tree, const ByteTable *table, const int64_t *chain, int64_t length, uint32_t *bits) {
    const int64_t nodes = tree->node_of ? tree->nodes : 0;
    Siblings *level = calloc(1, sizeof(Siblings) * (tree->levels + 1) + nodes + 1);
    if (!level) return 0;
    uint8_t *found = nodes ? (uint8_t *)(level + tree->levels + 1) : 0;
    for (int64_t i = 0; i < length; i++) {
        Siblings first = {0, tree->roots, chain[i] / table->nodes, chain[i] % table->nodes};
        if (found) {
            found[i] = 1;
            first.node = tree->child_start[i], first.end = first.node + tree->child_count[i];
        }
        walk_tokens(tree, table, first, level, found, bits);
    }
    for (int64_t word = 0; found && word < tree->words; word++) {
        uint32_t all = 0;
        for (int bit = 0; bit < 32; bit++) all |= (uint32_t)found[tree->node_of[32 * word + bit]] << bit;
        bits[word] = all;
    }
    for (const int32_t *twin = tree->twin; !found && twin < tree->twin + 2 * tree->twins; twin += 2)
        bits[twin[0] >> 5] |= (bits[twin[1] >> 5] >> (twin[1] & 31) & 1) << (twin[0] & 31);
    free(level);
    return 1;
}
