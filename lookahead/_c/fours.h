#include "pairs.h"
#include "speedups.h"

/* Attention of a single token as MKL adds it where it knows no instructions of the processor for numbers of two bytes,
 * as on those of other makers.
 *   scores: four sums take channels in turn, then those 2 apart are added, then the two;
 *   values: of four slots those 2 apart are added, then the two, that to the rest; what is left over one by one, the
 *   last first.
 * Query heads that come together: the last slots, behind fours, have eight sums; those 4 apart are added first; values
 * are added one by one. Of four heads or more, one sum takes the channels, or slots, of a chain; scores of less
 * than twelve slots do not. */
enum { IN_FOURS = 4 }; /* more than another order, see singly.h */

#define ABREAST 8 /* rows that are computed side by side, at most */
#define FEW 12    /* slots from which on there are chains of channels */

/* Work on so many rows side by side, at least as many as there are: others beside them are scratch. */
#define IN_PARTS(work, count) (count) > 4 ? work(ABREAST) : (count) > 1 ? work(4) : work(1)

/* The order of sums in a block of slots: those of query heads that come together are TILES, EIGHTS or CHAINS. */
typedef enum { PAIRS, TILES, FOURS, EIGHTS, CHAINS } Order;
typedef struct Row Row;

/* The order of a row's sums, whose query heads come together from `masked` on. */
Order order_of(int32_t how, Py_ssize_t masked, Py_ssize_t group);

/* How many slots may be added at a time, before those of others. */
Py_ssize_t step_of(Order order);

/* How many channels lie before a line of memory in plain decoding, where a thread has room for scores of a block of
 * slots, two numbers a row, and sums: those are added in another order. */
int peeled_of(const Attention *of, const int32_t *place, Py_ssize_t threads, Py_ssize_t head, Py_ssize_t slots);

/* Up to LANES keys as [channel, key], nothing in channels behind them. */
void turn_keys(const uint16_t *const *keys, Py_ssize_t count, Py_ssize_t size, Py_ssize_t wide, float *into);

/* As score_rows, and as add_values of up to ABREAST rows. */
void score_in_fours(const float *keys, Row *rows, Py_ssize_t count, Py_ssize_t wide, Order order, Py_ssize_t place);
void add_in_fours(Row *rows, Py_ssize_t count, Order order, const float *values, Py_ssize_t place, Py_ssize_t slots,
                  Py_ssize_t wide);
