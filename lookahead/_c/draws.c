#include "speedups.h"

typedef struct { /* what the draw of a token depends on */
    Warp warp;
    double rounding, close, low_noise; /* lookahead.verify.shortlist's _ROUNDING and _CLOSE; what low noise is below */
    PyObject *children;                /* a dict from token to node for each node */
    Array arrays[3];                   /* logits [node, vocab], and ids and logits of the best [node, rank] */
    Py_ssize_t vocab, listed;
    const float *logits, *best, *noise; /* of one node: of all tokens, if they are float32, and of the best; noise */
    const int32_t *ids, *low;           /* of the best, and tokens of low noise behind their number, or NULL */
    const uint16_t *narrow;             /* the logits in bfloat16 */
    float *wide;                        /* room for them in float32 */
    double *scaled;                     /* room for a list */
    Py_ssize_t token;                   /* that is drawn */
    double top, second, maybe;          /* the highest scores, and that of a token that may be cut */
    double highest, near, cut, kept;    /* logit; nearness of scores that are open; scaled logits surely cut, kept */
} Walk;

/* How many of BLOCK tokens may have a score above that of which `least` is the exponential: of noise e and a logit that
 * lies y below the best, they have e least exp(y) < 1, and exp(y) is at least (1 + y / 8)^8. */
WIDE static int
may_win(const float *logits, const float *noise, float best, float each, float least)
{
    int count = 0;
    for (int at = 0; at < BLOCK; at++) {
        float part = 1.0f + (best - logits[at]) * each;
        part *= part;
        part *= part;
        count += !(noise[at] * least * (part * part) >= 1.0f);
    }
    return count;
}

/* Take in a token's score. */
static void
enter(Walk *walk, Py_ssize_t token, double score)
{
    if (score > walk->top) {
        walk->second = walk->top;
        walk->top = score;
        walk->token = token;
    } else if (score > walk->second)
        walk->second = score;
}

/* Begin a draw of tokens that only min_p cuts; whether their scores can be told apart at all. */
static int
open_draw(Walk *walk, double highest)
{
    double close = walk->close + (walk->near = walk->rounding * (32.0 + 4.0 * fabs(highest) / walk->warp.temperature));
    walk->highest = highest;
    walk->top = walk->second = walk->maybe = -INFINITY;
    walk->cut = walk->warp.min_p ? log(walk->warp.min_p * (1.0 - close)) : -INFINITY;
    walk->kept = walk->warp.min_p ? log(walk->warp.min_p * (1.0 + close)) : -INFINITY;
    walk->token = 0;
    return walk->near < 1.0 && close < 1.0;
}

/* Whether a token's score is finite, or -inf. */
static int
take(Walk *walk, Py_ssize_t token, float logit)
{
    double scaled = (logit - walk->highest) / walk->warp.temperature, score = scaled - log(walk->noise[token]);
    if (scaled > walk->kept)
        enter(walk, token, score);
    else if (scaled > walk->cut)
        walk->maybe = fmax(walk->maybe, score);
    return score < INFINITY;
}

/* Of which number the exponential noise has to be the part, so that a token may outdo all so far. */
static double
least_of(const Walk *walk)
{
    return exp(walk->top - walk->near) * 0.9999; /* less by what is rounded in single precision */
}

static int
is_sure(const Walk *walk)
{
    return isfinite(walk->top) && walk->top - walk->near > fmax(walk->second, walk->maybe);
}

/* The token drawn from all, of which only min_p cuts any, and whether that is certain. */
static int
draw_of_all(Walk *walk)
{
    float each = (float)(0.125 / walk->warp.temperature), least = 0.0f;
    if (!open_draw(walk, highest_of(walk->logits, walk->vocab)))
        return 0;
    for (Py_ssize_t start = 0; start < walk->vocab; start += BLOCK) {
        Py_ssize_t end = Py_MIN(start + BLOCK, walk->vocab);
        const float *logits = walk->logits + start;
        if (end - start == BLOCK && !may_win(logits, walk->noise + start, (float)walk->highest, each, least))
            continue;
        for (Py_ssize_t at = start; at < end; at++)
            if (!take(walk, at, walk->logits[at]))
                return 0;
        least = (float)least_of(walk);
    }
    return is_sure(walk);
}

