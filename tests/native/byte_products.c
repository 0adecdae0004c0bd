/* Compares the products of bytes that this processor runs with plain C, and prints the number of the tier and a checksum
   of what linear layers and attention return, which has to be the same on every processor.

   Usage: byte_products [WIDEST_REGISTERS BYTE_INSTRUCTIONS] */
#include "compress.h"
#include "eight_bit_attention.h"
#include "eight_bit_linear.h"
#include "eight_bit_tiles.h"
#include "processor.h"
#include "tiers.h"

#include <stdio.h>
#include <stdlib.h>

#define LANES 16

static uint32_t state = 1;

static uint32_t draw(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

/* Random bytes, or one of the ends of their range everywhere, or the two in turns. */
static void fill(uint8_t *bytes, size_t n, int kind, uint8_t low, uint8_t high)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] = kind == 0 ? (uint8_t)draw() : kind == 1 ? low : kind == 2 ? high : i % 2 ? low : high;
}

static int wrong_tile(const char *name, const ByteTiles *tiles, int kind, int rows, int run, int x_kind, int w_kind)
{
    enum { MOST = 4096 };
    static uint8_t x[MOST + 64], wide_x[2 * sizeof x];
    static int8_t weights[4 * MOST * LANES], wide_weights[2 * sizeof weights];
    const int pixels = tiles->pixels[kind], sixteens = 1 << kind;
    int32_t sums[MOST_SUMS] __attribute__((aligned(64)));
    const uint8_t *windows[MOST_PIXELS] = {0};
    const size_t row_bytes = (size_t)run + 8, block = (size_t)rows * (size_t)run * LANES;
    fill(x, sizeof x, x_kind, 0, 255);
    fill((uint8_t *)weights, sizeof weights, w_kind, 0x80, 0x7f);
    for (int p = 0; p < pixels; p++)
        windows[p] = x + draw() % (MOST - (size_t)rows * row_bytes);
    if (tiles->size == 2) {
        const uint8_t *wide[MOST_PIXELS] = {0};
        tiles->widen_codes(x, sizeof x, 0, wide_x);
        for (int p = 0; p < pixels; p++)
            wide[p] = wide_x + 2 * (windows[p] - x);
        tiles->widen_weights(weights, (size_t)sixteens * block / (4 * LANES), wide_weights);
        tiles->tile[kind](wide, 2 * row_bytes, rows, run, wide_weights, 2 * block, sums);
    } else
        tiles->tile[kind](windows, row_bytes, rows, run, weights, block, sums);
    for (int p = 0; p < pixels; p++)
        for (int result = 0; result < sixteens * LANES; result++) {
            int32_t sum = 0;
            for (int r = 0; r < rows; r++)
                for (int k = 0; k < run; k++)
                    sum += windows[p][(size_t)r * row_bytes + (size_t)k]
                           * weights[(size_t)(result / LANES) * block + (size_t)(r * run + k) / 4 * 4 * LANES
                                     + (size_t)(result % LANES) * 4 + (size_t)(k % 4)];
            if (sums[p * sixteens * LANES + result] != sum) {
                fprintf(stderr, "%s: %d rows of %d, inputs %d, weights %d, pixel %d, result %d: %d instead of %d\n", name,
                        rows, run, x_kind, w_kind, p, result, sums[p * sixteens * LANES + result], sum);
                return 1;
            }
        }
    return 0;
}

static int wrong_tiles(const char *name, const ByteTiles *tiles)
{
    static const int rows[] = {1, 2, 3}, runs[] = {4, 8, 12, 64, 68, 200};
    int wrong = 0;
    for (int kind = 0; kind < tiles->kinds; kind++)
        for (size_t row = 0; row < sizeof rows / sizeof *rows; row++)
            for (size_t run = 0; run < sizeof runs / sizeof *runs; run++)
                for (int x = 0; x < 4; x++)
                    for (int w = 0; w < 4; w++) {
                        if (tiles->begin != NULL)
                            tiles->begin(runs[run]);
                        wrong |= wrong_tile(name, tiles, kind, rows[row], runs[run], x, w);
                        if (tiles->end != NULL)
                            tiles->end();
                    }
    return wrong;
}

#ifdef AVX_VNNI
/* The tile of AVX-VNNI, with the same instruction of AVX-512. */
#define HALF_TARGET "avx2,avx512vl,avx512vnni"
#define DPBUSD _mm256_dpbusd_epi32
#include "eight_bit_half_tile.h"
#endif

static uint64_t checksum = 14695981039346656037u;

static void add(const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        checksum = (checksum ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
}

static float number(void) { return ((float)(draw() % 2001) - 1000.0f) * 0x1p-9f; }

static void fill_gradient(uint16_t *gradient, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const float value = number();
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        gradient[i] = (uint16_t)(bits >> 16);
    }
}

