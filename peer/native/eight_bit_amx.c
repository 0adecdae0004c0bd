/* Tiles of products in AMX's registers: eight of 16 rows of 64 bytes. In the layout of packed weights, four terms of
   sixteen results are such a row, so that a register takes 64 terms of them as they lie. */
#include "eight_bit_amx.h"
#include "tiers.h"

#ifdef AMX

#define LANES 16
#define ROW 64
#define IN_TILES __attribute__((target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl")))

/* The intrinsics of tiles do not tell the compiler what memory they read and write. */
#define SETTLE __asm__ volatile("" ::: "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Configuration;

/* The numbers of the registers; the instructions know them only as text. */
#define FIRST_SUM 0
#define SECOND_SUM 1
#define THIRD_SUM 2
#define FOURTH_SUM 3
#define LEFT 4
#define RIGHT 5
#define LEFT_REST 6
#define RIGHT_REST 7
#define REGISTERS 8

IN_TILES static void configure(int rest)
{
    Configuration c = {.palette = 1};
    for (int i = 0; i < REGISTERS; i++) {
        c.row_bytes[i] = ROW;
        c.rows[i] = LANES;
    }
    if (rest > 0) {
        c.row_bytes[LEFT_REST] = (uint16_t)rest;
        c.rows[RIGHT_REST] = (uint8_t)(rest / 4);
    }
    SETTLE;
    _tile_loadconfig(&c);
}

void amx_begin_bytes(int run) { configure(run % ROW); }

void amx_begin_pairs(void) { configure(0); }

IN_TILES void amx_end(void) { _tile_release(); }

/* Where sixteen windows lie: `stride` bytes apart, or gathered for each part of a run. */
typedef struct {
    const uint8_t *const *windows;
    size_t stride;
    int even;
    uint8_t gathered[LANES * ROW] __attribute__((aligned(64)));
} Sixteen;

static inline void look(Sixteen *s, const uint8_t *const *windows)
{
    s->windows = windows;
    s->stride = (size_t)(windows[1] - windows[0]);
    s->even = 1;
    for (int p = 2; p < LANES; p++)
        s->even &= (size_t)(windows[p] - windows[p - 1]) == s->stride;
}

/* Up to 63 bytes past the end of a window are read. */
IN_TILES static inline const uint8_t *part(Sixteen *s, size_t at, size_t *stride)
{
    *stride = s->stride;
    if (s->even)
        return s->windows[0] + at;
    for (int p = 0; p < LANES; p++)
        _mm512_store_si512(s->gathered + p * ROW, _mm512_loadu_si512(s->windows[p] + at));
    SETTLE;
    *stride = ROW;
    return s->gathered;
}

/* Sixteen windows of `at` on into the register `left`; those that are read `once` do not take places in the first-level
   cache. */
#define LOAD_WINDOWS(left, sixteen, once)                            \
    {                                                                \
        const uint8_t *const from = part(&sixteen, at, &stride);     \
        if (once)                                                    \
            _tile_stream_loadd(left, from, stride);                  \
        else                                                         \
            _tile_loadd(left, from, stride);                         \
    }

/* PRODUCTS(left, right) for all terms of 32 windows, sixty-four at a time; those that are left have their registers. */
#define OVER_TERMS(PRODUCTS)                                                     \
    Sixteen upper, lower;                                                        \
    size_t stride;                                                               \
    look(&upper, windows);                                                       \
    look(&lower, windows + LANES);                                               \
    for (int r = 0; r < rows; r++) {                                             \
        size_t at = (size_t)r * row_bytes;                                       \
        int left = run;                                                          \
        for (; left >= ROW; left -= ROW, at += ROW, weights += ROW * LANES) {    \
            PRODUCTS(LEFT, RIGHT)                                                \
        }                                                                        \
        if (left > 0) {                                                          \
            PRODUCTS(LEFT_REST, RIGHT_REST)                                      \
            weights += left * LANES;                                             \
        }                                                                        \
    }

