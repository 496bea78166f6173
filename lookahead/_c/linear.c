#include "linear.h"
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#include "pairs.h"
#define WITH_BFLOAT16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define INPUTS 256    /* whose weights are turned at a time */
#define AHEAD 64      /* vectors of weights that are asked for beforehand; 0, 128, 256 take 3 to 15 % longer */
#define MOST_ROWS 12  /* that are multiplied side by side */

/* Linear layers, each row with the bits of oneDNN's kernels, whatever their number: those multiply pairs of inputs, in
 * chains of so many inputs, and add chains one after the other. The weight lies in lines, of which some are turned at a
 * time, or in columns: pairs of OUTPUTS outputs, one pair of inputs below the other. */
typedef struct {
    Work parts; /* first, as threads are given it: outputs, as many for each */
    const View *rows, *weight, *bias;
    uint16_t *into;
    Py_ssize_t count, inputs, outputs, chain;
} Linear;

/* Multiply some inputs of rows, and add that to what their chains have, [row, OUTPUTS]; ask for vectors ahead. */
WITH_BFLOAT16 static inline __attribute__((always_inline)) void
multiply_rows(const int count, const char *rows, Py_ssize_t apart, const __m512i *weights, Py_ssize_t pairs,
              const __m512i *ahead, Py_ssize_t step, float *sums)
{
    __m512 low[MOST_ROWS], high[MOST_ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < count; row++) {
        low[row] = _mm512_loadu_ps(sums + row * OUTPUTS);
        high[row] = _mm512_loadu_ps(sums + row * OUTPUTS + LANES);
    }
    for (Py_ssize_t pair = 0; pair < pairs; pair++) {
        _mm_prefetch((const char *)(ahead + step * pair), _MM_HINT_T0);
        _mm_prefetch((const char *)(ahead + step * pair + 1), _MM_HINT_T0);
        const __m512bh one = (__m512bh)_mm512_loadu_si512(weights + 2 * pair);
        const __m512bh two = (__m512bh)_mm512_loadu_si512(weights + 2 * pair + 1);
#pragma GCC unroll 12
        for (int row = 0; row < count; row++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(((const int32_t *)(rows + row * apart))[pair]);
            low[row] = _mm512_dpbf16_ps(low[row], both, one);
            high[row] = _mm512_dpbf16_ps(high[row], both, two);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < count; row++) {
        _mm512_storeu_ps(sums + row * OUTPUTS, low[row]);
        _mm512_storeu_ps(sums + row * OUTPUTS + LANES, high[row]);
    }
}

/* The same of all rows, some at a time, about as many each time. */
WITH_BFLOAT16 static void
multiply_all(const Linear *of, Py_ssize_t input, Py_ssize_t stop, const __m512i *weights, float *sums)
{
#define ROWS_OF(many)                                                                                 \
    case many:                                                                                        \
        multiply_rows(many, rows, 2 * of->inputs, weights, pairs, ahead, half ? 1 : 2, sums + row * OUTPUTS); \
        break;
    Py_ssize_t times = (of->count + MOST_ROWS - 1) / MOST_ROWS, pairs = (stop - input) / 2;
    const Py_ssize_t half = times == 2 ? pairs : 0; /* of the next weights: two ask for half each */
    const __m512i *ahead = weights + (half ? 2 * half : AHEAD);
    for (Py_ssize_t row = 0, many; row < of->count; row += many, times--, ahead += half) {
        const char *rows = of->rows->data + 2 * (row * of->inputs + input);
        many = (of->count - row + times - 1) / times;
        switch (many) {
            ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) ROWS_OF(6)
            ROWS_OF(7) ROWS_OF(8) ROWS_OF(9) ROWS_OF(10) ROWS_OF(11) ROWS_OF(12)
        }
    }
}

