#include "singly.h"
#ifdef HAS_SINGLY

/* Attention of many nodes, each with the bits of torch's kernel for a single token, where MKL multiplies numbers of two
 * bytes for it. That one takes the slots of a text in blocks, and in a block
 *   scores: of a slot 16 lanes, each of which adds pairs of channels, the odd one first; then lanes 8 apart are added,
 *   then neighbours, then what is 2 and what is 4 apart;
 *   shares: exponentials of whole vectors, summed in turn by two of them; what is left over one by one;
 *   values: those of STEP slots from nothing on, pair after pair, the odd one first; that is added to the rest.
 * Where it has a mask, transformers gives it the query heads of a key head together. Then tiles are multiplied: of
 * PAIRED channels, or slots, even ones and odd ones are added apart from nothing on, then both to the rest.
 * Other orders are in fours.h.
 * Nodes that a node does not see are no slots. What it does not see of the text has slots, and adds nothing. */

typedef struct { Py_ssize_t sequence, first, rows, start; Order order; } Run; /* rows that see from a slot on */

typedef struct {
    Attention all; /* first, as threads are given it; its tiles are runs of one key head */
    Run *runs;
    Py_ssize_t wide, threads; /* channels, up to whole vectors of pairs; of torch */
} Singly;

typedef struct { /* of a thread */
    Row rows[ROWS + ABREAST]; /* and room for one by itself */
    const uint16_t **keys, **values; /* of the text's slots, then of the nodes that the row sees */
    float *few, *shared, *own; /* keys; values of the text and of a row alone: [slot, channel] */
} Room;

/* A row's keys and values behind the text: those of the nodes that it sees. Returns how many slots there are. */
static Py_ssize_t
find_nodes(const Attention *of, const Run *run, Py_ssize_t head, Row *row, Room *room, Py_ssize_t text)
{
    row->slots = text;
    for (Py_ssize_t slot = of->slots - of->nodes; slot < of->slots; slot++)
        if (row->mask == NULL || row->mask[slot] >= 0) {
            room->keys[row->slots] = line_in(of->tensors + K, run->sequence, head, slot);
            room->values[row->slots++] = line_in(of->tensors + V, run->sequence, head, slot);
        }
    return row->slots;
}

/* Scores of some slots of a row, for which nothing is shared. */
FAST static void
score_own(const Singly *of, Order order, Room *room, Row *row, Py_ssize_t block, Py_ssize_t from, Py_ssize_t stop)
{
    for (Py_ssize_t at = from; at < stop; at += LANES) {
        Row *few = room->rows + ROWS; /* of which the first is this one, as others have scores already */
        gather_keys(room->keys + at, stop - at, of->all.channels, of->wide, order, room->few);
        few->query = row->query;
        score_rows(room->few, few, 1, of->wide, order, 0);
        memcpy(row->scores + at - block, few->scores, sizeof(float) * Py_MIN(LANES, stop - at));
    }
}

/* Shares of one block of a row's slots: those that are scored, then others; the text's may be hidden. */
FAST static void
share_block(const Singly *of, Order order, Room *room, Row *row, Py_ssize_t block, Py_ssize_t scored, Py_ssize_t text,
            Py_ssize_t offset)
{
    const Py_ssize_t stop = Py_MIN(row->slots, block + SPLIT), end = Py_MIN(text, stop), odd = (stop - block) % 4;
    score_own(of, order == EIGHTS ? FOURS : order, room, row, block, Py_MAX(scored, block), stop);
    if (order == EIGHTS && stop - block > 1)
        score_own(of, EIGHTS, room, row, block, stop - odd, stop);
    if (order == TILES && stop - block == 1) /* which is no tile */
        row->scores[0] = score_alone(room->keys[block], row->query, of->all.channels, of->wide);
    for (Py_ssize_t at = block; row->mask != NULL && at < end; at += LANES) {
        const __mmask16 all = (1u << Py_MIN(LANES, end - at)) - 1;
        const __mmask16 hidden = _mm256_movepi16_mask(_mm256_maskz_loadu_epi16(all, row->mask + offset + at));
        _mm512_mask_storeu_ps(row->scores + at - block, hidden, _mm512_set1_ps(-INFINITY));
    }
    share_scores(row, stop - block, of->all.scale, of->wide);
}

