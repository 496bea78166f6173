#include "speedups.h"

typedef struct { /* the best entries of a line so far, best first, and of equal ones the first */
    float *values;
    int32_t *ids;
    Py_ssize_t count, most;
} Best;

static void
insert(Best *best, float value, int32_t id)
{
    Py_ssize_t at = best->count < best->most ? best->count++ : best->most - 1;
    for (; at && best->values[at - 1] < value; at--) {
        best->values[at] = best->values[at - 1];
        best->ids[at] = best->ids[at - 1];
    }
    best->values[at] = value;
    best->ids[at] = id;
}

WIDE int
maxima_of(const float *line, Py_ssize_t rows, float *maxima)
{
    int broken = 0;
    for (int at = 0; at < COLUMNS; at++)
        maxima[at] = -INFINITY;
    for (Py_ssize_t row = 0; row < rows; row++)
        for (int at = 0; at < COLUMNS; at++) {
            float entry = line[row * COLUMNS + at];
            broken |= entry != entry;
            maxima[at] = entry > maxima[at] ? entry : maxima[at];
        }
    return broken;
}

/* The entry of some rank, in an order that is used up (Hoare's selection). */
static float
select_rank(float *entries, Py_ssize_t count, Py_ssize_t rank)
{
    Py_ssize_t low = 0, high = count - 1;
    while (low < high) {
        float middle = entries[(low + high) / 2];
        Py_ssize_t up = low, down = high;
        while (up <= down) {
            while (entries[up] > middle)
                up++;
            while (entries[down] < middle)
                down--;
            if (up <= down) {
                float moved = entries[up];
                entries[up++] = entries[down];
                entries[down--] = moved;
            }
        }
        if (rank <= down)
            high = down;
        else if (rank >= up)
            low = up;
        else
            break;
    }
    return entries[rank];
}

/* How many of BLOCK entries are not below the least that can be of use. */
WIDE static int
reach(const float *line, float least)
{
    int count = 0;
    for (int at = 0; at < BLOCK; at++)
        count += line[at] >= least;
    return count;
}

WIDE void
widen(const uint16_t *line, float *wide, Py_ssize_t count)
{
    for (Py_ssize_t at = 0; at < count; at++) {
        union { uint32_t bits; float value; } one = {(uint32_t)line[at] << 16};
        wide[at] = one.value;
    }
}

/* The best entries of one line. What is no number counts as the highest. So many columns have an entry that is at least
 * as high as that of their maxima which has the last rank: what is below it need not be looked at. */
static void
search(const float *line, Py_ssize_t vocab, Best *best)
{
    float maxima[COLUMNS], least = -INFINITY;
    Py_ssize_t rows = vocab / COLUMNS, broken = 0;
    if (best->most <= COLUMNS) {
        broken = maxima_of(line, rows, maxima);
        least = select_rank(maxima, COLUMNS, best->most - 1);
    }
    for (Py_ssize_t start = 0; start < vocab; start += BLOCK) {
        Py_ssize_t end = start + BLOCK < vocab ? start + BLOCK : vocab;
        if (end - start == BLOCK && !reach(line + start, least))
            continue;
        for (Py_ssize_t at = start; at < end; at++) {
            broken |= line[at] != line[at];
            if (line[at] >= least && (best->count < best->most || line[at] > best->values[best->most - 1]))
                insert(best, line[at], (int32_t)at);
        }
    }
    for (Py_ssize_t at = 0; broken && at < vocab; at++)
        if (line[at] != line[at]) {
            best->values[0] = NAN;
            best->ids[0] = (int32_t)at;
            for (; best->count < best->most; best->count++) { /* what else there is does not matter */
                best->values[best->count] = NAN;
                best->ids[best->count] = (int32_t)at;
            }
            break;
        }
}

/* best_of(lines, values, ids): scores._on_cpu, for lines of float32 or bfloat16 [line, vocab]; what it finds goes into
 * float32 and int32 [line, count]. */
PyObject *
best_of(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (!takes("best_of", 3, count) || !PyMemoryView_Check(args[0]))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "expected a memoryview");
    int narrow = PyMemoryView_GET_BUFFER(args[0])->itemsize == 2;
    Py_ssize_t lines = length_of(args[0], 0), vocab = length_of(args[0], 1);
    float *wide = narrow ? PyMem_Malloc(vocab * sizeof(float)) : NULL;
    if (narrow && wide == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < lines; at++) {
        const void *line = line_of(args[0], at, narrow ? 2 : 4);
        float *values = line == NULL ? NULL : (float *)line_of(args[1], at, sizeof(float));
        int32_t *ids = values == NULL ? NULL : (int32_t *)line_of(args[2], at, sizeof(int32_t));
        if (ids == NULL)
            break;
        Best best = {values, ids, 0, length_of(args[1], 1)};
        if (best.most != length_of(args[2], 1) || best.most < 1 || best.most > vocab) {
            PyErr_Format(PyExc_ValueError, "from 1 to %zd entries of a line can be found", vocab);
            break;
        }
        if (narrow)
            widen(line, wide, vocab);
        search(narrow ? wide : line, vocab, &best);
    }
    PyMem_Free(wide);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}