IN_TILES static inline __attribute__((always_inline)) void
tile_32_1(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights, int more,
          int32_t *sums)
{
    SETTLE;
    if (more) {
        _tile_loadd(FIRST_SUM, sums, ROW);
        _tile_loadd(SECOND_SUM, sums + LANES * LANES, ROW);
    } else {
        _tile_zero(FIRST_SUM);
        _tile_zero(SECOND_SUM);
    }
#define PRODUCTS(x, w)                    \
    _tile_loadd(w, weights, ROW);         \
    LOAD_WINDOWS(x, upper, 0)             \
    _tile_dpbusd(FIRST_SUM, x, w);        \
    LOAD_WINDOWS(x, lower, 0)             \
    _tile_dpbusd(SECOND_SUM, x, w);
    OVER_TERMS(PRODUCTS)
#undef PRODUCTS
    _tile_stored(FIRST_SUM, sums, ROW);
    _tile_stored(SECOND_SUM, sums + LANES * LANES, ROW);
    SETTLE;
}

IN_TILES void amx_tile_32_1(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                            size_t block, int32_t *sums)
{
    (void)block;
    tile_32_1(windows, row_bytes, rows, run, weights, 0, sums);
}

IN_TILES void amx_more_32_1(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                            size_t block, int32_t *sums)
{
    (void)block;
    tile_32_1(windows, row_bytes, rows, run, weights, 1, sums);
}

IN_TILES static inline void zero_sums(void)
{
    _tile_zero(FIRST_SUM);
    _tile_zero(SECOND_SUM);
    _tile_zero(THIRD_SUM);
    _tile_zero(FOURTH_SUM);
}

/* Runs of whole registers leave those of the rest to hold both operands: nothing is loaded twice. Windows that are read
   `once` leave the first-level cache to the weights. */
IN_TILES static inline __attribute__((always_inline)) void
sum_whole_registers(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                    size_t block, int once)
{
    Sixteen upper, lower;
    size_t stride;
    look(&upper, windows);
    look(&lower, windows + LANES);
    for (int r = 0; r < rows; r++)
        for (size_t at = (size_t)r * row_bytes, end = at + (size_t)run; at < end; at += ROW, weights += ROW * LANES) {
            LOAD_WINDOWS(LEFT, upper, once)
            _tile_loadd(RIGHT, weights, ROW);
            _tile_dpbusd(FIRST_SUM, LEFT, RIGHT);
            _tile_loadd(RIGHT_REST, weights + block, ROW);
            _tile_dpbusd(SECOND_SUM, LEFT, RIGHT_REST);
            LOAD_WINDOWS(LEFT_REST, lower, once)
            _tile_dpbusd(THIRD_SUM, LEFT_REST, RIGHT);
            _tile_dpbusd(FOURTH_SUM, LEFT_REST, RIGHT_REST);
        }
}

/* Others need two registers for their last terms, so that the weights of a sixteen are loaded twice. */
IN_TILES static void sum_parts(const uint8_t *const *windows, size_t row_bytes, int rows, int run,
                               const int8_t *weights, size_t block)
{
#define PRODUCTS(x, w)                            \
    LOAD_WINDOWS(x, upper, 0)                     \
    _tile_loadd(w, weights, ROW);                 \
    _tile_dpbusd(FIRST_SUM, x, w);                \
    _tile_loadd(w, weights + block, ROW);         \
    _tile_dpbusd(SECOND_SUM, x, w);               \
    LOAD_WINDOWS(x, lower, 0)                     \
    _tile_dpbusd(FOURTH_SUM, x, w);               \
    _tile_loadd(w, weights, ROW);                 \
    _tile_dpbusd(THIRD_SUM, x, w);
    OVER_TERMS(PRODUCTS)
#undef PRODUCTS
}

/* The four sums, whose rows lie `stride` bytes apart. */
IN_TILES static inline void load_sums(const void *from, size_t stride)
{
    const uint8_t *const at = from;
    SETTLE;
    _tile_loadd(FIRST_SUM, at, stride);
    _tile_loadd(SECOND_SUM, at + ROW, stride);
    _tile_loadd(THIRD_SUM, at + LANES * stride, stride);
    _tile_loadd(FOURTH_SUM, at + LANES * stride + ROW, stride);
}

IN_TILES static inline void store_sums(void *to, size_t stride)
{
    uint8_t *const at = to;
    _tile_stored(FIRST_SUM, at, stride);
    _tile_stored(SECOND_SUM, at + ROW, stride);
    _tile_stored(THIRD_SUM, at + LANES * stride, stride);
    _tile_stored(FOURTH_SUM, at + LANES * stride + ROW, stride);
    SETTLE;
}