/* What a linear layer returns, forwards and backwards. */
static void add_layer(int rows, int inputs, int outputs)
{
    const size_t read = (size_t)(rows * inputs), written = (size_t)(rows * outputs);
    int8_t *x = malloc(read), *codes = malloc(written);
    float *weights = malloc((size_t)(inputs * outputs) * sizeof *weights);
    float *bias = malloc((size_t)outputs * sizeof *bias);
    int32_t *acc = malloc(written * sizeof *acc);
    uint16_t *gradient = malloc(written * sizeof *gradient), *passed = malloc(read * sizeof *passed);
    LinearLayer layer = {.rows = rows, .outputs = outputs, .inputs = inputs, .weights = weights, .largest = -1.0f};
    const uint64_t forward = eb_linear_room(rows, outputs, inputs, 0), back = eb_linear_room(rows, outputs, inputs, 1);
    layer.room = malloc(forward > back ? forward : back);
    float extremes[2] = {0};
    fill((uint8_t *)x, read, 0, 0, 0);
    for (int i = 0; i < inputs * outputs; i++)
        weights[i] = number();
    for (int i = 0; i < outputs; i++)
        bias[i] = number();
    fill_gradient(gradient, written);
    float largest = eb_linear_product(&layer, x, -17, acc);
    add(acc, written * sizeof *acc);
    add(&largest, sizeof largest);
    eb_linear_codes(&layer, x, -17, 1e-3, bias, 1, 9.0f, -20, codes, extremes);
    add(codes, written);
    add(extremes, sizeof extremes);
    largest = eb_linear_backward(&layer, gradient, 2.0f, 5, 6, x, -20, NULL, 0, passed);
    add(passed, read * sizeof *passed);
    add(&largest, sizeof largest);
    void *const all[] = {x, codes, weights, bias, acc, gradient, passed, layer.room};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* What attention returns, forwards and backwards; the last of the positions is padding. */
static void add_attention(int batch, int heads, int n, int width)
{
    const size_t rows = (size_t)(batch * n), size = rows * (size_t)(heads * width);
    const size_t weights = rows * (size_t)heads, squares = weights * (size_t)n;
    int8_t *const query = malloc(size), *const key = malloc(size), *const value = malloc(size);
    int8_t *const codes = malloc(size), *const probabilities = malloc(squares);
    uint8_t *const hidden = calloc(rows, 1), *const room = malloc(eb_attention_room(n, width));
    float *const of_rows = malloc(weights * sizeof *of_rows);
    uint16_t *const gradient = malloc(size * sizeof *gradient), *const of_scores = malloc(squares * sizeof *of_scores);
    uint16_t *const first = malloc(size * sizeof *first), *const second = malloc(size * sizeof *second);
    const AttentionHeads all_heads = {.batch = batch, .heads = heads, .n = n, .width = width, .query = query,
                                      .key = key, .value = value, .probabilities = probabilities, .weights = of_rows,
                                      .room = room};
    float found[2] = {0};
    fill((uint8_t *)query, size, 0, 0, 0);
    fill((uint8_t *)key, size, 0, 0, 0);
    fill((uint8_t *)value, size, 0, 0, 0);
    fill_gradient(gradient, size);
    for (size_t i = (size_t)n - 1; i < rows; i += (size_t)n)
        hidden[i] = 1;
    eb_attention_mix(&all_heads, 1e-5f, hidden, (uint64_t)n, (uint64_t)n, 0.02f, 70.0f, -20, codes, found);
    add(codes, size);
    add(probabilities, squares);
    add(of_rows, weights * sizeof *of_rows);
    add(found, sizeof found);
    found[0] = eb_attention_of_value(&all_heads, gradient, 5, 6, first);
    found[1] = eb_attention_of_scores(&all_heads, gradient, 2.0f, 7, 8, 0.02, of_scores);
    add(first, size * sizeof *first);
    add(of_scores, squares * sizeof *of_scores);
    add(found, sizeof found);
    eb_attention_of_query_and_key(&all_heads, of_scores, found[1], 9, 10, 1e-3f, 2e-3f, first, second, found);
    add(first, size * sizeof *first);
    add(second, size * sizeof *second);
    add(found, sizeof found);
    void *const all[] = {query, key, value, codes, probabilities, hidden, room, of_rows, gradient, of_scores, first,
                         second};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

int main(int count, char **values)
{
    if (count == 3) {
        widest_registers = atoi(values[1]);
        byte_instructions = atoi(values[2]);
    }
    const ByteTiles tiles = tiles_of_this_processor();
    int wrong = wrong_tiles("tiles of this processor", &tiles);
#ifdef AVX_VNNI
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
        const ByteTiles half = {.size = 1, .kinds = 1, .tile = {half_6_1}, .pixels = {6}};
        wrong |= wrong_tiles("tile of AVX-VNNI", &half);
    }
#endif
    /* How much was drawn before depends on the tiles. */
    state = 1;
    add_layer(1, 1, 1);
    add_layer(3, 5, 7);
    add_layer(37, 131, 150);
    add_layer(64, 256, 33);
    add_layer(70, 1100, 520);
    add_attention(2, 3, 1, 5);
    add_attention(2, 2, 17, 24);
    add_attention(1, 3, 131, 70);
    printf("%d %016llx\n", processor_tier(), (unsigned long long)checksum);
    return wrong;
}
