#include "speedups.h"

#define OUTPUTS 32 /* of a linear layer, side by side in a packed weight */

/* How many numbers a tensor has whose lines follow each other without a gap; -1 if there are gaps. */
static inline int64_t
dense_numbers(const View *of)
{
    int64_t step = 1;
    for (int64_t axis = of->axes; axis-- > 0; step *= of->sizes[axis])
        if (of->sizes[axis] != 1 && of->strides[axis] != step)
            return -1;
    return step;
}

/* Whether a layer's rows [row, input], weight [output, input], or packed [OUTPUTS outputs, pair of inputs, pair], and
 * bias, which may be of no size, fit together; the sizes of its outputs [row, output]. */
int fits_layer(const View *given, int64_t *sizes);

/* The outputs, whose sums are chains of so many inputs, an even number. Not 0 if they cannot be had. */
int multiply(const View *given, int64_t chain, View *made);
