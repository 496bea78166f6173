#include "speedups.h"
#pragma GCC optimize("fp-contract=fast") /* whatever that is on a machine, it is the same for every row */

#ifdef __gnu_linux__
#include <dlfcn.h>
#endif

#define LANES 16 /* rows of a tile: query heads of a node that share a key head, then those of the next node */
#define KEYS 64  /* positions of a block, counted from a sequence's first token */
#define STEP 8   /* keys, or rows, that are multiplied side by side */
#define WIDEST 1024

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));

enum { QUERIES, OUTPUT, K, V, MASK, SEQUENCES };
enum { START, LENGTH, BASE, DEPTHS }; /* of a sequence: first slot, slots, first slot of its nodes, their depths */

typedef struct {
    Array arrays[6];
    Py_ssize_t nodes, group, channels, padded, slots; /* padded: channels, up to whole vectors */
    Py_ssize_t key_heads, tiles, next, count;         /* of a sequence, of a key head; untaken and all tiles */
    float scale;
    int failed;
} Attention;

typedef struct { /* one tile, and room for what it reads */
    Py_ssize_t sequence, line, rows, nodes[LANES], heads[LANES]; /* the line of keys; of each row */
    float *queries, *keys, *values, *sums;                       /* [channel, LANES], [key, channel], [LANES, channel] */
    float *scores, *seen;                                        /* [key, LANES], 0 for what is hidden and else 1 */
} Tile;

static void
read_numbers(const Array *array, Py_ssize_t line, Py_ssize_t start, Py_ssize_t count, float *into)
{
    const char *from = (char *)line_of(array, line) + start * array->size;
    if (array->size == 2)
        widen((const uint16_t *)from, into, count);
    else
        memcpy(into, from, count * sizeof(float));
}

/* Scores of `count` keys: each is one sum over channels in their order, whatever stands beside it. */
WIDE static void
score(const Tile *tile, Py_ssize_t count, Py_ssize_t channels, Py_ssize_t padded)
{
    for (Py_ssize_t key = 0; key < count; key += STEP) {
        const float *each = tile->keys + key * padded;
        Lanes sums[STEP] = {{0}};
        for (Py_ssize_t at = 0; at < channels; at++) {
            Lanes query = *(const Lanes *)(tile->queries + at * LANES);
            for (int step = 0; step < STEP; step++)
                sums[step] += query * each[step * padded + at];
        }
        for (int step = 0; step < STEP; step++)
            *(Lanes *)(tile->scores + (key + step) * LANES) = sums[step];
    }
}

/* Scores of a block become shares of it, by the highest score so far; `scales` are for what was summed before. */
WIDE static void
share(const Tile *tile, Py_ssize_t count, float scale, float *highest, float *whole, float *scales)
{
    Lanes top = *(Lanes *)highest, sum = *(Lanes *)whole, *all = (Lanes *)tile->scores;
    const Lanes *seen = (const Lanes *)tile->seen;
    for (Py_ssize_t key = 0; key < count; key++) {
        all[key] = all[key] * scale + (seen[key] - 1.0f) * 1e30f;
        Bits higher = all[key] > top;
        top = (Lanes)(((Bits)all[key] & higher) | ((Bits)top & ~higher));
    }
    *(Lanes *)scales = *(Lanes *)highest - top;
    for (Py_ssize_t key = 0; key < count; key++)
        all[key] -= top;
    chances_of(scales, 0.0f, 1.0f, scales, LANES);
    chances_of(tile->scores, 0.0f, 1.0f, tile->scores, count * LANES);
    sum *= *(Lanes *)scales;
    for (Py_ssize_t key = 0; key < count; key++)
        sum += all[key] *= seen[key];
    *(Lanes *)highest = top;
    *(Lanes *)whole = sum;
}

/* Add the values of a block, one key after the other, to what was summed before. */
WIDE static void
add_values(const Tile *tile, Py_ssize_t count, Py_ssize_t padded, const float *scales)
{
    for (Py_ssize_t at = 0; at < padded; at += LANES)
        for (Py_ssize_t row = 0; row < tile->rows; row += STEP) {
            Lanes sums[STEP];
            for (int step = 0; step < STEP; step++)
                sums[step] = *(Lanes *)(tile->sums + (row + step) * padded + at) * scales[row + step];
            for (Py_ssize_t key = 0; key < count; key++) {
                Lanes value = *(const Lanes *)(tile->values + key * padded + at);
                for (int step = 0; step < STEP; step++)
                    sums[step] += value * tile->scores[key * LANES + row + step];
            }
            for (int step = 0; step < STEP; step++)
                *(Lanes *)(tile->sums + (row + step) * padded + at) = sums[step];
        }
}

