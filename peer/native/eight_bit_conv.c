/* Convolutions of 8-bit training, without unfolding: with channels innermost, the pixels that one row of a window
   covers are one run of columns * channels bytes, so that a convolution is a product of matrices whose rows overlap.

   Samples are copied, a few at a time, into a frame of filling that stays in the second-level cache; tiles of 6 to 16
   pixels by 16 to 64 results are then kept in registers, with AMX of 32 pixels. The weight gradient multiplies two pixels
   at a time: the same pixel of two samples, side by side in 32 bits, or as floats where nothing multiplies bfloat16.
   Where each result has one channel there is nothing
   to multiply matrices of: sixteen channels of a row of pixels are worked on at a time. */
#include "eight_bit_conv.h"
#include "tiers.h"
#include "eight_bit_amx.h"
#include "eight_bit_tiles.h"
#include "processor.h"

#include <stdlib.h>

/* Bytes of framed samples that are worked on at a time: a part of a small second-level cache. */
#define FRAME_BYTES (256 * 1024)
#define GRADIENT_BYTES (512 * 1024)
/* The most where a number of samples is wanted: half of the second-level cache of processors with AMX, 2 MiB. */
#define MOST_FRAME_BYTES (1024 * 1024)
/* Pixels of a row that are worked on at a time, of one channel for each result. */
#define MOST_IN_ROW 32

/* What becomes of a tile's sums: `count` results from `result` on of one pixel, which lies at `at` of the output. */
typedef struct {
    const int32_t *offset;
    const float *scale, *shift;
    float low, high, factor;
    uint8_t *codes;
    int32_t *lows, *highs;
    int64_t *totals, *squares;
    const uint8_t *mask;
    int masked;
    float *largest;
    const uint16_t *added;
    uint16_t *gradient;
} Output;

/* One tile of the weight gradient: sums[j][result] += a[j] * g[result] over all pixels, for J neighbours in a row of
   the window. */
typedef void PairTile(const uint16_t *a, const uint16_t *g, int pairs, size_t a_pair, int height, size_t a_row,
                      int width, size_t a_pixel, size_t g_pixel, float *sums, size_t stride);

/* What is computed in wide registers, for 1, 2 and 4 sixteens of results and, of the weight gradient, 1 and, if there are
   such tiles, 2. */
typedef struct {
    int32_t (*quantize_row)(const float *v, int n, float inverse, int8_t *codes);
    void (*turn_codes)(const int8_t *from, int rows, int columns, int8_t *to, size_t to_row);
    void (*turn_fours)(const int8_t *from, size_t from_row, int columns, int8_t *to);
    void (*turn_floats)(const float *from, size_t from_row, int rows, int columns, float factor, float *to,
                        size_t to_row);
    void (*interleave)(const int8_t *const *from, int8_t *packed, int32_t *sums);
    void (*copy_flipped)(uint8_t *to, const uint8_t *from, size_t n, uint8_t flip);
    void (*finish_codes)(const Output *o, const int32_t *sums, int width, int pixels, const size_t *at, int result,
                         int count);
    void (*finish_gradient)(const Output *o, const int32_t *sums, int width, int pixels, const size_t *at, int result,
                            int count);
    void (*depthwise)(const uint8_t *x, size_t row, size_t channels, size_t step, const int32_t *weights, size_t wide,
                      int rows, int columns, int pixels, int32_t *sums);
    void (*depthwise_gradient)(const uint8_t *x, size_t row, size_t channels, size_t step, const uint16_t *gradient,
                               size_t results, int zero, int rows, int columns, int pixels, int count, float *sums,
                               size_t wide);
    /* For the weight gradient a pair of samples lies side by side in 32 bits, or in 2 `planes` of floats. */
    int planes;
    void (*pair_codes)(const uint8_t *first, const uint8_t *second, size_t n, int zero, uint16_t *out);
    void (*pair_gradients)(const uint16_t *first, const uint16_t *second, size_t n, uint16_t *out);
    void (*float_codes)(const uint8_t *codes, size_t n, int zero, float *out);
    void (*float_gradients)(const uint16_t *gradient, size_t n, float *out);
    ByteTiles bytes;
    int neighbours[2][3];
    PairTile *pairs[2][3];
} Kernels;

/* Keeps NaN. */
static inline void note_largest(float found, float *largest)
{
    *largest = (found > *largest) | (found != found) ? found : *largest;
}

#define KERNELS "eight_bit_conv_kernels.h"
#include "each_tier.h"

#ifdef WIDE
#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define BF16_PAIR_TILE(J, V)                                                                                        \
    BF16 static void bf16_pairs_##J##_##V(const uint16_t *a, const uint16_t *g, int pairs, size_t a_pair, int height, \
                                          size_t a_row, int width, size_t a_pixel, size_t g_pixel, float *sums,     \
                                          size_t stride)                                                            \
    {                                                                                                               \
        __m512 acc[J][V];                                                                                           \
        _Pragma("GCC unroll 24") for (int j = 0; j < J; j++) _Pragma("GCC unroll 2") for (int v = 0; v < V; v++)    \
            acc[j][v] = _mm512_loadu_ps(sums + (size_t)j * stride + v * LANES);                                     \
        for (int n = 0; n < pairs; n++, a += a_pair)                                                                \
            for (int y = 0; y < height; y++) {                                                                      \
                const uint16_t *here = a + (size_t)y * a_row;                                                       \
                for (int x = 0; x < width; x++, here += a_pixel, g += g_pixel) {                                    \
                    __m512i wide[V];                                                                                \
                    _Pragma("GCC unroll 2") for (int v = 0; v < V; v++) wide[v] =                                   \
                        _mm512_loadu_si512(g + 2 * v * LANES);                                                      \
                    _Pragma("GCC unroll 24") for (int j = 0; j < J; j++)                                            \
                    {                                                                                               \
                        int32_t two;                                                                                \
                        memcpy(&two, here + 2 * j, sizeof two);                                                     \
                        const __m512i both = _mm512_set1_epi32(two);                                                \
                        _Pragma("GCC unroll 2") for (int v = 0; v < V; v++) acc[j][v] =                             \
                            _mm512_dpbf16_ps(acc[j][v], (__m512bh)both, (__m512bh)wide[v]);                         \
                    }                                                                                               \
                }                                                                                                   \
            }                                                                                                       \
        _Pragma("GCC unroll 24") for (int j = 0; j < J; j++) _Pragma("GCC unroll 2") for (int v = 0; v < V; v++)    \
            _mm512_storeu_ps(sums + (size_t)j * stride + v * LANES, acc[j][v]);                                     \
    }

