#include "table.h"

#define MOST_ROWS 30 /* that one node is told by */

/* Append the usual candidates whose tokens are not among those found. */
static int
append_usual(PyObject *found, PyObject *usual)
{
    Py_ssize_t known = PyList_GET_SIZE(found);
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(usual); at++) {
        PyObject *candidate = PyList_GET_ITEM(usual, at);
        long token = PyLong_AsLong(PyTuple_GET_ITEM(candidate, 0));
        Py_ssize_t other = 0;
        while (other < known && PyLong_AsLong(PyTuple_GET_ITEM(PyList_GET_ITEM(found, other), 0)) != token)
            other++;
        if (other == known && PyList_Append(found, candidate) < 0)
            return -1;
    }
    return 0;
}

/* ranked(rows, context, steps, best, usual): SuccessorTable.ranked; `usual` is None where nothing is guessed. */
PyObject *
ranked(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Rows rows;
    int order = 0;
    long row;
    if (!takes("ranked", 5, count) || read_rows(args[0], &rows) < 0)
        return NULL;
    const float *steps = line_of(args[2], 0, sizeof(float));
    Py_ssize_t best = PyLong_AsSsize_t(args[3]);
    int known = PyErr_Occurred() ? -1 : last_rows(&rows, args[1], 1, 1, &order, &row), guess = PyList_Check(args[4]);
    PyObject *found = known < 0 ? NULL : PyList_New(0);
    if (found == NULL)
        return NULL;
    Py_ssize_t levels = length_of(args[2], 0), most = best < rows.width ? best : rows.width;
    if (!known || !(order || guess))
        row = most = 0;
    const float *logits = rows.logits + row * rows.width;
    for (Py_ssize_t rank = 0; rank < most && (!rank || logits[rank] > -INFINITY); rank++) {
        float gap = logits[0] - logits[rank ? rank : most > 1];
        int level = 0;
        while (level < levels && !(gap < steps[level]))
            level++;
        long kind = (place_of_order(order) * best + rank) * (levels + 1) + level;
        if (append(found, pair(token_at(&rows, row * rows.width + rank), kind)) < 0) {
            Py_CLEAR(found);
            break;
        }
    }
    if (found != NULL && guess && !order && append_usual(found, args[4]) < 0)
        Py_CLEAR(found);
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
    Py_ssize_t width = rows->width, most = warp->top_k && warp->top_k < width ? warp->top_k : width, kept = most;
    const float *logits = rows->logits + row * width;
    float *weights = draw->weights;
    float scale = (float)(1.0 / warp->temperature), total = 0.0f, before = 0.0f, sum = 0.0f;
    chances_of(logits, logits[0], scale, weights, kept);
    for (Py_ssize_t rank = 0; warp->min_p && rank < kept; rank++)
        weights[rank] = weights[rank] < (float)warp->min_p ? 0.0f : weights[rank];
    if (warp->top_p < 1.0) {
        for (Py_ssize_t rank = 0; rank < kept; rank++)
            total += weights[rank];
        for (kept = 0; kept < most && (!kept || before < (float)warp->top_p * total); kept++)
            before += weights[kept];
    }
    for (Py_ssize_t rank = 0; rank < kept; rank++)
        sum += weights[rank] /= noise_of(draw, token_at(rows, row * width + rank));
    memset(weights + kept, 0, (width - kept) * sizeof(float));
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
    if (!takes("heard", 5, count) || read_rows(args[1], &rows) < 0 ||
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
    int failed = left < 0.0 || ((!known || orders[0] <= 1) &&
                                add_usual(&all, args[4], &draw, left, known, bounds[1]) < 0);
    PyBuffer_Release(&noise);
    PyMem_Free(draw.weights);
    long first = (known ? place_of_order(orders[0]) : 4) * (bins + 1);
    PyObject *offer = failed ? NULL : offered(&all, best, bounds, bins, first);
    PyMem_Free(all.shares);
    return offer;
}
