/* Attention in 8-bit training, head by head: what one head takes stays in the second-level cache from its codes to what
   is made of its sums.

   A product reads rows of bytes on its left, and on its right four terms of sixteen results at a time. Which of the two
   a head's codes become, and whether their columns have to become rows for that, is seen to in a copy of that one
   head. */
#include "eight_bit_attention.h"
#include "tiers.h"
#include "eight_bit.h"
#include "eight_bit_extremes.h"
#include "eight_bit_steps.h"
#include "eight_bit_tiles.h"

/* What becomes of a product's sums: scores, gradients, or else codes. */
typedef struct {
    /* How far the results of a row are from those of the next. */
    size_t stride;
    const int32_t *offset;
    float factor;
    int32_t *scores;
    uint16_t *gradient;
    /* Bits of the largest magnitudes so far. */
    uint32_t largest[16];
    /* Of each row. */
    const float *weights;
    float inverse;
    int32_t zero;
    int8_t *codes;
    /* Extremes so far. */
    LaneExtremes ends;
} Finish;

typedef void Pack(const int8_t *from, size_t stride, int results, int terms, int run, int8_t *packed, int32_t *sums);

typedef struct {
    Pack *pack_rows, *pack_columns;
    /* One of these makes rows of columns: of those that were packed, where tiles read bytes and the other one is slower
       (else NULL), or of codes as they lie. */
    void (*unpack)(const int8_t *packed, int results, int run, uint8_t flip, uint8_t *rows, size_t stride);
    void (*turn_codes)(const int8_t *from, int rows, int columns, int8_t *to, size_t to_row);
    void (*copy_rows)(const int8_t *from, size_t from_stride, int rows, int width, uint8_t flip, uint8_t *to,
                      size_t stride);
    void (*finish)(Finish *f, const int32_t *sums, int width, int rows, int row, int result, int count);
} Kernels;

#define KERNELS "eight_bit_attention_kernels.h"
#include "each_tier.h"

/* Where the work on a head is done. */
typedef struct {
    ByteTiles tiles;
    Kernels kernels;
    /* The left operand of a product, and its right one with what is to be taken off each result. */
    uint8_t *left;
    int8_t *packed;
    int32_t *offset;
    /* Columns on their way to rows. */
    int8_t *turned;
    int32_t *scores;
    /* A head's part of a gradient, what is made of it, and its codes. */
    uint16_t *part, *weighted;
    int8_t *codes;
} Work;

static size_t larger_size(size_t a, size_t b) { return a > b ? a : b; }

/* Codes of a row of so many terms on the left, and how many bytes further the next one is. */
static size_t run_of(const ByteTiles *tiles, int terms) { return rounded_up(terms, tiles->terms); }
static size_t stride_of(const ByteTiles *tiles, int terms)
{
    return row_distance(tiles, rounded_up(terms, 64) * (size_t)tiles->size);
}

/* Lay the work out from the address `room` on, and return where it ends. */
static uintptr_t lay_out(Work *w, int n, int width, uintptr_t room)
{
    w->tiles = tiles_of_this_processor();
    w->kernels = BEST(kernels);
    const size_t rows = (size_t)n, columns = (size_t)width, squared = rows * rows;
    const size_t many = rounded_up(n, LANES), few = rounded_up(width, LANES);
    const size_t run_n = run_of(&w->tiles, n), run_width = run_of(&w->tiles, width);
#define TAKE(what, count)                                                   \
    do {                                                                    \
        w->what = (void *)room;                                             \
        room += ((count) * sizeof *w->what + 63) / 64 * 64;                 \
    } while (0)
    TAKE(left, rows * larger_size(stride_of(&w->tiles, n), stride_of(&w->tiles, width)));
    TAKE(packed, larger_size(many * run_width, few * run_n) * (size_t)w->tiles.size);
    TAKE(offset, larger_size(many, few));
    TAKE(turned, many * run_n);
    TAKE(scores, squared);
    TAKE(part, rows * columns);
    TAKE(weighted, rows * columns);
    TAKE(codes, larger_size(squared, rows * columns));
#undef TAKE
    return room;
}

uint64_t eb_attention_room(int n, int width)
{
    Work work;
    return (uint64_t)lay_out(&work, n, width, 0) + 64;
}

/* One head of all. */
typedef struct {
    int sample;
    /* How many numbers lie before its first in [batch, n, heads * width], in [batch, heads, n, width], in
       [batch, heads, n, n] and in [batch, heads, n]. */
    size_t in_rows, by_head, in_squares, in_weights;
} Head;

static size_t row_stride(const AttentionHeads *a) { return (size_t)a->heads * (size_t)a->width; }
static int heads_of(const AttentionHeads *a) { return a->batch * a->heads; }

static Head head_at(const AttentionHeads *a, int index)
{
    const size_t n = (size_t)a->n, width = (size_t)a->width, i = (size_t)index;
    const int sample = index / a->heads, head = index % a->heads;
    return (Head){sample, (size_t)sample * n * row_stride(a) + (size_t)head * width, i * n * width, i * n * n, i * n};
}