BF16_PAIR_TILE(4, 1)
BF16_PAIR_TILE(24, 1)
BF16_PAIR_TILE(4, 2)
BF16_PAIR_TILE(12, 2)
BF16_PAIR_TILE(8, 2)
BF16_PAIR_TILE(16, 1)
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
            PairTile *fast[2][3] = {{bf16_pairs_24_1, bf16_pairs_16_1, bf16_pairs_4_1},
                                    {bf16_pairs_12_2, bf16_pairs_8_2, bf16_pairs_4_2}};
            memcpy(kernels.pairs, fast, sizeof fast);
        }
    }
#endif
    kernels.bytes = tiles_of_this_processor();
    return kernels;
}

int eb_conv_codes(const float *weights, int outputs, int inputs, int rows, int columns, float inverse, int8_t *codes,
                  int32_t *sums)
{
    const int taps = rows * columns, padded = rounded_up(inputs, 4);
    const Kernels kernels = kernels_of_this_processor();
    int8_t *row = malloc((size_t)inputs * (size_t)taps);
    if (row == NULL)
        return -1;
    for (int o = 0; o < outputs; o++, weights += inputs * taps, codes += taps * padded) {
        /* Of one tap, the order is that of the weights. */
        sums[o] = kernels.quantize_row(weights, inputs * taps, inverse, taps == 1 ? codes : row);
        if (taps > 1)
            kernels.turn_codes(row, inputs, taps, codes, (size_t)padded);
        for (int t = 0; t < taps && inputs < padded; t++)
            memset(codes + t * padded + inputs, 0, (size_t)(padded - inputs));
    }
    free(row);
    return 0;
}

void eb_conv_pack_forward(const int8_t *codes, int outputs, int inputs, int rows, int columns, int8_t *packed)
{
    const int quads = rows * columns * inputs / 4;
    const Kernels kernels = kernels_of_this_processor();
    int block = 0;
    for (; block + LANES <= outputs; block += LANES, codes += 4 * LANES * quads, packed += 4 * LANES * quads)
        kernels.turn_fours(codes, 4 * (size_t)quads, quads, packed);
    for (int k = 0; k < quads && block < outputs; k++)
        for (int lane = 0; lane < LANES; lane++, packed += 4) {
            if (block + lane < outputs)
                memcpy(packed, codes + 4 * ((size_t)lane * (size_t)quads + (size_t)k), 4);
            else
                memset(packed, 0, 4);
        }
}

void eb_conv_pack_backward(const int8_t *codes, int outputs, int inputs, int all_rows, int all_columns,
                           const int32_t *row_taps, int rows, const int32_t *column_taps, int columns, int8_t *packed,
                           int32_t *sums)
{
    const int padded = rounded_up(inputs, 4);
    const size_t stride = (size_t)(all_rows * all_columns * padded);
    const Kernels kernels = kernels_of_this_processor();
    for (int block = 0; block < inputs; block += LANES) {
        const int lanes = padded - block < LANES ? padded - block : LANES;
        int32_t sum[LANES] = {0};
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) {
                const int8_t *tap = codes + (row_taps[r] * all_columns + column_taps[c]) * padded + block;
                for (int o = 0; o < outputs; o += 4, packed += 4 * LANES) {
                    const int8_t *from[4];
                    static const int8_t none[LANES];
                    for (int q = 0; q < 4; q++)
                        from[q] = o + q < outputs ? tap + (size_t)(o + q) * stride : none;
                    if (lanes == LANES)
                        kernels.interleave(from, packed, sum);
                    else
                        for (int lane = 0; lane < LANES; lane++)
                            for (int q = 0; q < 4; q++) {
                                packed[4 * lane + q] = lane < lanes ? from[q][lane] : 0;
                                sum[lane] += packed[4 * lane + q];
                            }
                }
            }
        memcpy(sums + block, sum, (size_t)lanes * sizeof *sum);
    }
}

void eb_conv_pack_depthwise(const int8_t *codes, int channels, int all_rows, int all_columns, const int32_t *row_taps,
                            int rows, const int32_t *column_taps, int columns, int8_t *packed, int32_t *sums)
{
    if (sums != NULL)
        memset(sums, 0, (size_t)channels * sizeof *sums);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            const int row = row_taps == NULL ? r : row_taps[r], column = column_taps == NULL ? c : column_taps[c];
            const int8_t *tap = codes + 4 * (row * all_columns + column);
            for (int i = 0; i < channels; i++, packed++) {
                *packed = tap[4 * (size_t)i * (size_t)(all_rows * all_columns)];
                if (sums != NULL)
                    sums[i] += *packed;
            }
        }
}

