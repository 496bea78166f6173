#include "speedups.h"

#define PLACES 4 /* of lookahead.sources.successor_table, for contexts of so many tokens; 0: of two, not the last */
#define PLACE_OF(order) ((order) ? (order) - 1 : PLACES - 1)
#define WAYS 8 /* entries of a bucket */
#define MOST_ROWS 30 /* that one node is told by */

static const uint64_t FACTORS[PLACES][3] = { /* of a context's tokens: successor_table._FACTORS */
    {0, 0, 0x9E3779B97F4A7C15},
    {0, 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15},
    {0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15},
    {0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0},
};

typedef struct { /* a table, as SuccessorTable.rows has it */
    const Array *entries; /* [bucket, 2 WAYS] of uint32: tags, and the numbers of their rows */
    const Array *before;  /* [row, 3] of uint32: the number of the row that its context of so many tokens had before */
    const Array *tokens;  /* [row, width] of uint16 or int32, best first */
    const Array *logits;
    Py_ssize_t width, capacity;
    uint32_t written; /* the next row's number */
} Rows;

/* Whether a table's arrays fit together. */
static int
is_table(const Rows *rows)
{
    Py_ssize_t buckets = rows->entries->lines, capacity = rows->capacity;
    return buckets && !(buckets & (buckets - 1)) && rows->entries->length == 2 * WAYS && capacity &&
           !(capacity & (capacity - 1)) && rows->before->lines == capacity && rows->before->length == 3 &&
           rows->tokens->lines == capacity && rows->tokens->length == rows->width;
}

/* How many rows were written since, and with, the last one of the suffix of a context with so many tokens. */
static uint32_t
age_of_last(const Rows *rows, const long long *context, int order)
{
    const int place = PLACE_OF(order);
    const uint64_t *factors = FACTORS[place];
    uint64_t hash = context[0] * factors[0] + context[1] * factors[1] + context[2] * factors[2] + place;
    hash = (hash ^ hash >> 32) * 0xFF51AFD7ED558CCD;
    const uint32_t *bucket = line_of(rows->entries, (Py_ssize_t)(hash >> 32) & (rows->entries->lines - 1));
    for (int way = 0; way < WAYS; way++)
        if (bucket[way] == (uint32_t)hash)
            return rows->written - bucket[WAYS + way];
    return UINT32_MAX;
}

typedef struct { /* a row that votes: tokens of the context that it is known by, rows written after it, its votes */
    long row;
    int order;
    uint32_t age;
    double votes;
} Voter;

/* SuccessorTable.last and votes_of: the last rows, `most` each, of the suffixes of a context, and where none has a
 * token, those `near` its last one. How many; -1 and an error. */
static int
find_voters(const Rows *rows, PyObject *given, int most, const double *votes, PyObject *near, Voter *found)
{
    long long context[3];
    int count = 0;
    if (!PyArg_Parse(given, "(LLL);a context is a tuple of three tokens", context, context + 1, context + 2))
        return -1;
    for (int order = 3; order >= 0 && !(count && !order && found[0].order > 1); order--) {
        uint32_t age = age_of_last(rows, context, order), before;
        int known = rows->width && age <= rows->capacity, enough = count + (order ? most : 1);
        for (double fading = 1.0; known && count < enough; age = before, fading *= votes[4]) {
            long row = (long)((rows->written - age) & (rows->capacity - 1));
            const uint32_t *numbers = line_of(rows->before, row);
            found[count++] = (Voter){row, order, age - 1, votes[order] * fading / sqrt(1.0 + (age - 1) / votes[5])};
            before = order ? rows->written - numbers[order - 1] : age;
            known = age < before && before <= rows->capacity;
        }
    }
    Py_ssize_t others = count && found[0].order ? 0 : Py_MIN(PyList_GET_SIZE(near), MOST_ROWS - count);
    for (Py_ssize_t at = 0; at < others; at++, count++) {
        PyObject *item = Py_XNewRef(PyList_GetItem(near, at)); /* what reads it may change the list */
        Voter *voter = memset(found + count, 0, sizeof(Voter));
        int read = item != NULL && PyArg_Parse(item, "(ld);a row and its votes", &voter->row, &voter->votes);
        Py_XDECREF(item);
        if (!read)
            return -1;
        if (voter->row < 0 || voter->row >= rows->capacity || !rows->width)
            return PyErr_Format(PyExc_ValueError, "expected a row of the table"), -1;
    }
    return count;
}

typedef struct { long token; double share; } Share;

typedef struct { /* how a token is drawn, and the shares of tokens so far */
    const Array *bounds, *line; /* of bins: only shares from the second on count; the noise of each token, if known */
    Warp warp;
    float *weights; /* room for what is worked out */
    Share *shares;  /* which have room for all tokens of the rows */
    Py_ssize_t count;
} Draw;

/* A token of a row. */
static inline long
token_at(const Array *tokens, long row, Py_ssize_t rank)
{
    const void *line = line_of(tokens, row);
    return tokens->size == 2 ? ((const uint16_t *)line)[rank] : ((const int32_t *)line)[rank];
}

static inline float
noise_of(const Draw *draw, long token)
{
    if (!draw->line->lines)
        return 1.0f;
    float noise = token >= 0 && token < draw->line->length ? ((const float *)draw->line->data)[token] : INFINITY;
    return noise > 1e-30f ? noise : 1e-30f;
}