static int
is_listed(const Walk *walk, int32_t token)
{
    for (Py_ssize_t at = 0; at < walk->listed; at++)
        if (walk->ids[at] == token)
            return 1;
    return 0;
}

/* Whether the listed tokens, and those of low noise, are all that may be drawn: others lie as far below the best as the
 * last one listed. Then the token, and whether that is certain; else -1. */
static int
draw_of_low(Walk *walk)
{
    if (!open_draw(walk, walk->best[0]) || walk->low[0] < 0)
        return -1;
    for (Py_ssize_t at = 0; at < walk->listed; at++)
        if (!take(walk, walk->ids[at], walk->best[at]))
            return -1;
    double last = (walk->best[walk->listed - 1] - walk->highest) / walk->warp.temperature;
    double bound = exp(last) / least_of(walk);
    if (!(bound < walk->low_noise))
        return -1;
    for (int32_t at = 1; at <= walk->low[0]; at++) {
        int32_t token = walk->low[at];
        float logit;
        if (!(walk->noise[token] < bound) || is_listed(walk, token))
            continue;
        if (walk->logits == NULL)
            widen(walk->narrow + token, &logit, 1);
        if (!take(walk, token, walk->logits == NULL ? logit : walk->logits[token]))
            return -1;
    }
    return is_sure(walk);
}

/* Shortlist._choice: the token drawn from the best where top_k or top_p cuts others, and whether that is certain. */
static int
draw_of_list(Walk *walk)
{
    const Warp *warp = &walk->warp;
    Py_ssize_t listed = walk->listed, count = listed, vocab = walk->vocab, ties = 0, surely = 0, maybe = 0;
    double best = walk->best[0], last = best, whole = 0.0, before = 0.0, close, *scaled = walk->scaled;
    int sure = 1, open = !warp->top_k && count < vocab;
    walk->token = walk->ids[0];
    if (warp->top_k)
        last = walk->best[Py_MIN(warp->top_k, count) - 1];
    double near = walk->rounding * (32.0 + 2.0 * (fabs(best) + fabs(last)) / warp->temperature);
    if (!(near < 1.0))
        return 0;
    if (warp->top_k) { /* which keeps those that equal the last */
        for (Py_ssize_t at = count = 0; at < listed; at++) {
            count += walk->best[at] >= last;
            ties += walk->best[at] > last - near * warp->temperature;
        }
        sure = ties == count && (count < listed || count == vocab);
    }
    for (Py_ssize_t at = 0; at < count; at++)
        scaled[at] = (walk->best[at] - best) / warp->temperature;
    Py_ssize_t kept = count, likely = count;
    if (warp->top_p < 1.0) {
        close = walk->close + near;
        if (open) {
            whole = sum_of_chances(walk->logits, vocab, (float)best, (float)(1.0 / warp->temperature));
            close += ldexp((double)vocab, -26);
        } else
            for (Py_ssize_t at = 0; at < count; at++)
                whole += exp(scaled[at]);
        for (Py_ssize_t at = 0; at < count; before += exp(scaled[at++])) {
            surely += before / whole < warp->top_p - close;
            maybe += before / whole < warp->top_p + close;
        }
        double cut = surely < count ? scaled[surely] : -INFINITY, least = scaled[maybe ? maybe - 1 : 0];
        for (Py_ssize_t at = kept = likely = 0; at < count; at++) {
            kept += scaled[at] > cut + near;
            likely += scaled[at] > least - near;
        }
    }
    if (warp->min_p) {
        close = walk->close + near;
        for (; kept && !(exp(scaled[kept - 1]) > warp->min_p * (1.0 + close)); kept--)
            ;
        for (; likely && !(exp(scaled[likely - 1]) > warp->min_p * (1.0 - close)); likely--)
            ;
    }
    walk->token = 0;
    walk->top = walk->second = -INFINITY;
    for (Py_ssize_t at = 0; at < Py_MAX(likely, 1); at++)
        enter(walk, at, scaled[at] - log(walk->noise[walk->ids[at]]));
    sure &= (!open || likely < count) && walk->token < kept && isfinite(walk->top) && walk->top - walk->second > near;
    walk->token = walk->ids[walk->token];
    int32_t few = walk->low == NULL ? -1 : *walk->low;
    for (Py_ssize_t at = 0; few < 0 && at < vocab; at++) /* noise of 0 wins even where the chance is 0, too */
        sure &= walk->noise[at] > 0.0f;
    for (int32_t at = 1; at <= few; at++)
        sure &= walk->noise[walk->low[at]] > 0.0f;
    return sure;
}

