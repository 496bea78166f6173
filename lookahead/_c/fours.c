#include "singly.h"
#ifdef HAS_SINGLY

#define CHAIN 192 /* terms that MKL adds before it adds them to others */

Order
order_of(int32_t how, Py_ssize_t masked, Py_ssize_t group)
{
    const int together = group > 1 && how % IN_FOURS >= masked;
    if (how < IN_FOURS)
        return together ? TILES : PAIRS;
    return !together ? FOURS : group < 4 ? EIGHTS : CHAINS;
}

Py_ssize_t
step_of(Order order)
{
    return order == PAIRS ? STEP : order == TILES ? PAIRED : order == FOURS ? 4 : order == EIGHTS ? 8 : 1;
}

int
peeled_of(const Attention *of, const int32_t *place, Py_ssize_t threads, Py_ssize_t head, Py_ssize_t slots)
{
    const Py_ssize_t tasks = place[BATCH] * of->key_heads, used = Py_MIN(tasks, threads);
    const Py_ssize_t each = (tasks + used - 1) / used, thread = (place[ROW] * of->key_heads + head) / each;
    const Py_ssize_t before = of->group * ((thread + 1) * (Py_MIN(SPLIT, slots) + 2) + thread * of->channels);
    return (int)(-before & 3);
}

FAST void
turn_keys(const uint16_t *const *keys, Py_ssize_t count, Py_ssize_t size, Py_ssize_t wide, float *into)
{
    __m512i pairs[LANES];
    for (Py_ssize_t channel = 0; channel < wide; channel += PAIRED) {
        turn_pairs(keys, count, channel, size, pairs);
        for (int pair = 0; pair < LANES; pair++, into += 2 * LANES) {
            _mm512_storeu_si512(into, _mm512_slli_epi32(pairs[pair], 16));
            _mm512_storeu_si512(into + LANES, _mm512_and_si512(pairs[pair], _mm512_set1_epi32(-65536)));
        }
    }
}

/* How many terms of a sum a chain takes, which is then added to the chains before it. */
static Py_ssize_t
chain_of(Py_ssize_t terms)
{
    return terms <= CHAIN ? terms : terms < 2 * CHAIN ? terms / 2 : CHAIN;
}