/* Whether any of some slots is hidden from a node. */
static int
hides(const Array *mask, Py_ssize_t node, Py_ssize_t start, Py_ssize_t stop)
{
    const void *line = mask->data == NULL ? NULL : line_of(mask, node);
    int hidden = 0;
    for (Py_ssize_t slot = start; line != NULL && slot < stop; slot++)
        hidden |= mask->size == 2 ? ((const int16_t *)line)[slot] < 0 : ((const float *)line)[slot] < 0.0f;
    return hidden;
}

/* Read keys and values behind `count` others, and which rows see them; those that none sees are left out. */
static Py_ssize_t
read_keys(const Attention *of, const Tile *tile, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t count)
{
    float *seen = tile->seen + count * LANES, any = 0.0f;
    for (int row = 0; row < LANES; row++) {
        int again = row && tile->nodes[row] == tile->nodes[row - 1];
        seen[row] = again ? seen[row - 1] : !hides(of->arrays + MASK, tile->nodes[row], start, stop);
        any += seen[row];
    }
    if (any < LANES && stop - start > 1) {
        for (Py_ssize_t slot = start; slot < stop; slot++)
            count = read_keys(of, tile, slot, slot + 1, count);
        return count;
    }
    for (Py_ssize_t slot = start; any > 0.0f && slot < stop; slot++, count++) {
        memcpy(tile->seen + count * LANES, seen, LANES * sizeof(float));
        read_numbers(of->arrays + K, tile->line, slot * of->channels, of->channels, tile->keys + count * of->padded);
        read_numbers(of->arrays + V, tile->line, slot * of->channels, of->channels, tile->values + count * of->padded);
    }
    return count;
}

/* The keys of a block that any row sees: those of the text in their order, then nodes, parents first. So what a node
 * sees comes in the order of the text, wherever it lies and whatever lies between. */
static Py_ssize_t
gather(const Attention *of, const Tile *tile, const int32_t *place, Py_ssize_t block)
{
    Py_ssize_t fresh = of->slots - of->nodes, dropped = place[BASE] - fresh, length = place[LENGTH] - place[START];
    Py_ssize_t start = Py_MAX(0, place[START] + block * KEYS - dropped);
    Py_ssize_t stop = place[START] + Py_MIN(length, (block + 1) * KEYS) - dropped;
    Py_ssize_t count = start < stop ? read_keys(of, tile, start, stop, 0) : 0;
    for (Py_ssize_t node = 0; node < of->nodes; node++)
        if ((length + place[DEPTHS + node]) / KEYS == block)
            count = read_keys(of, tile, fresh + node, fresh + node + 1, count);
    return count;
}

static void
attend_tile(const Attention *of, Tile *tile, Py_ssize_t number)
{
    Py_ssize_t first = number % of->tiles * LANES, all = of->nodes * of->group, last = 0;
    float highest[LANES], whole[LANES] = {0}, scales[LANES], numbers[WIDEST];
    tile->line = number / of->tiles;
    tile->sequence = tile->line / of->key_heads;
    tile->rows = Py_MIN(LANES, all - first);
    const int32_t *place = line_of(of->arrays + SEQUENCES, tile->sequence);
    for (Py_ssize_t node = 0; node < of->nodes; node++)
        last = Py_MAX(last, place[DEPTHS + node]);
    memset(tile->sums, 0, LANES * of->padded * sizeof(float));
    for (Py_ssize_t row = 0; row < LANES; row++) { /* the last row again, where there are fewer */
        Py_ssize_t each = Py_MIN(first + row, all - 1);
        highest[row] = -1e30f;
        tile->nodes[row] = tile->sequence * of->nodes + each / of->group;
        tile->heads[row] = tile->line % of->key_heads * of->group + each % of->group;
        read_numbers(of->arrays + QUERIES, tile->nodes[row], tile->heads[row] * of->channels, of->channels, numbers);
        for (Py_ssize_t at = 0; at < of->channels; at++)
            tile->queries[at * LANES + row] = numbers[at];
    }
    for (Py_ssize_t block = 0; block * KEYS <= place[LENGTH] - place[START] + last; block++) {
        Py_ssize_t count = gather(of, tile, place, block);
        if (!count)
            continue;
        score(tile, count, of->channels, of->padded);
        share(tile, count, of->scale, highest, whole, scales);
        add_values(tile, count, of->padded, scales);
    }
    for (Py_ssize_t row = 0; row < tile->rows; row++) {
        const Array *output = of->arrays + OUTPUT;
        char *into = (char *)line_of(output, tile->nodes[row]) + tile->heads[row] * of->channels * output->size;
        for (Py_ssize_t at = 0; at < of->channels; at++) {
            union { float value; uint32_t bits; } one = {tile->sums[row * of->padded + at] / whole[row]};
            if (output->size == 2)
                ((uint16_t *)into)[at] = (uint16_t)((one.bits + 0x7fff + ((one.bits >> 16) & 1)) >> 16);
            else
                ((float *)into)[at] = one.value;
        }
    }
}

