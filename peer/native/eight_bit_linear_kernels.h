/* The kernels of eight_bit_linear.c, once for each width of register. */
#include "eight_bit_tile_kernels.h"
#include "eight_bit_code_kernels.h"

/* These finish `rows` of a tile for `vectors` of results, of the last of which `lanes` are there; a row is written as it
   lies. */
INLINE void NAME(finish_forward)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result,
                                 int vectors, int lanes, int has_bias, int relu, int floats)
{
    Integers offset[4];
    Floats bias[4];
    for (int v = 0; v < vectors; v++) {
        offset[v] = load_integers(f->offset + result + v * LANES, lanes);
        bias[v] = has_bias ? load_floats(f->bias + result + v * LANES, lanes) : all(0.0f);
    }
    NAME(Grid) grid = NAME(grid)(f->inverse, f->zero, &f->ends);
    /* What is written might be a part of `f`, for all that the compiler knows. */
    const size_t results = (size_t)f->results;
    const float factor = f->factor;
    float *const numbers = f->floats;
    int8_t *const codes = f->codes;
    for (int p = 0; p < rows; p++, sums += width)
        for (int v = 0; v < vectors; v++) {
            const size_t at = (row + (size_t)p) * results + (size_t)(result + v * LANES);
            Floats y = __builtin_convertvector(load_integers(sums + v * LANES, LANES) - offset[v], Floats) * factor;
            if (has_bias)
                y = y + bias[v];
            if (relu)
                y = choose(y < 0.0f, all(0.0f), y);
            if (floats) {
                store_floats(numbers + at, y, lanes);
                continue;
            }
            NAME(code_vector)(&grid, y, codes, at, lanes);
        }
    NAME(keep_extremes)(&grid, &f->ends, lanes);
}

INLINE void NAME(finish_backward)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result,
                                  int vectors, int lanes, int kind)
{
    Integers offset[4];
    for (int v = 0; v < vectors; v++)
        offset[v] = load_integers(f->offset + result + v * LANES, lanes);
    Words largest;
    memcpy(&largest, f->largest, sizeof largest);
    const size_t results = (size_t)f->results;
    const float factor = f->factor, *const slopes = f->slopes;
    const uint8_t *const mask = (const uint8_t *)f->mask;
    const int32_t masked = f->masked;
    uint16_t *const gradient = f->gradient;
    for (int p = 0; p < rows; p++, sums += width)
        for (int v = 0; v < vectors; v++) {
            const size_t at = (row + (size_t)p) * results + (size_t)(result + v * LANES);
            Floats g = __builtin_convertvector(load_integers(sums + v * LANES, LANES) - offset[v], Floats) * factor;
            if (kind == MASKED)
                g = choose(load_codes(mask + at, lanes) == masked, all(0.0f), g);
            if (kind == SLOPED) {
                const Integers index = load_codes(mask + at, lanes) ^ 128;
#ifdef __AVX512F__
                g = g * (Floats)_mm512_i32gather_ps((__m512i)index, slopes, sizeof *slopes);
#else
                Floats slope;
                for (int l = 0; l < LANES; l++)
                    slope[l] = slopes[index[l]];
                g = g * slope;
#endif
            }
            if (kind == ADDED)
                g = load_gradient(gradient + at, lanes) + g;
            largest = larger(store_gradient(gradient + at, g, lanes), largest);
        }
    memcpy(f->largest, &largest, (size_t)lanes * sizeof *f->largest);
}

INLINE void NAME(finish_product)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result,
                                 int vectors, int lanes)
{
    for (int p = 0; p < rows; p++, sums += width)
        for (int v = 0; v < vectors; v++) {
            const int at = result + v * LANES;
            const Integers acc = load_integers(sums + v * LANES, lanes) - load_integers(f->offset + at, lanes);
            memcpy(f->product + (row + (size_t)p) * (size_t)f->results + (size_t)at, &acc,
                   (size_t)lanes * sizeof *f->product);
        }
}

