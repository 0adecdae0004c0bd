/* The products of linear layers in 8-bit training.

   Forwards and for the input gradient, tiles of 6 rows by 64 results are kept in registers. Rows are copied as uint8, a
   few at a time, so that they stay in the second-level cache, as does a panel of weights for 64 results; the sums of a
   tile become codes or gradients before the next is begun.

   The weight gradient multiplies two rows at a time, side by side in 32 bits, in tiles of 12 outputs by 32 inputs. */
#include "eight_bit_linear.h"
#include "tiers.h"
#include "eight_bit_amx.h"
#include "eight_bit_tiles.h"
#include "processor.h"

#define HEIGHT 12
#define STRIP 32
/* Outputs of the highest tile, that of AMX. */
#define MOST_HEIGHT 32
/* Bytes of rows that are worked on at a time: a part of a small second-level cache. */
#define BLOCK_BYTES (256 * 1024)
/* Rows of which the weight gradient is taken at a time. */
#define BLOCK_ROWS 512

typedef double Doubles __attribute__((vector_size(128)));

enum { PLAIN, MASKED, SLOPED, ADDED };

/* What becomes of a product's sums. */
typedef struct {
    int results;
    const int32_t *offset;
    float factor;
    const float *bias;
    int relu;
    float inverse;
    int32_t zero;
    int8_t *codes;
    float *floats;
    /* Extremes so far, ordered as integers. */
    int32_t low[16], high[16];
    int32_t *product;
    const int8_t *mask;
    int32_t masked;
    const float *slopes;
    int add;
    uint16_t *gradient;
    /* Bits of the largest magnitudes so far. */
    uint32_t largest[16];
} Finish;

typedef struct {
    int multiplies_bfloat16;
    /* Of a tile of weight gradients: how many outputs it has, and of what its number of pairs is a multiple. */
    int height, pairs_multiple;
    /* Called before tiles of weight gradients and after them, as of ByteTiles. */
    void (*begin)(void);
    void (*end)(void);
    void (*finish)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result, int count);
    void (*quantize_row)(const float *v, int n, float inverse, int8_t *codes);
    void (*interleave)(const int8_t *const *from, int8_t *packed, int32_t *sums);
    void (*copy_flipped)(uint8_t *to, const uint8_t *from, size_t n, uint8_t flip);
    void (*pair_codes)(const int8_t *first, const int8_t *second, int count, int zero, uint16_t *pairs);
    /* The gradients of a tile, of which `readable` are there in each row, as its left operand; and added to their sums. */
    void (*pack_gradients)(const uint16_t *gradient, size_t stride, int rows, int readable, uint16_t *left,
                           double *sums);
    void (*pairs_tile)(const uint16_t *g, const uint16_t *x, int pairs, int more, float factor, float *out,
                       size_t stride);
} Kernels;

static inline float unordered(int32_t bits)
{
    bits ^= (bits >> 31) & 0x7FFFFFFF;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define KERNELS "eight_bit_linear_kernels.h"
#include "each_tier.h"

#ifdef WIDE
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) static void
bf16_pairs_tile(const uint16_t *g, const uint16_t *x, int pairs, int more, float factor, float *out, size_t stride)
{
    __m512 acc[HEIGHT][2];
    _Pragma("GCC unroll 12") for (int j = 0; j < HEIGHT; j++) _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)
        acc[j][v] = more ? _mm512_loadu_ps(out + (size_t)j * stride + v * LANES) : _mm512_setzero_ps();
    for (int p = 0; p < pairs; p++, g += 2 * HEIGHT, x += 2 * STRIP) {
        const __m512i left = _mm512_loadu_si512(x), right = _mm512_loadu_si512(x + 2 * LANES);
        _Pragma("GCC unroll 12") for (int j = 0; j < HEIGHT; j++)
        {
            int32_t two;
            memcpy(&two, g + 2 * j, sizeof two);
            const __m512i both = _mm512_set1_epi32(two);
            acc[j][0] = _mm512_dpbf16_ps(acc[j][0], (__m512bh)both, (__m512bh)left);
            acc[j][1] = _mm512_dpbf16_ps(acc[j][1], (__m512bh)both, (__m512bh)right);
        }
    }
    const __m512 by = _mm512_set1_ps(factor);
    _Pragma("GCC unroll 12") for (int j = 0; j < HEIGHT; j++) _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)
        _mm512_storeu_ps(out + (size_t)j * stride + v * LANES, _mm512_mul_ps(acc[j][v], by));
}
#endif

