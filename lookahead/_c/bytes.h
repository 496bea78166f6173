#include "linear.h"

#define WHOLE 65536 /* inputs, whose products' sums four bytes hold */

/* Whether a layer's rows [row, input] in bfloat16 or float32, weight [OUTPUTS outputs, four inputs, output] in bytes, a
 * scale for each output, and bias in bfloat16, which may be of no size, fit together; the sizes of its outputs. */
int fits_bytes(const View *given, int64_t *sizes);

/* The outputs, in the rows' kind of numbers; there are no chains. Not 0 if they cannot be had. */
int multiply_bytes(const View *given, int64_t chain, View *made);