static void NAME(finish_linear)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result, int count)
{
/* What a product is followed by, known to the compiler, as is how many vectors there are. */
#define FINISH(STEP, ...)                                                                 \
    {                                                                                     \
        if (vectors == 4)                                                                \
            NAME(STEP)(f, sums, width, rows, row, result, 4, LANES, ##__VA_ARGS__);       \
        else if (vectors == 2)                                                           \
            NAME(STEP)(f, sums, width, rows, row, result, 2, LANES, ##__VA_ARGS__);       \
        else if (count >= LANES)                                                          \
            NAME(STEP)(f, sums, width, rows, row, result, 1, LANES, ##__VA_ARGS__);       \
        else                                                                              \
            NAME(STEP)(f, sums, width, rows, row, result, 1, count, ##__VA_ARGS__);       \
    }
    for (int vectors; count > 0; count -= vectors * LANES, result += vectors * LANES, sums += vectors * LANES) {
        vectors = count >= 4 * LANES ? 4 : count >= 2 * LANES ? 2 : 1;
        if (f->product != NULL)
            FINISH(finish_product)
        else if (f->floats != NULL && f->bias != NULL)
            FINISH(finish_forward, 1, 0, 1)
        else if (f->floats != NULL)
            FINISH(finish_forward, 0, 0, 1)
        else if (f->gradient == NULL && f->bias != NULL && f->relu)
            FINISH(finish_forward, 1, 1, 0)
        else if (f->gradient == NULL && f->bias != NULL)
            FINISH(finish_forward, 1, 0, 0)
        else if (f->gradient == NULL && f->relu)
            FINISH(finish_forward, 0, 1, 0)
        else if (f->gradient == NULL)
            FINISH(finish_forward, 0, 0, 0)
        else if (f->slopes != NULL)
            FINISH(finish_backward, SLOPED)
        else if (f->mask != NULL)
            FINISH(finish_backward, MASKED)
        else if (f->add)
            FINISH(finish_backward, ADDED)
        else
            FINISH(finish_backward, PLAIN)
    }
#undef FINISH
}

#if defined(__FMA__) && !defined(__AVX512F__)
#define FLOAT_GRADIENTS 1

static void NAME(float_codes)(const int8_t *codes, size_t stride, int rows, int count, int zero, uint16_t *pairs)
{
    float *to = (float *)pairs;
    for (; rows > 0; rows--, codes += stride)
        for (int i = 0; i < STRIP; i += LANES, to += LANES) {
            const int lanes = count - i;
            int64_t eight = 0;
            if (lanes >= LANES)
                memcpy(&eight, codes + i, sizeof eight);
            else if (lanes > 0)
                memcpy(&eight, codes + i, (size_t)lanes);
            const Integers code = (Integers)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(eight)) - zero;
            store_floats(to, __builtin_convertvector(code, Floats), LANES);
        }
}

static void NAME(float_gradients)(const uint16_t *gradient, size_t stride, int rows, int readable, uint16_t *left,
                                  double *sums)
{
    float *to = (float *)left;
    double total[HEIGHT] = {0};
    const int count = readable < HEIGHT ? readable : HEIGHT;
    memcpy(total, sums, (size_t)count * sizeof *sums);
    __m256d sum[HEIGHT / 4];
    _Pragma("GCC unroll 3") for (int i = 0; i < HEIGHT / 4; i++) sum[i] = _mm256_loadu_pd(total + 4 * i);
    for (; rows > 0; rows--, gradient += stride, to += HEIGHT) {
        const Floats low = readable >= LANES ? load_gradient(gradient, LANES) : load_gradient(gradient, readable);
        const int left_over = readable - LANES, more = left_over < HEIGHT - LANES ? left_over : HEIGHT - LANES;
        const Floats high = more == 4  ? load_gradient(gradient + LANES, 4)
                            : more > 0 ? load_gradient(gradient + LANES, more)
                                       : (Floats){};
        store_floats(to, low, LANES);
        store_floats(to + LANES, high, HEIGHT - LANES);
        sum[0] = _mm256_add_pd(sum[0], _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)low)));
        sum[1] = _mm256_add_pd(sum[1], _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)low, 1)));
        sum[2] = _mm256_add_pd(sum[2], _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)high)));
    }
    _Pragma("GCC unroll 3") for (int i = 0; i < HEIGHT / 4; i++) _mm256_storeu_pd(total + 4 * i, sum[i]);
    memcpy(sums, total, (size_t)count * sizeof *sums);
}

