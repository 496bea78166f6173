#include "speedups.h"
#ifdef __GNUC__ /* else there are no such vectors, and no operations */
#pragma GCC optimize("fp-contract=fast") /* whatever that is on a machine, it is the same for every row */

#define LANES 16 /* rows of a tile: query heads of a node that share a key head, then those of the next node */
#define KEYS 64  /* positions of a block, counted from a sequence's first token */
#define STEP 8   /* keys, or rows, that are multiplied side by side */

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct { /* one tile, and room for what it reads */
    Py_ssize_t sequence, head, rows, nodes[LANES], heads[LANES]; /* of keys; of each row */
    Lanes *queries, *scores, *seen; /* of a channel; of a key: of what is hidden 0, else 1 */
    float *keys, *values, *sums;    /* [key, channel], the same, [row, channel] */
    Lanes highest, whole, scales;
} Tile;

/* Scores of keys: each is one sum over channels in their order, whatever stands beside it. */
WIDE static void
score(const Tile *tile, Py_ssize_t count, Py_ssize_t channels, Py_ssize_t padded)
{
    for (Py_ssize_t key = 0; key < count; key += STEP) {
        Lanes sums[STEP] = {{0}};
        for (Py_ssize_t at = 0; at < channels; at++) {
            Lanes query = tile->queries[at];
            for (int step = 0; step < STEP; step++)
                sums[step] += query * tile->keys[(key + step) * padded + at];
        }
        for (int step = 0; step < STEP; step++)
            tile->scores[key + step] = sums[step];
    }
}

/* Scores of a block become shares of it, by the highest score so far; `scales` are for what was summed before. */
WIDE static void
share(Tile *tile, Py_ssize_t count, float scale)
{
    Lanes top = tile->highest, sum = tile->whole, *all = tile->scores;
    for (Py_ssize_t key = 0; key < count; key++) {
        all[key] = all[key] * scale + (tile->seen[key] - 1.0f) * 1e30f;
        Bits higher = all[key] > top;
        top = (Lanes)(((Bits)all[key] & higher) | ((Bits)top & ~higher));
    }
    for (Py_ssize_t key = 0; key < count; key++)
        all[key] -= top;
    tile->scales = tile->highest - top;
    tile->highest = top;
    chances_of((float *)&tile->scales, 0.0f, 1.0f, (float *)&tile->scales, LANES);
    chances_of((float *)all, 0.0f, 1.0f, (float *)all, count * LANES);
    sum *= tile->scales;
    for (Py_ssize_t key = 0; key < count; key++)
        sum += all[key] *= tile->seen[key];
    tile->whole = sum;
}

/* Add the values of a block, one key after the other, to what was summed before. */
WIDE static void
add_values(const Tile *tile, Py_ssize_t count, Py_ssize_t padded)
{
    for (Py_ssize_t at = 0; at < padded; at += LANES)
        for (Py_ssize_t row = 0; row < tile->rows; row += STEP) {
            Lanes sums[STEP];
            for (int step = 0; step < STEP; step++)
                sums[step] = *(Lanes *)(tile->sums + (row + step) * padded + at) * tile->scales[row + step];
            for (Py_ssize_t key = 0; key < count; key++) {
                Lanes value = *(const Lanes *)(tile->values + key * padded + at);
                const float *shares = (const float *)(tile->scores + key) + row;
                for (int step = 0; step < STEP; step++)
                    sums[step] += value * shares[step];
            }
            for (int step = 0; step < STEP; step++)
                *(Lanes *)(tile->sums + (row + step) * padded + at) = sums[step];
        }
}

/* Read keys and values behind `count` others, and which rows see them; those that none sees are left out. */
static Py_ssize_t
read_keys(const Attention *of, const Tile *tile, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t count)
{
    const View *mask = of->tensors + MASK;
    float any = 0.0f, seen[LANES];
    for (int row = 0; row < LANES; row++) {
        int hidden = 0, again = row && tile->nodes[row] == tile->nodes[row - 1];
        const int16_t *shown = mask->last && !again ? line_in(mask, tile->sequence, 0, tile->nodes[row]) : NULL;
        for (Py_ssize_t slot = start; shown != NULL && slot < stop; slot++)
            hidden |= shown[slot] < 0;
        any += seen[row] = again ? seen[row - 1] : !hidden;
    }
    if (any < LANES && stop - start > 1) {
        for (Py_ssize_t slot = start; slot < stop; slot++)
            count = read_keys(of, tile, slot, slot + 1, count);
        return count;
    }
    for (Py_ssize_t slot = start; any > 0.0f && slot < stop; slot++, count++) {
        Py_ssize_t to = count * of->padded;
        memcpy(tile->seen + count, seen, sizeof(seen));
        widen(line_in(of->tensors + K, tile->sequence, tile->head, slot), of->kind, tile->keys + to, of->channels);
        widen(line_in(of->tensors + V, tile->sequence, tile->head, slot), of->kind, tile->values + to, of->channels);
    }
    return count;
}

/* One tile. The keys of a block are those of the text in their order, then nodes, parents first: so what a node sees
 * comes in the order of the text, wherever it lies and whatever lies between. */
