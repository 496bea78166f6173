#include "speedups.h"

#define COLUMNS 256

static void
insert(Best *best, float value, int32_t id)
{
    Py_ssize_t at = best->count < best->most ? best->count++ : best->most - 1;
    for (; at && best->values[at - 1] < value; at--)
        best->values[at] = best->values[at - 1], best->ids[at] = best->ids[at - 1];
    best->values[at] = value;
    best->ids[at] = id;
}

/* What so many entries of a line reach, and few more: what so many of COLUMNS columns' maxima do, found by halving. The
 * columns' rows follow each other. */
WIDE static float
least_of_best(const float *line, Py_ssize_t rows, Py_ssize_t most)
{
    float maxima[COLUMNS], low = INFINITY, high = -INFINITY;
    for (int at = 0; at < COLUMNS; at++)
        maxima[at] = -INFINITY;
    for (Py_ssize_t row = 0; row < rows; row++)
        for (int at = 0; at < COLUMNS; at++)
            maxima[at] = Py_MAX(line[row * COLUMNS + at], maxima[at]);
    for (int at = 0; at < COLUMNS; at++) {
        low = Py_MIN(maxima[at], low);
        high = Py_MAX(maxima[at], high);
    }
    for (int step = 0; step < 10; step++) {
        float middle = low + 0.5f * (high - low);
        int count = 0;
        for (int at = 0; at < COLUMNS; at++)
            count += maxima[at] >= middle;
        *(count < most ? &high : &low) = middle;
    }
    return low;
}

WIDE int
reach(const float *line, float least)
{
    int count = 0;
    for (int at = 0; at < BLOCK; at++)
        count += !(line[at] < least);
    return count;
}

WIDE void
widen(const void *line, Kind kind, float *wide, Py_ssize_t count)
{
    for (Py_ssize_t at = 0; at < count && kind == FLOAT16; at++)
        wide[at] = (float)((const Half *)line)[at];
    for (Py_ssize_t at = 0; at < count && kind == BFLOAT16; at++)
        wide[at] = widened(((const uint16_t *)line)[at]);
}

WIDE void
chances_of(const float *logits, float best, float scale, float *chances, Py_ssize_t count)
{
    for (Py_ssize_t at = 0; at < count; at++)
        chances[at] = (logits[at] - best) * (scale * 1.44269504f);
    for (Py_ssize_t at = 0; at < count; at++)
        chances[at] = -126.0f > chances[at] ? -126.0f : chances[at]; /* or no number */
    for (Py_ssize_t at = 0; at < count; at++) { /* 2^whole times 2^part, of which a polynomial is the second */
        union { float value; uint32_t bits; } whole = {chances[at] + 12582912.0f}, two; /* 1.5 2^23: it is rounded */
        float part = (chances[at] - (whole.value - 12582912.0f)) * 0.693147181f;
        two.bits = (whole.bits + 127) << 23;
        part = 1.0f + part * (1.0f + part * (0.5f + part * (1.66666667e-1f + part * (4.16666667e-2f +
               part * (8.33333333e-3f + part * (1.38888889e-3f + part * 1.98412698e-4f))))));
        chances[at] = part * two.value;
    }
}

WIDE double
sum_of_chances(const float *logits, Py_ssize_t vocab, float best, float scale)
{
    double sums[BLOCK] = {0.0}, total = 0.0;
    for (Py_ssize_t start = 0; start < vocab; start += BLOCK) {
        float chances[BLOCK] = {0.0f};
        chances_of(logits + start, best, scale, chances, Py_MIN(BLOCK, vocab - start));
        for (int at = 0; at < BLOCK; at++)
            sums[at] += chances[at];
    }
    for (int at = 0; at < BLOCK; at++)
        total += sums[at];
    return total;
}

int
read_warp(PyObject *given, void *read)
{
    Warp *warp = read;
    if (!PyArg_Parse(given, "(dndd);expected temperature, top_k, top_p and min_p", &warp->temperature, &warp->top_k,
                     &warp->top_p, &warp->min_p))
        return 0;
    int sound = warp->temperature > 0.0 && warp->top_k >= 0 && warp->top_p >= 0.0 && warp->min_p >= 0.0;
    if (!sound)
        PyErr_SetString(PyExc_ValueError, "expected a temperature above 0, and no top_k, top_p and min_p below 0");
    return sound;
}

void
find_best(const float *line, Py_ssize_t vocab, Best *best)
{
    float least = best->most > COLUMNS ? -INFINITY : least_of_best(line, vocab / COLUMNS, best->most);
    Py_ssize_t broken = -1; /* the first that is no number */
    for (Py_ssize_t start = 0; start < vocab; start += BLOCK) {
        Py_ssize_t end = Py_MIN(start + BLOCK, vocab);
        if (end - start == BLOCK && !reach(line + start, least))
            continue;
        for (Py_ssize_t at = start; at < end; at++) {
            float entry = line[at] == line[at] ? line[at] : INFINITY;
            if (line[at] != line[at] && broken < 0)
                broken = at;
            if (entry >= least && (best->count < best->most || entry > best->values[best->most - 1]))
                insert(best, entry, (int32_t)at);
        }
    }
    if (broken >= 0)
        best->values[0] = NAN, best->ids[0] = (int32_t)broken;
}

/* best_of(lines, values, ids): scores._on_cpu, for lines of float32 or bfloat16 [line, vocab]; what it finds goes into
 * float32 and int32 [line, count]. */
PyObject *
best_of(PyObject *module, PyObject *args)
{
    Array arrays[] = {
        {"lines", FLOAT32_OR_BFLOAT16, 2}, {"values", FLOAT32, 2, WRITTEN}, {"ids", INT32, 2, WRITTEN}};
    Array *given = arrays, *values = arrays + 1, *ids = arrays + 2;
    if (!PyArg_ParseTuple(args, "O&O&O&:best_of", open_array, given, open_array, values, open_array, ids) ||
        share_memory(arrays, 3))
        return NULL;
    float *wide = given->size == 2 ? PyMem_New(float, given->length) : NULL;
    if (given->lines != values->lines || given->lines != ids->lines || values->length != ids->length ||
        values->length < 1 || values->length > given->length)
        PyErr_Format(PyExc_ValueError, "from 1 to %zd entries can be found, of each of %zd lines", given->length,
                     given->lines);
    else if (given->size == 2 && wide == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < given->lines && !PyErr_Occurred(); at++) {
        Best best = {line_of(values, at), line_of(ids, at), 0, values->length};
        if (wide != NULL)
            widen(line_of(given, at), BFLOAT16, wide, given->length);
        find_best(wide != NULL ? wide : line_of(given, at), given->length, &best);
    }
    PyMem_Free(wide);
    close_arrays(arrays, 3);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}
