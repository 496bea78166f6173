#include "singly.h"
#ifdef HAS_SINGLY

FAST void
split_line(const uint16_t *from, Py_ssize_t size, float *into)
{
    for (Py_ssize_t at = 0; at < size; at += PAIRED, into += PAIRED) {
        __m512i pairs = pairs_of(from + at, size - at);
        _mm512_storeu_si512(into, _mm512_slli_epi32(pairs, 16));
        _mm512_storeu_si512(into + LANES, _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
    }
}

#define SIDES(name, one, low, high) \
    FAST static inline __m512 name(__m512 a, __m512 b) { return _mm512_add_ps(one(a, b, low), one(a, b, high)); }
SIDES(eight_apart, _mm512_shuffle_f32x4, 0x44, 0xEE)
SIDES(in_fours, _mm512_shuffle_ps, 0x88, 0xDD)
SIDES(in_blocks, _mm512_shuffle_f32x4, 0x88, 0xDD)

/* Scores of LANES keys whose channels are split. */
FAST static void
score(const float *keys, const float *query, Py_ssize_t wide, float *scores)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    __m512 sums[LANES];
#pragma GCC unroll 16
    for (int key = 0; key < LANES; key++)
        sums[key] = _mm512_setzero_ps();
    for (Py_ssize_t at = 0; at < wide; at += PAIRED) {
        __m512 even = _mm512_loadu_ps(query + at), odd = _mm512_loadu_ps(query + at + LANES);
#pragma GCC unroll 16
        for (int key = 0; key < LANES; key++) {
            sums[key] = _mm512_fmadd_ps(_mm512_loadu_ps(keys + key * wide + at + LANES), odd, sums[key]);
            sums[key] = _mm512_fmadd_ps(_mm512_loadu_ps(keys + key * wide + at), even, sums[key]);
        }
    }
#pragma GCC unroll 8
    for (int at = 0; at < 8; at++)
        sums[at] = eight_apart(sums[2 * at], sums[2 * at + 1]);
#pragma GCC unroll 8
    for (int at = 0; at < 4; at++)
        sums[at] = in_fours(sums[2 * at], sums[2 * at + 1]);
#pragma GCC unroll 2
    for (int at = 0; at < 2; at++)
        sums[at] = in_fours(sums[2 * at], sums[2 * at + 1]);
    _mm512_storeu_ps(scores, _mm512_permutexvar_ps(order, in_blocks(sums[0], sums[1])));
}