/* The frame of a sample: so high and wide that every window lies in it. */
typedef struct {
    int height, width, top, left, kept_height, kept_width;
    size_t bytes;
} Frame;

static Frame frame_of(const ConvShape *s)
{
    Frame f;
    f.top = s->top < 0 ? -s->top : 0;
    f.left = s->left < 0 ? -s->left : 0;
    f.height = (s->result_height - 1) * s->step + s->top + s->rows + f.top;
    f.width = (s->result_width - 1) * s->step + s->left + s->columns + f.left;
    f.kept_height = f.height - f.top < s->height ? f.height - f.top : s->height;
    f.kept_width = f.width - f.left < s->width ? f.width - f.left : s->width;
    f.bytes = (size_t)f.height * (size_t)f.width * (size_t)s->channels;
    return f;
}

/* So many codes of filling, of `size` bytes each. */
static void fill(const ConvShape *s, uint8_t *to, size_t count, size_t size)
{
    memset(to, s->filling, count * size);
    for (size_t i = 1; i < count * size && size == 2; i += 2)
        to[i] = 0;
}

/* A frame in codes of `size` bytes. */
static void fill_frame(const Kernels *kernels, const ConvShape *s, const Frame *f, const uint8_t *x, size_t size,
                       uint8_t *frame)
{
    const size_t c = (size_t)s->channels, row = (size_t)f->width * c, kept = (size_t)f->kept_width * c;
    const size_t left = (size_t)f->left * c;
    for (int y = 0; y < f->height; y++, frame += row * size) {
        const int from = y - f->top;
        if (from < 0 || from >= f->kept_height) {
            fill(s, frame, row, size);
            continue;
        }
        const uint8_t *const codes = x + (size_t)from * (size_t)s->width * c;
        fill(s, frame, left, size);
        if (size == 1)
            kernels->copy_flipped(frame + left, codes, kept, (uint8_t)s->flip);
        else
            kernels->bytes.widen_codes(codes, kept, (uint8_t)s->flip, frame + left * size);
        fill(s, frame + (left + kept) * size, row - left - kept, size);
    }
}

/* A tile of sums that are to become codes or gradients. */
typedef struct {
    const int32_t *sums;
    int width, pixels;
    const size_t *at;
    int result, count;
} Waiting;

static void finish_waiting(const Kernels *kernels, const Output *out, Waiting *w)
{
    if (w->sums != NULL && out->lows != NULL)
        kernels->finish_codes(out, w->sums, w->width, w->pixels, w->at, w->result, w->count);
    else if (w->sums != NULL)
        kernels->finish_gradient(out, w->sums, w->width, w->pixels, w->at, w->result, w->count);
    w->sums = NULL;
}

/* Where the output goes on, so many numbers further. */
static void move_on(Output *out, size_t numbers)
{
    out->codes = out->codes == NULL ? NULL : out->codes + numbers;
    out->mask = out->mask == NULL ? NULL : out->mask + numbers;
    out->added = out->added == NULL ? NULL : out->added + numbers;
    out->gradient = out->gradient == NULL ? NULL : out->gradient + numbers;
}

/* The same as `convolve`, of one channel for each result. */
static int convolve_depthwise(const ConvShape *s, const uint8_t *x, const int8_t *taps, const Output *out)
{
    const Kernels kernels = kernels_of_this_processor();
    const Frame f = frame_of(s);
    const size_t channels = (size_t)s->channels, row = (size_t)f.width * channels, step = (size_t)s->step * channels;
    const size_t wide = rounded_up(s->channels, LANES), count = (size_t)(s->rows * s->columns);
    uint8_t *frame = malloc(f.bytes + LANES);
    int32_t *weights = calloc(count * wide, sizeof *weights);
    if (frame == NULL || weights == NULL) {
        free(frame);
        free(weights);
        return -1;
    }
    for (size_t t = 0; t < count; t++)
        for (size_t c = 0; c < channels; c++)
            weights[t * wide + c] = taps[t * channels + c];

    int32_t sums[MOST_IN_ROW * LANES] __attribute__((aligned(64)));
    Output here = *out;
    const size_t out_sample = (size_t)s->out_height * (size_t)s->out_width * channels;
    for (int n = 0; n < s->samples; n++, x += (size_t)s->height * (size_t)s->width * channels) {
        fill_frame(&kernels, s, &f, x, 1, frame);
        for (int y = 0; y < s->result_height; y++)
            for (int col = 0; col < s->result_width; col += MOST_IN_ROW) {
                const int pixels = s->result_width - col < MOST_IN_ROW ? s->result_width - col : MOST_IN_ROW;
                const uint8_t *start = frame + (size_t)(y * s->step + s->top + f.top) * row
                                       + (size_t)(col * s->step + s->left + f.left) * channels;
                size_t at[MOST_IN_ROW];
                for (int p = 0; p < pixels; p++)
                    at[p] = ((size_t)(y * s->out_step + s->out_top) * (size_t)s->out_width
                             + (size_t)((col + p) * s->out_step + s->out_left))
                            * channels;
                for (int result = 0; result < s->results; result += LANES) {
                    const int lanes = s->results - result < LANES ? s->results - result : LANES;
                    kernels.depthwise(start + result, row, channels, step, weights + result, wide, s->rows, s->columns,
                                      pixels, sums);
                    finish_waiting(&kernels, &here, &(Waiting){sums, LANES, pixels, at, result, lanes});
                }
            }
        move_on(&here, out_sample);
    }
    free(frame);
    free(weights);
    return 0;
}

