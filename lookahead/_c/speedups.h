/* What drafting and choosing do at every node of a tree, in C. Each function is the twin of a Python one, which says
 * what it is for, and which is used where this module is not built. A forward pass has filled the processor's caches
 * with the model's weights, so that Python's objects come from memory: here as few as possible are touched.
 *
 * Whatever is given is checked before it is read: arrays by open_array, which also holds them, so that no Python code
 * that runs meanwhile takes their memory away; lists by the size that they have then. */

#ifndef LOOKAHEAD_SPEEDUPS_H
#define LOOKAHEAD_SPEEDUPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include "threads.h"

/* Loops over whole vocabularies, for the widest vectors that the processor has. GCC knows the fourth level of x86-64
 * since its version 12. No clone contracts or reorders anything, so all compute the same. */
#if !defined(__x86_64__) || !defined(__gnu_linux__) || !defined(__GNUC__) || defined(__clang__)
#define WIDE
#elif __GNUC__ < 12
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#define BLOCK 64
#define CHANNELS 1024 /* of a head, at most */

/* Formats of usual memoryviews, and bytes of an item. */
#define FLOAT32 "f", 4
#define INT32 "il", 4
#define FLOAT32_OR_BFLOAT16 "fhH", 0 /* of two bytes or of four */
#define WRITTEN 1
#define OPTIONAL 2 /* may be None, and then has no lines */

typedef struct { /* an argument: first what it has to be, then what it is; all 0 until then */
    const char *name, *formats;
    Py_ssize_t size;
    int axes, flags;
    char *data, *end;
    Py_ssize_t lines, length, stride; /* of one axis there is one line; items of a line; bytes between lines */
    Py_buffer buffer;
} Array;

/* For O& of PyArg_ParseTuple: check an argument that is an array, and hold it until close_arrays. Nothing is held where
 * any argument is wrong. */
int open_array(PyObject *given, void *array);
void close_arrays(Array *arrays, int count);

/* Whether an array that is written shares memory with another one; then there is an error, and nothing is held. */
int share_memory(Array *arrays, int count);

static inline void *
line_of(const Array *array, Py_ssize_t line)
{
    return array->data + line * array->stride;
}

/* How many of BLOCK numbers are not below a limit; what is no number never is. */
int reach(const float *numbers, float least);

typedef struct { /* the best entries of a line so far, best first, and of equal ones the first */
    float *values;
    int32_t *ids;
    Py_ssize_t count, most;
} Best;

/* The best entries of one line. What is no number counts as the highest. */
void find_best(const float *line, Py_ssize_t vocab, Best *best);

/* exp of scaled logits less the best, to about single precision, of those far below next to nothing; and their sum. */
void chances_of(const float *logits, float best, float scale, float *chances, Py_ssize_t count);
double sum_of_chances(const float *logits, Py_ssize_t vocab, float best, float scale);

/* bfloat16 as float32, and back, to the nearest. */
static inline float
widened(uint16_t number)
{
    union { uint32_t bits; float value; } one = {(uint32_t)number << 16};
    return one.value;
}

static inline uint16_t
narrowed(float number)
{
    union { float value; uint32_t bits; } one = {number};
    return (uint16_t)((one.bits + 0x7fff + ((one.bits >> 16) & 1)) >> 16);
}

#ifdef __FLT16_MAX__
typedef _Float16 Half;
#else
typedef float Half; /* this compiler has no float16 */
#endif
typedef enum { BFLOAT16, FLOAT16, SINGLE } Kind; /* of numbers */
void widen(const void *line, Kind kind, float *wide, Py_ssize_t count);

/* What happens to logits before a draw, as lookahead.sources.perturbed.Draw.warp says it. */
typedef struct { double temperature, top_p, min_p; Py_ssize_t top_k; } Warp;

/* For O& of PyArg_ParseTuple: temperature, top_k, top_p and min_p. */
int read_warp(PyObject *given, void *warp);

typedef struct { /* a tensor of torch's */
    int64_t axes, *sizes, *strides, last; /* numbers of the last axis, which lie side by side */
    Kind kind;                            /* SINGLE: of four bytes, maybe whole ones */
    char *data;
} View;

/* Where the line of a sequence, head and node begins; where there is one sequence it is everybody's. */
static inline void *
line_in(const View *of, int64_t sequence, int64_t head, int64_t node)
{
    int64_t first = of->sizes[0] > 1 ? sequence * of->strides[0] : 0;
    return of->data + (first + head * of->strides[1] + node * of->strides[2]) * (of->kind == SINGLE ? 4 : 2);
}

enum { QUERIES, K, V, MASK, SEQUENCES, OUTPUT };
enum { START, LENGTH, BASE, HOW, WINDOW, ROW, BATCH, DEPTHS }; /* of a sequence, see `runtime.ordered_attention` */

/* Attention in numbers of two bytes: tensors are queries [batch, head, node, channel]; keys, values, mask (of no size
 * if there is none) and sequences as lookahead.runtime.ordered_attention says; and the output, like queries. */
typedef struct {
    Work tiles; /* first, as threads are given it; `row_tiles`: of a key head */
    const View *tensors;
    Py_ssize_t nodes, group, channels, padded, slots; /* padded: channels, up to whole vectors */
    Py_ssize_t key_heads, row_tiles;
    float scale;
    Kind kind; /* of queries, keys, values and masks */
} Attention;

/* Whether tensors, and what sequences say of them, fit together; sizes are noted. */
int is_sound(Attention *of);

/* What each thread does: take tiles of attention in the order of the text while there are any. */
void attend_tiles(void *attention);

/* Append an item and give its reference away; -1 and an error if it is NULL. */
int append(PyObject *list, PyObject *item);

#define FUNCTION(name) PyObject *name(PyObject *module, PyObject *args);
#define EACH(kind) kind(grow) kind(heard) kind(best_of) kind(exponential) kind(drawn) kind(operations)
EACH(FUNCTION)

#endif
