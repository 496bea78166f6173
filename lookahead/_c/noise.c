#include "speedups.h"

#define WORDS 624
#define AWAY 397 /* how far away the word is that each new one is made from */
#define PART 512 /* numbers made at a time */

/* torch's generator on a CPU (MT19937), as its state is saved: what precedes the words, and the words themselves, which
 * take 64 bits each. */
typedef struct {
    uint64_t seed;
    int32_t left, seeded; /* words until the next ones are made, less one that is read then */
    uint64_t next, words[WORDS];
} Saved;

static inline uint32_t
twisted(uint32_t one, uint32_t following, uint32_t away)
{
    uint32_t mixed = (one & 0x80000000u) | (following & 0x7fffffffu);
    return away ^ (mixed >> 1) ^ (-(following & 1u) & 0x9908b0dfu);
}

/* The next 624 words of the generator. */
WIDE static void
renew(uint32_t *words)
{
    for (int at = 0; at < WORDS - AWAY; at++)
        words[at] = twisted(words[at], words[at + 1], words[at + AWAY]);
    for (int at = WORDS - AWAY; at < WORDS - 1; at++)
        words[at] = twisted(words[at], words[at + 1], words[at + AWAY - WORDS]);
    words[WORDS - 1] = twisted(words[WORDS - 1], words[0], words[AWAY - 1]);
}

/* What is read of words (Matsumoto and Nishimura, 1998). */
WIDE static void
temper(const uint32_t *words, uint32_t *out, int count)
{
    for (int at = 0; at < count; at++) {
        uint32_t word = words[at];
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c5680u;
        word ^= (word << 15) & 0xefc60000u;
        out[at] = word ^ (word >> 18);
    }
}

/* -log(1 - u) of PART numbers u of 53 random bits, each from two words, the upper one first. 1 - u has a finite number
 * of bits, so only the logarithm is rounded: of x = 2^k (1 + f) with 1 + f from sqrt(1/2) to sqrt(2) it is k log 2 and
 * 2 artanh(f / (2 + f)), by its series. */
WIDE static void
exponentials(const uint32_t *words, float *out)
{
    double uniform[PART];
    for (int at = 0; at < PART; at++) {
        double upper = (double)(int32_t)(words[2 * at] & 0x1fffffu);
        double lower = (double)(int32_t)(words[2 * at + 1] ^ 0x80000000u) + 2147483648.0;
        uniform[at] = 1.0 - (upper * 4294967296.0 + lower) / 9007199254740992.0;
    }
    for (int at = 0; at < PART; at++) {
        union { double value; uint64_t bits; } x = {uniform[at]}, k, part;
        uint64_t shifted = x.bits + (0x3ff0000000000000u - 0x3fe6a09e00000000u);
        k.bits = (shifted >> 52) | 0x4330000000000000u;
        part.bits = (shifted & 0xfffffffffffffu) + 0x3fe6a09e00000000u;
        double power = k.value - (4503599627370496.0 + 1023.0), f = part.value - 1.0;
        double s = f / (2.0 + f), z = s * s, series = 1.0 / 21;
        for (int odd = 19; odd > 1; odd -= 2)
            series = series * z + 1.0 / odd;
        out[at] = (float)(0.0 - (power * 0.693147180559945309417 + (2.0 * s + 2.0 * s * z * series))); /* never -0 */
    }
}

/* The next `count` words, as they are read; which of the generator's is read then. */
static int
read_words(uint32_t *words, int next, uint32_t *out, int count)
{
    for (int more; count; next += more, out += more, count -= more) {
        if (next == WORDS) {
            renew(words);
            next = 0;
        }
        more = Py_MIN(count, WORDS - next);
        temper(words + next, out, more);
    }
    return next;
}

/* exponential(states, lines): fill float32 lines as torch's `exponential_` does, as many behind each of several states,
 * of which the first is given and the others are found. */
PyObject *
exponential(PyObject *module, PyObject *args)
{
    Saved saved = {.left = 0};
    uint32_t generator[WORDS], words[2 * PART] = {0};
    float part[PART];
    Array arrays[] = {{"states", "B", 1, 2, WRITTEN}, {"lines", FLOAT32, 2, WRITTEN}};
    Array *states = arrays, *lines = arrays + 1;
    if (!PyArg_ParseTuple(args, "O&O&:exponential", open_array, states, open_array, lines) || share_memory(arrays, 2))
        return NULL;
    if (states->lines && states->length >= (Py_ssize_t)sizeof(Saved))
        memcpy(&saved, states->data, sizeof(Saved));
    Py_ssize_t others = Py_MAX(states->lines - 1, 1), each = lines->lines / others;
    int sound = saved.next <= WORDS && saved.left > 0 && each && states->lines > 1 && lines->lines == each * others;
    if (!sound)
        PyErr_SetString(PyExc_ValueError, "expected states of torch's generator on a CPU, and as many lines for each");
    int next = saved.left == 1 ? WORDS : (int)saved.next;
    for (int at = 0; at < WORDS; at++)
        generator[at] = (uint32_t)saved.words[at];
    for (Py_ssize_t line = 0; sound && line < lines->lines; line++) {
        for (Py_ssize_t start = 0; start < lines->length; start += PART) {
            int numbers = (int)Py_MIN(PART, lines->length - start);
            next = read_words(generator, next, words, 2 * numbers);
            exponentials(words, part);
            memcpy((float *)line_of(lines, line) + start, part, numbers * sizeof(float));
        }
        if ((line + 1) % each)
            continue;
        for (int at = 0; at < WORDS; at++)
            saved.words[at] = generator[at];
        saved.next = next;
        saved.left = WORDS + 1 - next;
        memcpy(memcpy(line_of(states, (line + 1) / each), states->data, states->length), &saved, sizeof(Saved));
    }
    close_arrays(arrays, 2);
    return sound ? Py_NewRef(Py_None) : NULL;
}