/* Pixels in the order in which tiles take them: where each of `samples` framed samples' windows starts, and where its
   results lie, in codes. Of each `even` samples, if it is not 0, the same pixel comes in a row: these are `frame` codes
   apart. */
static void lay_pixels(const ConvShape *s, const Frame *f, size_t frame, int samples, int even, size_t *starts,
                       size_t *at)
{
    const size_t channels = (size_t)s->channels, row = (size_t)f->width * channels;
    const size_t results = (size_t)s->results, out_sample = (size_t)s->out_height * (size_t)s->out_width * results;
    for (int first = 0; first < samples;) {
        const int together = even > 0 && samples - first >= even ? even : 1;
        for (int y = 0; y < s->result_height; y++) {
            size_t start = (size_t)first * frame + (size_t)(y * s->step + s->top + f->top) * row
                           + (size_t)(s->left + f->left) * channels;
            size_t place = (size_t)first * out_sample
                           + ((size_t)(y * s->out_step + s->out_top) * (size_t)s->out_width + (size_t)s->out_left)
                                 * results;
            const size_t next = (size_t)s->step * channels, next_place = (size_t)s->out_step * results;
            for (int col = 0; col < s->result_width; col++, start += next, place += next_place)
                for (int n = 0; n < together; n++) {
                    *starts++ = start + (size_t)n * frame;
                    *at++ = place + (size_t)n * out_sample;
                }
        }
        first += together;
    }
}

static int convolve(const ConvShape *s, const uint8_t *x, const int8_t *packed, const Output *out)
{
    if (s->depthwise)
        return convolve_depthwise(s, x, packed, out);
    const Kernels kernels = kernels_of_this_processor();
    const Frame f = frame_of(s);
    const size_t sample = (size_t)s->height * (size_t)s->width * (size_t)s->channels, size = (size_t)kernels.bytes.size;
    const size_t row_bytes = (size_t)f.width * (size_t)s->channels * size;
    const int run = s->columns * s->channels, area = s->result_height * s->result_width;
    const size_t block = (size_t)s->rows * (size_t)run * LANES;
    int together = (int)(FRAME_BYTES / (f.bytes * size)), even = kernels.bytes.even;
    /* Windows of wide rows lie at one distance as they are, and so do those of rows, and of samples, without a gap. */
    const int apart = s->result_width < f.width || (area % LANES != 0 && s->result_height < f.height);
    if (even == 0 || s->result_width % even == 0 || !apart || s->samples < even
        || f.bytes * (size_t)even > MOST_FRAME_BYTES)
        even = 0;
    else
        together = together < even ? even : together / even * even;
    together = together < 1 ? 1 : together < s->samples ? together : s->samples;
    /* Frames an odd number of lines apart: lines a power of two apart would take each other's places in the cache. */
    const size_t frame = even == 0 ? f.bytes * size : rounded_up((int)f.bytes, 64) | 64;

    /* A tile is finished when the products of the next one are on their way: tile registers take long to be read. */
    int32_t sums[2 * MOST_SUMS] __attribute__((aligned(64)));
    Waiting waiting = {0};
    const size_t pixels_together = (size_t)together * (size_t)area;
    /* Tiles read rows of a line of the cache each, and up to 63 bytes past the end of a window. Behind the frames lie the
       weights of a tile, where they are widened. */
    const size_t framed = ((size_t)together * frame + 2 * 64) / 64 * 64;
    const size_t widened = size > 1 ? block * size << (kernels.bytes.kinds - 1) : 0;
    uint8_t *room = malloc(framed + widened + 64);
    size_t *starts = malloc(2 * pixels_together * sizeof *starts);
    if (room == NULL || starts == NULL) {
        free(room);
        free(starts);
        return -1;
    }
    uint8_t *const frames = room + (-(uintptr_t)room & 63);
    int8_t *const wide = (int8_t *)(frames + framed);
    size_t *at = starts + pixels_together;
    int laid = 0;

    if (kernels.bytes.begin != NULL)
        kernels.bytes.begin(run);
    Output here = *out;
    const size_t out_sample = (size_t)s->out_height * (size_t)s->out_width * (size_t)s->results;
    for (int first = 0; first < s->samples; first += together) {
        const int samples = s->samples - first < together ? s->samples - first : together;
        for (int n = 0; n < samples; n++)
            fill_frame(&kernels, s, &f, x + (size_t)(first + n) * sample, size, frames + (size_t)n * frame);
        /* With samples in a row, those that are left at last have an order of their own. */
        if (samples > laid || (even > 0 && samples < laid))
            lay_pixels(s, &f, frame / size, samples, even, starts, at);
        laid = samples;
        const size_t pixels = (size_t)samples * (size_t)area;
        for (int result = 0; result < s->results;) {
            const int left = rounded_up(s->results - result, LANES) / LANES;
            const int kind = kind_of_tile(&kernels.bytes, left), width = LANES << kind;
            const int most = kernels.bytes.pixels[kind];
            const int count = s->results - result < width ? s->results - result : width;
            const int8_t *weights = packed + (size_t)(result / LANES) * block;
            if (size > 1) {
                kernels.bytes.widen_weights(weights, (block << kind) / (4 * LANES), wide);
                weights = wide;
            }
            for (size_t pixel = 0; pixel < pixels; pixel += (size_t)most) {
                const uint8_t *windows[MOST_PIXELS];
                const int there = pixels - pixel < (size_t)most ? (int)(pixels - pixel) : most;
                for (int p = 0; p < most; p++)
                    windows[p] = frames + starts[pixel + (size_t)(p < there ? p : there - 1)] * size;
                int32_t *const own = waiting.sums == sums ? sums + MOST_SUMS : sums;
                kernels.bytes.tile[kind](windows, row_bytes, s->rows, run, weights, block * size, own);
                finish_waiting(&kernels, &here, &waiting);
                waiting = (Waiting){own, width, there, at + pixel, result, count};
            }
            result += width;
        }
        finish_waiting(&kernels, &here, &waiting);
        move_on(&here, (size_t)samples * out_sample);
    }
    if (kernels.bytes.end != NULL)
        kernels.bytes.end();
    free(room);
    free(starts);
    return 0;
}