/* Whatever its runs are: all are multiples of the terms that a tile takes at a time. */
static void begin(const AttentionHeads *a, Work *w)
{
    lay_out(w, a->n, a->width, ((uintptr_t)a->room + 63) / 64 * 64);
    if (w->tiles.begin != NULL)
        w->tiles.begin(w->tiles.terms);
}

static void end(const Work *w)
{
    if (w->tiles.end != NULL)
        w->tiles.end();
}

/* The right operand from codes whose rows or columns are the results. Where the left one is `flipped`, its codes are
   read as uint8, 128 more than they are. */
static void pack(const Work *w, Pack *by, const int8_t *from, size_t stride, int results, int terms, int flipped)
{
    const size_t run = run_of(&w->tiles, terms), all = rounded_up(results, LANES) / LANES * run;
    by(from, stride, results, terms, (int)run, packed_for(&w->tiles, w->packed, all), w->offset);
    finish_packing(&w->tiles, w->packed, all);
    for (int i = 0; i < results; i++)
        w->offset[i] = flipped ? w->offset[i] * 128 : 0;
}

/* The left operand from rows of codes. By what a run is longer, whatever is there meets zeros on the right. */
static void copy(const Work *w, const int8_t *from, size_t stride, int rows, int terms, uint8_t flip)
{
    const size_t to = stride_of(&w->tiles, terms);
    if (w->tiles.size == 1)
        w->kernels.copy_rows(from, stride, rows, terms, flip, w->left, to);
    else
        for (int row = 0; row < rows; row++)
            w->tiles.widen_codes((const uint8_t *)from + (size_t)row * stride, (size_t)terms, flip,
                                 w->left + (size_t)row * to);
}

/* The left operand from the columns of codes [n, n]. */
static void turn(const Work *w, const int8_t *from, int n, uint8_t flip)
{
    const int run = (int)run_of(&w->tiles, n);
    if (w->tiles.size > 1 || w->kernels.unpack == NULL) {
        w->kernels.turn_codes(from, n, n, w->turned, (size_t)n);
        copy(w, w->turned, (size_t)n, n, n, flip);
        return;
    }
    w->kernels.pack_columns(from, (size_t)n, n, n, run, w->turned, w->offset);
    w->kernels.unpack(w->turned, n, run, flip, w->left, stride_of(&w->tiles, n));
}

/* The sums of the two operands for `rows` and `results`, and what becomes of them. */
static void multiply(const Work *w, int rows, int results, int terms, Finish *finish)
{
    const size_t run = run_of(&w->tiles, terms), stride = stride_of(&w->tiles, terms), size = (size_t)w->tiles.size;
    int32_t sums[MOST_SUMS] __attribute__((aligned(64)));
    finish->offset = w->offset;
    for (int result = 0, kind; result < results; result += LANES << kind) {
        kind = kind_of_tile(&w->tiles, (results - result + LANES - 1) / LANES);
        const int width = LANES << kind, most = w->tiles.pixels[kind];
        const int count = results - result < width ? results - result : width;
        for (int row = 0; row < rows; row += most) {
            const uint8_t *windows[MOST_PIXELS];
            const int there = rows - row < most ? rows - row : most;
            rows_as_windows(w->left + (size_t)row * stride, stride, there, most, windows);
            w->tiles.tile[kind](windows, 0, 1, (int)run, w->packed + (size_t)result * run * size,
                               run * LANES * size, sums);
            w->kernels.finish(finish, sums, width, there, row, result, count);
        }
    }
}

void eb_attention_mix(const AttentionHeads *a, float factor, const uint8_t *hidden, uint64_t mask_of_sample,
                      uint64_t rows_of_mask, float value_scale, float inverse, int32_t zero, int8_t *codes,
                      float *extremes)
{
    const int n = a->n, width = a->width;
    const size_t d = row_stride(a);
    Work w;
    begin(a, &w);
    Finish scores = {.stride = (size_t)n, .scores = w.scores};
    Finish mixed = {.stride = d, .factor = value_scale, .inverse = inverse, .zero = zero, .ends = no_extremes()};
    for (int i = 0; i < heads_of(a); i++) {
        const Head head = head_at(a, i);
        const uint8_t *none = hidden == NULL ? NULL : hidden + (size_t)head.sample * mask_of_sample;
        int8_t *const probabilities = a->probabilities + head.in_squares;
        copy(&w, a->query + head.in_rows, d, n, width, 128);
        pack(&w, w.kernels.pack_rows, a->key + head.in_rows, d, n, width, 1);
        multiply(&w, n, n, width, &scores);
        eb_softmax(w.scores, (uint64_t)n, (uint64_t)n, factor, none, rows_of_mask, probabilities,
                   a->weights + head.in_weights);
        copy(&w, probabilities, (size_t)n, n, n, 0);
        pack(&w, w.kernels.pack_columns, a->value + head.in_rows, d, width, n, 0);
        mixed.weights = a->weights + head.in_weights;
        mixed.codes = codes == NULL ? NULL : codes + head.in_rows;
        multiply(&w, n, width, n, &mixed);
    }
    end(&w);
    extremes_of_lanes(&mixed.ends, extremes);
}