IN_TILES void amx_tile_32_2(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                            size_t block, int32_t *sums)
{
    zero_sums();
    if (run % ROW == 0)
        sum_whole_registers(windows, row_bytes, rows, run, weights, block, 0);
    else
        sum_parts(windows, row_bytes, rows, run, weights, block);
    store_sums(sums, 2 * ROW);
}

IN_TILES void amx_once_32_2(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                            size_t block, int32_t *sums)
{
    zero_sums();
    sum_whole_registers(windows, row_bytes, rows, run, weights, block, 1);
    store_sums(sums, 2 * ROW);
}

IN_TILES void amx_more_32_2(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                            size_t block, int32_t *sums)
{
    load_sums(sums, 2 * ROW);
    sum_whole_registers(windows, row_bytes, rows, run, weights, block, 1);
    store_sums(sums, 2 * ROW);
}

IN_TILES void amx_pairs_32_32(const uint16_t *g, const uint16_t *x, int pairs, const float *before,
                              size_t before_stride, float factor, float *out, size_t stride)
{
    const size_t x_row = 4 * LANES, tile = 2 * LANES * LANES;
    if (before != NULL)
        load_sums(before, before_stride * sizeof *before);
    else
        zero_sums();
    for (int p = 0; p < pairs; p += LANES, g += 2 * tile, x += LANES * x_row) {
        /* The first-level cache is left to x, which the next tile reads again. */
        _tile_stream_loadd(LEFT, g, ROW);
        _tile_stream_loadd(LEFT_REST, g + tile, ROW);
        _tile_loadd(RIGHT, x, x_row * sizeof *x);
        _tile_loadd(RIGHT_REST, x + 2 * LANES, x_row * sizeof *x);
        _tile_dpbf16ps(FIRST_SUM, LEFT, RIGHT);
        _tile_dpbf16ps(SECOND_SUM, LEFT, RIGHT_REST);
        _tile_dpbf16ps(THIRD_SUM, LEFT_REST, RIGHT);
        _tile_dpbf16ps(FOURTH_SUM, LEFT_REST, RIGHT_REST);
    }
    if (factor == 1.0f) {
        store_sums(out, stride * sizeof *out);
        return;
    }
    /* Rows of `out` may all fall on one set of the first-level cache: they are written once, and not read. */
    float sums[4 * LANES * LANES] __attribute__((aligned(64)));
    store_sums(sums, 2 * ROW);
    const __m512 by = _mm512_set1_ps(factor);
    for (int j = 0; j < 2 * LANES; j++, out += stride) {
        _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_load_ps(sums + 2 * LANES * j), by));
        _mm512_storeu_ps(out + LANES, _mm512_mul_ps(_mm512_load_ps(sums + 2 * LANES * j + LANES), by));
    }
}

#define TRANSPOSE_TARGET IN_TILES
#include "eight_bit_transpose.h"

IN_TILES void amx_transpose_pairs(const uint16_t *in, uint16_t *out)
{
    __m512i a[LANES];
    for (int i = 0; i < LANES; i++)
        a[i] = _mm512_loadu_si512(in + 2 * LANES * i);
    transpose(a);
    for (int i = 0; i < LANES; i++)
        _mm512_storeu_si512(out + 2 * LANES * i, a[i]);
}

IN_TILES void amx_pair_gradients(const uint16_t *const *first, const uint16_t *const *second, int results,
                                 uint16_t *out)
{
    for (int result = 0; result < results; result += LANES, out += 2 * LANES * LANES) {
        const __mmask16 there = (__mmask16)(results - result < LANES ? (1u << (results - result)) - 1u : 0xFFFFu);
        __m512i a[LANES];
        for (int i = 0; i < LANES; i++) {
            /* What is masked is not read: nothing lies at NULL. */
            const __m256i one = _mm256_maskz_loadu_epi16(first[i] == NULL ? 0 : there, first[i] + result);
            const __m256i other = _mm256_maskz_loadu_epi16(second[i] == NULL ? 0 : there, second[i] + result);
            a[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(one), _mm512_slli_epi32(_mm512_cvtepu16_epi32(other), 16));
        }
        transpose(a);
        for (int i = 0; i < LANES; i++)
            _mm512_storeu_si512(out + 2 * LANES * i, a[i]);
    }
}