/* The token that is drawn, and whether that is certain. Where top_k or top_p cuts, the best have to be listed. */
static int
draw(Walk *walk)
{
    int cuts = walk->warp.top_k || walk->warp.top_p < 1.0;
    int sure = cuts || !walk->listed || walk->low == NULL ? -1 : draw_of_low(walk);
    if (sure >= 0)
        return sure;
    if (walk->logits == NULL && !walk->warp.top_k) {
        widen(walk->narrow, walk->wide, walk->vocab);
        walk->logits = walk->wide;
    }
    return cuts ? draw_of_list(walk) : draw_of_all(walk);
}

/* Whether these are tokens of a vocabulary. */
static int
are_tokens(const int32_t *ids, Py_ssize_t count, Py_ssize_t vocab)
{
    uint32_t highest = 0;
    for (Py_ssize_t at = 0; at < count; at++)
        highest = Py_MAX(highest, (uint32_t)ids[at]);
    return highest < vocab;
}

/* What is drawn at a node, by a row of noise and tokens of low noise; -1 and an error if they are none. */
static int
draw_at(Walk *walk, Py_ssize_t node, PyObject *both, Py_ssize_t row)
{
    Array given[] = {{"noise", FLOAT32, 2}, {"tokens of low noise", INT32, 2, OPTIONAL}};
    const Array *noise = given, *low = given + 1, *logits = walk->arrays, *ids = logits + 1, *best = logits + 2;
    int sure = -1;
    if (!PyTuple_Check(both) || PyTuple_GET_SIZE(both) != 2) {
        PyErr_SetString(PyExc_TypeError, "expected pairs of noise and of tokens of low noise");
        return -1;
    }
    if (open_arrays(given, &PyTuple_GET_ITEM(both, 0), 2) < 0)
        return -1;
    int known = node < logits->lines && row >= 0 && row < noise->lines && noise->length == walk->vocab &&
                (ids->data == NULL || node < ids->lines) && (low->data == NULL || (row < low->lines && low->length));
    if (known) {
        walk->narrow = line_of(logits, node);
        walk->logits = walk->wide == NULL ? line_of(logits, node) : NULL;
        walk->noise = line_of(noise, row);
        walk->ids = ids->data == NULL ? NULL : line_of(ids, node);
        walk->best = ids->data == NULL ? NULL : line_of(best, node);
        walk->low = low->data == NULL ? NULL : line_of(low, row);
    }
    if (known && are_tokens(walk->ids, walk->listed, walk->vocab) &&
        (walk->low == NULL || (*walk->low < low->length && are_tokens(walk->low + 1, *walk->low, walk->vocab))))
        sure = draw(walk);
    else
        PyErr_Format(PyExc_ValueError, "node %zd and row %zd, or their tokens, are of other arrays", node, row);
    close_arrays(given, 2);
    return sure;
}