/* Scores of LANES keys, [channel, key], by tiles. */
FAST static inline __attribute__((always_inline)) void
score_together(const float *keys, Row *rows, const int count, Py_ssize_t wide, Py_ssize_t place)
{
    __m512 sums[ABREAST];
#pragma GCC unroll 8
    for (int row = 0; row < count; row++)
        sums[row] = _mm512_setzero_ps();
    for (Py_ssize_t at = 0; at < wide;) {
        __m512 evens[ABREAST], odds[ABREAST];
#pragma GCC unroll 8
        for (int row = 0; row < count; row++)
            evens[row] = odds[row] = _mm512_setzero_ps();
        for (Py_ssize_t stop = at + PAIRED; at < stop; at += 2) {
            const __m512 even = _mm512_loadu_ps(keys + at * LANES), odd = _mm512_loadu_ps(keys + (at + 1) * LANES);
#pragma GCC unroll 8
            for (int row = 0; row < count; row++) {
                evens[row] = _mm512_fmadd_ps(even, _mm512_set1_ps(rows[row].query[at]), evens[row]);
                odds[row] = _mm512_fmadd_ps(odd, _mm512_set1_ps(rows[row].query[at + 1]), odds[row]);
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < count; row++)
            sums[row] = _mm512_add_ps(sums[row], _mm512_add_ps(evens[row], odds[row]));
    }
#pragma GCC unroll 8
    for (int row = 0; row < count; row++)
        _mm512_storeu_ps(rows[row].scores + place, sums[row]);
}

FAST void
gather_keys(const uint16_t *const *keys, Py_ssize_t count, Py_ssize_t size, Py_ssize_t wide, Order order, float *into)
{
    if (order != PAIRS)
        turn_keys(keys, Py_MIN(LANES, count), size, wide, into);
    for (Py_ssize_t key = 0; order == PAIRS && key < Py_MIN(LANES, count); key++)
        split_line(keys[key], size, into + key * wide);
}

FAST void
score_rows(const float *keys, Row *rows, Py_ssize_t count, Py_ssize_t wide, Order order, Py_ssize_t place)
{
#define SCORED(many) score_together(keys, rows, many, wide, place)
    if (order >= FOURS)
        score_in_fours(keys, rows, count, wide, order, place);
    for (; order == TILES && count > 0; rows += ABREAST, count -= ABREAST)
        IN_PARTS(SCORED, count);
    for (; order == PAIRS && count > 0; rows++, count--)
        score(keys, rows->query, wide, rows->scores + place);
}

/* The exponential that torch takes for numbers of two bytes, of what is not above 0 (Malossi and others, 2015). */
FAST static inline __m512
exponential_of(__m512 numbers)
{
    const __m512 least = _mm512_castsi512_ps(_mm512_set1_epi32((int32_t)0xc2aeac50));
    const __m512 scaled = _mm512_mul_ps(numbers, _mm512_castsi512_ps(_mm512_set1_epi32(0x3fb8aa3b)));
    const __m512 rest = _mm512_sub_ps(scaled, _mm512_floor_ps(scaled));
    __m512 sum = _mm512_fmadd_ps(rest, _mm512_set1_ps(-0.079204240219773236f), _mm512_set1_ps(-0.22433836478672356f));
    sum = _mm512_fmadd_ps(rest, sum, _mm512_set1_ps(0.30354260500649682f));
    sum = _mm512_sub_ps(scaled, _mm512_fmadd_ps(rest, sum, _mm512_set1_ps(0.00010703434948458272f)));
    sum = _mm512_fmadd_ps(_mm512_set1_ps(8388608.0f), sum, _mm512_set1_ps(8388608.0f * 127.0f));
    const __mmask16 seen = _mm512_cmp_ps_mask(numbers, least, _CMP_NLT_US);
    return _mm512_castsi512_ps(_mm512_maskz_cvttps_epi32(seen, sum));
}

FAST void
share_scores(Row *row, Py_ssize_t count, float scale, Py_ssize_t wide)
{
    float *scores = row->scores, sum;
    __m512 tops = _mm512_set1_ps(row->highest);
    for (Py_ssize_t at = count; at % LANES; at++)
        scores[at] = -INFINITY;
    for (Py_ssize_t at = 0; at < count; at += LANES) {
        __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores + at), _mm512_set1_ps(scale));
        _mm512_storeu_ps(scores + at, scaled);
        tops = _mm512_max_ps(tops, scaled);
    }
    const float top = _mm512_reduce_max_ps(tops);
    if (top == -INFINITY) { /* nothing is seen */
        memset(scores, 0, sizeof(row->scores));
        return;
    }
    __m512 sums = _mm512_setzero_ps(), others = sums; /* of every other vector */
    Py_ssize_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        __m512 each = exponential_of(_mm512_sub_ps(_mm512_loadu_ps(scores + at), _mm512_set1_ps(top)));
        __m512 *turn = at / LANES % 2 ? &others : &sums;
        *turn = _mm512_add_ps(*turn, each);
        _mm512_storeu_ps(scores + at, each);
    }
    sums = _mm512_add_ps(sums, others);
    sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(sums, sums, 0x4E));
    sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(sums, sums, 0xB1));
    sums = _mm512_add_ps(sums, _mm512_shuffle_ps(sums, sums, 0x4E));
    sum = _mm512_cvtss_f32(_mm512_add_ps(sums, _mm512_shuffle_ps(sums, sums, 0xB1)));
    for (; at < count; at++)
        sum += scores[at] = (float)exp(scores[at] - top); /* torch takes the one of float64 there */
    for (at = 0; at < count; at++)
        scores[at] = widened(narrowed(scores[at]));
    memset(scores + count, 0, STEP * sizeof(float));
    const float before = expf(row->highest - top);
    for (at = 0; at < wide; at++)
        row->sums[at] *= before;
    row->whole = fmaf(before, row->whole, sum);
    row->highest = top;
}