#ifdef AMX
/* In tile registers the left operand lies output by output: twice sixteen of them, in blocks of sixteen pairs. */
static void pack_for_amx(const uint16_t *gradient, size_t stride, int rows, int readable, uint16_t *left, double *sums)
{
    for (int output = 0; output < MOST_HEIGHT && output < readable; output += LANES)
        for (int row = 0; row < (int)rounded_up(rows, 2 * LANES); row += 2 * LANES) {
            const int here = rows - row < 2 * LANES ? rows - row : 2 * LANES;
            uint16_t pairs[2 * LANES * LANES] __attribute__((aligned(64))) = {0};
            pair_gradients_v4(gradient + (size_t)row * stride + output, stride, here, readable - output, LANES, pairs,
                              sums + output);
            amx_transpose_pairs(pairs, left + (output * (int)rounded_up(rows, 2 * LANES)) + row * LANES);
        }
}
#endif

static Kernels kernels_of_this_processor(void)
{
    Kernels kernels = kernels_portable;
#ifdef WIDE
    const int tier = tier_of_this_processor();
    if (tier == 1)
        kernels = kernels_v3;
    if (tier == 2) {
        kernels = kernels_v4;
        if (__builtin_cpu_supports("avx512bf16")) {
            kernels.multiplies_bfloat16 = 1;
            kernels.pairs_tile = bf16_pairs_tile;
        }
#ifdef AMX
        if (processor_tier() == TIER_AMX) {
            kernels.height = MOST_HEIGHT;
            kernels.pairs_multiple = LANES;
            kernels.begin = amx_begin_pairs;
            kernels.end = amx_end;
            kernels.pack_gradients = pack_for_amx;
            kernels.pairs_tile = amx_pairs_32_32;
        }
#endif
    }
#endif
    return kernels;
}

int eb_linear_speed(void)
{
    return tiles_of_this_processor().fast | (kernels_of_this_processor().multiplies_bfloat16 ? 2 : 0);
}

void eb_linear_pack(const float *weights, int outputs, int inputs, float inverse, int transposed, int8_t *packed,
                    int32_t *sums, int8_t *rows)
{
    const Kernels kernels = kernels_of_this_processor();
    const size_t terms = rounded_up(transposed ? outputs : inputs, 4), stride = rounded_up(inputs, LANES);
    /* Rows of weights at a time: a sixteen of results, or so many terms that what is written is more than a line. */
    const int together = transposed ? 4 * LANES : LANES;
    if (transposed)
        memset(sums, 0, (size_t)inputs * sizeof *sums);
    for (int first = 0; first < outputs; first += together) {
        const int count = outputs - first < together ? outputs - first : together;
        for (int r = 0; r < together; r++) {
            int8_t *row = rows + (size_t)r * stride;
            const int there = r < count ? inputs : 0;
            kernels.quantize_row(weights + (size_t)(first + r) * (size_t)inputs, there, inverse, row);
            memset(row + there, 0, stride - (size_t)there);
        }
        if (transposed) {
            for (int block = 0; block < inputs; block += LANES) {
                int8_t *to = packed + (size_t)block * terms + (size_t)first * LANES;
                int32_t sum[LANES] = {0};
                const int lanes = inputs - block < LANES ? inputs - block : LANES;
                memcpy(sum, sums + block, (size_t)lanes * sizeof *sum);
                for (int r = 0; r < count; r += 4, to += 4 * LANES) {
                    const int8_t *from = rows + (size_t)r * stride + (size_t)block;
                    const int8_t *four[4] = {from, from + stride, from + 2 * stride, from + 3 * stride};
                    kernels.interleave(four, to, sum);
                }
                memcpy(sums + block, sum, (size_t)lanes * sizeof *sum);
            }
        } else {
            for (size_t k = 0; k < terms; k += 4)
                for (int lane = 0; lane < LANES; lane++, packed += 4)
                    memcpy(packed, rows + (size_t)lane * stride + k, 4);
            for (int r = 0; r < count; r++) {
                int32_t sum = 0;
                for (int i = 0; i < inputs; i++)
                    sum += rows[(size_t)r * stride + (size_t)i];
                sums[first + r] = sum;
            }
        }
    }
}

