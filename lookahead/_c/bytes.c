#include "bytes.h"
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#include "pairs.h"
#define WITH_BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")))
#define AHEAD 64     /* vectors of weights that are asked for beforehand; 32, 128, 256 take as long, 0 a third longer */
#define MOST_ROWS 12 /* that are multiplied side by side */
#define INPUTS 256   /* that many rows are multiplied by before the next ones; 512, 1024 take up to a tenth longer */
#define TINY 1e-30f  /* the least step of a row, for one of zeros alone */
#define MIDDLE 128   /* that weights have more than they mean, as one factor of a product has no sign */

/* Linear layers in bytes: each row of inputs is rounded by its own largest number. Sums of integers are exact. */
typedef struct {
    Work parts; /* first, as threads are given it: outputs, as many for each */
    const View *weight, *scales, *bias, *made;
    int8_t *rows;
    float *steps;     /* of rows */
    int32_t *too_much; /* of a row's sums, as weights have MIDDLE more */
    Py_ssize_t count, inputs, outputs;
} Bytes;

WITH_BYTES static inline __m512
numbers_at(const char *row, Py_ssize_t at, __mmask16 some, int is_wide)
{
    if (is_wide)
        return _mm512_maskz_loadu_ps(some, (const float *)row + at);
    __m512i halves = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, (const uint16_t *)row + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
}

#define EACH_VECTOR                                                            \
    for (Py_ssize_t at = 0; at < of->inputs; at += LANES) {                    \
        const __mmask16 some = (1u << Py_MIN(LANES, of->inputs - at)) - 1;     \
        const __m512 numbers = numbers_at(row, at, some, of->made->kind == SINGLE);

/* Round a row to the steps of its largest number; one that is no number is larger than any. */
WITH_BYTES static void
round_row(const Bytes *of, Py_ssize_t number, const char *row)
{
    __m512i largest = _mm512_setzero_si512(), sum = _mm512_setzero_si512();
    EACH_VECTOR
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(numbers)));
    }
    const float step = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epu32(largest)))) / 127.0f;
    of->steps[number] = step < TINY ? TINY : step;
    const __m512 steps = _mm512_set1_ps(of->steps[number]);
    EACH_VECTOR
        const __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(numbers, steps));
        sum = _mm512_add_epi32(sum, whole);
        _mm_mask_storeu_epi8(of->rows + number * of->inputs + at, some, _mm512_cvtepi32_epi8(whole));
    }
    of->too_much[number] = MIDDLE * _mm512_reduce_add_epi32(sum);
}

/* Multiply fours of inputs of some rows, and add that to their sums, [row, OUTPUTS]; ask for vectors ahead. */
WITH_BYTES static inline __attribute__((always_inline)) void
multiply_rows(const int count, const int8_t *rows, Py_ssize_t apart, const __m512i *weights, Py_ssize_t fours,
              const __m512i *ahead, Py_ssize_t step, int32_t *sums)
{
    __m512i low[MOST_ROWS], high[MOST_ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < count; row++) {
        low[row] = _mm512_loadu_si512(sums + row * OUTPUTS);
        high[row] = _mm512_loadu_si512(sums + row * OUTPUTS + LANES);
    }
    for (Py_ssize_t four = 0; four < fours; four++) {
        _mm_prefetch((const char *)(ahead + step * four), _MM_HINT_T0);
        _mm_prefetch((const char *)(ahead + step * four + 1), _MM_HINT_T0);
        const __m512i one = _mm512_loadu_si512(weights + 2 * four), two = _mm512_loadu_si512(weights + 2 * four + 1);
#pragma GCC unroll 12
        for (int row = 0; row < count; row++) {
            const __m512i all = _mm512_set1_epi32(((const int32_t *)(rows + row * apart))[four]);
            low[row] = _mm512_dpbusd_epi32(low[row], one, all);
            high[row] = _mm512_dpbusd_epi32(high[row], two, all);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < count; row++) {
        _mm512_storeu_si512(sums + row * OUTPUTS, low[row]);
        _mm512_storeu_si512(sums + row * OUTPUTS + LANES, high[row]);
    }
}

WITH_BYTES static void
multiply_part(const Bytes *of, Py_ssize_t output, int32_t *sums)
{
#define ROWS_OF(many)                                                                                           \
    case many:                                                                                                  \
        multiply_rows(many, rows, of->inputs, weights, fours, ahead, half ? 1 : 2, sums + row * OUTPUTS);       \
        break;
    memset(sums, 0, of->count * OUTPUTS * sizeof(int32_t));
    const Py_ssize_t most = of->count > MOST_ROWS ? INPUTS : of->inputs;
    for (Py_ssize_t input = 0, stop; input < of->inputs; input = stop) {
        const __m512i *weights = (const __m512i *)(of->weight->data + output * of->inputs + input * OUTPUTS);
        Py_ssize_t times = (of->count + MOST_ROWS - 1) / MOST_ROWS; /* about as many rows each time */
        stop = Py_MIN(of->inputs, input + most);
        const Py_ssize_t fours = (stop - input) / 4, half = times == 2 ? fours : 0; /* two ask for half of it each */
        const __m512i *ahead = weights + (half ? 2 * half : AHEAD);
        for (Py_ssize_t row = 0, many; row < of->count; row += many, times--, ahead += half) {
            const int8_t *rows = of->rows + row * of->inputs + input;
            many = (of->count - row + times - 1) / times;
            switch (many) {
                ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) ROWS_OF(6)
                ROWS_OF(7) ROWS_OF(8) ROWS_OF(9) ROWS_OF(10) ROWS_OF(11) ROWS_OF(12)
            }
        }
    }
    const float *scales = (const float *)of->scales->data + output;
    const uint16_t *bias = of->bias->last ? (const uint16_t *)of->bias->data + output : NULL;
    for (Py_ssize_t row = 0; row < of->count; row++) {
        const Py_ssize_t first = row * of->outputs + output;
        for (int at = 0; at < OUTPUTS; at++) {
            const float product = (float)(sums[row * OUTPUTS + at] - of->too_much[row]) * scales[at] * of->steps[row];
            const float value = bias == NULL ? product : product + widened(bias[at]);
            if (of->made->kind == SINGLE)
                ((float *)of->made->data)[first + at] = value;
            else
                ((uint16_t *)of->made->data)[first + at] = narrowed(value);
        }
    }
}

