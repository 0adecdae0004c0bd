/* The products of linear layers in 8-bit training.

   Forwards and for the input gradient, tiles of 6 rows by 64 results are kept in registers. Rows are copied as uint8, a
   few at a time, so that they stay in the second-level cache, as does a panel of weights for 64 results; the sums of a
   tile become codes or gradients while the products of the next are on their way.

   The weight gradient multiplies two rows at a time, side by side in 32 bits, in tiles of 12 outputs by 32 inputs. Where
   nothing multiplies bfloat16, 32 bits are a float of one row. */
#include "eight_bit_linear.h"
#include "tiers.h"
#include "eight_bit.h"
#include "eight_bit_amx.h"
#include "eight_bit_extremes.h"
#include "eight_bit_steps.h"
#include "eight_bit_tiles.h"
#include "processor.h"

#define HEIGHT 12
#define STRIP 32
/* Outputs of the highest tile, that of AMX. */
#define MOST_HEIGHT 32
/* Rows that are worked on at a time are a multiple of those of every tile. */
#define TOGETHER 96
/* Rows of gradients that are paired at a time, over all outputs: memory is read as it lies. */
#define PAIRED_ROWS 32
/* Pairs of rows that the weight gradient works on at a time. */
#define PAIRS_TOGETHER 512

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
    /* Extremes so far. */
    LaneExtremes ends;
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
    /* Whether weight gradients take less time than torch's products of bfloat16. */
    int fast_gradients;
    /* Of a tile of weight gradients: how many outputs it has, of what its number of pairs is a multiple, and how many
       rows are a pair: 2, or 1 of floats. */
    int height, pairs_multiple, paired;
    /* Pairs of which a tile is taken at a time: those of a strip of inputs fill most of a first-level cache; and how
       many bytes the gradients of those that are worked on take at most, a part of a second-level cache. The sums of a
       strip stay there from one part to the next: only those of further rows go to memory and come back. */
    int part;
    size_t block;
    /* Called before tiles of weight gradients and after them, as of ByteTiles. */
    void (*begin)(void);
    void (*end)(void);
    void (*finish)(Finish *f, const int32_t *sums, int width, int rows, size_t row, int result, int count);
    int32_t (*quantize_row)(const float *v, int n, float inverse, int8_t *codes);
    void (*turn_fours)(const int8_t *from, size_t from_row, int columns, int8_t *to);
    void (*interleave)(const int8_t *const *from, int8_t *packed, int32_t *sums);
    void (*copy_flipped)(uint8_t *to, const uint8_t *from, size_t n, uint8_t flip);
    /* Codes less `zero` of `rows` rows and `count` columns, a strip, as pairs. */
    void (*pair_codes)(const int8_t *codes, size_t stride, int rows, int count, int zero, uint16_t *pairs);
    /* The gradients of a tile in up to PAIRED_ROWS rows, of which `readable` are there in each, as its left operand, and
       added to their sums. */
    void (*pack_gradients)(const uint16_t *gradient, size_t stride, int rows, int readable, uint16_t *left,
                           double *sums);
    void (*pairs_tile)(const uint16_t *g, const uint16_t *x, int pairs, const float *before, size_t before_stride,
                       float factor, float *out, size_t stride);
} Kernels;

#define KERNELS "eight_bit_linear_kernels.h"
#include "each_tier.h"