int eb_conv_forward(const ConvShape *shape, const uint8_t *x, const int8_t *packed, const int32_t *offset,
                    const float *scale, const float *shift, float low, float high, uint8_t *codes, int32_t *lows,
                    int32_t *highs, int64_t *totals, int64_t *squares)
{
    const Output out = {.offset = offset, .scale = scale, .shift = shift, .low = low, .high = high, .codes = codes,
                        .lows = lows, .highs = highs, .totals = totals, .squares = squares};
    return convolve(shape, x, packed, &out);
}

int eb_conv_backward(const ConvShape *shape, const int8_t *x, const int8_t *packed, const int32_t *offset,
                     float factor, const uint16_t *added, const uint8_t *mask, int masked, uint16_t *gradient,
                     float *largest)
{
    const Output out = {.offset = offset, .factor = factor, .added = added, .mask = mask, .masked = masked,
                        .gradient = gradient, .largest = largest};
    return convolve(shape, (const uint8_t *)x, packed, &out);
}

/* Sums [taps, channels, results] as weights [results, inputs, taps], sixteen results of a few inputs at a time: what a
   run of weights is read from then lies in the first-level cache. */
static void spread(const Kernels *kernels, const float *sums, size_t stride, const ConvShape *s, int inputs,
                   float factor, float *weights)
{
    enum { PART = 8192 };
    float part[PART];
    const int taps = s->rows * s->columns, most = PART / (LANES * taps);
    const size_t size = (size_t)inputs * (size_t)taps;
    for (int block = 0; block < s->results; block += LANES) {
        const int lanes = s->results - block < LANES ? s->results - block : LANES;
        float *out = weights + (size_t)block * size;
        for (int first = 0; first < inputs;) {
            const int there = most < 1 ? 1 : inputs - first < most ? inputs - first : most;
            const float *from = sums + (size_t)first * stride + block;
            if (most > 0) {
                for (int t = 0; t < taps; t++)
                    for (int i = 0; i < there; i++)
                        memcpy(part + (i * taps + t) * LANES, from + (size_t)(t * s->channels + i) * stride,
                               LANES * sizeof *part);
                kernels->turn_floats(part, LANES, there * taps, lanes, factor, out, size);
            } else {
                kernels->turn_floats(from, (size_t)s->channels * stride, taps, lanes, factor, out, size);
            }
            out += there * taps;
            first += there;
        }
    }
}

/* The same as `eb_conv_weight_gradient`, of one channel for each result. */
static int depthwise_weight_gradient(const ConvShape *s, const uint8_t *x, const uint16_t *gradient, float factor,
                                     float *weights)
{
    const Kernels kernels = kernels_of_this_processor();
    const Frame f = frame_of(s);
    const size_t channels = (size_t)s->channels, row = (size_t)f.width * channels, step = (size_t)s->step * channels;
    const size_t wide = rounded_up(s->channels, LANES), count = (size_t)(s->rows * s->columns);
    const size_t result_row = (size_t)s->result_width * channels;
    uint8_t *frame = malloc(f.bytes + LANES);
    float *sums = calloc(2 * count * wide, sizeof *sums);
    if (frame == NULL || sums == NULL) {
        free(frame);
        free(sums);
        return -1;
    }
    /* Samples are added up one by one, so that roundings do not grow with the number of pixels. */
    float *all = sums + count * wide;
    for (int n = 0; n < s->samples; n++, x += (size_t)s->height * (size_t)s->width * channels) {
        fill_frame(&kernels, s, &f, x, 1, frame);
        memset(sums, 0, count * wide * sizeof *sums);
        for (int y = 0; y < s->result_height; y++, gradient += result_row)
            for (int result = 0; result < s->results; result += LANES) {
                const int lanes = s->results - result < LANES ? s->results - result : LANES;
                const uint8_t *start = frame + (size_t)(y * s->step + s->top + f.top) * row
                                       + (size_t)(s->left + f.left) * channels + (size_t)result;
                kernels.depthwise_gradient(start, row, channels, step, gradient + result, channels, s->filling, s->rows,
                                           s->columns, s->result_width, lanes, sums + result, wide);
            }
        for (size_t i = 0; i < count * wide; i++)
            all[i] += sums[i];
    }
    for (size_t c = 0; c < channels; c++)
        for (size_t t = 0; t < count; t++)
            weights[c * count + t] = all[t * wide + c] * factor;
    free(frame);
    free(sums);
    return 0;
}

#ifdef AMX
#define TILE_NUMBERS ((size_t)LANES * LANES)

/* How the pairs of samples lie whose products tile registers add up. A register takes sixteen pairs at one distance
   from each other, of sixteen channels each: pixels of a row of results, of `side` pairs of samples side by side, so
   that rows of 1, 2, 4 and 8 pixels fill registers as well. Then the columns of a frame lie in `phases`, those that
   are a step apart one after the other, and each tap has its chunks of sixteen channels. Fewer channels than that, of
   a single pair of samples, lie as they do elsewhere: chunks are cut from a whole row of a window. Distances count
   pairs. */