FAST static void
attend_run(Singly *of, const Run *run, Py_ssize_t head, Room *room)
{
    const View *tensors = of->all.tensors, *sequences = tensors + SEQUENCES;
    const int32_t *place = (const int32_t *)sequences->data + run->sequence * sequences->strides[0];
    const Py_ssize_t size = of->all.channels, wide = of->wide, group = of->all.group;
    const Py_ssize_t text = Py_MAX(0, place[LENGTH] - run->start);
    const Py_ssize_t offset = run->start - place[BASE] + of->all.slots - of->all.nodes; /* the first slot's place */
    Row *rows = room->rows, *end = rows + run->rows;
    const Order order = run->order;
    const Py_ssize_t step = step_of(order);
    Py_ssize_t most = 0;
    if (offset < 0) {
        of->all.tiles.failed = 1;
        return;
    }
    for (Py_ssize_t at = 0; at < text; at++) {
        room->keys[at] = line_in(tensors + K, run->sequence, head, offset + at);
        room->values[at] = line_in(tensors + V, run->sequence, head, offset + at);
    }
    for (Row *row = rows; row < end; row++) {
        Py_ssize_t number = run->first + (row - rows);
        row->node = number / group;
        row->head = head * group + number % group;
        row->mask = tensors[MASK].last ? line_in(tensors + MASK, run->sequence, 0, row->node) : NULL;
        row->highest = -INFINITY;
        row->whole = 0.0f;
        const uint16_t *query = line_in(tensors + QUERIES, run->sequence, row->head, row->node);
        memset(row->query, 0, wide * sizeof(float));
        memset(row->sums, 0, wide * sizeof(float));
        order == PAIRS ? split_line(query, size, row->query) : widen(query, BFLOAT16, row->query, size);
        most = Py_MAX(most, find_nodes(&of->all, run, head, row, room, text));
        row->peeled = order == EIGHTS ? peeled_of(&of->all, place, of->threads, head, row->slots) : 0;
    }
    const Py_ssize_t shared = order == CHAINS ? most : text; /* of rows of a single node all slots */
    for (Py_ssize_t block = 0; block < most; block += SPLIT) {
        const Py_ssize_t stop = Py_MIN(shared, block + SPLIT), steps = Py_MAX(0, stop - block) / step * step;
        const Order scored = order == CHAINS && stop - block < FEW ? EIGHTS : order;
        for (Py_ssize_t at = block; at < stop; at += LANES) {
            const Order each = scored == EIGHTS ? FOURS : scored;
            gather_keys(room->keys + at, stop - at, size, wide, each, room->few);
            score_rows(room->few, rows, run->rows, wide, each, at - block);
        }
        for (Row *row = rows; row < end; row++)
            if (block < find_nodes(&of->all, run, head, row, room, text))
                share_block(of, scored, room, row, block, shared, text, offset);
        gather_values(room->values + block, steps, size, wide, room->shared);
        add_values(rows, run->rows, order, room->shared, 0, steps, wide);
        for (Row *row = rows; row < end; row++) {
            const Py_ssize_t slots = find_nodes(&of->all, run, head, row, room, text);
            const Py_ssize_t rest = Py_MIN(slots, block + SPLIT) - block - steps;
            if (rest > 0) {
                gather_values(room->values + block + steps, rest, size, wide, room->own);
                add_values(row, 1, order, room->own, steps, rest, wide);
            }
        }
    }
    for (Row *row = rows; row < end; row++) {
        uint16_t *into = line_in(tensors + OUTPUT, run->sequence, row->head, row->node);
        const float scale = 1.0f / (row->whole == 0.0f ? 1.0f : row->whole);
        for (Py_ssize_t at = 0; at < size; at++)
            into[at] = narrowed(row->sums[at] * scale);
    }
}

/* What each thread does: take runs while there are any. */
static void
attend_runs(void *given)
{
    Singly *of = given;
    const size_t slots = of->all.slots + of->all.nodes, values = SPLIT + STEP;
    Room *room = calloc(1, sizeof(Room));
    const uint16_t **lines = malloc(2 * slots * sizeof(uint16_t *));
    float *rest = calloc((LANES + 2 * values + 2 * (ROWS + ABREAST)) * of->wide, sizeof(float));
    if (room != NULL && lines != NULL && rest != NULL) {
        room->keys = lines;
        room->values = lines + slots;
        room->few = rest;
        room->shared = room->few + LANES * of->wide;
        room->own = room->shared + values * of->wide;
        for (int row = 0; row < ROWS + ABREAST; row++) {
            room->rows[row].query = room->own + (values + row) * of->wide;
            room->rows[row].sums = room->own + (values + ROWS + ABREAST + row) * of->wide;
        }
        for (Py_ssize_t at; (at = next_part(&of->all.tiles)) < of->all.tiles.count;)
            attend_run(of, of->runs + at / of->all.key_heads, at % of->all.key_heads, room);
    } else
        of->all.tiles.failed = 1;
    free(room);
    free(lines);
    free(rest);
}

static int
attend_singly(const Attention *all, int windowed)
{
    Singly of = {.all = *all, .threads = torch_threads()};
    const View *tensors = all->tensors;
    if (!__builtin_cpu_supports("avx512dq") || all->kind != BFLOAT16 || all->channels > CHANNELS)
        return 1;
    const Py_ssize_t batch = tensors->sizes[0], rows = of.all.nodes * of.all.group;
    of.wide = (of.all.channels + PAIRED - 1) / PAIRED * PAIRED;
    of.runs = malloc(batch * rows * sizeof(Run));
    if (of.runs == NULL)
        return 1;
    Py_ssize_t count = 0;
    for (Py_ssize_t sequence = 0; sequence < batch; sequence++) {
        const View *sequences = tensors + SEQUENCES;
        const int32_t *place = (const int32_t *)sequences->data + sequence * sequences->strides[0];
        const int32_t window = windowed ? place[WINDOW] : 0; /* plain decoding has dropped what is before it */
        for (Py_ssize_t row = 0; row < rows; row++) {
            Py_ssize_t end = (Py_ssize_t)place[LENGTH] + place[DEPTHS + row / of.all.group] + 1;
            Py_ssize_t start = window ? Py_MAX(0, end - window) : 0, masked = window && end >= window ? PACKED : MASKED;
            Order order = order_of(place[HOW], masked, of.all.group);
            Run *last = of.runs + Py_MAX(0, count - 1);
            int apart = order == CHAINS && row % of.all.group == 0; /* a node's rows by themselves */
            if (row && last->start == start && last->order == order && last->rows < ROWS && !apart)
                last->rows++;
            else
                of.runs[count++] = (Run){sequence, row, 1, start, order};
        }
    }
    of.all.tiles.count = count * of.all.key_heads;
    int failed = share_out(&of.all.tiles, attend_runs);
    free(of.runs);
    return failed;
}
#else
static int
attend_singly(const Attention *all, int windowed)
{
    return 1;
}
#endif

int
attend(Attention *of, int windowed)
{
    int in_order = ((const int32_t *)of->tensors[SEQUENCES].data)[HOW] == IN_ORDER;
    return in_order ? share_out(&of->tiles, attend_tiles) : attend_singly(of, windowed);
}