static void
attend_tile(const Attention *of, Tile *tile, Py_ssize_t number)
{
    Py_ssize_t first = number % of->row_tiles * LANES, all = of->nodes * of->group, size = of->channels;
    Py_ssize_t sequence = number / of->row_tiles / of->key_heads, fresh = of->slots - of->nodes;
    const View *sequences = of->tensors + SEQUENCES;
    const int32_t *place = (const int32_t *)sequences->data + sequence * sequences->strides[0];
    Py_ssize_t text = place[START] - place[BASE] + fresh, length = place[LENGTH] - place[START]; /* where it begins */
    tile->sequence = sequence;
    tile->head = number / of->row_tiles % of->key_heads;
    tile->rows = Py_MIN(LANES, all - first);
    tile->highest = (Lanes){0} - 1e30f;
    tile->whole = (Lanes){0};
    memset(tile->sums, 0, LANES * of->padded * sizeof(float));
    for (Py_ssize_t row = 0; row < LANES; row++) { /* the last row again, where there are fewer */
        Py_ssize_t each = Py_MIN(first + row, all - 1);
        tile->nodes[row] = each / of->group;
        tile->heads[row] = tile->head * of->group + each % of->group;
        widen(line_in(of->tensors + QUERIES, sequence, tile->heads[row], tile->nodes[row]), of->kind, tile->keys, size);
        for (Py_ssize_t at = 0; at < size; at++)
            tile->queries[at][row] = tile->keys[at];
    }
    for (Py_ssize_t block = 0; block < length + of->nodes; block += KEYS) {
        Py_ssize_t start = Py_MAX(0, text + block), stop = text + Py_MIN(length, block + KEYS);
        Py_ssize_t count = start < stop ? read_keys(of, tile, start, stop, 0) : 0;
        for (Py_ssize_t node = 0; node < of->nodes; node++)
            if ((length + place[DEPTHS + node]) / KEYS * KEYS == block)
                count = read_keys(of, tile, fresh + node, fresh + node + 1, count);
        score(tile, count, size, of->padded);
        share(tile, count, of->scale);
        add_values(tile, count, of->padded);
    }
    for (Py_ssize_t row = 0; row < tile->rows; row++) {
        void *into = line_in(of->tensors + OUTPUT, sequence, tile->heads[row], tile->nodes[row]);
        float *sums = tile->sums + row * of->padded, whole = tile->whole[row];
        for (Py_ssize_t at = 0; at < size && of->kind == FLOAT16; at++)
            ((Half *)into)[at] = (Half)(sums[at] / whole);
        for (Py_ssize_t at = 0; at < size && of->kind == BFLOAT16; at++)
            ((uint16_t *)into)[at] = narrowed(sums[at] / whole);
    }
}

void
attend_tiles(void *given)
{
    Attention *of = given;
    Py_ssize_t keys = KEYS + of->nodes + STEP, size = of->padded;
    Lanes *room = calloc(size + 2 * keys + (2 * keys + LANES) * size / LANES, sizeof(Lanes));
    Tile tile = {.queries = room, .scores = room + size, .seen = room + size + keys};
    tile.keys = (float *)(room + size + 2 * keys);
    tile.values = tile.keys + keys * size;
    tile.sums = tile.values + keys * size;
    of->tiles.failed |= room == NULL;
    for (Py_ssize_t at; room != NULL && (at = next_part(&of->tiles)) < of->tiles.count;)
        attend_tile(of, &tile, at);
    free(room);
}

static int
is_of_sizes(const View *tensor, int64_t batch, int64_t heads, int64_t lines, int64_t size)
{
    const int64_t *sizes = tensor->sizes;
    return sizes[0] == batch && sizes[1] == heads && sizes[2] == lines && sizes[3] == size;
}

int
is_sound(Attention *of)
{
    const View *queries = of->tensors + QUERIES, *keys = of->tensors + K, *mask = of->tensors + MASK;
    const View *sequences = of->tensors + SEQUENCES;
    const int64_t batch = queries->sizes[0];
    of->nodes = queries->sizes[2];
    of->channels = queries->last;
    of->key_heads = keys->sizes[1];
    of->slots = keys->sizes[2];
    if (batch < 1 || of->nodes < 1 || of->channels < 1 || of->key_heads < 1)
        return 0;
    of->padded = (of->channels + LANES - 1) / LANES * LANES;
    of->group = queries->sizes[1] / of->key_heads;
    of->row_tiles = (of->nodes * of->group + LANES - 1) / LANES;
    of->tiles.count = batch * of->key_heads * of->row_tiles;
    int sound = of->group > 0 && queries->sizes[1] == of->group * of->key_heads && of->slots >= of->nodes &&
                is_of_sizes(keys, batch, of->key_heads, of->slots, of->channels) &&
                is_of_sizes(of->tensors + V, batch, of->key_heads, of->slots, of->channels) &&
                (!mask->last || is_of_sizes(mask, batch, 1, of->nodes, of->slots)) &&
                sequences->sizes[0] == batch && sequences->last == DEPTHS + of->nodes;
    for (Py_ssize_t at = 0; sound && at < batch * of->nodes; at++) {
        const int32_t *place = (const int32_t *)sequences->data + at / of->nodes * sequences->strides[0];
        int32_t depth = place[DEPTHS + at % of->nodes];
        sound = 0 <= place[START] && place[START] <= place[LENGTH] && place[LENGTH] <= place[BASE] &&
                place[BASE] >= of->slots - of->nodes && place[WINDOW] >= 0 && 0 <= place[ROW] &&
                place[ROW] < place[BATCH] && 0 <= depth && depth < of->nodes;
    }
    return sound;
}
#endif
