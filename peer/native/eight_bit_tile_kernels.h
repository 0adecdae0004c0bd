/* What goes into the tiles of convolutions and of linear layers, once for each width of register. */
#include "vectors.h"

INLINE Integers NAME(quantize_sixteen)(const float *v, float inverse, int8_t *codes, int lanes)
{
    const Floats level = nearest(cut(load_floats(v, lanes) * inverse, all(-127.0f), all(127.0f)));
    const Integers code = __builtin_convertvector(level, Integers);
    store_codes((uint8_t *)codes, code, lanes);
    return code;
}

/* Codes of a row of weights; returns their sum. */
static int32_t NAME(quantize_row)(const float *v, int n, float inverse, int8_t *codes)
{
    Integers sums = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        sums += NAME(quantize_sixteen)(v + i, inverse, codes + i, LANES);
    if (i < n)
        sums += NAME(quantize_sixteen)(v + i, inverse, codes + i, n - i);
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

/* Sixteen codes of four rows side by side, and added to their sums. */
static void NAME(interleave)(const int8_t *const *from, int8_t *packed, int32_t *sums)
{
    Integers sum = load_integers(sums, LANES), words = {};
    for (int q = 0; q < 4; q++) {
        const Integers bytes = load_codes((const uint8_t *)from[q], LANES);
        words |= bytes << 8 * q;
        sum += (bytes ^ 128) - 128;
    }
    memcpy(packed, &words, sizeof words);
    memcpy(sums, &sum, sizeof sum);
}

/* Copy with the highest bit turned over where `flip` is 128, which makes uint8 of int8. */
static void NAME(copy_flipped)(uint8_t *to, const uint8_t *from, size_t n, uint8_t flip)
{
    for (size_t i = 0; i < n; i++)
        to[i] = from[i] ^ flip;
}