/* A head's part of a gradient [batch, n, heads * width], row after row. */
static void take_part(const AttentionHeads *a, const Work *w, const uint16_t *gradient, const Head *head)
{
    const size_t width = (size_t)a->width;
    for (int row = 0; row < a->n; row++)
        memcpy(w->part + (size_t)row * width, gradient + head->in_rows + (size_t)row * row_stride(a),
               width * sizeof *w->part);
}

/* The same times the weights of its rows; returns the largest magnitude. */
static float weigh_part(const AttentionHeads *a, const Work *w, const uint16_t *gradient, const Head *head)
{
    take_part(a, w, gradient, head);
    return eb_scale_rows(w->part, (uint64_t)a->n, (uint64_t)a->width, a->weights + head->in_weights, w->weighted);
}

float eb_attention_of_value(const AttentionHeads *a, const uint16_t *gradient, uint32_t key0, uint32_t key1,
                            uint16_t *out)
{
    const int n = a->n, width = a->width;
    const uint64_t size = (uint64_t)n * (uint64_t)width;
    Work w;
    begin(a, &w);
    float largest = 0.0f;
    for (int i = 0; i < heads_of(a); i++) {
        const Head head = head_at(a, i);
        largest = greatest(largest, weigh_part(a, &w, gradient, &head));
    }
    Finish finish = {.stride = row_stride(a), .factor = (float)((double)largest / 127.0)};
    for (int i = 0; i < heads_of(a); i++) {
        const Head head = head_at(a, i);
        weigh_part(a, &w, gradient, &head);
        eb_quantize_gradient_from(w.weighted, head.by_head, size, (float)inverse_step(largest), key0, key1, 0, w.codes);
        turn(&w, a->probabilities + head.in_squares, n, 0);
        pack(&w, w.kernels.pack_columns, w.codes, (size_t)width, width, n, 0);
        finish.gradient = out + head.in_rows;
        multiply(&w, n, width, n, &finish);
    }
    end(&w);
    return largest_of_lanes(finish.largest);
}

float eb_attention_of_scores(const AttentionHeads *a, const uint16_t *gradient, float largest, uint32_t key0,
                             uint32_t key1, double value_scale, uint16_t *out)
{
    const int n = a->n, width = a->width;
    const uint64_t size = (uint64_t)n * (uint64_t)width;
    const float factor = (float)((double)largest / 127.0 * value_scale);
    Work w;
    begin(a, &w);
    Finish scores = {.stride = (size_t)n, .scores = w.scores};
    float found = 0.0f;
    for (int i = 0; i < heads_of(a); i++) {
        const Head head = head_at(a, i);
        take_part(a, &w, gradient, &head);
        eb_quantize_gradient_from(w.part, head.by_head, size, (float)inverse_step(largest), key0, key1, 0, w.codes);
        copy(&w, w.codes, (size_t)width, n, width, 128);
        pack(&w, w.kernels.pack_rows, a->value + head.in_rows, row_stride(a), n, width, 1);
        multiply(&w, n, n, width, &scores);
        found = greatest(found, eb_softmax_backward(w.scores, (uint64_t)n, (uint64_t)n, factor,
                                                    a->probabilities + head.in_squares, a->weights + head.in_weights,
                                                    out + head.in_squares));
    }
    end(&w);
    return found;
}

void eb_attention_of_query_and_key(const AttentionHeads *a, const uint16_t *of_scores, float largest, uint32_t key0,
                                   uint32_t key1, float query_factor, float key_factor, uint16_t *of_query,
                                   uint16_t *of_key, float *found)
{
    const int n = a->n, width = a->width;
    const size_t d = row_stride(a);
    Work w;
    begin(a, &w);
    Finish query = {.stride = d, .factor = query_factor}, key = {.stride = d, .factor = key_factor};
    for (int i = 0; i < heads_of(a); i++) {
        const Head head = head_at(a, i);
        eb_quantize_gradient_from(of_scores + head.in_squares, head.in_squares, (uint64_t)n * (uint64_t)n,
                                  (float)inverse_step(largest), key0, key1, 0, w.codes);
        copy(&w, w.codes, (size_t)n, n, n, 128);
        pack(&w, w.kernels.pack_columns, a->key + head.in_rows, d, width, n, 1);
        query.gradient = of_query + head.in_rows;
        multiply(&w, n, width, n, &query);
        turn(&w, w.codes, n, 128);
        pack(&w, w.kernels.pack_columns, a->query + head.in_rows, d, width, n, 1);
        key.gradient = of_key + head.in_rows;
        multiply(&w, n, width, n, &key);
    }
    end(&w);
    found[0] = largest_of_lanes(query.largest);
    found[1] = largest_of_lanes(key.largest);
}