static int rows_together(int rows, int terms)
{
    const int fitting = (int)(BLOCK_BYTES / rounded_up(terms, 4)), together = fitting < 96 ? 96 : fitting;
    return together < rows ? together : rows;
}

uint64_t eb_linear_room(int rows, int terms) { return (uint64_t)rows_together(rows, terms) * rounded_up(terms, 4) + 64; }

static void multiply(const int8_t *x, int rows, int terms, const int8_t *packed, Finish *finish, uint8_t *copy)
{
    const Kernels kernels = kernels_of_this_processor();
    const ByteTiles tiles = tiles_of_this_processor();
    const size_t run = rounded_up(terms, 4), block = run * LANES;
    const int together = rows_together(rows, terms);
    int32_t sums[MOST_SUMS] __attribute__((aligned(64)));
    if (tiles.begin != NULL)
        tiles.begin((int)run);
    for (int first = 0; first < rows; first += together) {
        const int here = rows - first < together ? rows - first : together;
        const uint8_t *from = (const uint8_t *)x + (size_t)first * (size_t)terms;
        if (run == (size_t)terms)
            kernels.copy_flipped(copy, from, (size_t)here * run, 128);
        else
            for (int r = 0; r < here; r++)
                kernels.copy_flipped(copy + (size_t)r * run, from + (size_t)r * (size_t)terms, (size_t)terms, 128);
        for (int result = 0; result < finish->results;) {
            const int left = (finish->results - result + LANES - 1) / LANES;
            const int kind = kind_of_tile(&tiles, left), width = LANES << kind, most = tiles.pixels[kind];
            const int count = finish->results - result < width ? finish->results - result : width;
            const int8_t *weights = packed + (size_t)(result / LANES) * block;
            for (int row = 0; row < here; row += most) {
                const uint8_t *windows[MOST_PIXELS];
                const int there = here - row < most ? here - row : most;
                for (int p = 0; p < most; p++)
                    windows[p] = copy + (size_t)(row + (p < there ? p : there - 1)) * run;
                tiles.tile[kind](windows, 0, 1, (int)run, weights, block, sums);
                kernels.finish(finish, sums, width, there, (size_t)(first + row), result, count);
            }
            result += width;
        }
    }
    if (tiles.end != NULL)
        tiles.end();
}

void eb_linear_codes(const int8_t *x, int rows, int terms, const int8_t *packed, int results, const int32_t *offset,
                    float factor, const float *bias, int relu, float inverse, int32_t zero, int8_t *codes,
                    float *extremes, uint8_t *room)
{
    Finish finish = {.results = results, .offset = offset, .factor = factor, .bias = bias, .relu = relu,
                     .inverse = inverse, .zero = zero, .codes = codes};
    for (int l = 0; l < LANES; l++) {
        finish.low[l] = INT32_MAX;
        finish.high[l] = INT32_MIN;
    }
    multiply(x, rows, terms, packed, &finish, room);
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int l = 0; l < LANES; l++) {
        least = finish.low[l] < least ? finish.low[l] : least;
        most = finish.high[l] > most ? finish.high[l] : most;
    }
    const float low = unordered(least), high = unordered(most);
    const int wrong = (low != low) | (high != high);
    extremes[0] = wrong ? NAN : low;
    extremes[1] = wrong ? NAN : high;
}

void eb_linear_floats(const int8_t *x, int rows, int terms, const int8_t *packed, int results, const int32_t *offset,
                     float factor, const float *bias, float *y, uint8_t *room)
{
    Finish finish = {.results = results, .offset = offset, .factor = factor, .bias = bias, .floats = y};
    multiply(x, rows, terms, packed, &finish, room);
}

void eb_linear_product(const int8_t *x, int rows, int terms, const int8_t *packed, int results, const int32_t *offset,
                      int32_t *acc, uint8_t *room)
{
    Finish finish = {.results = results, .offset = offset, .product = acc};
    multiply(x, rows, terms, packed, &finish, room);
}