/* The same as `pairs_tile`, of floats of a row: four times six outputs by sixteen inputs, whose sums are all that the
   registers hold. A product of a code and a gradient is exact, so that these are the sums of plain C, row after row. */
static void NAME(floats_tile)(const uint16_t *g, const uint16_t *x, int pairs, const float *before,
                              size_t before_stride, float factor, float *out, size_t stride)
{
    enum { HIGH = 6 };
    const __m256 by = _mm256_set1_ps(factor);
    for (int i = 0; i < STRIP; i += SIXTEEN)
        for (int first = 0; first < HEIGHT; first += HIGH) {
            const float *left = (const float *)g + first, *right = (const float *)x + i;
            __m256 acc[HIGH][2];
            _Pragma("GCC unroll 6") for (int j = 0; j < HIGH; j++) _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)
                acc[j][v] = before ? _mm256_loadu_ps(before + (size_t)(first + j) * before_stride + i + v * 8)
                                   : _mm256_setzero_ps();
            for (int p = 0; p < pairs; p++, left += HEIGHT, right += STRIP) {
                const __m256 low = _mm256_loadu_ps(right), high = _mm256_loadu_ps(right + 8);
                _Pragma("GCC unroll 6") for (int j = 0; j < HIGH; j++)
                {
                    const __m256 one = _mm256_broadcast_ss(left + j);
                    acc[j][0] = _mm256_fmadd_ps(one, low, acc[j][0]);
                    acc[j][1] = _mm256_fmadd_ps(one, high, acc[j][1]);
                }
            }
            _Pragma("GCC unroll 6") for (int j = 0; j < HIGH; j++) _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)
                _mm256_storeu_ps(out + (size_t)(first + j) * stride + i + v * 8, _mm256_mul_ps(acc[j][v], by));
        }
}
#else
#ifdef __AVX512F__
/* Sixteen float64. As one vector, compilers keep them in memory. */
typedef struct {
    __m512d low, high;
} NAME(Totals);

INLINE NAME(Totals) NAME(added)(NAME(Totals) totals, Floats v)
{
    const __m512 wide = (__m512)v;
    return (NAME(Totals)){_mm512_add_pd(totals.low, _mm512_cvtps_pd(_mm512_castps512_ps256(wide))),
                          _mm512_add_pd(totals.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(wide, 1)))};
}
#else
typedef double NAME(Totals) __attribute__((vector_size(128)));

INLINE NAME(Totals) NAME(added)(NAME(Totals) totals, Floats v)
{
    return totals + __builtin_convertvector(v, NAME(Totals));
}
#endif

/* Codes less `zero` of two rows as pairs of bfloat16, which holds them exactly; `second` may be NULL. */
INLINE void NAME(pair_of_codes)(const int8_t *first, const int8_t *second, int lanes, int zero, uint16_t *pairs)
{
    const Integers one = (load_codes((const uint8_t *)first, lanes) ^ 128) - 128 - zero;
    Words both = (Words)__builtin_convertvector(one, Floats) >> 16;
    if (second != NULL) {
        const Integers other = (load_codes((const uint8_t *)second, lanes) ^ 128) - 128 - zero;
        both |= (Words)__builtin_convertvector(other, Floats) & 0xFFFF0000u;
    }
    memcpy(pairs, &both, sizeof both);
}

INLINE void NAME(pair_columns)(const int8_t *codes, size_t stride, int rows, int lanes, int zero, uint16_t *pairs)
{
    for (; rows > 1; rows -= 2, codes += 2 * stride, pairs += 2 * STRIP)
        NAME(pair_of_codes)(codes, codes + stride, lanes, zero, pairs);
    if (rows == 1)
        NAME(pair_of_codes)(codes, NULL, lanes, zero, pairs);
}