WITH_BFLOAT16 static void
multiply_part(const Linear *of, Py_ssize_t output, __m512i *turned, float *sums, float *totals)
{
    const uint16_t *weight = (const uint16_t *)of->weight->data, *lines[OUTPUTS];
    for (int line = 0; line < OUTPUTS; line++) /* lines behind the last one are that */
        lines[line] = weight + Py_MIN(output + line, of->outputs - 1) * of->inputs;
    memset(totals, 0, of->count * OUTPUTS * sizeof(float));
    for (Py_ssize_t start = 0, end; start < of->inputs; start = end) {
        end = Py_MIN(of->inputs, start + of->chain);
        memset(sums, 0, of->count * OUTPUTS * sizeof(float));
        for (Py_ssize_t input = start, stop; input < end; input = stop) {
            const __m512i *columns = (const __m512i *)(weight + output * of->inputs + input * OUTPUTS);
            stop = Py_MIN(end, input + INPUTS);
            if (of->weight->axes == 2) {
                columns = turned;
                for (Py_ssize_t at = input; at < stop; at += PAIRED)
                    for (int half = 0; half < 2; half++) {
                        __m512i pairs[LANES];
                        turn_pairs(lines + half * LANES, LANES, at, stop, pairs);
                        for (int pair = 0; pair < LANES; pair++)
                            turned[at - input + 2 * pair + half] = pairs[pair];
                    }
            }
            multiply_all(of, input, stop, columns, sums);
        }
        for (Py_ssize_t at = 0; at < of->count * OUTPUTS; at++)
            totals[at] += sums[at];
    }
    for (Py_ssize_t row = 0; row < of->count; row++)
        for (Py_ssize_t at = output; at < Py_MIN(output + OUTPUTS, of->outputs); at++) {
            const float more = of->bias->last ? widened(((const uint16_t *)of->bias->data)[at]) : 0.0f;
            of->into[row * of->outputs + at] = narrowed(totals[row * OUTPUTS + at - output] + more);
        }
}

/* What each thread does: take parts while there are any. */
static void
multiply_parts(void *given)
{
    Linear *of = given;
    const size_t room = of->count * OUTPUTS, line = LANES * INPUTS; /* float32 numbers */
    float *own = aligned_alloc(64, (line + 2 * room) * sizeof(float));
    of->parts.failed |= own == NULL;
    for (Py_ssize_t part; own != NULL && (part = next_part(&of->parts)) < of->parts.count;) {
        Py_ssize_t all = (of->outputs + OUTPUTS - 1) / OUTPUTS, at = all * part / of->parts.count;
        for (; at < all * (part + 1) / of->parts.count; at++)
            multiply_part(of, at * OUTPUTS, (__m512i *)own, own + line, own + line + room);
    }
    free(own);
}

int
multiply(const View *given, int64_t chain, View *made)
{
    Linear of = {.rows = given, .weight = given + 1, .bias = given + 2, .into = (uint16_t *)made->data,
                 .count = made->sizes[0], .inputs = given->last, .outputs = made->last, .chain = chain,
                 .parts.count = torch_threads()}; /* what one reads lies side by side, and is asked for beforehand */
    return __builtin_cpu_supports("avx512bf16") ? share_out(&of.parts, multiply_parts) : 1;
}
#else
int
multiply(const View *given, int64_t chain, View *made)
{
    return 1;
}
#endif

int
fits_layer(const View *given, int64_t *sizes)
{
    const View *rows = given, *weight = given + 1, *bias = given + 2;
    const int packed = weight->axes == 3;
    for (int at = 0; at < 3; at++)
        if (given[at].kind != BFLOAT16 || dense_numbers(given + at) < 0)
            return 0;
    sizes[0] = rows->sizes[0];
    sizes[1] = weight->sizes[0] * (packed ? OUTPUTS : 1);
    return rows->axes == 2 && sizes[0] && sizes[1] && rows->last && rows->last % 2 == 0 &&
           (packed ? weight->last == 2 * OUTPUTS && 2 * weight->sizes[1] == rows->last
                   : weight->axes == 2 && weight->last == rows->last) &&
           bias->axes == 1 && (!bias->last || bias->last == sizes[1]);
}