/* Scores of LANES keys, [channel, key], by so many sums in turn, or by chains. */
FAST static inline __attribute__((always_inline)) void
score_in_turn(const float *keys, Row *rows, const int count, const int turns, Py_ssize_t size, Py_ssize_t place)
{
    const Py_ssize_t step = turns > 1 ? size : chain_of(size);
    __m512 sums[LANES], totals[LANES];
#pragma GCC unroll 4
    for (int row = 0; row < count; row++)
        totals[row] = _mm512_setzero_ps();
    for (Py_ssize_t at = 0; at < size;) {
#pragma GCC unroll 16
        for (int sum = 0; sum < count * turns; sum++)
            sums[sum] = _mm512_setzero_ps();
        for (Py_ssize_t stop = Py_MIN(size, at + step); at < stop; at += turns)
#pragma GCC unroll 8
            for (int turn = 0; turn < turns; turn++) {
                const __m512 key = _mm512_loadu_ps(keys + (at + turn) * LANES);
#pragma GCC unroll 4
                for (int row = 0; row < count; row++) {
                    __m512 *sum = sums + row * turns + turn;
                    *sum = _mm512_fmadd_ps(key, _mm512_set1_ps(rows[row].query[at + turn]), *sum);
                }
            }
#pragma GCC unroll 4
        for (int row = 0; row < count; row++) {
            __m512 *own = sums + row * turns;
            if (turns == 8)
#pragma GCC unroll 4
                for (int turn = 0; turn < 4; turn++)
                    own[turn] = _mm512_add_ps(own[turn], own[turn + 4]);
            if (turns > 1)
                own[0] = _mm512_add_ps(_mm512_add_ps(own[0], own[2]), _mm512_add_ps(own[1], own[3]));
            totals[row] = _mm512_add_ps(totals[row], own[0]);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < count; row++)
        _mm512_storeu_ps(rows[row].scores + place, totals[row]);
}

FAST void
score_in_fours(const float *keys, Row *rows, Py_ssize_t count, Py_ssize_t wide, Order order, Py_ssize_t place)
{
#define IN_TURNS(turns) \
    count > 1 ? score_in_turn(keys, rows, 4, turns, wide, place) : score_in_turn(keys, rows, 1, turns, wide, place)
    for (; order != EIGHTS && count > 0; rows += 4, count -= 4)
        order == FOURS ? IN_TURNS(4) : IN_TURNS(1);
    for (; order == EIGHTS && count > 0; rows++, count--)
        score_in_turn(keys, rows, 1, 8, wide, place);
}

/* Add values of fours of slots by their shares, a vector of channels after another. */
FAST static inline __attribute__((always_inline)) void
add_fours(Row *rows, const int count, const float *values, Py_ssize_t place, Py_ssize_t slots, Py_ssize_t wide)
{
    for (Py_ssize_t at = 0; at < wide; at += LANES) {
        __m512 sums[ABREAST];
#pragma GCC unroll 8
        for (int row = 0; row < count; row++)
            sums[row] = _mm512_loadu_ps(rows[row].sums + at);
        for (Py_ssize_t slot = 0; slot + 4 <= slots; slot += 4) {
            __m512 four[4];
#pragma GCC unroll 4
            for (int each = 0; each < 4; each++)
                four[each] = _mm512_loadu_ps(values + (slot + each) * wide + at);
#pragma GCC unroll 8
            for (int row = 0; row < count; row++) {
                const float *shares = rows[row].scores + place + slot;
                __m512 even = _mm512_mul_ps(four[0], _mm512_set1_ps(shares[0]));
                __m512 odd = _mm512_mul_ps(four[1], _mm512_set1_ps(shares[1]));
                even = _mm512_fmadd_ps(four[2], _mm512_set1_ps(shares[2]), even);
                odd = _mm512_fmadd_ps(four[3], _mm512_set1_ps(shares[3]), odd);
                sums[row] = _mm512_add_ps(sums[row], _mm512_add_ps(even, odd));
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < count; row++)
            _mm512_storeu_ps(rows[row].sums + at, sums[row]);
    }
}

/* The same, one slot after the other, by chains of so many; 0 = the last four of eight are a chain, and that of the
 * first vector alone. */
FAST static inline __attribute__((always_inline)) void
add_chains(Row *rows, const int count, Py_ssize_t step, const float *values, Py_ssize_t place, Py_ssize_t slots,
           Py_ssize_t wide)
{
    for (Py_ssize_t at = 0; at < (step ? wide : LANES); at += LANES) {
        __m512 sums[ABREAST], chains[ABREAST];
#pragma GCC unroll 8
        for (int row = 0; row < count; row++)
            sums[row] = _mm512_loadu_ps(rows[row].sums + at);
        for (Py_ssize_t slot = 0, stop; slot < slots;) {
            stop = step == 1 ? slots : Py_MIN(slots, slot + (step ? step : 4)); /* chains of one are as good as none */
            const int whole = step ? step > 1 : slot % 8 == 4 && stop - slot == 4;
#pragma GCC unroll 8
            for (int row = 0; row < count; row++)
                chains[row] = whole ? _mm512_setzero_ps() : sums[row];
            for (; slot < stop; slot++) {
                const __m512 value = _mm512_loadu_ps(values + slot * wide + at);
#pragma GCC unroll 8
                for (int row = 0; row < count; row++)
                    chains[row] = _mm512_fmadd_ps(value, _mm512_set1_ps(rows[row].scores[place + slot]), chains[row]);
            }
#pragma GCC unroll 8
            for (int row = 0; row < count; row++)
                sums[row] = whole ? _mm512_add_ps(sums[row], chains[row]) : chains[row];
        }
#pragma GCC unroll 8
        for (int row = 0; row < count; row++)
            _mm512_storeu_ps(rows[row].sums + at, sums[row]);
    }
}

FAST void
add_in_fours(Row *rows, Py_ssize_t count, Order order, const float *values, Py_ssize_t place, Py_ssize_t slots,
             Py_ssize_t wide)
{
#define IN_FOUR(many) add_fours(rows, many, values, place, slots, wide)
#define LEFT(many) add_chains(rows, many, 1, values + slot * wide, place + slot, 1, wide)
#define CHAINED(many) add_chains(rows, many, order == CHAINS ? chain_of(slots) : 1, values, place, slots, wide)
#define PEELED(many) add_chains(rows, many, 0, values, place, slots, wide)
    __m512 before[ABREAST], after[ABREAST];
    int peeled = 0;
    for (Py_ssize_t row = 0; row < count; row++) {
        before[row] = _mm512_loadu_ps(rows[row].sums);
        peeled |= rows[row].peeled;
    }
    if (order == FOURS)
        IN_PARTS(IN_FOUR, count);
    else
        IN_PARTS(CHAINED, count);
    for (Py_ssize_t slot = slots; order == FOURS && slot-- > slots / 4 * 4;) /* what is left over */
        IN_PARTS(LEFT, count);
    if (!peeled)
        return;
    for (Py_ssize_t row = 0; row < count; row++) {
        after[row] = _mm512_loadu_ps(rows[row].sums);
        _mm512_storeu_ps(rows[row].sums, before[row]);
    }
    IN_PARTS(PEELED, count);
    for (Py_ssize_t row = 0; row < count; row++)
        _mm512_mask_storeu_ps(rows[row].sums, (__mmask16)(0xFFFFu << rows[row].peeled), after[row]);
}
#endif
