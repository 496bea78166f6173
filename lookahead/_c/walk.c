#include "speedups.h"

typedef struct {
    PyObject *logits, *ids, *best; /* memoryviews [node, vocab] and [node, rank], these two of the best or None */
    PyObject *children;            /* a dict from token to node for each node */
    float *wide;                   /* room for a line of logits, where they are bfloat16 */
    double *scaled;                /* room for a list */
    Warp warp;
    Margins margins;
} Walk;

/* What is drawn at a node, by a row of noise and tokens of low noise; -1 and an error if they are none. */
static int
draw_at(const Walk *walk, Py_ssize_t node, PyObject *both, Py_ssize_t row, Py_ssize_t *token)
{
    List list = {NULL, NULL, 0};
    const int32_t *low = NULL;
    if (!PyTuple_Check(both) || PyTuple_GET_SIZE(both) != 2) {
        PyErr_SetString(PyExc_TypeError, "expected pairs of noise and of tokens of low noise");
        return -1;
    }
    const void *line = line_of(walk->logits, node, walk->wide == NULL ? sizeof(float) : sizeof(uint16_t));
    const float *noise = line == NULL ? NULL : line_of(PyTuple_GET_ITEM(both, 0), row, sizeof(float));
    if (noise != NULL && PyTuple_GET_ITEM(both, 1) != Py_None)
        low = line_of(PyTuple_GET_ITEM(both, 1), row, sizeof(int32_t));
    if (!PyErr_Occurred() && walk->ids != Py_None) {
        list.ids = line_of(walk->ids, node, sizeof(int32_t));
        list.logits = list.ids == NULL ? NULL : line_of(walk->best, node, sizeof(float));
        list.count = list.ids == NULL ? 0 : length_of(walk->ids, 1);
    } else if (!PyErr_Occurred() && (walk->warp.top_k || walk->warp.top_p < 1.0))
        PyErr_SetString(PyExc_ValueError, "expected a list of the best logits where top_k or top_p cuts");
    if (PyErr_Occurred())
        return -1;
    Logits logits = {walk->wide == NULL ? line : NULL, line, walk->wide, walk->scaled};
    return draw(&logits, length_of(walk->logits, 1), &list, noise, low, &walk->warp, walk->margins, token);
}

/* The tokens drawn at a node and below it, as far as they are certain and the lines of noise go. */
static int
draw_path(const Walk *walk, Py_ssize_t node, PyObject *lines, Py_ssize_t row, PyObject *drawn)
{
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(lines); at++) {
        Py_ssize_t token = 0;
        int sure = draw_at(walk, node, PyList_GET_ITEM(lines, at), row, &token);
        PyObject *below = NULL, *choice = sure < 0 ? NULL : pair((long)token, sure ? 1 : 2);
        int failed = choice == NULL || PyList_Append(drawn, choice) < 0;
        if (!failed && sure)
            below = PyDict_GetItemWithError(PyList_GET_ITEM(walk->children, node), PyTuple_GET_ITEM(choice, 0));
        Py_XDECREF(choice);
        if (failed || below == NULL)
            return PyErr_Occurred() ? -1 : 0;
        node = PyLong_AsSsize_t(below);
    }
    return 0;
}

/* drawn(logits, ids, best, children, node, lines, row, warp, (rounding, close, low)): tokens and certainty, 1 or 2, at
 * a node and at those of its children which are drawn. `logits` are [node, vocab], float32 or bfloat16, with the best
 * [node, rank], which have to be known where top_k or top_p cuts, and else may be None twice. Of each token in turn
 * `lines` has the noise [row, vocab], and tokens whose noise is below `low`, as `exponential` gives them, or None. */
PyObject *
drawn(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (!takes("drawn", 9, count))
        return NULL;
    Walk walk = {args[0], args[1], args[2], args[3], NULL, NULL, {0.0, 0.0, 0.0, 0}, {0.0, 0.0, 0.0}};
    Warp *warp = &walk.warp;
    Margins *margins = &walk.margins;
    if (!PyArg_ParseTuple(args[7], "dndd;warp", &warp->temperature, &warp->top_k, &warp->top_p, &warp->min_p) ||
        !PyArg_ParseTuple(args[8], "ddd;margins", &margins->rounding, &margins->close, &margins->low))
        return NULL;
    margins->low = (float)margins->low; /* as lines compare it */
    Py_ssize_t node = PyLong_AsSsize_t(args[4]), row = PyLong_AsSsize_t(args[6]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyMemoryView_Check(args[0]) || !PyList_Check(args[5]) || !PyList_Check(args[3]) ||
        (args[1] != Py_None && !PyMemoryView_Check(args[1])))
        return PyErr_Format(PyExc_TypeError, "expected memoryviews of logits, and lists of children and lines");
    int narrow = PyMemoryView_GET_BUFFER(args[0])->itemsize == sizeof(uint16_t);
    walk.wide = narrow ? PyMem_Malloc(length_of(args[0], 1) * sizeof(float)) : NULL;
    walk.scaled = PyMem_Malloc((args[1] == Py_None ? 1 : length_of(args[1], 1)) * sizeof(double));
    PyObject *found = PyList_New(0);
    if (found != NULL && (walk.scaled == NULL || (narrow && walk.wide == NULL)))
        PyErr_NoMemory();
    if (PyErr_Occurred() || draw_path(&walk, node, args[5], row, found) < 0)
        Py_CLEAR(found);
    PyMem_Free(walk.wide);
    PyMem_Free(walk.scaled);
    return found;
}
