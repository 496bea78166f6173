#include "speedups.h"

/* How sums are ordered: as the text, or each node's as plain decoding has them, which may give a kernel the query heads
 * of a key head together as soon as there is a mask (PACKED), and has one in all passes (MASKED). */
enum { IN_ORDER, SINGLY, PACKED, MASKED };

/* Attention as the first sequence says; whether the layer has a window. Not 0 if that cannot be had. */
int attend(Attention *of, int windowed);

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_SINGLY
#include "fours.h"
#define SPLIT 512 /* slots of a block */
#define STEP 8
#define ABREAST 8 /* rows that are computed side by side, at most */
#define ROWS 32   /* of a run: query heads of a node that share a key head, then of the next one */

struct Row {
    const int16_t *mask;
    Py_ssize_t node, head, slots; /* slots that it is computed over, those hidden in the text among them */
    int peeled; /* channels before the first line of memory, in the sums of torch's kernel */
    float highest, whole, *query, *sums;
    float scores[SPLIT + STEP]; /* then shares; a pair of them may be half past the end */
};

/* Channels as float32, even ones and odd ones apart. */
void split_line(const uint16_t *from, Py_ssize_t size, float *into);

/* Read up to LANES keys, and score them by some rows, into scores that begin at a place of the block. */
void gather_keys(const uint16_t *const *keys, Py_ssize_t count, Py_ssize_t size, Py_ssize_t wide, Order order,
                 float *into);
void score_rows(const float *keys, Row *rows, Py_ssize_t count, Py_ssize_t wide, Order order, Py_ssize_t place);

/* The score of a key that is the only one of its block, by a query whose channels are not split. */
float score_alone(const uint16_t *key, const float *query, Py_ssize_t size, Py_ssize_t wide);

/* Scores of a block become shares; what was summed before is scaled. */
void share_scores(Row *row, Py_ssize_t count, float scale, Py_ssize_t wide);

/* Read values, behind an odd number of them one of nothing; add them to rows by their shares, which begin at a place
 * of the block. */
void gather_values(const uint16_t *const *values, Py_ssize_t count, Py_ssize_t size, Py_ssize_t wide, float *into);
void add_values(Row *rows, Py_ssize_t count, Order order, const float *values, Py_ssize_t place, Py_ssize_t slots,
                Py_ssize_t wide);
#endif
