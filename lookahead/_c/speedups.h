/* What drafting and choosing do at every node of a tree, in C. Each function is the twin of a Python one, which says
 * what it is for, and which is used where this module is not built. A forward pass has filled the processor's caches
 * with the model's weights, so that Python's objects come from memory: here as few as possible are touched.
 *
 * Arrays come as memoryviews of contiguous NumPy arrays, because reading those costs nothing. */

#ifndef LOOKAHEAD_SPEEDUPS_H
#define LOOKAHEAD_SPEEDUPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

/* Loops over whole vocabularies, for the widest vectors that the processor has. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WIDE
#endif
#define BLOCK 64
#define COLUMNS 256

/* The highest entries of a line in each of COLUMNS columns, of so many rows that follow each other, into `maxima`;
 * whether any is no number. */
int maxima_of(const float *line, Py_ssize_t rows, float *maxima);

/* exp of scaled logits less the best, to about single precision; of those far below, next to nothing. */
void chances_of(const float *logits, float best, float scale, float *chances, Py_ssize_t count);

/* bfloat16 as float32. */
void widen(const uint16_t *line, float *wide, Py_ssize_t count);

typedef struct { /* what happens to logits before a draw, as lookahead.sources.perturbed.Draw.warp says it */
    double temperature, top_p, min_p;
    Py_ssize_t top_k;
} Warp;

typedef struct {
    double rounding, close; /* lookahead.verify.shortlist's _ROUNDING and _CLOSE */
    double low;             /* what low noise is below */
} Margins;

typedef struct { /* the best tokens, best first: int32 ids and logits */
    const int32_t *ids;
    const float *logits;
    Py_ssize_t count;
} List;

typedef struct { /* of one node: float32, or else bfloat16, and room for as many float32; and room for listed ones */
    const float *whole;
    const uint16_t *narrow;
    float *wide;
    double *scaled;
} Logits;

/* The token that is drawn by a line of noise, and whether that is certain. Where top_k or top_p cuts, the best have to
 * be listed; `low` are tokens of low noise behind their number, or NULL. */
int draw(Logits *logits, Py_ssize_t vocab, const List *list, const float *noise, const int32_t *low, const Warp *warp,
         Margins margins, Py_ssize_t *token);

/* A line of a memoryview of one or two axes, whose items take `size` bytes; NULL and an error if it is none. */
const void *line_of(PyObject *view, Py_ssize_t line, Py_ssize_t size);

/* How long an axis of it is. */
static inline Py_ssize_t
length_of(PyObject *view, int axis)
{
    return PyMemoryView_GET_BUFFER(view)->shape[axis];
}

/* A tuple of two integers. */
PyObject *pair(long one, long other);

/* Append an item and give its reference away; -1 and an error if it is NULL. */
int append(PyObject *list, PyObject *item);

/* Whether a function was given so many arguments; if not, there is an error. */
int takes(const char *name, Py_ssize_t count, Py_ssize_t given);

typedef struct { /* a candidate that waits for its place in the tree */
    double value;
    int parent, place;
    PyObject *token, *states; /* of its own, and its parent's */
} Waiting;

typedef struct {
    Waiting *entries;
    Py_ssize_t count, room;
} Heap;

int heap_push(Heap *heap, Waiting entry);         /* takes references of its own; -1 and an error without memory */
Waiting heap_pop(Heap *heap);                     /* the best one of some, with its references */
double heap_cut(Heap *heap, Py_ssize_t count);    /* keep the best `count` of more; the value of the last */
void heap_drop(Heap *heap, Py_ssize_t count);     /* keep the first `count`, in whatever order they are */

PyObject *grow(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *put(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *ranked(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *heard(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *best_of(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *exponential(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *drawn(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
