#include "speedups.h"

#define WORDS 624
#define AWAY 397 /* how far away the word is that each new one is made from */
#define PART 512 /* numbers made at a time: blocks, too */

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
        uniform[at] = 1.0 - (upper * 4294967296.0 + lower) * 0x1p-53;
    }
    for (int at = 0; at < PART; at++) {
        union { double value; uint64_t bits; } x = {uniform[at]}, k, part;
        uint64_t shifted = x.bits + (0x3ff0000000000000u - 0x3fe6a09e00000000u);
        k.bits = (shifted >> 52) | 0x4330000000000000u;
        part.bits = (shifted & 0xfffffffffffffu) + 0x3fe6a09e00000000u;
        double power = k.value - (4503599627370496.0 + 1023.0), f = part.value - 1.0;
        double s = f / (2.0 + f), z = s * s;
        double series = 1.0 / 21;
        series = series * z + 1.0 / 19;
        series = series * z + 1.0 / 17;
        series = series * z + 1.0 / 15;
        series = series * z + 1.0 / 13;
        series = series * z + 1.0 / 11;
        series = series * z + 1.0 / 9;
        series = series * z + 1.0 / 7;
        series = series * z + 1.0 / 5;
        series = series * z + 1.0 / 3;
        out[at] = (float)-(power * 0.693147180559945309417 + (2.0 * s + 2.0 * s * z * series));
    }
}

/* Whether any of BLOCK numbers is below a limit. */
WIDE static int
any_low(const float *numbers, float limit)
{
    int found = 0;
    for (int at = 0; at < BLOCK; at++)
        found |= numbers[at] < limit;
    return found;
}

typedef struct {
    uint32_t words[WORDS];
    int next; /* of them that is read */
} Generator;

/* The next `count` words, as they are read. */
static void
read_words(Generator *from, uint32_t *out, int count)
{
    while (count) {
        if (from->next == WORDS) {
            renew(from->words);
            from->next = 0;
        }
        int more = count < WORDS - from->next ? count : WORDS - from->next;
        temper(from->words + from->next, out, more);
        from->next += more;
        out += more;
        count -= more;
    }
}

/* Draw a line, and write the tokens whose noise is below `limit` behind their number, which is -1 if they have no
 * room; `low` may be NULL. */
static void
draw_line(Generator *from, float *line, Py_ssize_t vocab, float limit, int32_t *low, Py_ssize_t room)
{
    uint32_t words[2 * PART] = {0};
    float part[PART];
    Py_ssize_t found = 0;
    for (Py_ssize_t start = 0; start < vocab; start += PART) {
        int count = vocab - start < PART ? (int)(vocab - start) : PART;
        read_words(from, words, 2 * count);
        exponentials(words, part);
        memcpy(line + start, part, count * sizeof(float));
        for (int at = 0; low != NULL && at < count; at += BLOCK) {
            if (!any_low(part + at, limit))
                continue;
            for (int each = at; each < at + BLOCK && each < count; each++)
                if (part[each] < limit && found++ < room - 1)
                    low[found] = (int32_t)(start + each);
        }
    }
    if (low != NULL)
        low[0] = found < room ? (int32_t)found : -1;
}

/* exponential(states, lines, low, limit): fill float32 lines as torch's `exponential_` does, as many behind each of
 * several states, of which the first is given and the others are found. `low` has a line of int32 for each, or is
 * None. */
PyObject *
exponential(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Generator generator;
    if (!takes("exponential", 4, given))
        return NULL;
    double limit = PyFloat_AsDouble(args[3]);
    const Saved *saved = line_of(args[0], 0, 1);
    if (saved == NULL || line_of(args[1], 0, sizeof(float)) == NULL || PyErr_Occurred() ||
        (args[2] != Py_None && line_of(args[2], 0, sizeof(int32_t)) == NULL))
        return NULL;
    Py_ssize_t states = length_of(args[0], 0), bytes = length_of(args[0], 1), lines = length_of(args[1], 0);
    if (bytes < (Py_ssize_t)sizeof(Saved) || saved->next > WORDS || saved->left < 1 || states < 2 || lines < 1 ||
        lines % (states - 1)) {
        PyErr_SetString(PyExc_ValueError, "expected states of torch's generator on a CPU, and as many lines for each");
        return NULL;
    }
    Py_ssize_t each = lines / (states - 1);
    generator.next = saved->left == 1 ? WORDS : (int)saved->next;
    for (int at = 0; at < WORDS; at++)
        generator.words[at] = (uint32_t)saved->words[at];
    for (Py_ssize_t line = 0; line < lines; line++) {
        int32_t *low = args[2] == Py_None ? NULL : (int32_t *)line_of(args[2], line, sizeof(int32_t));
        draw_line(&generator, (float *)line_of(args[1], line, sizeof(float)), length_of(args[1], 1), (float)limit, low,
                  low == NULL ? 0 : length_of(args[2], 1));
        if ((line + 1) % each)
            continue;
        Saved *behind = (Saved *)line_of(args[0], (line + 1) / each, 1);
        memcpy(behind, saved, bytes);
        for (int at = 0; at < WORDS; at++)
            behind->words[at] = generator.words[at];
        behind->next = generator.next;
        behind->left = WORDS + 1 - generator.next;
    }
    Py_RETURN_NONE;
}
