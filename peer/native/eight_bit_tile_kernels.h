/* What goes into the tiles of convolutions and of linear layers, once for each width of register. */
#include "vectors.h"

#ifndef SOTTOVOCE_EIGHT_BIT_TILE_KERNELS_H
#define SOTTOVOCE_EIGHT_BIT_TILE_KERNELS_H
typedef uint32_t FourWords __attribute__((vector_size(16)));

#ifdef __clang__
#define SHUFFLED(TYPE, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(TYPE, a, b, ...) __builtin_shuffle(a, b, (TYPE){__VA_ARGS__})
#endif
/* The words of a and b by turns: of their first halves, and of their second ones. */
#define FIRST_WORDS(a, b) SHUFFLED(FourWords, a, b, 0, 4, 1, 5)
#define LAST_WORDS(a, b) SHUFFLED(FourWords, a, b, 2, 6, 3, 7)
#endif

#ifdef __AVX512F__
#define transpose NAME(transpose)
#define TRANSPOSE_TARGET
#include "eight_bit_transpose.h"
#endif

INLINE Integers NAME(quantize_vector)(const float *v, float inverse, int8_t *codes, int lanes)
{
    const Floats level = nearest(cut(load_floats(v, lanes) * inverse, all(-127.0f), all(127.0f)));
    const Integers code = __builtin_convertvector(level, Integers);
    store_codes((uint8_t *)codes, code, lanes);
    return code;
}

/* Codes of a row of weights; returns their sum. */
static inline int32_t NAME(quantize_row)(const float *v, int n, float inverse, int8_t *codes)
{
    Integers sums = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        sums += NAME(quantize_vector)(v + i, inverse, codes + i, LANES);
    if (i < n)
        sums += NAME(quantize_vector)(v + i, inverse, codes + i, n - i);
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

/* Sixteen codes of four rows side by side, and added to their sums. */
static inline void NAME(interleave)(const int8_t *const *from, int8_t *packed, int32_t *sums)
{
    for (int i = 0; i < SIXTEEN; i += LANES) {
        Integers sum = load_integers(sums + i, LANES), words = {};
        for (int q = 0; q < 4; q++) {
            const Integers bytes = load_codes((const uint8_t *)from[q] + i, LANES);
            words |= bytes << 8 * q;
            sum += (bytes ^ 128) - 128;
        }
        memcpy(packed + 4 * i, &words, sizeof words);
        memcpy(sums + i, &sum, sizeof sum);
    }
}

/* Copy with the highest bit turned over where `flip` is 128, which makes uint8 of int8. */
static inline void NAME(copy_flipped)(uint8_t *to, const uint8_t *from, size_t n, uint8_t flip)
{
    for (size_t i = 0; i < n; i++)
        to[i] = from[i] ^ flip;
}

/* Four columns of four rows of words. */
INLINE void NAME(turn_four)(FourWords v[4])
{
    const FourWords a = FIRST_WORDS(v[0], v[2]), b = LAST_WORDS(v[0], v[2]);
    const FourWords c = FIRST_WORDS(v[1], v[3]), d = LAST_WORDS(v[1], v[3]);
    v[0] = FIRST_WORDS(a, c);
    v[1] = LAST_WORDS(a, c);
    v[2] = FIRST_WORDS(b, d);
    v[3] = LAST_WORDS(b, d);
}

/* Fours of codes [SIXTEEN, columns], whose rows are `from_row` bytes apart, as [columns, SIXTEEN]. */
static inline void NAME(turn_fours)(const int8_t *from, size_t from_row, int columns, int8_t *to)
{
#ifdef __AVX512F__
    for (int column = 0; column < columns; column += SIXTEEN, from += 4 * SIXTEEN) {
        const int here = columns - column < SIXTEEN ? columns - column : SIXTEEN;
        __m512i v[SIXTEEN];
        for (int row = 0; row < SIXTEEN; row++)
            v[row] = _mm512_maskz_loadu_epi32((__mmask16)((1u << here) - 1u), from + (size_t)row * from_row);
        transpose(v);
        for (int i = 0; i < here; i++, to += 4 * SIXTEEN)
            _mm512_storeu_si512(to, v[i]);
    }
#else
    int column = 0;
    for (; column + 4 <= columns; column += 4, from += 16, to += 16 * SIXTEEN)
        for (int row = 0; row < SIXTEEN; row += 4) {
            FourWords v[4];
            for (int i = 0; i < 4; i++)
                memcpy(&v[i], from + (size_t)(row + i) * from_row, sizeof v[i]);
            NAME(turn_four)(v);
            for (int i = 0; i < 4; i++)
                memcpy(to + 4 * (i * SIXTEEN + row), &v[i], sizeof v[i]);
        }
    for (; column < columns; column++, from += 4)
        for (int row = 0; row < SIXTEEN; row++, to += 4)
            memcpy(to, from + (size_t)row * from_row, 4);
#endif
}
#undef transpose