#ifdef WIDE
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) static void
bf16_pairs_tile(const uint16_t *g, const uint16_t *x, int pairs, const float *before, size_t before_stride,
                float factor, float *out, size_t stride)
{
    __m512 acc[HEIGHT][2];
    _Pragma("GCC unroll 12") for (int j = 0; j < HEIGHT; j++) _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)
        acc[j][v] = before ? _mm512_loadu_ps(before + (size_t)j * before_stride + v * LANES) : _mm512_setzero_ps();
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
/* In tile registers the left operand lies output by output: twice sixteen of them by sixteen pairs. */
__attribute__((target("arch=x86-64-v4"))) static void pack_for_amx(const uint16_t *gradient, size_t stride, int rows,
                                                                    int readable, uint16_t *left, double *sums)
{
    for (int output = 0; output < MOST_HEIGHT && output < readable; output += LANES) {
        uint16_t pairs[PAIRED_ROWS * LANES] __attribute__((aligned(64)));
        const int there = 2 * LANES * ((rows + 1) / 2);
        memset(pairs + there, 0, sizeof pairs - (size_t)there * sizeof *pairs);
        pair_gradients_v4(gradient + output, stride, rows, readable - output, LANES, pairs, sums + output);
        amx_transpose_pairs(pairs, left + output * PAIRED_ROWS);
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
            kernels.fast_gradients = 1;
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
    const Kernels kernels = kernels_of_this_processor();
    return tiles_of_this_processor().fast | (kernels.fast_gradients ? 2 : 0) | (kernels.paired == 1 ? 4 : 0);
}

/* Rows of weights that are quantized at a time: a sixteen of results, or so many terms that what is written is more than
   a line. */
static int packed_together(int transposed) { return transposed ? 4 * LANES : LANES; }

/* Codes of weights [outputs, inputs] in the order in which a product reads them, [results / 16, run / 4, 16, 4], filled
   with zeros, as wide as it reads them, and the sums of each result's. Results are the inputs if `transposed`. `rows` is memory for those that are
   quantized at a time, of inputs rounded up to 64. */
static void pack(const ByteTiles *tiles, const Kernels *kernels, const LinearLayer *layer, float inverse,
                 int transposed, size_t run, int8_t *packed, int32_t *sums, int8_t *rows)
{
    const int outputs = layer->outputs, inputs = layer->inputs, together = packed_together(transposed);
    const size_t stride = rounded_up(inputs, 4 * LANES), size = (size_t)tiles->size;
    if (transposed)
        memset(sums, 0, rounded_up(inputs, LANES) * sizeof *sums);
    for (int first = 0; first < (transposed ? (int)run : outputs); first += together) {
        const int left = outputs - first, count = left < 0 ? 0 : left < together ? left : together;
        for (int r = 0; r < together; r++) {
            int8_t *row = rows + (size_t)r * stride;
            const int there = r < count ? inputs : 0;
            const float *weights = layer->weights + (size_t)(first + r) * (size_t)inputs;
            const int32_t sum = kernels->quantize_row(weights, there, inverse, row);
            memset(row + there, 0, stride - (size_t)there);
            if (!transposed)
                sums[first + r] = sum;
        }
        if (!transposed) {
            int8_t *const to = packed + (size_t)first * run * size;
            kernels->turn_fours(rows, stride, (int)run / 4, packed_for(tiles, to, run));
            finish_packing(tiles, to, run);
            continue;
        }
        const int here = (int)run - first < together ? (int)run - first : together;
        for (int block = 0; block < inputs; block += LANES) {
            int8_t *const all = packed + ((size_t)block * run + (size_t)first * LANES) * size;
            int8_t *to = packed_for(tiles, all, (size_t)here);
            for (int r = 0; r < here; r += 4, to += 4 * LANES) {
                const int8_t *from = rows + (size_t)r * stride + (size_t)block;
                const int8_t *four[4] = {from, from + stride, from + 2 * stride, from + 3 * stride};
                kernels->interleave(four, to, sums + block);
            }
            finish_packing(tiles, all, (size_t)here);
        }
    }
}

/* Where a product works. */
typedef struct {
    /* Terms of a row of codes as a product reads it, how many bytes further the next one is, and how many are worked on
       at a time. */
    size_t run, stride;
    int together;
    /* Terms that are summed before the next tile. */
    int depth;
    size_t packed, copy, sums, end;
} Room;

static Room room_for(const ByteTiles *tiles, int rows, int terms, int results, int inputs, int transposed)
{
    Room r = {.run = rounded_up(terms, tiles->terms)};
    r.stride = row_distance(tiles, r.run * (size_t)tiles->size);
    const int fitting = (int)((size_t)tiles->block / r.stride);
    r.together = fitting < TOGETHER ? TOGETHER : fitting - fitting % TOGETHER;
    r.together = r.together < rows ? r.together : rows;
    r.depth = tiles->depth && tiles->depth < (int)r.run ? tiles->depth : (int)r.run;
    const size_t padded = rounded_up(results, LANES), quantized = rounded_up(inputs, 4 * LANES);
    r.packed = rounded_up((int)(padded * sizeof(int32_t)), 64);
    r.copy = r.packed + padded * r.run * (size_t)tiles->size;
    const size_t packing = (size_t)packed_together(transposed) * quantized;
    const size_t copying = rounded_up((int)((size_t)r.together * r.stride), 64) + 64;
    r.sums = r.copy + copying;
    const size_t summing = r.depth < (int)r.run ? (size_t)r.together / MOST_PIXELS * MOST_SUMS + MOST_SUMS : 0;
    r.end = r.copy + (packing > copying + summing * sizeof(int32_t) ? packing : copying + summing * sizeof(int32_t));
    return r;
}

static Room room_of(const ByteTiles *tiles, const LinearLayer *l, int transposed)
{
    return transposed ? room_for(tiles, l->rows, l->outputs, l->inputs, l->inputs, 1)
                      : room_for(tiles, l->rows, l->inputs, l->outputs, l->inputs, 0);
}

uint64_t eb_linear_room(int rows, int outputs, int inputs, int transposed)
{
    const ByteTiles tiles = tiles_of_this_processor();
    const LinearLayer layer = {.rows = rows, .outputs = outputs, .inputs = inputs};
    return (uint64_t)room_of(&tiles, &layer, transposed).end + 64;
}

/* A tile of sums that are to be finished. */
typedef struct {
    const int32_t *sums;
    int width, rows;
    size_t row;
    int result, count;
} Waiting;

static void finish_waiting(const Kernels *kernels, Finish *finish, Waiting *w)
{
    if (w->sums != NULL)
        kernels->finish(finish, w->sums, w->width, w->rows, w->row, w->result, w->count);
    w->sums = NULL;
}

/* The sums of up to `here` rows of codes, and what becomes of them, for the results from `result` on that are a tile. A
   tile is finished when the products of the next one are on their way: tile registers take long to be read. */
static void multiply_panel(const ByteTiles *tiles, const Kernels *kernels, const Room *r, int kind,
                           const int8_t *weights, const uint8_t *copy, int32_t *sums, int first, int here, int result,
                           Finish *finish, Waiting *waiting)
{
    const int width = LANES << kind, most = tiles->pixels[kind];
    const int count = finish->results - result < width ? finish->results - result : width;
    const int whole = r->depth == (int)r->run;
    const size_t block = r->run * LANES * (size_t)tiles->size;
    for (int term = 0; term < (int)r->run; term += r->depth) {
        const int left = (int)r->run - term, part = left < r->depth ? left : r->depth;
        Tile *const tile = term == 0 ? tiles->once[kind] : tiles->more[kind];
        for (int row = 0; row < here; row += most) {
            const uint8_t *windows[MOST_PIXELS];
            const int there = here - row < most ? here - row : most;
            rows_as_windows(copy + (size_t)row * r->stride + term, r->stride, there, most, windows);
            int32_t *const own = !whole ? sums + (size_t)(row / most) * MOST_SUMS
                                        : waiting->sums == sums ? sums + MOST_SUMS : sums;
            if (waiting->sums == own)
                finish_waiting(kernels, finish, waiting);
            tile(windows, 0, 1, part, weights + (size_t)term * LANES, block, own);
            finish_waiting(kernels, finish, waiting);
            if (part == left)
                *waiting = (Waiting){own, width, there, (size_t)(first + row), result, count};
        }
    }
}

/* The left operand of a product: rows of codes, or of a gradient that is rounded to codes. */
typedef struct {
    int terms;
    const int8_t *codes;
    const uint16_t *gradient;
    /* How many steps of the gradient's codes make 1, and the keys of their rounding. */
    float inverse;
    uint32_t key0, key1;
} Left;

/* `count` of its codes from number `first` on, as uint8, as wide as a product reads them. */
static void copy_codes(const ByteTiles *tiles, const Kernels *kernels, const Left *left, size_t first, size_t count,
                       uint8_t *to)
{
    const uint8_t *const codes = (const uint8_t *)left->codes + (left->codes != NULL ? first : 0);
    if (left->codes != NULL && tiles->size == 1)
        kernels->copy_flipped(to, codes, count, 128);
    else if (left->codes != NULL)
        tiles->widen_codes(codes, count, 128, to);
    else {
        /* In the second half of what they become. */
        uint8_t *const own = to + (size_t)(tiles->size - 1) * count;
        eb_quantize_gradient_from(left->gradient + first, first, count, left->inverse, left->key0, left->key1, 128,
                                  (int8_t *)own);
        if (tiles->size > 1)
            tiles->widen_codes(own, count, 0, to);
    }
}

static void multiply(const LinearLayer *layer, int transposed, const Left *left, float inverse, int32_t zero,
                     Finish *finish)
{
    const size_t terms = (size_t)left->terms;
    const Kernels kernels = kernels_of_this_processor();
    const ByteTiles tiles = tiles_of_this_processor();
    const Room r = room_of(&tiles, layer, transposed);
    uint8_t *const room = layer->room + (64 - (uintptr_t)layer->room % 64) % 64;
    int32_t own[2 * MOST_SUMS] __attribute__((aligned(64)));
    int32_t *const offset = (int32_t *)room;
    int32_t *const sums = r.depth < (int)r.run ? (int32_t *)(room + r.sums) : own;
    int8_t *const packed = (int8_t *)(room + r.packed);
    uint8_t *const copy = room + r.copy;
    /* Rows of weights lie where those of codes will. */
    pack(&tiles, &kernels, layer, inverse, transposed, r.run, packed, offset, (int8_t *)copy);
    /* Codes are read as uint8, 128 more than they are. */
    for (int i = 0; i < finish->results; i++)
        offset[i] = (int32_t)((uint32_t)offset[i] * (uint32_t)(zero + 128));
    finish->offset = offset;
    Waiting waiting = {0};
    if (tiles.begin != NULL)
        tiles.begin((int)r.run);
    for (int first = 0; first < layer->rows; first += r.together) {
        const int here = layer->rows - first < r.together ? layer->rows - first : r.together;
        if (r.stride == terms * (size_t)tiles.size)
            copy_codes(&tiles, &kernels, left, (size_t)first * terms, (size_t)here * terms, copy);
        else
            for (int row = 0; row < here; row++)
                copy_codes(&tiles, &kernels, left, (size_t)(first + row) * terms, terms,
                           copy + (size_t)row * r.stride);
        for (int result = 0; result < finish->results;) {
            const int kind = kind_of_tile(&tiles, (finish->results - result + LANES - 1) / LANES);
            multiply_panel(&tiles, &kernels, &r, kind, packed + (size_t)result * r.run * (size_t)tiles.size, copy, sums,
                           first, here, result, finish, &waiting);
            result += LANES << kind;
        }
    }
    finish_waiting(&kernels, finish, &waiting);
    if (tiles.end != NULL)
        tiles.end();
}

/* The largest magnitude of the weights. */
static float largest_weight(const LinearLayer *layer)
{
    if (!(layer->largest < 0.0f))
        return layer->largest;
    float ends[2] = {INFINITY, -INFINITY};
    eb_extremes(layer->weights, (uint64_t)layer->outputs * (uint64_t)layer->inputs, ends);
    return greatest(-ends[0], ends[1]);
}

/* How many of their steps make 1. */
static float steps_in_one(const LinearLayer *layer, float largest)
{
    return layer->levels ? 1.0f : (float)inverse_step(largest);
}

static float multiply_forward(const LinearLayer *layer, const int8_t *x, int32_t zero, double scale, Finish *finish)
{
    const float largest = largest_weight(layer);
    finish->results = layer->outputs;
    finish->factor = (float)(scale * ((double)largest / 127.0));
    const Left left = {.terms = layer->inputs, .codes = x};
    multiply(layer, 0, &left, steps_in_one(layer, largest), zero, finish);
    return largest;
}

float eb_linear_codes(const LinearLayer *layer, const int8_t *x, int32_t x_zero, double x_scale, const float *bias,
                      int relu, float inverse, int32_t zero, int8_t *codes, float *extremes)
{
    Finish finish = {.bias = bias, .relu = relu, .inverse = inverse, .zero = zero, .codes = codes,
                     .ends = no_extremes()};
    const float largest = multiply_forward(layer, x, x_zero, x_scale, &finish);
    extremes_of_lanes(&finish.ends, extremes);
    return largest;
}

float eb_linear_floats(const LinearLayer *layer, const int8_t *x, int32_t x_zero, double x_scale, const float *bias,
                       float *y)
{
    Finish finish = {.bias = bias, .floats = y};
    return multiply_forward(layer, x, x_zero, x_scale, &finish);
}

float eb_linear_product(const LinearLayer *layer, const int8_t *x, int32_t x_zero, int32_t *acc)
{
    Finish finish = {.product = acc};
    return multiply_forward(layer, x, x_zero, 1.0, &finish);
}

float eb_linear_backward(const LinearLayer *layer, const uint16_t *gradient, float largest, uint32_t key0,
                         uint32_t key1, const int8_t *mask, int32_t masked, const float *slopes, int add,
                         uint16_t *out)
{
    const float of_weights = largest_weight(layer);
    Finish finish = {.results = layer->inputs, .mask = mask, .masked = masked & 255, .slopes = slopes, .add = add,
                     .gradient = out};
    finish.factor = (float)((double)largest / 127.0 * ((double)of_weights / 127.0));
    const Left left = {.terms = layer->outputs, .gradient = gradient, .inverse = (float)inverse_step(largest),
                       .key0 = key0, .key1 = key1};
    multiply(layer, 1, &left, steps_in_one(layer, of_weights), 0, &finish);
    return largest_of_lanes(finish.largest);
}

/* Where the weight gradient works. */
typedef struct {
    /* The most pairs of rows that are worked on at a time, and the most outputs. */
    size_t pairs, outputs;
    /* Where the operands of tiles begin, and sums of a strip of inputs on their way to the next part; before all that
       lie the sums of outputs. */
    size_t x, g, sums, end;
} GradientRoom;

/* The pairs that so many rows make. */
static int pairs_of(const Kernels *kernels, int rows) { return (rows + kernels->paired - 1) / kernels->paired; }

static GradientRoom gradient_room(const Kernels *kernels, int rows, int outputs)
{
    const int all = (int)rounded_up(pairs_of(kernels, rows), kernels->pairs_multiple);
    GradientRoom r = {.pairs = (size_t)(all < PAIRS_TOGETHER ? all : PAIRS_TOGETHER)};
    const size_t output = r.pairs * 2 * sizeof(uint16_t), fitting = kernels->block / output;
    r.outputs = rounded_up(outputs, kernels->height);
    if (fitting < r.outputs)
        r.outputs = fitting - fitting % (size_t)kernels->height;
    r.x = rounded_up(outputs + LANES, 8) * sizeof(double);
    r.g = r.x + r.pairs * 2 * STRIP * sizeof(uint16_t);
    r.sums = rounded_up((int)(r.g + r.outputs * output), 64);
    r.end = r.sums + r.outputs * STRIP * sizeof(float);
    return r;
}

uint64_t eb_linear_gradient_room(int rows, int outputs)
{
    const Kernels kernels = kernels_of_this_processor();
    return (uint64_t)gradient_room(&kernels, rows, outputs).end + 64;
}

/* Two blocks of rows of sums. */
static void copy_sums(const float *from, size_t from_stride, int rows, int count, float *to, size_t to_stride)
{
    for (int j = 0; j < rows; j++)
        memcpy(to + (size_t)j * to_stride, from + (size_t)j * from_stride, (size_t)count * sizeof *to);
}

/* Gradients of `rows` rows and `outputs` outputs as left operands, `pairs` of them, and added to the sums of outputs. */
static void pack_gradient_block(const Kernels *kernels, const uint16_t *gradient, size_t stride, int rows, int outputs,
                                int readable, size_t pairs, uint16_t *g, double *totals)
{
    for (int row = 0; row < rows; row += PAIRED_ROWS) {
        const int left = rows - row < PAIRED_ROWS ? rows - row : PAIRED_ROWS;
        for (int output = 0; output < outputs; output += kernels->height)
            kernels->pack_gradients(gradient + (size_t)row * stride + output, stride, left, readable - output,
                                    g + (size_t)output * 2 * pairs
                                        + (size_t)(row / kernels->paired * 2) * (size_t)kernels->height,
                                    totals + output);
    }
}

/* A strip of the weight gradients of a group of outputs. */
typedef struct {
    int outputs, inputs;
    /* Whether sums of the rows before are there, and what these are multiplied by when those of all rows are. */
    int more;
    float factor;
    float *weights;
    size_t stride;
} Strip;

/* Sums over `pairs` pairs of rows, in parts. */
static void sum_strip(const Kernels *kernels, const GradientRoom *r, const uint16_t *g, const uint16_t *x, int pairs,
                      float *sums, const Strip *strip)
{
    const int most = kernels->height;
    for (int part = 0; part < pairs; part += kernels->part) {
        const int taken = pairs - part < kernels->part ? pairs - part : kernels->part, last = part + taken == pairs;
        for (int output = 0; output < strip->outputs; output += most) {
            const int height = strip->outputs - output < most ? strip->outputs - output : most;
            const int whole = height == most && strip->inputs == STRIP;
            float *const out = strip->weights + (size_t)output * strip->stride;
            float *const own = sums + (size_t)output * STRIP, *const to = last && whole ? out : own;
            const float *before = part > 0 ? own : strip->more ? out : NULL;
            if (before == out && !whole) {
                copy_sums(out, strip->stride, height, strip->inputs, own, STRIP);
                before = own;
            }
            kernels->pairs_tile(g + (size_t)output * 2 * r->pairs + (size_t)part * 2 * (size_t)most,
                                x + (size_t)part * 2 * STRIP, taken, before, before == out ? strip->stride : STRIP,
                                last ? strip->factor : 1.0f, to, to == out ? strip->stride : STRIP);
            if (last && !whole)
                copy_sums(own, STRIP, height, strip->inputs, out, strip->stride);
        }
    }
}

void eb_linear_weight_gradient(const uint16_t *gradient, const int8_t *codes, int32_t zero, int rows, int outputs,
                               int inputs, float factor, float *weights, float *bias, uint8_t *room)
{
    const Kernels kernels = kernels_of_this_processor();
    const GradientRoom r = gradient_room(&kernels, rows, outputs);
    const size_t stride = (size_t)inputs;
    const int together = kernels.paired * (int)r.pairs;
    room += (64 - (uintptr_t)room % 64) % 64;
    double *const totals = (double *)room;
    uint16_t *const x = (uint16_t *)(room + r.x), *const g = (uint16_t *)(room + r.g);
    memset(totals, 0, ((size_t)outputs + LANES) * sizeof *totals);
    if (kernels.begin != NULL)
        kernels.begin();
    for (int group = 0; group < outputs; group += (int)r.outputs)
        for (int first = 0; first < rows; first += together) {
            const int here = rows - first < together ? rows - first : together, there = pairs_of(&kernels, here);
            const int pairs = (int)rounded_up(there, kernels.pairs_multiple);
            Strip strip = {.more = first > 0, .factor = first + here == rows ? factor : 1.0f, .stride = stride};
            strip.outputs = outputs - group < (int)r.outputs ? outputs - group : (int)r.outputs;
            pack_gradient_block(&kernels, gradient + (size_t)first * (size_t)outputs + group, (size_t)outputs, here,
                                strip.outputs, outputs - group, r.pairs, g, totals + group);
            memset(x + (size_t)there * 2 * STRIP, 0, (size_t)(pairs - there) * 2 * STRIP * sizeof *x);
            for (int input = 0; input < inputs; input += STRIP) {
                strip.inputs = inputs - input < STRIP ? inputs - input : STRIP;
                strip.weights = weights + (size_t)group * stride + input;
                kernels.pair_codes(codes + (size_t)first * stride + input, stride, here, strip.inputs, zero, x);
                sum_strip(&kernels, &r, g, x, pairs, (float *)(room + r.sums), &strip);
            }
        }
    if (kernels.end != NULL)
        kernels.end();
    for (int output = 0; output < outputs; output++)
        bias[output] = (float)totals[output];
}