/* What each thread does: take parts while there are any. */
static void
multiply_parts(void *given)
{
    Bytes *of = given;
    int32_t *sums = aligned_alloc(64, of->count * OUTPUTS * sizeof(int32_t));
    of->parts.failed |= sums == NULL;
    for (Py_ssize_t part; sums != NULL && (part = next_part(&of->parts)) < of->parts.count;) {
        const Py_ssize_t all = of->outputs / OUTPUTS, stop = all * (part + 1) / of->parts.count;
        for (Py_ssize_t at = all * part / of->parts.count; at < stop; at++)
            multiply_part(of, at * OUTPUTS, sums);
    }
    free(sums);
}

int
multiply_bytes(const View *given, int64_t chain, View *made)
{
    Bytes of = {.weight = given + 1, .scales = given + 2, .bias = given + 3, .made = made,
                .count = made->sizes[0], .inputs = given->last, .outputs = made->last};
    of.parts.count = torch_threads();
    char *room = malloc(of.count * (sizeof(float) + sizeof(int32_t) + of.inputs));
    int failed = room == NULL || !__builtin_cpu_supports("avx512vnni");
    if (!failed) {
        of.steps = (float *)room;
        of.too_much = (int32_t *)(of.steps + of.count);
        of.rows = (int8_t *)(of.too_much + of.count);
        for (Py_ssize_t row = 0; row < of.count; row++)
            round_row(&of, row, given->data + row * of.inputs * (made->kind == SINGLE ? 4 : 2));
        failed = share_out(&of.parts, multiply_parts);
    }
    free(room);
    return failed;
}
#else
int
multiply_bytes(const View *given, int64_t chain, View *made)
{
    return 1;
}
#endif

int
fits_bytes(const View *given, int64_t *sizes)
{
    const View *rows = given, *weight = given + 1, *scales = given + 2, *bias = given + 3;
    for (int at = 0; at < 4; at++)
        if (dense_numbers(given + at) < 0)
            return 0;
    sizes[0] = rows->sizes[0];
    sizes[1] = weight->sizes[0] * OUTPUTS;
    return rows->axes == 2 && rows->kind != FLOAT16 && sizes[0] && sizes[1] && rows->last && rows->last <= WHOLE &&
           weight->axes == 3 && weight->last == OUTPUTS && 4 * weight->sizes[1] == rows->last && scales->axes == 1 &&
           scales->kind == SINGLE && scales->last == sizes[1] && bias->axes == 1 &&
           (!bias->last || (bias->last == sizes[1] && bias->kind == BFLOAT16));
}
