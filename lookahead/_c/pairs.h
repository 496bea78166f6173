#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#define FAST __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define LANES 16
#define PAIRED 32 /* numbers of two bytes in a vector, as pairs */

FAST static inline __m512i
pairs_of(const uint16_t *from, Py_ssize_t left)
{
    return left >= PAIRED ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << left) - 1, from);
}

/* Lines that lie so far apart change every other part of them. */
#define TURNED(apart, low, high)                                             \
    _Pragma("GCC unroll 16") for (int at = 0; at < LANES; at++) {            \
        const __m512i one = lines[at & ~(apart)], two = lines[at | (apart)]; \
        turned[at] = at & (apart) ? high : low;                              \
    }                                                                        \
    memcpy(lines, turned, sizeof(lines))

/* PAIRED numbers of up to LANES lines, from a place on, as pairs [pair, line]. */
FAST static inline void
turn_pairs(const uint16_t *const *from, Py_ssize_t count, Py_ssize_t place, Py_ssize_t size, __m512i *pairs)
{
    __m512i lines[LANES], turned[LANES];
#pragma GCC unroll 16
    for (int line = 0; line < LANES; line++)
        lines[line] = line < count ? pairs_of(from[line] + place, size - place) : _mm512_setzero_si512();
    TURNED(1, _mm512_unpacklo_epi32(one, two), _mm512_unpackhi_epi32(one, two));
    TURNED(2, _mm512_unpacklo_epi64(one, two), _mm512_unpackhi_epi64(one, two));
    TURNED(4, _mm512_shuffle_i32x4(one, two, 0x88), _mm512_shuffle_i32x4(one, two, 0xDD));
    TURNED(8, _mm512_shuffle_i32x4(one, two, 0x88), _mm512_shuffle_i32x4(one, two, 0xDD));
#pragma GCC unroll 16
    for (int pair = 0; pair < LANES; pair++)
        pairs[pair] = lines[(pair & 12) | (pair >> 1 & 1) | (pair << 1 & 2)];
}