FAST void
gather_values(const uint16_t *const *values, Py_ssize_t count, Py_ssize_t size, Py_ssize_t wide, float *into)
{
    for (Py_ssize_t slot = 0; slot < count; slot++)
        widen(values[slot], BFLOAT16, into + slot * wide, size);
    if (count % 2)
        memset(into + count * wide, 0, wide * sizeof(float));
}

/* Add values by their shares, which begin at a place of the block, to some rows: a vector of channels after another. */
FAST static inline __attribute__((always_inline)) void
add(Row *rows, const int count, const int together, const float *values, Py_ssize_t place, Py_ssize_t slots,
    Py_ssize_t wide)
{
    for (Py_ssize_t at = 0; at < wide; at += LANES) {
        __m512 sums[ABREAST];
#pragma GCC unroll 8
        for (int row = 0; row < count; row++)
            sums[row] = _mm512_loadu_ps(rows[row].sums + at);
        for (Py_ssize_t slot = 0; slot < slots;) {
            __m512 steps[ABREAST], odds[ABREAST];
#pragma GCC unroll 8
            for (int row = 0; row < count; row++)
                steps[row] = odds[row] = _mm512_setzero_ps();
            for (Py_ssize_t stop = Py_MIN(slots, slot + (together ? PAIRED : STEP)); slot < stop; slot += 2) {
                const float *from = values + slot * wide + at;
                const __m512 even = _mm512_loadu_ps(from), odd = _mm512_loadu_ps(from + wide);
#pragma GCC unroll 8
                for (int row = 0; row < count; row++) {
                    const float *shares = rows[row].scores + place + slot;
                    __m512 *sum = together ? odds + row : steps + row;
                    *sum = _mm512_fmadd_ps(odd, _mm512_set1_ps(shares[1]), *sum);
                    steps[row] = _mm512_fmadd_ps(even, _mm512_set1_ps(shares[0]), steps[row]);
                }
            }
#pragma GCC unroll 8
            for (int row = 0; row < count; row++)
                sums[row] = _mm512_add_ps(sums[row], together ? _mm512_add_ps(steps[row], odds[row]) : steps[row]);
        }
#pragma GCC unroll 8
        for (int row = 0; row < count; row++)
            _mm512_storeu_ps(rows[row].sums + at, sums[row]);
    }
}

FAST void
add_values(Row *rows, Py_ssize_t count, Order order, const float *values, Py_ssize_t place, Py_ssize_t slots,
           Py_ssize_t wide)
{
#define TILED(many) add(rows, many, 1, values, place, slots, wide)
#define ADDED(many) add(rows, many, 0, values, place, slots, wide)
    for (; count > 0; rows += ABREAST, count -= ABREAST)
        if (order >= FOURS)
            add_in_fours(rows, Py_MIN(count, ABREAST), order, values, place, slots, wide);
        else if (order == TILES)
            IN_PARTS(TILED, count);
        else
            IN_PARTS(ADDED, count);
}

FAST float
score_alone(const uint16_t *key, const float *query, Py_ssize_t size, Py_ssize_t wide)
{
    float lanes[LANES] = {0}, line[wide];
    memset(line, 0, wide * sizeof(float));
    widen(key, BFLOAT16, line, size);
    for (Py_ssize_t at = 0; at < wide; at += 2) {
        float *lane = lanes + at / 2 % LANES;
        *lane = fmaf(line[at], query[at], fmaf(line[at + 1], query[at + 1], *lane));
    }
    for (int lane = 0; lane < 8; lane++)
        lanes[lane] += lanes[lane + 8];
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}
#endif
