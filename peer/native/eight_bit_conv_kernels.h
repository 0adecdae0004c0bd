/* The kernels of eight_bit_conv.c, once for each width of register. */
#include "eight_bit_tile_kernels.h"
#include "eight_bit_turn_kernels.h"
#include "eight_bit_depthwise_kernels.h"

INLINE void NAME(codes_of_vector)(const Output *o, const int32_t *sums, int width, int pixels, const size_t *at,
                                   int result, int lanes)
{
    const Integers offset = load_integers(o->offset + result, lanes);
    const Floats scale = load_floats(o->scale + result, lanes), shift = load_floats(o->shift + result, lanes);
    const Floats low = all(o->low), high = all(o->high);
    uint8_t *codes = o->codes;
    Integers least = load_integers(o->lows + result, lanes), most = load_integers(o->highs + result, lanes);
    Integers total = {}, square = {};
    for (int p = 0; p < pixels; p++, sums += width) {
        const Integers acc = load_integers(sums, LANES) - offset;
        least = lesser(acc, least);
        most = greater(acc, most);
        if (codes != NULL) {
            const Floats level = nearest(cut(__builtin_convertvector(acc, Floats) * scale + shift, low, high));
            const Integers code = __builtin_convertvector(level, Integers), q = code - 128;
            total += q;
            square += q * q;
            store_codes(codes + at[p] + result, code, lanes);
        }
    }
    memcpy(o->lows + result, &least, (size_t)lanes * sizeof *o->lows);
    memcpy(o->highs + result, &most, (size_t)lanes * sizeof *o->highs);
    if (o->totals != NULL) {
        int64_t *totals = o->totals + result, *squares = o->squares + result;
        for (int l = 0; l < lanes; l++) {
            totals[l] += total[l];
            squares[l] += square[l];
        }
    }
}

static void NAME(finish_codes)(const Output *o, const int32_t *sums, int width, int pixels, const size_t *at,
                               int result, int count)
{
    for (; count >= LANES; count -= LANES, result += LANES, sums += LANES)
        NAME(codes_of_vector)(o, sums, width, pixels, at, result, LANES);
    if (count > 0)
        NAME(codes_of_vector)(o, sums, width, pixels, at, result, count);
}

INLINE Words NAME(gradient_of_vector)(const Output *o, const int32_t *sums, int width, int pixels, const size_t *at,
                                       int result, int lanes)
{
    const Integers offset = load_integers(o->offset + result, lanes);
    /* What is written might be a part of `o`, for all that the compiler knows. */
    const float factor = o->factor;
    const uint8_t *const mask = o->mask;
    const int masked = o->masked;
    const uint16_t *const added = o->added;
    uint16_t *const gradient = o->gradient;
    Words largest = {};
    for (int p = 0; p < pixels; p++, sums += width) {
        const size_t here = at[p] + (size_t)result;
        Floats g = __builtin_convertvector(load_integers(sums, LANES) - offset, Floats) * factor;
        if (added != NULL)
            g = (Floats)(rounded_gradient(g) << 16) + load_gradient(added + here, lanes);
        if (mask != NULL)
            g = choose(load_codes(mask + here, lanes) == masked, all(0.0f), g);
        largest = larger(store_gradient(gradient + here, g, lanes), largest);
    }
    return largest;
}

static void NAME(finish_gradient)(const Output *o, const int32_t *sums, int width, int pixels, const size_t *at,
                                  int result, int count)
{
    Words largest = {};
    for (; count >= LANES; count -= LANES, result += LANES, sums += LANES)
        largest = larger(NAME(gradient_of_vector)(o, sums, width, pixels, at, result, LANES), largest);
    float found = largest_of(largest, LANES);
    note_largest(found, o->largest);
    if (count > 0)
        note_largest(largest_of(NAME(gradient_of_vector)(o, sums, width, pixels, at, result, count), count),
                     o->largest);
}

#if defined(__FMA__) && !defined(__AVX512F__)
/* J by sixteen sums of the same pixel of two samples, whose frames and gradients lie one after the other. A product of a
   code and a gradient is exact: the second rounds nothing where the first is added to it, so that a sum is rounded as often
   as in plain C, and to the same bits. */
#define FLOAT_TILE(J)                                                                                               \
    static void NAME(floats_##J)(const uint16_t *a, const uint16_t *g, int pairs, size_t a_pair, int height,        \
                                 size_t a_row, int width, size_t a_pixel, size_t g_pixel, float *sums,              \
                                 size_t stride)                                                                     \
    {                                                                                                               \
        const size_t next = (size_t)height * (size_t)width * g_pixel;                                               \
        __m256 acc[J][2];                                                                                           \
        _Pragma("GCC unroll 6") for (int j = 0; j < J; j++) _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)     \
            acc[j][v] = _mm256_loadu_ps(sums + (size_t)j * stride + 8 * v);                                         \
        for (int n = 0; n < pairs; n++, a += a_pair, g += next)                                                     \
            for (int y = 0; y < height; y++) {                                                                      \
                const uint16_t *here = a + (size_t)y * a_row;                                                       \
                for (int x = 0; x < width; x++, here += a_pixel, g += g_pixel)                                      \
                    _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)                                             \
                    {                                                                                               \
                        const __m256 first = _mm256_loadu_ps((const float *)g + 8 * v);                             \
                        const __m256 second = _mm256_loadu_ps((const float *)(g + next) + 8 * v);                   \
                        _Pragma("GCC unroll 6") for (int j = 0; j < J; j++)                                         \
                        {                                                                                           \
                            const __m256 one = _mm256_broadcast_ss((const float *)here + j);                        \
                            const __m256 other = _mm256_broadcast_ss((const float *)(here + a_pair / 2) + j);       \
                            const __m256 both = _mm256_fmadd_ps(one, first, _mm256_mul_ps(other, second));          \
                            acc[j][v] = _mm256_add_ps(acc[j][v], both);                                             \
                        }                                                                                           \
                    }                                                                                               \
            }                                                                                                       \
        _Pragma("GCC unroll 6") for (int j = 0; j < J; j++) _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)     \
            _mm256_storeu_ps(sums + (size_t)j * stride + 8 * v, acc[j][v]);                                         \
    }

