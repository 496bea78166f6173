/* lookahead.sources.successor_table.SuccessorTable, in C. */

#ifndef LOOKAHEAD_TABLE_H
#define LOOKAHEAD_TABLE_H

#include "speedups.h"

#define PLACES 4
#define WAYS 8 /* entries of a bucket */

typedef struct { /* SuccessorTable.rows */
    uint32_t *entries; /* [bucket, 2, WAYS]: tags, and the numbers of their rows */
    uint32_t *before;  /* [row, 3]: the number of the row that its context of so many tokens had before */
    const char *tokens; /* [row, width] of uint16 or int32, best first */
    const float *logits;
    Py_ssize_t width, size; /* tokens in a row, bytes of each */
    uint32_t capacity, buckets, written; /* the next row's number */
} Rows;

int read_rows(PyObject *given, Rows *rows);

/* Where entries and kinds of contexts of so many tokens stand; 0 are the two before the last. */
static inline int
place_of_order(int order)
{
    return order ? order - 1 : PLACES - 1;
}

/* SuccessorTable.last: the last rows, `most` each, of the suffixes of a context, with their lengths in `orders`; how
 * many; -1 and an error. With only `one` length, those of the longest that is known. */
int last_rows(const Rows *rows, PyObject *context, int most, int one, int *orders, long *found);

static inline long
token_at(const Rows *rows, Py_ssize_t place)
{
    return rows->size == 2 ? ((const uint16_t *)rows->tokens)[place] : ((const int32_t *)rows->tokens)[place];
}

#endif