/* Add the shares of one row, which has this part of the votes: Draw.chances of its tokens, divided by the noise. */
static void
add_row(Draw *draw, const Rows *rows, long row, double vote)
{
    const Warp *warp = &draw->warp;
    const float *logits = line_of(rows->logits, row);
    float *weights = draw->weights, total = 0.0f, before = 0.0f, sum = 0.0f;
    Py_ssize_t most = warp->top_k ? Py_MIN(warp->top_k, rows->width) : rows->width, kept = most;
    chances_of(logits, logits[0], (float)(1.0 / warp->temperature), weights, most);
    for (Py_ssize_t rank = 0; warp->min_p && rank < most; rank++)
        weights[rank] = weights[rank] < (float)warp->min_p ? 0.0f : weights[rank];
    if (warp->top_p < 1.0) {
        for (Py_ssize_t rank = 0; rank < most; rank++)
            total += weights[rank];
        for (kept = 0; kept < most && (!kept || !(before >= (float)warp->top_p * total)); kept++)
            before += weights[kept];
    }
    for (Py_ssize_t rank = 0; rank < kept; rank++)
        sum += weights[rank] /= noise_of(draw, token_at(rows->tokens, row, rank));
    float factor = (float)vote / sum;
    for (Py_ssize_t rank = 0; rank < kept; rank++) {
        double share = weights[rank] * factor;
        long token = token_at(rows->tokens, row, rank);
        Py_ssize_t at = 0; /* few tokens have a share, so they are looked through */
        if (!(share >= ((const double *)draw->bounds->data)[1]))
            continue;
        while (at < draw->count && draw->shares[at].token != token)
            at++;
        if (at == draw->count)
            draw->shares[draw->count++] = (Share){token, 0.0};
        draw->shares[at].share += share;
    }
}

/* perturbed.offer: the best `most`, equal ones in their order. */
static PyObject *
offered(Draw *draw, Py_ssize_t most, long first)
{
    PyObject *found = PyList_New(0);
    for (Py_ssize_t place = 0; found != NULL && place < Py_MIN(most, draw->count); place++) {
        Share *best = draw->shares;
        long bin = 0;
        for (Share *each = best + 1; each < draw->shares + draw->count; each++)
            best = each->share > best->share ? each : best;
        while (bin < draw->bounds->length && ((const double *)draw->bounds->data)[bin] <= best->share)
            bin++;
        best->share = -INFINITY;
        if (append(found, Py_BuildValue("ll", best->token, first + bin)) < 0)
            Py_CLEAR(found);
    }
    return found;
}

/* heard((warp, most, votes, bounds, best, begun), (entries, before, tokens, logits), written, context, line, near):
 * RecyclingSource._heard; `line` has the noise of each token, or is None. */
PyObject *
heard(PyObject *module, PyObject *args)
{
    Array arrays[] = {{"entries", "IL", 4, 2}, {"before", "IL", 4, 2}, {"tokens", "hHil", 0, 2}, {"logits", FLOAT32, 2},
                      {"bounds", "d", 8, 1}, {"line", FLOAT32, 1, OPTIONAL}};
    Array *entries = arrays, *before = arrays + 1, *tokens = arrays + 2, *logits = arrays + 3;
    Array *bounds = arrays + 4, *line = arrays + 5;
    Draw draw = {.bounds = bounds, .line = line};
    PyObject *context, *near, *offer = NULL;
    Py_ssize_t best;
    int most, known = -1;
    long begun;
    unsigned long written;
    double votes[6], whole = 0.0;
    Voter voters[MOST_ROWS];
    if (!PyArg_ParseTuple(args, "(O&i(dddddd)O&nl)(O&O&O&O&)kOO&O:heard", read_warp, &draw.warp, &most, votes,
                          votes + 1, votes + 2, votes + 3, votes + 4, votes + 5, open_array, bounds, &best, &begun,
                          open_array, entries, open_array, before, open_array, tokens, open_array, logits, &written,
                          &context, open_array, line, &near))
        return NULL;
    const Rows rows = {entries, before, tokens, logits, logits->length, logits->lines, (uint32_t)written};
    if (most < 0 || most >= MOST_ROWS / 3 || best < 0 || bounds->length < 2 || !PyList_Check(near))
        PyErr_Format(PyExc_ValueError, "expected two bounds or more, a list, and less than %d rows", MOST_ROWS / 3);
    else if (!is_table(&rows))
        PyErr_SetString(PyExc_ValueError, "expected entries [2^n, 16], before [2^n, 3], tokens, logits [2^n, rank]");
    else
        known = find_voters(&rows, context, most, votes, near, voters);
    draw.shares = known < 0 ? NULL : PyMem_New(Share, (known + 1) * rows.width); /* and room for weights */
    if (draw.shares != NULL) {
        draw.weights = (float *)(draw.shares + known * rows.width);
        for (int at = 0; at < known; at++)
            whole += voters[at].votes;
        for (int at = 0; at < known; at++)
            add_row(&draw, &rows, voters[at].row, voters[at].votes / whole);
        int others = known && voters->order && voters->age >= rows.written - (uint32_t)begun; /* only they had it */
        long first = known ? PLACE_OF(voters->order) + (others ? PLACES : 0) : 0;
        offer = offered(&draw, best, first * (long)(bounds->length + 1));
    } else if (known >= 0)
        PyErr_NoMemory();
    PyMem_Free(draw.shares);
    close_arrays(arrays, 6);
    return offer;
}