FLOAT_TILE(6)
FLOAT_TILE(4)
FLOAT_TILE(2)

static void NAME(float_codes)(const uint8_t *first, size_t n, int zero, float *to)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_floats(to + i, __builtin_convertvector(load_codes(first + i, LANES) - zero, Floats), LANES);
    for (; i < n; i++)
        to[i] = (float)(first[i] - zero);
}

static void NAME(float_gradients)(const uint16_t *first, size_t n, float *to)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_floats(to + i, load_gradient(first + i, LANES), LANES);
    for (; i < n; i++)
        to[i] = widen(first[i]);
}

#define PAIR_KERNELS                                                            \
    .planes = 2, .neighbours = {{6, 4, 2}},                                     \
    .float_codes = NAME(float_codes), .float_gradients = NAME(float_gradients), \
    .pairs = {{NAME(floats_6), NAME(floats_4), NAME(floats_2)}}
#else
#define PORTABLE_PAIR_TILE(J, V)                                                                                    \
    static void NAME(pairs_##J##_##V)(const uint16_t *a, const uint16_t *g, int pairs, size_t a_pair,     \
                                                int height, size_t a_row, int width, size_t a_pixel, size_t g_pixel, \
                                                float *sums, size_t stride)                                         \
    {                                                                                                               \
        float acc[J][V * SIXTEEN];                                                                                    \
        for (int j = 0; j < J; j++)                                                                                 \
            memcpy(acc[j], sums + (size_t)j * stride, sizeof acc[j]);                                               \
        for (int n = 0; n < pairs; n++, a += a_pair)                                                                \
            for (int y = 0; y < height; y++)                                                                        \
                for (int x = 0; x < width; x++, g += g_pixel) {                                                     \
                    const uint16_t *here = a + (size_t)y * a_row + (size_t)x * a_pixel;                             \
                    for (int j = 0; j < J; j++) {                                                                   \
                        const float first = widen(here[2 * j]), second = widen(here[2 * j + 1]);                    \
                        for (int i = 0; i < V * SIXTEEN; i++)                                                         \
                            acc[j][i] += first * widen(g[2 * i]) + second * widen(g[2 * i + 1]);                    \
                    }                                                                                               \
                }                                                                                                   \
        for (int j = 0; j < J; j++)                                                                                 \
            memcpy(sums + (size_t)j * stride, acc[j], sizeof acc[j]);                                               \
    }

PORTABLE_PAIR_TILE(4, 1)
PORTABLE_PAIR_TILE(24, 1)
PORTABLE_PAIR_TILE(4, 2)
PORTABLE_PAIR_TILE(12, 2)
PORTABLE_PAIR_TILE(8, 2)
PORTABLE_PAIR_TILE(16, 1)

/* Two rows of codes less their zero, which bfloat16 holds exactly, side by side; `second` may be NULL. */
INLINE void NAME(pair_of_codes)(const uint8_t *first, const uint8_t *second, int zero, uint16_t *out, int lanes)
{
    const Floats low = __builtin_convertvector(load_codes(first, lanes) - zero, Floats);
    Words both = (Words)low >> 16;
    if (second != NULL)
        both |= (Words)__builtin_convertvector(load_codes(second, lanes) - zero, Floats) & 0xFFFF0000u;
    memcpy(out, &both, (size_t)lanes * sizeof(uint32_t));
}

static void NAME(pair_codes)(const uint8_t *first, const uint8_t *second, size_t n, int zero, uint16_t *out)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        NAME(pair_of_codes)(first + i, second == NULL ? NULL : second + i, zero, out + 2 * i, LANES);
    if (i < n)
        NAME(pair_of_codes)(first + i, second == NULL ? NULL : second + i, zero, out + 2 * i, (int)(n - i));
}

static void NAME(pair_gradients)(const uint16_t *first, const uint16_t *second, size_t n, uint16_t *out)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        Words both = (Words)load_gradient(first + i, LANES) >> 16;
        if (second != NULL)
            both |= (Words)load_gradient(second + i, LANES);
        memcpy(out + 2 * i, &both, sizeof both);
    }
    for (; i < n; i++) {
        out[2 * i] = first[i];
        out[2 * i + 1] = second == NULL ? 0 : second[i];
    }
}

#define PAIR_KERNELS                                                                     \
    .planes = 1, .neighbours = {{24, 16, 4}, {12, 8, 4}},                                \
    .pair_codes = NAME(pair_codes), .pair_gradients = NAME(pair_gradients),              \
    .pairs = {{NAME(pairs_24_1), NAME(pairs_16_1), NAME(pairs_4_1)},                     \
              {NAME(pairs_12_2), NAME(pairs_8_2), NAME(pairs_4_2)}}
#endif

static const Kernels NAME(kernels) = {
    .quantize_row = NAME(quantize_row),
    .turn_codes = NAME(turn_codes),
    .turn_fours = NAME(turn_fours),
    .turn_floats = NAME(turn_floats),
    .interleave = NAME(interleave),
    .copy_flipped = NAME(copy_flipped),
    .finish_codes = NAME(finish_codes),
    .finish_gradient = NAME(finish_gradient),
    .depthwise = NAME(depthwise),
    .depthwise_gradient = NAME(depthwise_gradient),
    PAIR_KERNELS,
};
#undef PAIR_KERNELS
