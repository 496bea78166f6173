#include "speedups.h"

#define MOST_ROWS 30 /* that one node is told by */

typedef struct { /* lookahead.sources.successor_table.SuccessorTable.rows */
    PyObject *tables; /* (new, young, old), each of four dictionaries: ones, twos, threes, before the last */
    PyObject *links;  /* of each length of context: the row before each one, int32 */
    const char *tokens; /* [row, width] of uint16 or int32, best first */
    const float *logits;
    Py_ssize_t width, size; /* tokens in a row, bytes of each */
} Rows;

static int
read_rows(PyObject *given, Rows *rows)
{
    PyObject *tokens, *logits;
    if (!PyArg_ParseTuple(given, "OOOO;rows", &rows->tables, &rows->links, &tokens, &logits))
        return -1;
    rows->size = PyMemoryView_Check(tokens) ? PyMemoryView_GET_BUFFER(tokens)->itemsize : 0;
    rows->tokens = line_of(tokens, 0, rows->size == 2 ? 2 : 4);
    rows->logits = rows->tokens == NULL ? NULL : line_of(logits, 0, sizeof(float));
    if (rows->logits == NULL)
        return -1;
    rows->width = length_of(logits, 1);
    return 0;
}

static inline long
token_at(const Rows *rows, Py_ssize_t place)
{
    return rows->size == 2 ? ((const uint16_t *)rows->tokens)[place] : ((const int32_t *)rows->tokens)[place];
}

/* Where a table and its kinds stand: those of one, two and three tokens, and then (order 0) of two before the last. */
static inline int
place_of_order(int order)
{
    return order ? order - 1 : 3;
}

/* The row that a generation has for the last `order` tokens of a context, `key`; 0: none; -1: an error. */
static long
row_of(const Rows *rows, int generation, int order, PyObject *key)
{
    PyObject *table = PyTuple_GET_ITEM(PyTuple_GET_ITEM(rows->tables, generation), place_of_order(order));
    PyObject *row = PyDict_GetItemWithError(table, key);
    if (row == NULL)
        return PyErr_Occurred() ? -1 : 0;
    return PyLong_AsLong(row);
}

static PyObject *
key_of(PyObject *context, int order) /* a new reference */
{
    if (order == 0)
        return PyTuple_GetSlice(context, 0, 2);
    if (order == 1)
        return Py_NewRef(PyTuple_GET_ITEM(context, 2));
    if (order == 2)
        return PyTuple_Pack(2, PyTuple_GET_ITEM(context, 1), PyTuple_GET_ITEM(context, 2));
    return Py_NewRef(context);
}

/* SuccessorTable.last: the last rows, `most` each, of the suffixes of a context, with their lengths in `orders`; how
 * many. With only `one` length, those of the longest that is known. */
static int
last_rows(const Rows *rows, PyObject *context, int most, int one, int *orders, long *found)
{
    int count = 0;
    for (int order = 3; order >= 0 && !(count && (one || (!order && orders[0] > 1))); order--) {
        PyObject *key = key_of(context, order);
        if (key == NULL)
            return -1;
        const int32_t *before = line_of(PyTuple_GET_ITEM(rows->links, order ? order - 1 : 0), 0, sizeof(int32_t));
        int enough = count + (order ? most : 1);
        for (int generation = 0; generation < 3 && count < enough; generation++) {
            long row = before == NULL ? -1 : row_of(rows, generation, order, key);
            if (row < 0) {
                Py_DECREF(key);
                return -1;
            }
            while (row && count < enough) {
                orders[count] = order;
                found[count++] = row;
                row = generation && order ? before[row] : 0; /* newest rows are not linked yet */
            }
        }
        Py_DECREF(key);
    }
    return count;
}

static int
is_context(PyObject *context)
{
    if (PyTuple_Check(context) && PyTuple_GET_SIZE(context) == 3)
        return 1;
    PyErr_SetString(PyExc_TypeError, "a context is a tuple of three tokens");
    return 0;
}