typedef struct {
    int side, phases, runs, sixteens, chunks, blocks;
    size_t column, row, sixteen, group, step;
} PairFrame;

static PairFrame pair_frame(const ConvShape *s, const Frame *f, int side)
{
    PairFrame p = {.side = side, .phases = side > 1 ? s->step : 1, .runs = side == 1 && s->channels < LANES};
    const size_t lanes = s->channels < LANES ? (size_t)s->channels : LANES;
    p.sixteens = (s->channels + LANES - 1) / LANES;
    p.chunks = s->rows * (p.runs ? (s->columns * s->channels + LANES - 1) / LANES : s->columns * p.sixteens);
    p.blocks = (s->result_width * side + LANES - 1) / LANES;
    p.column = (size_t)side * lanes;
    p.row = rounded_up(f->width, p.phases) * p.column;
    p.sixteen = (size_t)f->height * p.row;
    p.group = (size_t)p.sixteens * p.sixteen;
    p.step = side > 1 ? lanes : (size_t)s->step * lanes;
    return p;
}

/* Where column x of a frame lies in its row. */
static size_t column_at(const PairFrame *p, const Frame *f, int x)
{
    const size_t phase = (size_t)(x % p->phases) * (rounded_up(f->width, p->phases) / (size_t)p->phases);
    return (phase + (size_t)(x / p->phases)) * p->column;
}

static size_t bytes_of_group(const PairFrame *p, const ConvShape *s)
{
    const size_t tiles = (size_t)(s->result_height * p->blocks) * (rounded_up(s->results, LANES) / LANES);
    return (p->group + tiles * TILE_NUMBERS) * sizeof(uint32_t);
}

/* The frame whose products are the fewest, with as few pairs side by side as possible. */
static PairFrame best_pair_frame(const ConvShape *s, const Frame *f, int pairs, size_t most_bytes)
{
    PairFrame best = pair_frame(s, f, 1);
    int64_t least = INT64_MAX;
    for (int side = 1; side <= LANES && side < 2 * pairs; side *= 2) {
        const PairFrame p = pair_frame(s, f, side);
        const int64_t products = (int64_t)p.chunks * p.blocks * ((pairs + side - 1) / side);
        if (products < least && (side == 1 || bytes_of_group(&p, s) <= most_bytes)) {
            least = products;
            best = p;
        }
    }
    return best;
}

/* Where each chunk begins in a frame. */
static void lay_chunks(const ConvShape *s, const Frame *f, const PairFrame *p, size_t *at)
{
    const int in_row = p->chunks / s->rows;
    for (int chunk = 0; chunk < p->chunks; chunk++) {
        const int r = chunk / in_row, part = chunk % in_row;
        const int column = p->runs ? 0 : part / p->sixteens, sixteen = p->runs ? 0 : part % p->sixteens;
        at[chunk] = (size_t)sixteen * p->sixteen + (size_t)(r + s->top + f->top) * p->row
                    + column_at(p, f, column + s->left + f->left) + (p->runs ? (size_t)part * LANES : 0);
    }
}

/* Sums [chunks, results, 16] as weights [results, inputs, taps]. */
static void spread_chunks(const Kernels *kernels, const float *sums, size_t chunk_sums, const ConvShape *s,
                          const PairFrame *p, int inputs, float factor, float *weights)
{
    const int taps = s->rows * s->columns;
    const size_t size = (size_t)inputs * (size_t)taps;
    if (p->runs) {
        const int c = s->channels, in_row = p->chunks / s->rows;
        for (int result = 0; result < s->results; result++, weights += size)
            for (int r = 0; r < s->rows; r++)
                for (int column = 0; column < s->columns; column++)
                    for (int i = 0; i < inputs; i++) {
                        const int number = column * c + i;
                        const size_t chunk = (size_t)(r * in_row + number / LANES);
                        weights[i * taps + r * s->columns + column] =
                            sums[chunk * chunk_sums + (size_t)(result * LANES + number % LANES)] * factor;
                    }
        return;
    }
    /* Sixteen results at a time: neither what is read nor what is written is then far from what was before. */
    for (int block = 0; block < s->results; block += LANES)
        for (int first = 0; first < inputs; first += LANES) {
            const float *from = sums + (size_t)(first / LANES) * chunk_sums + (size_t)block * LANES;
            const int there = inputs - first < LANES ? inputs - first : LANES;
            for (int result = block; result < s->results && result < block + LANES; result++, from += LANES)
                kernels->turn_floats(from, (size_t)p->sixteens * chunk_sums, taps, there, factor,
                                     weights + (size_t)result * size + (size_t)first * (size_t)taps, (size_t)taps);
        }
}

/* The codes of a group of pairs, from `sample` on. Where samples are missing there stays what was there: their
   gradients are zero. */
static void fill_group(const ConvShape *s, const Frame *f, const PairFrame *p, const uint8_t *x, int sample,
                       uint16_t *a)
{
    const size_t c = (size_t)s->channels, row = (size_t)s->width * c, next = (size_t)s->height * row;
    const size_t pair = 2 * p->column / (size_t)p->side;
    for (int n = sample; n < sample + 2 * p->side && n < s->samples; n += 2, a += pair)
        for (int y = 0; y < f->kept_height; y++)
            for (int phase = 0; phase < p->phases && phase < f->kept_width; phase++) {
                const uint8_t *first = x + (size_t)n * next + (size_t)y * row + (size_t)phase * c;
                const uint8_t *second = n + 1 < s->samples ? first + next : NULL;
                uint16_t *to = a + 2 * ((size_t)(y + f->top) * p->row + column_at(p, f, phase + f->left));
                const int pixels = (f->kept_width - phase + p->phases - 1) / p->phases;
                amx_pair_codes(first, second, (size_t)p->phases * c, pixels, s->channels, s->filling, to,
                               2 * p->column, 2 * p->sixteen);
            }
}