void eb_linear_backward(const int8_t *x, int rows, int terms, const int8_t *packed, int results, const int32_t *offset,
                       float factor, const int8_t *mask, int32_t masked, const float *slopes, int add,
                       uint16_t *gradient, float *largest, uint8_t *room)
{
    Finish finish = {.results = results, .offset = offset, .factor = factor, .mask = mask, .masked = masked & 255,
                     .slopes = slopes, .add = add, .gradient = gradient};
    multiply(x, rows, terms, packed, &finish, room);
    uint32_t most = 0;
    for (int l = 0; l < LANES; l++)
        most = finish.largest[l] > most ? finish.largest[l] : most;
    *largest = widen((uint16_t)most);
}

/* The most pairs that are summed at a time, for which there is room. */
static size_t pairs_together(const Kernels *kernels, int rows)
{
    return rounded_up(((rows < BLOCK_ROWS ? rows : BLOCK_ROWS) + 1) / 2, kernels->pairs_multiple);
}

uint64_t eb_linear_gradient_room(int rows, int outputs)
{
    const Kernels kernels = kernels_of_this_processor();
    const size_t pairs = pairs_together(&kernels, rows);
    return (uint64_t)(((size_t)outputs + LANES) * sizeof(double)
                      + 2 * (pairs * (STRIP + rounded_up(outputs, kernels.height)) + LANES) * sizeof(uint16_t));
}

void eb_linear_weight_gradient(const uint16_t *gradient, const int8_t *codes, int32_t zero, int rows, int outputs,
                               int inputs, float factor, float *weights, float *bias, uint8_t *room)
{
    const Kernels kernels = kernels_of_this_processor();
    const int together = rows < BLOCK_ROWS ? rows : BLOCK_ROWS, most = kernels.height;
    const size_t most_pairs = pairs_together(&kernels, rows), g_output = 2 * most_pairs;
    double *totals = (double *)room;
    uint16_t *x = (uint16_t *)(totals + outputs + LANES), *g = x + most_pairs * 2 * STRIP;
    memset(totals, 0, ((size_t)outputs + LANES) * sizeof *totals);
    if (kernels.begin != NULL)
        kernels.begin();
    for (int first = 0; first < rows; first += together) {
        const int here = rows - first < together ? rows - first : together, there = (here + 1) / 2;
        const int pairs = (int)rounded_up(there, kernels.pairs_multiple);
        const uint16_t *from = gradient + (size_t)first * (size_t)outputs;
        const float by = first + here < rows ? 1.0f : factor;
        for (int output = 0; output < outputs; output += most)
            kernels.pack_gradients(from + output, (size_t)outputs, here, outputs - output,
                                   g + (size_t)output * g_output, totals + output);
        memset(x + (size_t)there * 2 * STRIP, 0, (size_t)(pairs - there) * 2 * STRIP * sizeof *x);
        for (int input = 0; input < inputs; input += STRIP) {
            const int count = inputs - input < STRIP ? inputs - input : STRIP;
            const int8_t *row = codes + (size_t)first * (size_t)inputs + input;
            for (int p = 0; p < there; p++, row += 2 * (size_t)inputs)
                kernels.pair_codes(row, 2 * p + 1 < here ? row + inputs : NULL, count, zero,
                                   x + (size_t)p * 2 * STRIP);
            for (int output = 0; output < outputs; output += most) {
                const int height = outputs - output < most ? outputs - output : most;
                float *out = weights + (size_t)output * (size_t)inputs + input;
                const uint16_t *left = g + (size_t)output * g_output;
                if (height == most && count == STRIP) {
                    kernels.pairs_tile(left, x, pairs, first > 0, by, out, (size_t)inputs);
                    continue;
                }
                float edge[MOST_HEIGHT * STRIP] __attribute__((aligned(64))) = {0};
                for (int j = 0; j < height && first > 0; j++)
                    memcpy(edge + j * STRIP, out + (size_t)j * (size_t)inputs, (size_t)count * sizeof *edge);
                kernels.pairs_tile(left, x, pairs, first > 0, by, edge, STRIP);
                for (int j = 0; j < height; j++)
                    memcpy(out + (size_t)j * (size_t)inputs, edge + j * STRIP, (size_t)count * sizeof *edge);
            }
        }
    }
    if (kernels.end != NULL)
        kernels.end();
    for (int output = 0; output < outputs; output++)
        bias[output] = (float)totals[output];
}
