#include "speedups.h"

typedef struct { /* what the draw of a token depends on */
    Warp warp;
    double rounding, close; /* lookahead.verify.shortlist's _ROUNDING and _CLOSE */
    Array arrays[5];        /* logits [node, vocab]; ids and logits of the best [node, rank]; parents, tokens [node] */
    Py_ssize_t vocab;
    Best found, list;            /* room for the best of one node where they are not given; the best */
    const float *logits, *noise; /* of one node, of all tokens */
    float *wide;                 /* room for logits that are given in bfloat16 */
    Py_ssize_t token;            /* that is drawn */
    double top, second, maybe;   /* the highest scores, and that of a token that may be cut */
    double near, cut, kept;      /* nearness of scores that are open; scaled logits that are surely cut, and kept */
} Walk;

static double
scaled(const Walk *walk, float logit)
{
    return ((double)logit - walk->list.values[0]) / walk->warp.temperature;
}

/* Begin a draw of tokens that only min_p cuts, of which two logits are these; whether scores can be told apart. */
static int
open_draw(Walk *walk, double one, double other)
{
    walk->near = walk->rounding * (32.0 + 2.0 * (fabs(one) + fabs(other)) / walk->warp.temperature);
    double close = walk->close + walk->near;
    walk->top = walk->second = walk->maybe = -INFINITY;
    walk->cut = log(walk->warp.min_p * (1.0 - close));
    walk->kept = log(walk->warp.min_p * (1.0 + close));
    walk->token = walk->list.ids[0];
    return walk->near < 1.0 && close < 1.0;
}

/* Take in a token's score, more than once maybe; whether that is finite, or -inf. */
static int
take(Walk *walk, Py_ssize_t token, float logit)
{
    double place = scaled(walk, logit), score = place - log(walk->noise[token]);
    if (place > walk->kept && score > walk->top) {
        walk->second = walk->top;
        walk->top = score;
        walk->token = token;
    } else if (place > walk->kept)
        walk->second = token == walk->token ? walk->second : fmax(walk->second, score);
    else if (place > walk->cut)
        walk->maybe = fmax(walk->maybe, score);
    return score < INFINITY;
}

static int
is_sure(const Walk *walk)
{
    return isfinite(walk->top) && walk->top - walk->near > fmax(walk->second, walk->maybe);
}

/* The token drawn where only min_p cuts, and whether that is certain. Tokens that are not listed lie as far below the
 * best as the last one listed, so most have too much noise to win, whatever their logits are. */
static int
draw_of_all(Walk *walk)
{
    const Best *list = &walk->list;
    const float *noise = walk->noise;
    if (!open_draw(walk, list->values[0], list->values[0]))
        return 0;
    for (Py_ssize_t at = 0; at < list->count; at++)
        if (!take(walk, list->ids[at], list->values[at]))
            return 0;
    double last = scaled(walk, list->values[list->count - 1]);
    float bound = (float)fmax(exp(last - walk->top + walk->near) * 1.0001, 1e-37); /* and noise of 0 always wins */
    for (Py_ssize_t start = 0; start < walk->vocab; start += BLOCK) {
        Py_ssize_t end = Py_MIN(start + BLOCK, walk->vocab);
        if (end - start == BLOCK && reach(noise + start, bound) == BLOCK)
            continue;
        for (Py_ssize_t at = start; at < end; at++)
            if (noise[at] < bound && !take(walk, at, walk->logits[at]))
                return 0;
    }
    return is_sure(walk);
}