/* The gradients of a group of pairs, from `sample` on, as left tiles. */
static void fill_gradients(const ConvShape *s, const PairFrame *p, const uint16_t *gradient, int sample, uint16_t *g)
{
    const size_t results = (size_t)s->results, area = (size_t)(s->result_height * s->result_width);
    const size_t next = rounded_up(s->results, LANES) * 2 * LANES;
    for (int y = 0; y < s->result_height; y++)
        for (int b = 0; b < p->blocks; b++, g += next) {
            const uint16_t *first[LANES] = {0}, *second[LANES] = {0};
            for (int i = 0; i < LANES; i++) {
                const int x = (b * LANES + i) / p->side, n = sample + 2 * ((b * LANES + i) % p->side);
                const size_t pixel = ((size_t)n * area + (size_t)(y * s->result_width + x)) * results;
                if (x < s->result_width && n < s->samples)
                    first[i] = gradient + pixel;
                if (x < s->result_width && n + 1 < s->samples)
                    second[i] = gradient + pixel + area * results;
            }
            amx_pair_gradients(first, second, s->results, g);
        }
}

/* Zeros that begin on a line of the cache, as the rows of a tile do then. */
static void *aligned_zeros(size_t bytes)
{
    const size_t whole = (bytes + 63) / 64 * 64;
    void *found = aligned_alloc(64, whole);
    return found == NULL ? NULL : memset(found, 0, whole);
}

/* The same as `eb_conv_weight_gradient`, in the tile registers of AMX. A product takes sixteen cycles whatever counts
   of its sixteen channels, and sixteen pairs by sixteen results of each of them are as many instructions for the other
   kernels: four channels, which are the fewest, are reason enough. */
static int weight_gradient_in_tiles(const ConvShape *s, const uint8_t *x, const uint16_t *gradient, int inputs,
                                    float factor, float *weights)
{
    const Frame f = frame_of(s);
    const int pairs = (s->samples + 1) / 2, sixteens = rounded_up(s->results, LANES) / LANES;
    const size_t taps = (size_t)(s->rows * s->columns), chunk_sums = TILE_NUMBERS * (size_t)sixteens;
    /* Sums that do not stay in the cache are read and written once for all samples. */
    const int all = taps * rounded_up(s->channels, LANES) / LANES * chunk_sums * sizeof(float) > GRADIENT_BYTES / 2;
    const PairFrame p = best_pair_frame(s, &f, pairs, all ? SIZE_MAX : 2 * GRADIENT_BYTES);
    const int groups = (pairs + p.side - 1) / p.side, fitting = (int)(GRADIENT_BYTES / bytes_of_group(&p, s));
    const int together = all || fitting > groups ? groups : fitting < 1 ? 1 : fitting;
    const size_t g_block = 2 * chunk_sums, g_group = (size_t)(s->result_height * p.blocks) * g_block;
    /* Behind the last row, a tile reads up to fifteen pixels and fifteen channels that do not count. */
    const size_t behind = LANES * p.step + LANES;

    uint16_t *a = aligned_zeros(((size_t)together * p.group + behind) * sizeof(uint32_t));
    uint16_t *g = aligned_zeros((size_t)together * g_group * sizeof *g);
    float *sums = aligned_zeros((size_t)p.chunks * chunk_sums * sizeof *sums);
    size_t *at = malloc((size_t)p.chunks * sizeof *at);
    int status = -1;
    if (a == NULL || g == NULL || sums == NULL || at == NULL)
        goto end;
    const Kernels kernels = kernels_of_this_processor();
    lay_chunks(s, &f, &p, at);
    PairRows rows = {.height = s->result_height, .blocks = p.blocks, .x_group = 2 * p.group,
                     .x_row = 2 * (size_t)s->step * p.row, .x_pair = 2 * p.step, .g_block = g_block};
    amx_begin_pairs();
    for (int first = 0; first < groups; first += together) {
        rows.groups = groups - first < together ? groups - first : together;
        for (int n = 0; n < rows.groups; n++) {
            fill_group(s, &f, &p, x, 2 * (first + n) * p.side, a + 2 * (size_t)n * p.group);
            fill_gradients(s, &p, gradient, 2 * (first + n) * p.side, g + (size_t)n * g_group);
        }
        /* Chunks outermost: what they read is small, and read again for all results. */
        for (int chunk = 0; chunk < p.chunks; chunk += 2) {
            const uint16_t *second = chunk + 1 < p.chunks ? a + 2 * at[chunk + 1] : NULL;
            float *to = sums + (size_t)chunk * chunk_sums;
            for (int j = 0; j < sixteens; j += 2)
                amx_pairs_of_rows(&rows, g + 2 * TILE_NUMBERS * (size_t)j, j + 1 < sixteens ? 2 : 1, a + 2 * at[chunk],
                                  second, to + TILE_NUMBERS * (size_t)j, chunk_sums);
        }
    }
    amx_end();
    spread_chunks(&kernels, sums, chunk_sums, s, &p, inputs, factor, weights);
    status = 0;
end:
    free(a);
    free(g);
    free(sums);
    free(at);
    return status;
}
#endif

/* `n` codes less `zero` of a pair of samples, or of one if `second` is NULL; a plane lies `plane` from the other. What is
   there of a second sample that is missing meets gradients that are zero. */
