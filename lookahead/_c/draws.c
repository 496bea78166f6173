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

typedef struct { /* scores of tokens that only min_p cuts: what a draw of them depends on */
    double best, temperature, near, cut, kept; /* of scaled logits less the best: surely cut, surely kept */
    Race race;
} Draw;

/* Whether scores can be told apart at all. */
static int
open_draw(Draw *draw, double best, const Warp *warp, Margins margins)
{
    double near = margins.rounding * (32.0 + 4.0 * fabs(best) / warp->temperature), close = margins.close + near;
    *draw = (Draw){best, warp->temperature, near, -INFINITY, -INFINITY, {-INFINITY, -INFINITY, -INFINITY, 0}};
    if (warp->min_p) {
        draw->cut = log(warp->min_p * (1.0 - close));
        draw->kept = log(warp->min_p * (1.0 + close));
    }
    return near < 1.0 && close < 1.0;
}

/* Whether a token's score is a number. */
static int
take(Draw *draw, Py_ssize_t token, float logit, float noise)
{
    double scaled = (logit - draw->best) / draw->temperature, score = scaled - log(noise);
    if (scaled > draw->kept)
        enter(&draw->race, token, score);
    else if (scaled > draw->cut)
        draw->race.maybe = fmax(draw->race.maybe, score);
    return score == score;
}

/* Of which number the exponential noise has to be the part, so that a token may outdo all so far. */
static double
least_of(const Draw *draw)
{
    return exp(draw->race.top - draw->near) * 0.9999; /* less by what is rounded in single precision */
}

static int
is_sure(const Draw *draw)
{
    double rival = draw->race.top - draw->near;
    return isfinite(draw->race.top) && rival > draw->race.second && rival > draw->race.maybe;
}

/* The token drawn from all, of which only min_p cuts any, and whether that is certain. */
static int
draw_of_all(const float *logits, const float *noise, Py_ssize_t vocab, const Warp *warp, Margins margins,
            Py_ssize_t *token)
{
    Draw draw;
    float each = (float)(0.125 / warp->temperature), least = 0.0f;
    *token = 0;
    if (!open_draw(&draw, highest_of(logits, vocab), warp, margins))
        return 0;
    for (Py_ssize_t start = 0; start < vocab; start += BLOCK) {
        if (start + BLOCK <= vocab && !may_win(logits + start, noise + start, (float)draw.best, each, least))
            continue;
        Py_ssize_t end = start + BLOCK < vocab ? start + BLOCK : vocab;
        for (Py_ssize_t at = start; at < end; at++)
            if (!take(&draw, at, logits[at], noise[at]))
                return 0;
        least = (float)least_of(&draw);
    }
    *token = draw.race.token;
    return is_sure(&draw);
}

WIDE void
chances_of(const float *logits, float best, float scale, float *chances, Py_ssize_t count)
{
    for (Py_ssize_t at = 0; at < count; at++)
        chances[at] = (logits[at] - best) * (scale * 1.44269504f);
    for (Py_ssize_t at = 0; at < count; at++)
        chances[at] = chances[at] > -126.0f ? chances[at] : -126.0f;
    for (Py_ssize_t at = 0; at < count; at++) { /* 2^whole times 2^part, of which a polynomial is the second */
        int whole = (int)chances[at];
        float part = (chances[at] - (float)whole) * 0.693147181f;
        union { int32_t bits; float value; } two = {(whole + 127) * (1 << 23)};
        part = 1.0f + part * (1.0f + part * (0.5f + part * (1.66666667e-1f + part * (4.16666667e-2f +
               part * (8.33333333e-3f + part * (1.38888889e-3f + part * 1.98412698e-4f))))));
        chances[at] = part * two.value;
    }
}

/* The sum of BLOCK chances. */
WIDE static float
sum_of_block(const float *logits, float best, float scale)
{
    float chances[BLOCK];
    chances_of(logits, best, scale, chances, BLOCK);
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

static float
logit_of(const Logits *logits, Py_ssize_t token)
{
    float value;
    if (logits->whole != NULL)
        return logits->whole[token];
    widen(logits->narrow + token, &value, 1);
    return value;
}

static int
is_listed(const List *list, int32_t token)
{
    for (Py_ssize_t at = 0; at < list->count; at++)
        if (list->ids[at] == token)
            return 1;
    return 0;
}

/* Whether the listed tokens, and those of low noise, are all that may be drawn: others lie as far below the best as the
 * last one listed. Then the token, and whether that is certain. */
static int
draw_of_low(const List *list, const Logits *logits, const float *noise, const int32_t *low, const Warp *warp,
            Margins margins, Py_ssize_t *token, int *sure)
{
    Draw draw;
    *sure = *token = 0;
    if (!open_draw(&draw, list->logits[0], warp, margins) || low[0] < 0)
        return 0;
    for (Py_ssize_t at = 0; at < list->count; at++)
        if (!take(&draw, list->ids[at], list->logits[at], noise[list->ids[at]]))
            return 0;
    double bound = exp((list->logits[list->count - 1] - draw.best) / draw.temperature) / least_of(&draw);
    if (!(bound < margins.low))
        return 0;
    for (int32_t at = 1; at <= low[0]; at++)
        if (noise[low[at]] < bound && !is_listed(list, low[at]))
            take(&draw, low[at], logit_of(logits, low[at]), noise[low[at]]);
    *token = draw.race.token;
    *sure = is_sure(&draw);
    return 1;
}

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

int
draw(Logits *logits, Py_ssize_t vocab, const List *list, const float *noise, const int32_t *low, const Warp *warp,
     Margins margins, Py_ssize_t *token)
{
    int sure = 0, cuts = warp->top_k || warp->top_p < 1.0;
    if (!cuts && list->count && low != NULL && draw_of_low(list, logits, noise, low, warp, margins, token, &sure))
        return sure;
    if (logits->whole == NULL && !warp->top_k) {
        widen(logits->narrow, logits->wide, vocab);
        logits->whole = logits->wide;
    }
    if (cuts)
        return draw_of_list(list, logits->whole, noise, vocab, warp, margins, logits->scaled, token);
    return draw_of_all(logits->whole, noise, vocab, warp, margins, token);
}