/* Shortlist._choice: the token drawn from the best where top_k or top_p cuts others, and whether that is certain. */
static int
draw_of_list(Walk *walk)
{
    const Warp *warp = &walk->warp;
    const float *best = walk->list.values;
    Py_ssize_t listed = walk->list.count, count = listed, vocab = walk->vocab, ties = 0, surely = 0, maybe = 0;
    float last = warp->top_k ? best[Py_MIN(warp->top_k, listed) - 1] : best[0];
    int sure = 1, open = !warp->top_k && listed < vocab;
    if (!open_draw(walk, best[0], last))
        return 0;
    if (warp->top_k) { /* which keeps those that equal the last */
        for (Py_ssize_t at = count = 0; at < listed; at++) {
            count += best[at] >= last;
            ties += best[at] > last - walk->near * warp->temperature;
        }
        sure = ties == count && (count < listed || count == vocab);
    }
    if (warp->top_p < 1.0) {
        double whole = 0.0, before = 0.0, close = walk->close + walk->near;
        if (open) {
            whole = sum_of_chances(walk->logits, vocab, best[0], (float)(1.0 / warp->temperature));
            close += ldexp((double)vocab, -26);
        } else
            for (Py_ssize_t at = 0; at < count; at++)
                whole += exp(scaled(walk, best[at]));
        for (Py_ssize_t at = 0; at < count; before += exp(scaled(walk, best[at++]))) {
            surely += before / whole < warp->top_p - close;
            maybe += before / whole < warp->top_p + close;
        }
        if (surely < count)
            walk->kept = fmax(walk->kept, scaled(walk, best[surely]) + walk->near);
        walk->cut = fmax(walk->cut, scaled(walk, best[maybe ? maybe - 1 : 0]) - walk->near);
    }
    for (Py_ssize_t at = 0; at < count; at++)
        sure &= take(walk, walk->list.ids[at], best[at]);
    for (Py_ssize_t at = 0; at < vocab; at++) /* noise of 0 wins even where the chance is 0, too */
        sure &= walk->noise[at] > 0.0f;
    return sure && !(open && scaled(walk, best[count - 1]) > walk->cut) && is_sure(walk);
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

/* Draw at a node, by a row of a line of noise; whether that is certain; -1 and an error if they are none. */
static int
draw_at(Walk *walk, Py_ssize_t node, PyObject *line, Py_ssize_t row)
{
    Array noise = {"noise", FLOAT32, 2};
    const Array *logits = walk->arrays, *ids = logits + 1, *best = logits + 2;
    int sure = -1;
    if (open_arrays(&noise, &line, 1) < 0)
        return -1;
    if (node < logits->lines && row >= 0 && row < noise.lines && noise.length == walk->vocab &&
        (!ids->length || node < ids->lines)) {
        walk->logits = walk->wide == NULL ? line_of(logits, node) : walk->wide;
        walk->noise = line_of(&noise, row);
        if (walk->wide != NULL)
            widen(line_of(logits, node), walk->wide, walk->vocab);
        if (ids->length)
            walk->list = (Best){line_of(best, node), line_of(ids, node), ids->length, ids->length};
        else {
            walk->list = walk->found;
            find_best(walk->logits, walk->vocab, &walk->list);
        }
        if (are_tokens(walk->list.ids, walk->list.count, walk->vocab))
            sure = walk->warp.top_k || walk->warp.top_p < 1.0 ? draw_of_list(walk) : draw_of_all(walk);
    }
    if (sure < 0)
        PyErr_Format(PyExc_ValueError, "node %zd and row %zd, or their tokens, are of other arrays", node, row);
    close_arrays(&noise, 1);
    return sure;
}

/* The child of a node that holds the token drawn there; -1 if there is none. */
static Py_ssize_t
child_of(const Walk *walk, Py_ssize_t node)
{
    const int32_t *parents = (int32_t *)walk->arrays[3].data, *tokens = (int32_t *)walk->arrays[4].data;
    for (Py_ssize_t at = node + 1; at < walk->arrays[3].length; at++)
        if (parents[at] == node && tokens[at] == walk->token)
            return at;
    return -1;
}

/* The tokens drawn at a node and below it, as far as they are certain and the lines of noise go. */
static int
draw_path(Walk *walk, Py_ssize_t node, PyObject *lines, Py_ssize_t row, PyObject *drawn)
{
    for (Py_ssize_t at = 0; node >= 0 && at < PyTuple_GET_SIZE(lines); at++) {
        int sure = draw_at(walk, node, PyTuple_GET_ITEM(lines, at), row);
        int failed = append(drawn, sure < 0 ? NULL : Py_BuildValue("ni", walk->token, sure ? 1 : 2)) < 0;
        node = failed || !sure ? -1 : child_of(walk, node);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* drawn(logits, ids, best, parents, tokens, lines, (node, row, warp, (rounding, close, listed))): tokens and certainty
 * (1, 2) at a node of a tree and at those of its children which are drawn. `logits` are float32 or bfloat16, and the
 * best None twice where so many are to be found here. Each token's noise is a row of one of `lines`. */
PyObject *
drawn(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Walk walk = {
        .arrays = {{"logits", FLOAT32_OR_BFLOAT16, 2}, {"ids", INT32, 2, OPTIONAL}, {"best", FLOAT32, 2, OPTIONAL},
                   {"parents", INT32, 1}, {"tokens", INT32, 1}}};
    const Array *logits = walk.arrays, *ids = logits + 1, *best = logits + 2;
    Warp *warp = &walk.warp;
    Py_ssize_t node, row, listed;
    if (!takes("drawn", 7, count) ||
        !read_tuple(args[6], "nn(dndd)(ddn);place, warp and margins", &node, &row, &warp->temperature, &warp->top_k,
                    &warp->top_p, &warp->min_p, &walk.rounding, &walk.close, &listed) || !is_warp(warp))
        return NULL;
    if (!PyTuple_Check(args[5]))
        return PyErr_Format(PyExc_TypeError, "expected a tuple of lines");
    if (open_arrays(walk.arrays, args, 5) < 0)
        return NULL;
    walk.vocab = logits->length;
    listed = Py_MIN(Py_MAX(listed, 1), walk.vocab);
    Py_ssize_t widened = logits->size == 2 ? walk.vocab : 0;
    float *room = PyMem_New(float, widened + 2 * listed);
    walk.wide = widened ? room : NULL;
    PyObject *found = PyList_New(0);
    if (ids->length != best->length || ids->lines != best->lines || walk.vocab < 1 || node < 0 ||
        walk.arrays[3].length != walk.arrays[4].length)
        PyErr_SetString(PyExc_ValueError, "expected a node of a tree, and as many ids as logits of the best");
    else if (found != NULL && room == NULL)
        PyErr_NoMemory();
    else if (room != NULL)
        walk.found = (Best){room + widened, (int32_t *)(room + widened + listed), 0, listed};
    if (PyErr_Occurred() || draw_path(&walk, node, args[5], row, found) < 0)
        Py_CLEAR(found);
    PyMem_Free(room);
    close_arrays(walk.arrays, 5);
    return found;
}
