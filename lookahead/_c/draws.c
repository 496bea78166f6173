#include "speedups.h"

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

/* The highest of some logits; NaN if one is no number. */
static float
highest_of(const float *logits, Py_ssize_t vocab)
{
    float maxima[COLUMNS], best = -INFINITY;
    Py_ssize_t rows = vocab / COLUMNS;
    int broken = maxima_of(logits, rows, maxima);
    for (int at = 0; at < COLUMNS; at++)
        best = maxima[at] > best ? maxima[at] : best;
    for (Py_ssize_t at = rows * COLUMNS; at < vocab; at++) {
        broken |= logits[at] != logits[at];
        best = logits[at] > best ? logits[at] : best;
    }
    return broken ? NAN : best;
}

typedef struct {
    double top, second, maybe; /* the highest scores, and that of a token that may be cut */
    Py_ssize_t token;
} Race;

typedef struct {
    double rounding, close; /* lookahead.verify.shortlist's _ROUNDING and _CLOSE */
} Margins;

static void
enter(Race *race, Py_ssize_t token, double score)
{
    if (score > race->top) {
        race->second = race->top;
        race->top = score;
        race->token = token;
    } else if (score > race->second)
        race->second = score;
}

/* The token drawn from all, of which only min_p cuts any, and whether that is certain. */
static int
draw_of_all(const float *logits, const float *noise, Py_ssize_t vocab, const Warp *warp, Margins margins,
            Py_ssize_t *token)
{
    double best = highest_of(logits, vocab), near = margins.rounding * (32.0 + 4.0 * fabs(best) / warp->temperature);
    double close = margins.close + near, cut = -INFINITY, kept = -INFINITY;
    Race race = {-INFINITY, -INFINITY, -INFINITY, 0};
    float each = (float)(0.125 / warp->temperature), least = 0.0f;
    *token = 0;
    if (!(near < 1.0) || !(close < 1.0))
        return 0;
    if (warp->min_p) {
        cut = log(warp->min_p * (1.0 - close));
        kept = log(warp->min_p * (1.0 + close));
    }
    for (Py_ssize_t start = 0; start < vocab; start += BLOCK) {
        if (start + BLOCK <= vocab && !may_win(logits + start, noise + start, (float)best, each, least))
            continue;
        Py_ssize_t end = start + BLOCK < vocab ? start + BLOCK : vocab;
        for (Py_ssize_t at = start; at < end; at++) {
            double scaled = (logits[at] - best) / warp->temperature;
            double score = scaled - log(noise[at]);
            if (scaled > kept)
                enter(&race, at, score);
            else if (scaled > cut)
                race.maybe = fmax(race.maybe, score);
            else if (score != score)
                return 0;
        }
        /* Less by what is rounded here, in single precision, and what makes a rival too near. */
        least = (float)(exp(race.top - near) * 0.9999);
    }
    *token = race.token;
    return isfinite(race.top) && race.top - race.second > near && race.top - race.maybe > near;
}

/* The sum of exp of BLOCK logits less the best of all, to about single precision. */
WIDE static float
sum_of_block(const float *logits, float best, float scale)
{
    float powers[BLOCK], chances[BLOCK];
    for (int at = 0; at < BLOCK; at++)
        powers[at] = (logits[at] - best) * (scale * 1.44269504f);
    for (int at = 0; at < BLOCK; at++)
        powers[at] = powers[at] > -126.0f ? powers[at] : -126.0f;
    for (int at = 0; at < BLOCK; at++) { /* 2^whole times 2^part, of which a polynomial is the second */
        int whole = (int)powers[at];
        float part = (powers[at] - (float)whole) * 0.693147181f;
        union { int32_t bits; float value; } two = {(whole + 127) * (1 << 23)};
        part = 1.0f + part * (1.0f + part * (0.5f + part * (1.66666667e-1f + part * (4.16666667e-2f +
               part * (8.33333333e-3f + part * (1.38888889e-3f + part * 1.98412698e-4f))))));
        chances[at] = part * two.value;
    }
    for (int half = BLOCK / 2; half; half /= 2)
        for (int at = 0; at < half; at++)
            chances[at] += chances[at + half];
    return chances[0];
}