/* ranked(rows, context, steps, best): SuccessorTable.ranked. */
PyObject *
ranked(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Rows rows;
    int order;
    long row;
    if (!takes("ranked", 4, count) || !is_context(args[1]) || read_rows(args[0], &rows) < 0)
        return NULL;
    const float *steps = line_of(args[2], 0, sizeof(float));
    Py_ssize_t best = PyLong_AsSsize_t(args[3]);
    int known = PyErr_Occurred() ? -1 : last_rows(&rows, args[1], 1, 1, &order, &row);
    PyObject *found = known < 0 ? NULL : PyList_New(0);
    if (found == NULL || !known)
        return found;
    Py_ssize_t levels = length_of(args[2], 0), most = best < rows.width ? best : rows.width;
    const float *logits = rows.logits + row * rows.width;
    for (Py_ssize_t rank = 0; rank < most && (!rank || logits[rank] > -INFINITY); rank++) {
        float gap = logits[0] - logits[rank ? rank : most > 1];
        int level = 0;
        while (level < levels && !(gap < steps[level]))
            level++;
        long kind = (place_of_order(order) * best + rank) * (levels + 1) + level;
        PyObject *candidate = pair(token_at(&rows, row * rows.width + rank), kind);
        int failed = candidate == NULL || PyList_Append(found, candidate) < 0;
        Py_XDECREF(candidate);
        if (failed) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

typedef struct {
    long token;
    double share;
} Share;

typedef struct {
    Share *shares;
    Py_ssize_t count, room;
} Shares;

/* Where a token's share stands, or the next one is to stand. Few tokens have one, so they are looked through. */
static Py_ssize_t
place_of(const Shares *all, long token)
{
    Py_ssize_t at = 0;
    while (at < all->count && all->shares[at].token != token)
        at++;
    return at;
}

/* Give a token a larger share. */
static int
add_share(Shares *all, long token, double share)
{
    Py_ssize_t at = place_of(all, token);
    if (at < all->count) {
        all->shares[at].share += share;
        return 0;
    }
    if (all->count == all->room) {
        Share *larger = PyMem_Realloc(all->shares, (all->room * 2 + 64) * sizeof(Share));
        if (larger == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        all->shares = larger;
        all->room = all->room * 2 + 64;
    }
    all->shares[all->count++] = (Share){token, share};
    return 0;
}

typedef struct { /* how a token is drawn */
    Warp warp;
    const float *noise; /* of each token; NULL: it is not known */
    Py_ssize_t vocab;
    float *weights; /* room for what is worked out */
} Draw;

static inline float
noise_of(const Draw *draw, long token)
{
    if (draw->noise == NULL)
        return 1.0f;
    float noise = token >= 0 && token < draw->vocab ? draw->noise[token] : INFINITY;
    return noise > 1e-30f ? noise : 1e-30f;
}

/* Draw.chances of a row's tokens, divided by the noise, as weights; their sum. */
static float
weigh(const Rows *rows, long row, const Draw *draw)
{
    const Warp *warp = &draw->warp;
    Py_ssize_t width = rows->width, kept = warp->top_k && warp->top_k < width ? warp->top_k : width;
    const float *logits = rows->logits + row * width;
    float *weights = draw->weights;
    float scale = (float)(1.0 / warp->temperature), total = 0.0f, before = 0.0f, sum = 0.0f;
    for (Py_ssize_t rank = 0; rank < kept; rank++) {
        float chance = expf((logits[rank] - logits[0]) * scale);
        weights[rank] = warp->min_p && chance < (float)warp->min_p ? 0.0f : chance;
        total += weights[rank];
    }
    for (Py_ssize_t rank = 0; rank < kept; rank++) {
        float chance = weights[rank];
        if (rank && warp->top_p < 1.0 && before >= (float)warp->top_p * total)
            weights[rank] = 0.0f;
        else if (chance > 0.0f)
            weights[rank] = chance / noise_of(draw, token_at(rows, row * width + rank));
        before += chance;
        sum += weights[rank];
    }
    for (Py_ssize_t rank = kept; rank < width; rank++)
        weights[rank] = 0.0f;
    return sum;
}

/* Add the shares of one row, which has this part of the votes. */
static int
add_row(Shares *all, const Rows *rows, long row, const Draw *draw, double vote, double least)
{
    float factor = (float)vote / weigh(rows, row, draw);
    for (Py_ssize_t rank = 0; rank < rows->width; rank++) {
        double share = draw->weights[rank] * factor;
        if (share >= least && add_share(all, token_at(rows, row * rows->width + rank), share) < 0)
            return -1;
    }
    return 0;
}

/* Add what the text's usual tokens say, (tokens, chances), which have `left` of the votes; beside what rows say only
 * what then counts, or has been said already. */
static int
add_usual(Shares *all, PyObject *usual, const Draw *draw, double left, int beside, double least)
{
    const int64_t *tokens = line_of(PyTuple_GET_ITEM(usual, 0), 0, sizeof(int64_t));
    const float *chances = tokens == NULL ? NULL : line_of(PyTuple_GET_ITEM(usual, 1), 0, sizeof(float));
    if (chances == NULL)
        return -1;
    Py_ssize_t count = length_of(PyTuple_GET_ITEM(usual, 0), 0);
    float sum = 0.0f;
    for (Py_ssize_t at = 0; at < count; at++)
        sum += draw->weights[at] = chances[at] / noise_of(draw, (long)tokens[at]);
    for (Py_ssize_t at = 0; at < count; at++) {
        double share = draw->weights[at] / sum;
        if (share >= least && (!beside || left * share >= least || place_of(all, (long)tokens[at]) < all->count) &&
            add_share(all, (long)tokens[at], left * share) < 0)
            return -1;
    }
    return 0;
}

/* perturbed.offer: the best `most`, equal ones in their order. */
static PyObject *
offered(Shares *all, Py_ssize_t most, const double *bounds, Py_ssize_t bins, long first)
{
    Py_ssize_t count = all->count < most ? all->count : most;
    PyObject *found = PyList_New(count);
    for (Py_ssize_t place = 0; found != NULL && place < count; place++) {
        Py_ssize_t best = place;
        for (Py_ssize_t at = place + 1; at < all->count; at++)
            if (all->shares[at].share > all->shares[best].share)
                best = at;
        Share taken = all->shares[best];
        memmove(all->shares + place + 1, all->shares + place, (best - place) * sizeof(Share));
        all->shares[place] = taken;
        long bin = 0;
        while (bin < bins && bounds[bin] <= taken.share)
            bin++;
        PyObject *candidate = pair(taken.token, first + bin);
        if (candidate == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, place, candidate);
    }
    return found;
}

/* Add what rows say, longest contexts first: DrawnRecycling's votes. What is left of them for the usual tokens; -1: an
 * error. */
static double
add_rows(Shares *all, const Rows *rows, int count, const int *orders, const long *found, const Draw *draw, double heard,
         double older, double least)
{
    double left = 1.0;
    for (int at = 0; at < count;) {
        int end = at;
        double whole = 0.0, fading = 1.0;
        for (; end < count && orders[end] == orders[at]; end++, fading *= older)
            whole += fading;
        fading = left * heard / whole;
        left *= 1.0 - heard;
        for (; at < end; at++, fading *= older)
            if (add_row(all, rows, found[at], draw, fading, least) < 0)
                return -1.0;
    }
    return left;
}

/* heard((warp, (most, heard, older), bounds, best), rows, context, line, usual): DrawnRecycling._heard; `line` is any
 * array, or None. */
PyObject *
heard(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Rows rows;
    Draw draw = {0};
    Py_buffer noise = {0};
    PyObject *limits, *tokens, *chances;
    Py_ssize_t best;
    int most, orders[MOST_ROWS];
    long found[MOST_ROWS];
    double heard, older;
    if (!takes("heard", 5, count) || !is_context(args[2]) || read_rows(args[1], &rows) < 0 ||
        !PyArg_ParseTuple(args[0], "(dndd)(idd)On;settings", &draw.warp.temperature, &draw.warp.top_k, &draw.warp.top_p,
                          &draw.warp.min_p, &most, &heard, &older, &limits, &best) ||
        !PyArg_ParseTuple(args[4], "OO;usual", &tokens, &chances))
        return NULL;
    const double *bounds = line_of(limits, 0, sizeof(double));
    const void *usual = bounds == NULL ? NULL : line_of(tokens, 0, sizeof(int64_t));
    if (usual != NULL && most >= MOST_ROWS / 3)
        PyErr_Format(PyExc_ValueError, "fewer than %d rows of each length are heard", MOST_ROWS / 3);
    int known = PyErr_Occurred() ? -1 : last_rows(&rows, args[2], most, 0, orders, found);
    if (known < 0 || (args[3] != Py_None && PyObject_GetBuffer(args[3], &noise, PyBUF_C_CONTIGUOUS) < 0))
        return NULL;
    draw.noise = noise.itemsize == sizeof(float) ? noise.buf : NULL;
    draw.vocab = noise.len / (Py_ssize_t)sizeof(float);
    draw.weights = PyMem_Malloc((rows.width + length_of(tokens, 0) + 1) * sizeof(float));
    Shares all = {NULL, 0, 0};
    Py_ssize_t bins = length_of(limits, 0);
    double left = -1.0;
    if (draw.weights == NULL)
        PyErr_NoMemory();
    else
        left = add_rows(&all, &rows, known, orders, found, &draw, heard, older, bounds[1]);
    int failed = left < 0.0;
    if (!failed && (!known || orders[0] <= 1))
        failed = add_usual(&all, args[4], &draw, left, known, bounds[1]) < 0;
    PyBuffer_Release(&noise);
    PyMem_Free(draw.weights);
    long first = (known ? place_of_order(orders[0]) : 4) * (bins + 1);
    PyObject *offer = failed ? NULL : offered(&all, best, bounds, bins, first);
    PyMem_Free(all.shares);
    return offer;
}
