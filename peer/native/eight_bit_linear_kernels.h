/* The kernels of eight_bit_linear.c, once for each width of register. */
#include "eight_bit_vectors.h"

#define load_integers NAME(load_integers)
#define ordered NAME(ordered)

INLINE Integers load_integers(const int32_t *from, int lanes)
{
    Integers v = {};
    memcpy(&v, from, (size_t)lanes * sizeof *from);
    return v;
}

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

static void NAME(finish_linear)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result, int count)
{
    for (; count > 0; count -= LANES, result += LANES, sums += LANES) {
#define EACH_WIDTH(CALL)         \
    {                            \
        if (count >= LANES)      \
            CALL(LANES);         \
        else                     \
            CALL(count);         \
    }
#define FORWARD(L) NAME(forward_of_sixteen)(f, sums, width, rows, row, result, L, BIAS, RELU)
#define BACKWARD(L) NAME(backward_of_sixteen)(f, sums, width, rows, row, result, L, KIND)
        if (f->product != NULL) {
            for (int p = 0; p < rows; p++) {
                int32_t *to = f->product + (row + (size_t)p) * (size_t)f->results + (size_t)result;
#define PRODUCT(L)                                                                                                 \
    const Integers acc = load_integers(sums + p * width, L) - load_integers(f->offset + result, L);                \
    memcpy(to, &acc, (size_t)(L) * sizeof *to);
                if (count >= LANES) {
                    PRODUCT(LANES)
                } else {
                    PRODUCT(count)
                }
#undef PRODUCT
            }
        } else if (f->gradient == NULL) {
#define BIAS 1
#define RELU 1
            if (f->bias != NULL && f->relu)
                EACH_WIDTH(FORWARD)
#undef RELU
#define RELU 0
            if (f->bias != NULL && !f->relu)
                EACH_WIDTH(FORWARD)
#undef BIAS
#define BIAS 0
            if (f->bias == NULL && !f->relu)
                EACH_WIDTH(FORWARD)
#undef RELU
#define RELU 1
            if (f->bias == NULL && f->relu)
                EACH_WIDTH(FORWARD)
#undef RELU
#undef BIAS
        } else if (f->slopes != NULL) {
#define KIND SLOPED
            EACH_WIDTH(BACKWARD)
#undef KIND
        } else if (f->mask != NULL) {
#define KIND MASKED
            EACH_WIDTH(BACKWARD)
#undef KIND
        } else if (f->add) {
#define KIND ADDED
            EACH_WIDTH(BACKWARD)
#undef KIND
        } else {
#define KIND PLAIN
            EACH_WIDTH(BACKWARD)
#undef KIND
        }
#undef FORWARD
#undef BACKWARD
#undef EACH_WIDTH
    }
}

/* Codes of a row of weights. */
static void NAME(quantize_row)(const float *v, int n, float inverse, int8_t *codes)
{
    for (int i = 0; i < n; i += LANES) {
        const int lanes = n - i < LANES ? n - i : LANES;
#define ROUND(L)                                                                                           \
    const Floats level = nearest(cut(load_floats(v + i, L) * inverse, all(-127.0f), all(127.0f)));         \
    store_codes((uint8_t *)codes + i, __builtin_convertvector(level, Integers), L);
        if (lanes == LANES) {
            ROUND(LANES)
        } else {
            ROUND(lanes)
        }
#undef ROUND
    }
}

/* Sixteen results' codes of four rows side by side, and added to their sums. */
static void NAME(interleave)(const int8_t *from, size_t stride, int8_t *packed, int32_t *sums)
{
    Integers sum = load_integers(sums, LANES), words = {};
    for (int q = 0; q < 4; q++) {
        const Integers bytes = load_codes((const uint8_t *)from + (size_t)q * stride, LANES);
        words |= bytes << 8 * q;
        sum += (bytes ^ 128) - 128;
    }
    memcpy(packed, &words, sizeof words);
    memcpy(sums, &sum, sizeof sum);
}

/* uint8 of int8 codes. */
static void NAME(copy_flipped)(uint8_t *to, const int8_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)from[i] ^ 128;
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

/* A strip of gradients, of which `readable` are there in each row, as pairs; they are written sixteen at a time, so
   that the last overrun the strip. */
static void NAME(pair_gradients)(const uint16_t *gradient, size_t stride, int rows, int readable, uint16_t *pairs,
                                 double *sums)
{
    const int count = readable < HEIGHT ? readable : HEIGHT;
    Doubles total = {};
    memcpy(&total, sums, (size_t)count * sizeof *sums);
    for (int row = 0; row < rows; row += 2, gradient += 2 * stride, pairs += 2 * HEIGHT) {
        const uint16_t *second = row + 1 < rows ? gradient + stride : NULL;
        if (readable >= LANES)
            total = NAME(pair_of_gradients)(gradient, second, LANES, pairs, total);
        else
            total = NAME(pair_of_gradients)(gradient, second, readable, pairs, total);
    }
    memcpy(sums, &total, (size_t)count * sizeof *sums);
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
    .pair_gradients = NAME(pair_gradients),
    .pairs_tile = NAME(pairs_tile),
};
#undef load_integers
#undef ordered