static double
sum_of_chances(const float *logits, Py_ssize_t vocab, float best, float scale)
{
    double total = 0.0;
    Py_ssize_t start = 0;
    for (; start + BLOCK <= vocab; start += BLOCK)
        total += sum_of_block(logits + start, best, scale);
    for (; start < vocab; start++)
        total += exp((logits[start] - (double)best) * scale);
    return total;
}

typedef struct { /* the best tokens, best first: int32 ids and logits */
    const int32_t *ids;
    const float *logits;
    Py_ssize_t count;
} List;

/* Shortlist._choice: the token drawn from the best ones where top_k or top_p cuts the others, and whether it is
 * certain. `scaled` has room for the list. */
static int
draw_of_list(const List *list, const float *all, const float *noise, Py_ssize_t vocab, const Warp *warp,
             Margins margins, double *scaled, Py_ssize_t *token)
{
    Py_ssize_t count = list->count, ties = 0, surely = 0, maybe = 0, drawn = 0;
    double best = list->logits[0], last = best, whole = 0.0, before = 0.0, close;
    int sure = 1, open = !warp->top_k && count < vocab;
    *token = list->ids[0];
    if (warp->top_k)
        last = list->logits[(warp->top_k < count ? warp->top_k : count) - 1];
    double near = margins.rounding * (32.0 + 2.0 * (fabs(best) + fabs(last)) / warp->temperature);
    if (!(near < 1.0))
        return 0;
    if (warp->top_k) { /* which keeps those that equal the last */
        for (Py_ssize_t at = count = 0; at < list->count; at++) {
            count += list->logits[at] >= last;
            ties += list->logits[at] > last - near * warp->temperature;
        }
        sure = ties == count && (count < list->count || count == vocab);
    }
    for (Py_ssize_t at = 0; at < count; at++)
        scaled[at] = (list->logits[at] - best) / warp->temperature;
    Py_ssize_t kept = count, likely = count;
    if (warp->top_p < 1.0) {
        close = margins.close + near;
        if (open) {
            whole = sum_of_chances(all, vocab, (float)best, (float)(1.0 / warp->temperature));
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
        close = margins.close + near;
        for (; kept && !(exp(scaled[kept - 1]) > warp->min_p * (1.0 + close)); kept--)
            ;
        for (; likely && !(exp(scaled[likely - 1]) > warp->min_p * (1.0 - close)); likely--)
            ;
    }
    Race race = {-INFINITY, -INFINITY, -INFINITY, 0};
    for (Py_ssize_t at = 0; at < (likely > 1 ? likely : 1); at++)
        enter(&race, at, scaled[at] - log(noise[list->ids[at]]));
    drawn = race.token;
    *token = list->ids[drawn];
    return sure && (!open || likely < count) && drawn < kept && isfinite(race.top) && race.top - race.second > near;
}

/* drawn(logits, noise, place, ids, best, warp, (rounding, close)): token and certainty, 1 or 2, at one of several
 * places, by [place, vocab] and the best [place, rank], which is None for both where no list is needed. */
PyObject *
drawn(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Warp warp;
    Margins margins;
    Py_ssize_t token;
    int sure;
    if (!takes("drawn", 7, count) ||
        !PyArg_ParseTuple(args[5], "dndd;warp", &warp.temperature, &warp.top_k, &warp.top_p, &warp.min_p) ||
        !PyArg_ParseTuple(args[6], "dd;margins", &margins.rounding, &margins.close))
        return NULL;
    Py_ssize_t place = PyLong_AsSsize_t(args[2]);
    const float *logits = line_of(args[0], place, sizeof(float));
    const float *noise = logits == NULL ? NULL : line_of(args[1], place, sizeof(float));
    if (noise == NULL || PyErr_Occurred())
        return NULL;
    Py_ssize_t vocab = length_of(args[0], 1);
    if (args[3] == Py_None)
        sure = draw_of_all(logits, noise, vocab, &warp, margins, &token);
    else {
        List list = {line_of(args[3], place, sizeof(int32_t)), NULL, 0};
        list.logits = list.ids == NULL ? NULL : line_of(args[4], place, sizeof(float));
        if (list.logits == NULL)
            return NULL;
        list.count = length_of(args[3], 1);
        double *scaled = PyMem_Malloc(list.count * sizeof(double));
        if (scaled == NULL)
            return PyErr_NoMemory();
        sure = draw_of_list(&list, logits, noise, vocab, &warp, margins, scaled, &token);
        PyMem_Free(scaled);
    }
    return pair((long)token, sure ? 1 : 2);
}