static void NAME(pair_codes)(const int8_t *codes, size_t stride, int rows, int count, int zero, uint16_t *pairs)
{
    for (int i = 0; i < STRIP; i += LANES)
        if (count - i >= LANES)
            NAME(pair_columns)(codes + i, stride, rows, LANES, zero, pairs + 2 * i);
        else
            NAME(pair_columns)(codes + i, stride, rows, count > i ? count - i : 0, zero, pairs + 2 * i);
}

/* Up to sixteen gradients of two rows as pairs, of which `written`, and added to their sums. */
INLINE NAME(Totals) NAME(pair_of_gradients)(const uint16_t *first, const uint16_t *second, int lanes, int written,
                                            uint16_t *pairs, NAME(Totals) sums)
{
    const Floats one = load_gradient(first, lanes);
    const Floats other = second == NULL ? (Floats){} : load_gradient(second, lanes);
    const Words both = ((Words)one >> 16) | (Words)other;
    memcpy(pairs, &both, (size_t)written * sizeof(uint32_t));
    sums = NAME(added)(sums, one);
    return second == NULL ? sums : NAME(added)(sums, other);
}

/* A strip of `height` gradients, at most sixteen, of which `readable` are there in each row, as pairs. */
INLINE void NAME(pair_gradients)(const uint16_t *gradient, size_t stride, int rows, int readable, int height,
                                 uint16_t *pairs, double *sums)
{
    const int count = readable < height ? readable : height;
    NAME(Totals) total = {};
    memcpy(&total, sums, (size_t)count * sizeof *sums);
    for (; rows > 1; rows -= 2, gradient += 2 * stride, pairs += 2 * height)
        if (readable >= LANES)
            total = NAME(pair_of_gradients)(gradient, gradient + stride, LANES, height, pairs, total);
        else
            total = NAME(pair_of_gradients)(gradient, gradient + stride, readable, height, pairs, total);
    if (rows == 1)
        total = NAME(pair_of_gradients)(gradient, NULL, count, height, pairs, total);
    memcpy(sums, &total, (size_t)count * sizeof *sums);
}

static void NAME(pack_gradients)(const uint16_t *gradient, size_t stride, int rows, int readable, uint16_t *left,
                                 double *sums)
{
    NAME(pair_gradients)(gradient, stride, rows, readable, HEIGHT, left, sums);
}

/* out[j][i] = ((before[j][i] or 0) + the sum over pairs of g[pair][j] * x[pair][i]) * factor; `before` may be NULL. */
static void NAME(pairs_tile)(const uint16_t *g, const uint16_t *x, int pairs, const float *before,
                             size_t before_stride, float factor, float *out, size_t stride)
{
    for (int j = 0; j < HEIGHT; j++) {
        float acc[STRIP] = {0};
        if (before != NULL)
            memcpy(acc, before + (size_t)j * before_stride, sizeof acc);
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

#endif

static const Kernels NAME(kernels) = {
    .finish = NAME(finish_linear),
    .quantize_row = NAME(quantize_row),
    .turn_fours = NAME(turn_fours),
    .interleave = NAME(interleave),
    .copy_flipped = NAME(copy_flipped),
    .height = HEIGHT,
    .pairs_multiple = 1,
#ifdef FLOAT_GRADIENTS
    .fast_gradients = 1,
    .paired = 1,
    .part = 128,
    .block = 256 * 1024,
    .pair_codes = NAME(float_codes),
    .pack_gradients = NAME(float_gradients),
    .pairs_tile = NAME(floats_tile),
#else
    .paired = 2,
    .part = 256,
    .block = 1024 * 1024,
    .pair_codes = NAME(pair_codes),
    .pack_gradients = NAME(pack_gradients),
    .pairs_tile = NAME(pairs_tile),
#endif
};
#undef FLOAT_GRADIENTS
