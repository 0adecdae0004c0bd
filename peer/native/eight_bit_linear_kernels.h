/* The kernels of eight_bit_linear.c, once for each width of register. */
#include "eight_bit_tile_kernels.h"

#define ordered NAME(ordered)

/* As in eight_bit.c. */
INLINE Integers ordered(Floats v)
{
    const Integers bits = (Integers)v;
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

INLINE void NAME(forward_of_sixteen)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result,
                                     int lanes, int has_bias, int relu)
{
    const Integers offset = load_integers(f->offset + result, lanes);
    const Floats bias = has_bias ? load_floats(f->bias + result, lanes) : all(0.0f);
    const Floats low = all(-128.0f - (float)f->zero), high = all(127.0f - (float)f->zero);
    Integers least = load_integers(f->low, LANES), most = load_integers(f->high, LANES);
    for (int p = 0; p < rows; p++, sums += width) {
        const size_t at = (row + (size_t)p) * (size_t)f->results + (size_t)result;
        Floats y = __builtin_convertvector(load_integers(sums, LANES) - offset, Floats) * f->factor;
        if (has_bias)
            y = y + bias;
        if (relu)
            y = choose(y < 0.0f, all(0.0f), y);
        if (f->floats != NULL) {
            store_floats(f->floats + at, y, lanes);
            continue;
        }
        const Integers key = ordered(y);
        least = lesser(key, least);
        most = greater(key, most);
        if (f->codes != NULL) {
            const Integers level = __builtin_convertvector(nearest(cut(y * f->inverse, low, high)), Integers);
            store_codes((uint8_t *)f->codes + at, level + f->zero, lanes);
        }
    }
    memcpy(f->low, &least, (size_t)lanes * sizeof *f->low);
    memcpy(f->high, &most, (size_t)lanes * sizeof *f->high);
}

INLINE void NAME(backward_of_sixteen)(Finish *f, const int32_t *sums, int width, int rows, size_t row,
                                      int result, int lanes, int kind)
{
    const Integers offset = load_integers(f->offset + result, lanes);
    Words largest;
    memcpy(&largest, f->largest, sizeof largest);
    for (int p = 0; p < rows; p++, sums += width) {
        const size_t at = (row + (size_t)p) * (size_t)f->results + (size_t)result;
        Floats g = __builtin_convertvector(load_integers(sums, LANES) - offset, Floats) * f->factor;
        if (kind == MASKED)
            g = choose(load_codes((const uint8_t *)f->mask + at, lanes) == f->masked, all(0.0f), g);
        if (kind == SLOPED) {
            const Integers index = load_codes((const uint8_t *)f->mask + at, lanes) ^ 128;
#ifdef __AVX512F__
            g = g * (Floats)_mm512_i32gather_ps((__m512i)index, f->slopes, sizeof *f->slopes);
#else
            Floats slope;
            for (int l = 0; l < LANES; l++)
                slope[l] = f->slopes[index[l]];
            g = g * slope;
#endif
        }
        if (kind == ADDED)
            g = load_gradient(f->gradient + at, lanes) + g;
        largest = larger(store_gradient(f->gradient + at, g, lanes), largest);
    }
    memcpy(f->largest, &largest, (size_t)lanes * sizeof *f->largest);
}

INLINE void NAME(product_of_sixteen)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result,
                                     int lanes)
{
    const Integers offset = load_integers(f->offset + result, lanes);
    for (int p = 0; p < rows; p++, sums += width) {
        const Integers acc = load_integers(sums, lanes) - offset;
        memcpy(f->product + (row + (size_t)p) * (size_t)f->results + (size_t)result, &acc,
               (size_t)lanes * sizeof *f->product);
    }
}