static void pair_row(const Kernels *kernels, const uint8_t *first, const uint8_t *second, size_t n, int zero,
                     uint16_t *to, size_t plane)
{
    if (kernels->planes == 1) {
        kernels->pair_codes(first, second, n, zero, to);
        return;
    }
    kernels->float_codes(first, n, zero, (float *)to);
    if (second != NULL)
        kernels->float_codes(second, n, zero, (float *)(to + plane));
}

static void pair_gradient_row(const Kernels *kernels, const uint16_t *first, const uint16_t *second, size_t n,
                              uint16_t *to, size_t plane)
{
    if (kernels->planes == 1) {
        kernels->pair_gradients(first, second, n, to);
        return;
    }
    kernels->float_gradients(first, n, (float *)to);
    if (second != NULL)
        kernels->float_gradients(second, n, (float *)(to + plane));
    else
        memset(to + plane, 0, n * sizeof(float));
}

/* Whether the next tile is of two sixteens of results. */
static int takes_two(const Kernels *kernels, int left) { return left >= 2 * LANES && kernels->pairs[1][0] != NULL; }

int eb_conv_weight_gradient(const ConvShape *s, const uint8_t *x, const uint16_t *gradient, int inputs, float factor,
                            float *weights)
{
    if (s->depthwise)
        return depthwise_weight_gradient(s, x, gradient, factor, weights);
#ifdef AMX
    if (processor_tier() == TIER_AMX)
        return weight_gradient_in_tiles(s, x, gradient, inputs, factor, weights);
#endif
    const Kernels kernels = kernels_of_this_processor();
    const Frame f = frame_of(s);
    const int results = rounded_up(s->results, LANES), run = s->columns * s->channels;
    const size_t c = (size_t)s->channels, a_row = 2 * (size_t)f.width * c, a_plane = (size_t)f.height * a_row;
    const size_t area = (size_t)s->result_height * (size_t)s->result_width, g_pixel = 2 * (size_t)results;
    const size_t planes = (size_t)kernels.planes, a_pair = planes * a_plane, g_pair = planes * area * g_pixel, pair_bytes = 2 * (a_pair + g_pair), stride = (size_t)results;
    const size_t sums_size = (size_t)(s->rows * run) * stride;
    const int pairs = (s->samples + 1) / 2;
    const int most = kernels.neighbours[takes_two(&kernels, results)][0];
    /* Sums that do not stay in the cache are read and written once for all samples. */
    int together = sums_size * sizeof(float) > GRADIENT_BYTES / 2 ? pairs : (int)(GRADIENT_BYTES / pair_bytes);
    together = together < 1 ? 1 : together < pairs ? together : pairs;

    uint16_t *a = calloc((size_t)together * a_pair + 64, sizeof *a);
    uint16_t *g = calloc((size_t)together * g_pair + 64, sizeof *g);
    float *sums = calloc(sums_size, sizeof *sums);
    if (a == NULL || g == NULL || sums == NULL) {
        free(a);
        free(g);
        free(sums);
        return -1;
    }
    for (int first = 0; first < pairs; first += together) {
        const int count = pairs - first < together ? pairs - first : together;
        for (int n = 0; n < count; n++) {
            const int sample = 2 * (first + n), alone = sample + 1 >= s->samples;
            const size_t row = (size_t)s->width * c, next = (size_t)s->height * row;
            const uint8_t *const from = x + (size_t)sample * next;
            uint16_t *const to = a + (size_t)n * a_pair + (size_t)f.top * a_row + 2 * (size_t)f.left * c;
            const uint16_t *const above = gradient + (size_t)sample * area * (size_t)s->results;
            const uint16_t *const below = alone ? NULL : above + area * (size_t)s->results;
            uint16_t *const g_to = g + (size_t)n * g_pair;
            for (int y = 0; y < f.kept_height; y++) {
                const uint8_t *const one = from + (size_t)y * row, *const other = alone ? NULL : one + next;
                pair_row(&kernels, one, other, (size_t)f.kept_width * c, s->filling, to + (size_t)y * a_row, a_plane);
            }
            if (results == s->results)
                pair_gradient_row(&kernels, above, below, area * (size_t)results, g_to, g_pair / 2);
            else
                for (size_t p = 0; p < area; p++)
                    pair_gradient_row(&kernels, above + p * (size_t)s->results,
                                      alone ? NULL : below + p * (size_t)s->results, (size_t)s->results,
                                      g_to + p * g_pixel, g_pair / 2);
        }
        /* Neighbours outermost: their column of `a` is small, and read again for all results. */
        const uint16_t *start = a + (size_t)(s->top + f.top) * a_row + 2 * (size_t)(s->left + f.left) * c;
        for (int r = 0; r < s->rows; r++)
            for (int j = 0; j < run; j += most) {
                const int neighbours = run - j < most ? run - j : most;
                for (int result = 0; result < results;) {
                    const int wide = takes_two(&kernels, results - result);
                    for (int done = 0, k = 0; done < neighbours; done += kernels.neighbours[wide][k]) {
                        while (kernels.neighbours[wide][k] > neighbours - done)
                            k++;
                        kernels.pairs[wide][k](start + (size_t)r * a_row + 2 * (size_t)(j + done), g + 2 * result,
                                            count, a_pair, s->result_height, (size_t)s->step * a_row, s->result_width,
                                            2 * (size_t)s->step * c, g_pixel,
                                            sums + (size_t)(r * run + j + done) * stride + result, stride);
                    }
                    result += wide ? 2 * LANES : LANES;
                }
            }
    }
    spread(&kernels, sums, stride, s, inputs, factor, weights);
    free(a);
    free(g);
    free(sums);
    return 0;
}
