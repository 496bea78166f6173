#include "speedups.h"

#define LEAST_NOISE 1e-37 /* with less, as with 0, a token may win even where its chance is 0 */

typedef struct { /* what the choice of a token depends on */
    Warp warp;
    double rounding, close; /* lookahead.verify.shortlist's _ROUNDING and _CLOSE */
    Py_ssize_t vocab;
    const float *logits, *noise; /* of all tokens */
    Best list;                   /* the best of them */
    Py_ssize_t token;            /* that is drawn */
    double top, second, maybe;   /* the highest scores, and that of a token that may be cut */
    double near, cut, kept;      /* nearness of scores that are open; scaled logits that are surely cut, and kept */
} Choice;

static double
scaled(const Choice *choice, float logit)
{
    return ((double)logit - choice->list.values[0]) / choice->warp.temperature;
}

/* Take in a token's score, more than once maybe; whether that is finite, or -inf, by noise that counts. */
static int
take(Choice *choice, Py_ssize_t token, float logit)
{
    double place = scaled(choice, logit), score = place - log(choice->noise[token]);
    if (place > choice->kept && score > choice->top) {
        choice->second = choice->top;
        choice->top = score;
        choice->token = token;
    } else if (place > choice->kept)
        choice->second = token == choice->token ? choice->second : fmax(choice->second, score);
    else if (place > choice->cut)
        choice->maybe = fmax(choice->maybe, score);
    return score < INFINITY && choice->noise[token] >= (float)LEAST_NOISE;
}

/* Take in the tokens whose noise is below a bound; what `take` says of all of them. */
WIDE static int
take_below(Choice *choice, float bound)
{
    const float *noise = choice->noise;
    for (Py_ssize_t start = 0; start < choice->vocab; start += BLOCK) {
        Py_ssize_t end = Py_MIN(start + BLOCK, choice->vocab);
        if (end - start == BLOCK && reach(noise + start, bound) == BLOCK)
            continue;
        for (Py_ssize_t at = start; at < end; at++)
            if (noise[at] < bound && !take(choice, at, choice->logits[at]))
                return 0;
    }
    return 1;
}

/* Shortlist._choice: draw a token; whether that is certain. Where only min_p cuts, tokens that are not listed lie as
 * far below the best as the last one listed, so most have too much noise to win, whatever their logits are. */
static int
choose(Choice *choice)
{
    const Warp *warp = &choice->warp;
    const float *best = choice->list.values;
    Py_ssize_t listed = choice->list.count, count = listed, vocab = choice->vocab, ties = 0, surely = 0, maybe = 0;
    float last = warp->top_k ? best[Py_MIN(warp->top_k, listed) - 1] : best[0];
    int sure = 1, cuts = warp->top_k || warp->top_p < 1.0, open = !warp->top_k && listed < vocab;
    choice->near = choice->rounding * (32.0 + 2.0 * (fabs(best[0]) + fabs(last)) / warp->temperature);
    double whole = 0.0, before = 0.0, close = choice->close + choice->near;
    choice->top = choice->second = choice->maybe = -INFINITY;
    choice->cut = log(warp->min_p * (1.0 - close));
    choice->kept = log(warp->min_p * (1.0 + close));
    choice->token = choice->list.ids[0];
    if (!(choice->near < 1.0 && close < 1.0)) /* scores cannot be told apart */
        return 0;
    if (warp->top_k) { /* which keeps those that equal the last */
        for (Py_ssize_t at = count = 0; at < listed; at++) {
            count += best[at] >= last;
            ties += best[at] > last - choice->near * warp->temperature;
        }
        sure = ties == count && (count < listed || count == vocab);
    }
    if (warp->top_p < 1.0) {
        if (open) {
            whole = sum_of_chances(choice->logits, vocab, best[0], (float)(1.0 / warp->temperature));
            close += ldexp((double)vocab, -26);
        } else
            for (Py_ssize_t at = 0; at < count; at++)
                whole += exp(scaled(choice, best[at]));
        for (Py_ssize_t at = 0; at < count; before += exp(scaled(choice, best[at++]))) {
            surely += before / whole < warp->top_p - close;
            maybe += before / whole < warp->top_p + close;
        }
        if (surely < count)
            choice->kept = fmax(choice->kept, scaled(choice, best[surely]) + choice->near);
        choice->cut = fmax(choice->cut, scaled(choice, best[maybe ? maybe - 1 : 0]) - choice->near);
    }
    for (Py_ssize_t at = 0; at < count; at++)
        sure &= take(choice, choice->list.ids[at], best[at]);
    double lowest = scaled(choice, best[count - 1]), bound = exp(lowest - choice->top + choice->near) * 1.0001;
    if (!sure || !take_below(choice, (float)fmax(cuts ? 0.0 : bound, LEAST_NOISE)))
        return 0;
    return !(cuts && open && lowest > choice->cut) && isfinite(choice->top) &&
           choice->top - choice->near > fmax(choice->second, choice->maybe);
}

/* drawn(logits, ids, best, noise, (node, row, warp, (rounding, close, listed))): the token that is drawn at a node, and
 * whether that is certain: 1, or 2. `logits` are float32 or bfloat16 [node, vocab]; the best of each [node, rank], or
 * None twice where so many are to be found here; the noise of each token is a row. */
PyObject *
drawn(PyObject *module, PyObject *args)
{
    Array arrays[] = {{"logits", FLOAT32_OR_BFLOAT16, 2}, {"ids", INT32, 2, OPTIONAL}, {"best", FLOAT32, 2, OPTIONAL},
                      {"noise", FLOAT32, 2}};
    Array *logits = arrays, *ids = logits + 1, *best = logits + 2, *noise = logits + 3;
    Choice choice = {{0}};
    PyObject *found = NULL;
    Py_ssize_t node, row, listed;
    uint32_t highest = 0;
    if (!PyArg_ParseTuple(args, "O&O&O&O&(nnO&(ddn)):drawn", open_array, logits, open_array, ids, open_array, best,
                          open_array, noise, &node, &row, read_warp, &choice.warp, &choice.rounding, &choice.close,
                          &listed))
        return NULL;
    Py_ssize_t vocab = choice.vocab = logits->length, widened = logits->size == 2 ? vocab : 0;
    listed = Py_MIN(Py_MAX(listed, 1), vocab);
    float *room = PyMem_New(float, widened + 2 * listed);
    if (room == NULL)
        PyErr_NoMemory();
    else if (vocab && node >= 0 && node < logits->lines && row >= 0 && row < noise->lines &&
             noise->length == vocab && ids->length == best->length && ids->lines == best->lines &&
             (!ids->length || node < ids->lines)) {
        choice.logits = widened ? room : line_of(logits, node);
        choice.noise = line_of(noise, row);
        if (widened)
            widen(line_of(logits, node), BFLOAT16, room, vocab);
        if (ids->length)
            choice.list = (Best){line_of(best, node), line_of(ids, node), ids->length, ids->length};
        else {
            choice.list = (Best){room + widened, (int32_t *)(room + widened + listed), 0, listed};
            find_best(choice.logits, vocab, &choice.list);
        }
        for (Py_ssize_t at = 0; at < choice.list.count; at++)
            highest = Py_MAX(highest, (uint32_t)choice.list.ids[at]);
        if (highest < vocab) {
            int sure = choose(&choice);
            found = Py_BuildValue("ni", choice.token, sure ? 1 : 2);
        }
    }
    if (found == NULL && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "node %zd and row %zd, or their tokens, are of other arrays", node, row);
    PyMem_Free(room);
    close_arrays(arrays, 4);
    return found;
}