static void NAME(finish_linear)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result, int count)
{
/* What a product is followed by, known to the compiler, as is a full sixteen. */
#define OF_SIXTEEN(STEP, ...)                                                                  \
    {                                                                                          \
        if (count >= LANES)                                                                    \
            NAME(STEP)(f, sums, width, rows, row, result, LANES, ##__VA_ARGS__);               \
        else                                                                                   \
            NAME(STEP)(f, sums, width, rows, row, result, count, ##__VA_ARGS__);               \
    }
    for (; count > 0; count -= LANES, result += LANES, sums += LANES) {
        if (f->product != NULL)
            OF_SIXTEEN(product_of_sixteen)
        else if (f->gradient == NULL && f->bias != NULL && f->relu)
            OF_SIXTEEN(forward_of_sixteen, 1, 1)
        else if (f->gradient == NULL && f->bias != NULL)
            OF_SIXTEEN(forward_of_sixteen, 1, 0)
        else if (f->gradient == NULL && f->relu)
            OF_SIXTEEN(forward_of_sixteen, 0, 1)
        else if (f->gradient == NULL)
            OF_SIXTEEN(forward_of_sixteen, 0, 0)
        else if (f->slopes != NULL)
            OF_SIXTEEN(backward_of_sixteen, SLOPED)
        else if (f->mask != NULL)
            OF_SIXTEEN(backward_of_sixteen, MASKED)
        else if (f->add)
            OF_SIXTEEN(backward_of_sixteen, ADDED)
        else
            OF_SIXTEEN(backward_of_sixteen, PLAIN)
    }
#undef OF_SIXTEEN
}

/* Codes less their zero of two rows, as pairs of bfloat16, which holds them exactly; `second` may be NULL. */
static void NAME(pair_codes)(const int8_t *first, const int8_t *second, int count, int zero, uint16_t *pairs)
{
    for (int i = 0; i < STRIP; i += LANES) {
        const int lanes = count - i >= LANES ? LANES : count - i > 0 ? count - i : 0;
        Words both = {};
#define PAIR(L)                                                                                                \
    const Integers one = (load_codes((const uint8_t *)first + i, L) ^ 128) - 128 - zero;                       \
    both = (Words)__builtin_convertvector(one, Floats) >> 16;                                                  \
    if (second != NULL) {                                                                                      \
        const Integers other = (load_codes((const uint8_t *)second + i, L) ^ 128) - 128 - zero;                \
        both |= (Words)__builtin_convertvector(other, Floats) & 0xFFFF0000u;                                   \
    }
        if (lanes == LANES) {
            PAIR(LANES)
        } else if (lanes > 0) {
            PAIR(lanes)
        }
#undef PAIR
        memcpy(pairs + 2 * i, &both, sizeof both);
    }
}

/* Up to sixteen gradients of two rows as pairs, and added to their sums. */
INLINE Doubles NAME(pair_of_gradients)(const uint16_t *first, const uint16_t *second, int lanes, uint16_t *pairs,
                                       Doubles sums)
{
    const Floats one = load_gradient(first, lanes);
    const Floats other = second == NULL ? (Floats){} : load_gradient(second, lanes);
    const Words both = ((Words)one >> 16) | (Words)other;
    memcpy(pairs, &both, sizeof both);
    sums = sums + __builtin_convertvector(one, Doubles);
    return second == NULL ? sums : sums + __builtin_convertvector(other, Doubles);
}

/* A strip of `height` gradients, at most sixteen, of which `readable` are there in each row, as pairs; they are written
   sixteen at a time, so that the last may overrun the strip. */
static void NAME(pair_gradients)(const uint16_t *gradient, size_t stride, int rows, int readable, int height,
                                 uint16_t *pairs, double *sums)
{
    const int count = readable < height ? readable : height;
    Doubles total = {};
    memcpy(&total, sums, (size_t)count * sizeof *sums);
    for (int row = 0; row < rows; row += 2, gradient += 2 * stride, pairs += 2 * height) {
        const uint16_t *second = row + 1 < rows ? gradient + stride : NULL;
        if (readable >= LANES)
            total = NAME(pair_of_gradients)(gradient, second, LANES, pairs, total);
        else
            total = NAME(pair_of_gradients)(gradient, second, readable, pairs, total);
    }
    memcpy(sums, &total, (size_t)count * sizeof *sums);
}

static void NAME(pack_gradients)(const uint16_t *gradient, size_t stride, int rows, int readable, uint16_t *left,
                                 double *sums)
{
    NAME(pair_gradients)(gradient, stride, rows, readable, HEIGHT, left, sums);
}

/* out[j][i] = (out[j][i] or 0) + sum over pairs of g[pair][j] * x[pair][i], times factor. */
static void NAME(pairs_tile)(const uint16_t *g, const uint16_t *x, int pairs, int more, float factor, float *out,
                             size_t stride)
{
    for (int j = 0; j < HEIGHT; j++) {
        float acc[STRIP] = {0};
        if (more)
            memcpy(acc, out + (size_t)j * stride, sizeof acc);
        for (int p = 0; p < pairs; p++) {
            const float first = widen(g[(p * HEIGHT + j) * 2]), second = widen(g[(p * HEIGHT + j) * 2 + 1]);
            const uint16_t *here = x + (size_t)p * 2 * STRIP;
            for (int i = 0; i < STRIP; i++)
                acc[i] += first * widen(here[2 * i]) + second * widen(here[2 * i + 1]);
        }
        for (int i = 0; i < STRIP; i++)
            out[(size_t)j * stride + (size_t)i] = acc[i] * factor;
    }
}

static const Kernels NAME(kernels) = {
    .finish = NAME(finish_linear),
    .quantize_row = NAME(quantize_row),
    .interleave = NAME(interleave),
    .copy_flipped = NAME(copy_flipped),
    .pair_codes = NAME(pair_codes),
    .height = HEIGHT,
    .pairs_multiple = 1,
    .pack_gradients = NAME(pack_gradients),
    .pairs_tile = NAME(pairs_tile),
};
#undef ordered