/* The node of a child; -1 and maybe an error if there is none. */
static Py_ssize_t
child_of(PyObject *children, Py_ssize_t node, PyObject *token)
{
    PyObject *siblings = item_of(children, node), *child = NULL;
    if (siblings != NULL && PyDict_Check(siblings))
        child = Py_XNewRef(PyDict_GetItemWithError(siblings, token));
    else if (siblings != NULL)
        PyErr_SetString(PyExc_TypeError, "the children of a node are a dict");
    Py_ssize_t found = child == NULL ? -1 : PyLong_AsSsize_t(child);
    Py_XDECREF(siblings);
    Py_XDECREF(child);
    return found;
}

/* The tokens drawn at a node and below it, as far as they are certain and the lines of noise go. */
static int
draw_path(Walk *walk, Py_ssize_t node, PyObject *lines, Py_ssize_t row, PyObject *drawn)
{
    for (Py_ssize_t at = 0; node >= 0 && at < PyList_GET_SIZE(lines); at++) {
        PyObject *both = item_of(lines, at);
        int sure = both == NULL ? -1 : draw_at(walk, node, both, row);
        PyObject *choice = sure < 0 ? NULL : pair((long)walk->token, sure ? 1 : 2);
        int failed = choice == NULL || PyList_Append(drawn, choice) < 0;
        node = failed || !sure ? -1 : child_of(walk->children, node, PyTuple_GET_ITEM(choice, 0));
        Py_XDECREF(choice);
        Py_XDECREF(both);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* drawn(logits, ids, best, children, node, lines, row, warp, (rounding, close, low)): tokens and certainty, 1 or 2, at
 * a node and at those of its children which are drawn. `logits` are [node, vocab], float32 or bfloat16, with the best
 * [node, rank], which have to be known where top_k or top_p cuts, and else may be None twice. Of each token in turn
 * `lines` has the noise [row, vocab], and tokens whose noise is below `low`, as `exponential` gives them, or None. */
PyObject *
drawn(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Walk walk = {
        .arrays = {{"logits", FLOAT32_OR_BFLOAT16, 2}, {"ids", INT32, 2, OPTIONAL}, {"best", FLOAT32, 2, OPTIONAL}}};
    const Array *logits = walk.arrays, *ids = logits + 1, *best = logits + 2;
    Warp *warp = &walk.warp;
    if (!takes("drawn", 9, count) ||
        !read_tuple(args[7], "dndd;warp", &warp->temperature, &warp->top_k, &warp->top_p, &warp->min_p) ||
        !read_tuple(args[8], "ddd;margins", &walk.rounding, &walk.close, &walk.low_noise) || !is_warp(warp))
        return NULL;
    walk.low_noise = (float)walk.low_noise; /* as lines compare it */
    walk.children = args[3];
    Py_ssize_t node = PyLong_AsSsize_t(args[4]), row = PyErr_Occurred() ? 0 : PyLong_AsSsize_t(args[6]);
    if (!PyErr_Occurred() && !(PyList_Check(args[3]) && PyList_Check(args[5])))
        PyErr_SetString(PyExc_TypeError, "expected lists of children and lines");
    if (PyErr_Occurred() || open_arrays(walk.arrays, args, 3) < 0)
        return NULL;
    walk.vocab = logits->length;
    walk.listed = ids->length;
    walk.wide = logits->size == 2 ? PyMem_New(float, walk.vocab) : NULL;
    walk.scaled = PyMem_New(double, walk.listed);
    PyObject *found = PyList_New(0);
    int listed = walk.listed > 0 || (ids->data == NULL && !walk.warp.top_k && walk.warp.top_p >= 1.0);
    if (!listed || ids->length != best->length || ids->lines != best->lines || walk.vocab < 1 || node < 0)
        PyErr_SetString(PyExc_ValueError, "expected a node, logits, and a list of the best where top_k or top_p cuts");
    else if (found != NULL && (walk.scaled == NULL || (logits->size == 2 && walk.wide == NULL)))
        PyErr_NoMemory();
    if (PyErr_Occurred() || draw_path(&walk, node, args[5], row, found) < 0)
        Py_CLEAR(found);
    PyMem_Free(walk.wide);
    PyMem_Free(walk.scaled);
    close_arrays(walk.arrays, 3);
    return found;
}