/* What each thread does: take tiles while there are any. */
static void
attend_tiles(void *given)
{
    Attention *of = given;
    Py_ssize_t keys = KEYS + of->nodes + STEP, numbers = keys * of->padded;
    float *room = calloc(2 * numbers + 2 * of->padded * LANES + 2 * keys * LANES, sizeof(float));
    Tile tile = {.keys = room, .values = room + numbers, .queries = room + 2 * numbers};
    tile.sums = tile.queries + of->padded * LANES;
    tile.scores = tile.sums + of->padded * LANES;
    tile.seen = tile.scores + keys * LANES;
    of->failed |= room == NULL;
    for (Py_ssize_t at; room != NULL && (at = __atomic_fetch_add(&of->next, 1, __ATOMIC_RELAXED)) < of->count;)
        attend_tile(of, &tile, at);
    free(room);
}

/* Whether arrays and what sequences say of them fit together. */
static int
is_sound(Attention *of)
{
    const Array *given = of->arrays, *keys = given + K, *values = given + V, *queries = given + QUERIES;
    Py_ssize_t batch = given[SEQUENCES].lines;
    of->slots = keys->buffer.shape[1];
    of->channels = keys->buffer.shape[2];
    if (batch < 1 || of->channels < 1 || of->channels > WIDEST || keys->lines < 1 || keys->lines % batch ||
        queries->lines < 1 || queries->lines % batch)
        return 0;
    of->padded = (of->channels + LANES - 1) / LANES * LANES;
    of->nodes = queries->lines / batch;
    of->key_heads = keys->lines / batch;
    of->group = queries->length / of->channels / of->key_heads;
    of->tiles = (of->nodes * of->group + LANES - 1) / LANES;
    of->count = keys->lines * of->tiles;
    int sound = of->group > 0 && queries->length == of->group * of->key_heads * of->channels &&
                given[OUTPUT].lines == queries->lines && given[OUTPUT].length == queries->length &&
                values->lines == keys->lines && values->buffer.shape[1] == of->slots && values->length == keys->length &&
                of->slots >= of->nodes && given[SEQUENCES].length == DEPTHS + of->nodes &&
                (given[MASK].data == NULL || (given[MASK].lines == queries->lines && given[MASK].length == of->slots));
    for (Py_ssize_t at = 0; sound && at < batch; at++) {
        const int32_t *place = line_of(given + SEQUENCES, at);
        sound = 0 <= place[START] && place[START] <= place[LENGTH] && place[LENGTH] <= place[BASE] &&
                place[BASE] >= of->slots - of->nodes;
        for (Py_ssize_t node = 0; sound && node < of->nodes; node++)
            sound = 0 <= place[DEPTHS + node] && place[DEPTHS + node] < of->nodes;
    }
    return sound;
}

/* attend(queries, output, keys, values, mask, sequences, scale, threads): attention of nodes [batch * node, head *
 * channel] over slots [batch * key head, slot, channel], of which the last ones are the nodes' own; a mask
 * [batch * node, slot] is below 0 where a slot is hidden, or None. `sequences` are int32 [batch, 3 + node]. */
PyObject *
attend(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Attention of = {.arrays = {{"queries", FLOAT32_OR_BFLOAT16, 2},
                               {"output", FLOAT32_OR_BFLOAT16, 2, WRITTEN},
                               {"keys", FLOAT32_OR_BFLOAT16, 3},
                               {"values", FLOAT32_OR_BFLOAT16, 3},
                               {"mask", FLOAT32_OR_BFLOAT16, 2, OPTIONAL},
                               {"sequences", INT32, 2}}};
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = NULL;
    of.scale = takes("attend", 8, count) ? (float)PyFloat_AsDouble(args[6]) : 0.0f;
    long threads = PyErr_Occurred() ? 0 : PyLong_AsLong(args[7]);
    if (PyErr_Occurred() || open_arrays(of.arrays, args, 6) < 0)
        return NULL;
    if (!is_sound(&of))
        PyErr_SetString(PyExc_ValueError, "expected slots, masks and places of the same sequences and nodes");
    else {
#ifdef __gnu_linux__ /* torch's own threads, where its library is found: others would wait beside them */
        *(void **)&parallel = threads > 1 && of.count > 1 ? dlsym(RTLD_DEFAULT, "GOMP_parallel") : NULL;
#endif
        Py_BEGIN_ALLOW_THREADS;
        if (parallel != NULL)
            parallel(attend_tiles, &of, (unsigned)threads, 0);
        else
            attend_tiles(&of);
        Py_END_ALLOW_THREADS;
    }
    if (of.failed)
        PyErr_NoMemory();
    close_arrays(of.arrays, 6);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}