IN_TILES static inline __m512i levels(const uint8_t *codes, __mmask16 there, __m512i zero)
{
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, codes));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(wide, zero)));
}

IN_TILES void amx_pair_codes(const uint8_t *first, const uint8_t *second, size_t step, int pixels, int channels,
                             int zero, uint16_t *out, size_t pixel, size_t sixteen)
{
    const __m512i less = _mm512_set1_epi32(zero), upper = _mm512_set1_epi32((int)0xFFFF0000u);
    for (int p = 0; p < pixels; p++, first += step, out += pixel) {
        uint16_t *to = out;
        for (int c = 0; c < channels; c += LANES, to += sixteen) {
            const __mmask16 there = (__mmask16)(channels - c < LANES ? (1u << (channels - c)) - 1u : 0xFFFFu);
            __m512i both = _mm512_srli_epi32(levels(first + c, there, less), 16);
            if (second != NULL)
                both = _mm512_or_si512(both, _mm512_and_si512(levels(second + c, there, less), upper));
            _mm512_mask_storeu_epi32(to, there, both);
        }
        second = second == NULL ? NULL : second + step;
    }
}

/* The sums of amx_pairs_of_rows, whose conditions the compiler knows. */
IN_TILES static inline __attribute__((always_inline)) void
add_pairs(const PairRows *rows, const uint16_t *g, int two_left, const uint16_t *first, const uint16_t *second,
          int two_right, float *sums, size_t second_sums)
{
    const size_t x_pair = rows->x_pair * sizeof *first, tile = LANES * LANES;
    SETTLE;
    _tile_loadd(FIRST_SUM, sums, ROW);
    if (two_right)
        _tile_loadd(SECOND_SUM, sums + second_sums, ROW);
    if (two_left)
        _tile_loadd(THIRD_SUM, sums + tile, ROW);
    if (two_left && two_right)
        _tile_loadd(FOURTH_SUM, sums + second_sums + tile, ROW);
    for (int n = 0; n < rows->groups; n++)
        for (int y = 0; y < rows->height; y++) {
            size_t at = (size_t)n * rows->x_group + (size_t)y * rows->x_row;
            for (int b = 0; b < rows->blocks; b++, at += LANES * rows->x_pair, g += rows->g_block) {
                _tile_loadd(LEFT, g, ROW);
                _tile_loadd(RIGHT, first + at, x_pair);
                _tile_dpbf16ps(FIRST_SUM, LEFT, RIGHT);
                if (two_right) {
                    _tile_loadd(RIGHT_REST, second + at, x_pair);
                    _tile_dpbf16ps(SECOND_SUM, LEFT, RIGHT_REST);
                }
                if (two_left) {
                    _tile_loadd(LEFT_REST, g + 2 * tile, ROW);
                    _tile_dpbf16ps(THIRD_SUM, LEFT_REST, RIGHT);
                }
                if (two_left && two_right)
                    _tile_dpbf16ps(FOURTH_SUM, LEFT_REST, RIGHT_REST);
            }
        }
    _tile_stored(FIRST_SUM, sums, ROW);
    if (two_right)
        _tile_stored(SECOND_SUM, sums + second_sums, ROW);
    if (two_left)
        _tile_stored(THIRD_SUM, sums + tile, ROW);
    if (two_left && two_right)
        _tile_stored(FOURTH_SUM, sums + second_sums + tile, ROW);
}

IN_TILES void amx_pairs_of_rows(const PairRows *rows, const uint16_t *g, int sixteens, const uint16_t *first,
                                const uint16_t *second, float *sums, size_t second_sums)
{
    if (sixteens == 2 && second != NULL)
        add_pairs(rows, g, 1, first, second, 1, sums, second_sums);
    else if (sixteens == 2)
        add_pairs(rows, g, 1, first, NULL, 0, sums, 0);
    else if (second != NULL)
        add_pairs(rows, g, 0, first, second, 1, sums, second_sums);
    else
        add_pairs(rows, g, 0, first, NULL, 0, sums, 0);
}
#endif
