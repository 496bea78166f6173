#include "speedups.h"

#define MOST_ROWS 30 /* that one node is told by */

typedef struct {
    long token;
    double share;
} Share;

typedef struct { /* how a token is drawn, and the shares of tokens so far */
    Warp warp;
    const float *noise; /* of each token; NULL: it is not known */
    float *weights;     /* room for what is worked out */
    double least;       /* share that counts */
    Share *shares; /* which have room for all tokens of the rows */
    Py_ssize_t vocab, count;
} Draw;

static inline float
noise_of(const Draw *draw, long token)
{
    if (draw->noise == NULL)
        return 1.0f;
    float noise = token >= 0 && token < draw->vocab ? draw->noise[token] : INFINITY;
    return noise > 1e-30f ? noise : 1e-30f;
}

/* Add the shares of one row, which has this part of the votes: Draw.chances of its tokens, divided by the noise. */
static void
add_row(Draw *draw, const Rows *rows, long row, double vote)
{
    const Warp *warp = &draw->warp;
    const float *logits = line_of(rows->arrays + LOGITS, row);
    const void *tokens = line_of(rows->arrays + TOKENS, row);
    Py_ssize_t size = rows->arrays[TOKENS].size;
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
        sum += weights[rank] /= noise_of(draw, token_at(tokens, size, rank));
    float factor = (float)vote / sum;
    for (Py_ssize_t rank = 0; rank < kept; rank++) {
        double share = weights[rank] * factor;
        long token = token_at(tokens, size, rank);
        Py_ssize_t at = 0; /* few tokens have a share, so they are looked through */
        if (!(share >= draw->least))
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
offered(Draw *draw, Py_ssize_t most, const Array *bounds, long first)
{
    PyObject *found = PyList_New(0);
    for (Py_ssize_t place = 0; found != NULL && place < Py_MIN(most, draw->count); place++) {
        Share *best = draw->shares, taken;
        for (Share *each = best + 1; each < draw->shares + draw->count; each++)
            best = each->share > best->share ? each : best;
        taken = *best;
        best->share = -INFINITY;
        long bin = 0;
        while (bin < bounds->length && ((const double *)bounds->data)[bin] <= taken.share)
            bin++;
        if (append(found, Py_BuildValue("ll", taken.token, first + bin)) < 0)
            Py_CLEAR(found);
    }
    return found;
}

/* The votes of rows, by context and age, and of those `near` a new last token. How many rows; -1: an error. */
static int
weigh(const Rows *rows, int count, int *orders, long *found, double *weights, const double *votes, PyObject *near)
{
    double fading = 1.0;
    for (int at = 0; at < count; at++) {
        uint32_t age = (rows->written - 1 - (uint32_t)found[at]) & (uint32_t)(rows->capacity - 1);
        fading = at && orders[at] == orders[at - 1] ? fading * votes[4] : 1.0;
        weights[at] = votes[orders[at]] * fading / sqrt(1.0 + age / votes[5]);
    }
    Py_ssize_t others = count && orders[0] ? 0 : Py_MIN(PyList_GET_SIZE(near), MOST_ROWS - count);
    for (Py_ssize_t at = 0; at < others; at++, count++) {
        PyObject *item = Py_XNewRef(PyList_GetItem(near, at)); /* what reads it may change the list */
        int read = item != NULL && read_tuple(item, "ld;a row and its votes", found + count, weights + count);
        Py_XDECREF(item);
        orders[count] = 0;
        if (!read)
            return -1;
        if (found[count] < 0 || found[count] >= rows->capacity || !rows->width)
            return PyErr_Format(PyExc_ValueError, "expected a row of the table"), -1;
    }
    return count;
}

/* heard((warp, most, votes, bounds, best, begun), rows, written, context, line, near): RecyclingSource._heard; `line`
 * has the noise of each token, or is None. */
PyObject *
heard(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Draw draw = {{0}};
    Array arrays[] = {{"bounds", "d", 8, 1}, {"line", FLOAT32, 1, OPTIONAL}};
    Warp *warp = &draw.warp;
    PyObject *views[2], *offer = NULL;
    Py_ssize_t best;
    int most, orders[MOST_ROWS];
    long found[MOST_ROWS], begun;
    double votes[6], weights[MOST_ROWS], whole = 0.0;
    if (!takes("heard", 6, count) ||
        !read_tuple(args[0], "(dndd)i(dddddd)Onl;settings", &warp->temperature, &warp->top_k, &warp->top_p,
                    &warp->min_p, &most, votes, votes + 1, votes + 2, votes + 3, votes + 4, votes + 5, views, &best,
                    &begun) || !is_warp(warp))
        return NULL;
    views[1] = args[4];
    if (most < 0 || most >= MOST_ROWS / 3 || best < 0 || !PyList_Check(args[5]))
        return PyErr_Format(PyExc_ValueError, "expected a list, and less than %d rows", MOST_ROWS / 3);
    Rows *rows = rows_of(args[1], args[2]);
    int known = rows == NULL ? -1 : last_rows(rows, args[3], most, orders, found);
    known = known < 0 ? -1 : weigh(rows, known, orders, found, weights, votes, args[5]);
    if (known < 0 || open_arrays(arrays, views, 2) < 0)
        return NULL;
    draw.noise = (const float *)arrays[1].data;
    draw.vocab = arrays[1].length;
    draw.weights = PyMem_New(float, rows->width);
    draw.shares = PyMem_New(Share, known * rows->width);
    if (draw.weights == NULL || draw.shares == NULL)
        PyErr_NoMemory();
    else if (arrays->length < 2)
        PyErr_SetString(PyExc_ValueError, "expected two bounds or more");
    else {
        draw.least = ((const double *)arrays->data)[1];
        for (int at = 0; at < known; at++)
            whole += weights[at];
        for (int at = 0; at < known; at++)
            add_row(&draw, rows, found[at], weights[at] / whole);
        uint32_t age = known ? (rows->written - 1 - (uint32_t)found[0]) & (uint32_t)(rows->capacity - 1) : 0;
        int others = known && orders[0] && age >= rows->written - (uint32_t)begun; /* only they have had the context */
        long first = known ? place_of_order(orders[0]) + (others ? PLACES : 0) : 0;
        offer = offered(&draw, best, arrays, first * (long)(arrays->length + 1));
    }
    PyMem_Free(draw.weights);
    PyMem_Free(draw.shares);
    close_arrays(arrays, 2);
    return offer;
}
