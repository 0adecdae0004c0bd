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

/* Sixteen windows of `at` on into the register `left`. */
#define LOAD_WINDOWS(left, sixteen)                                  \
    {                                                                \
        const uint8_t *const from = part(&sixteen, at, &stride);     \
        _tile_loadd(left, from, stride);                             \
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

IN_TILES void amx_tile_32_1(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                            size_t block, int32_t *sums)
{
    (void)block;
    _tile_zero(FIRST_SUM);
    _tile_zero(SECOND_SUM);
#define PRODUCTS(x, w)                    \
    _tile_loadd(w, weights, ROW);         \
    LOAD_WINDOWS(x, upper)                \
    _tile_dpbusd(FIRST_SUM, x, w);        \
    LOAD_WINDOWS(x, lower)                \
    _tile_dpbusd(SECOND_SUM, x, w);
    OVER_TERMS(PRODUCTS)
#undef PRODUCTS
    _tile_stored(FIRST_SUM, sums, ROW);
    _tile_stored(SECOND_SUM, sums + LANES * LANES, ROW);
}

IN_TILES void amx_tile_32_2(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                            size_t block, int32_t *sums)
{
    _tile_zero(FIRST_SUM);
    _tile_zero(SECOND_SUM);
    _tile_zero(THIRD_SUM);
    _tile_zero(FOURTH_SUM);
#define PRODUCTS(x, w)                            \
    LOAD_WINDOWS(x, upper)                        \
    _tile_loadd(w, weights, ROW);                 \
    _tile_dpbusd(FIRST_SUM, x, w);                \
    _tile_loadd(w, weights + block, ROW);         \
    _tile_dpbusd(SECOND_SUM, x, w);               \
    LOAD_WINDOWS(x, lower)                        \
    _tile_dpbusd(FOURTH_SUM, x, w);               \
    _tile_loadd(w, weights, ROW);                 \
    _tile_dpbusd(THIRD_SUM, x, w);
    OVER_TERMS(PRODUCTS)
#undef PRODUCTS
    _tile_stored(FIRST_SUM, sums, 2 * ROW);
    _tile_stored(SECOND_SUM, sums + LANES, 2 * ROW);
    _tile_stored(THIRD_SUM, sums + 2 * LANES * LANES, 2 * ROW);
    _tile_stored(FOURTH_SUM, sums + 2 * LANES * LANES + LANES, 2 * ROW);
}

IN_TILES void amx_pairs_32_32(const uint16_t *g, const uint16_t *x, int pairs, int more, float factor, float *out,
                              size_t stride)
{
    const size_t x_row = 4 * LANES, to = stride * sizeof *out, g_sixteen = 2 * LANES * (size_t)pairs;
    if (more) {
        _tile_loadd(FIRST_SUM, out, to);
        _tile_loadd(SECOND_SUM, out + LANES, to);
        _tile_loadd(THIRD_SUM, out + LANES * stride, to);
        _tile_loadd(FOURTH_SUM, out + LANES * stride + LANES, to);
    } else {
        _tile_zero(FIRST_SUM);
        _tile_zero(SECOND_SUM);
        _tile_zero(THIRD_SUM);
        _tile_zero(FOURTH_SUM);
    }
    for (int p = 0; p < pairs; p += LANES, g += 2 * LANES * LANES, x += LANES * x_row) {
        _tile_loadd(LEFT, g, ROW);
        _tile_loadd(LEFT_REST, g + g_sixteen, ROW);
        _tile_loadd(RIGHT, x, x_row * sizeof *x);
        _tile_loadd(RIGHT_REST, x + 2 * LANES, x_row * sizeof *x);
        _tile_dpbf16ps(FIRST_SUM, LEFT, RIGHT);
        _tile_dpbf16ps(SECOND_SUM, LEFT, RIGHT_REST);
        _tile_dpbf16ps(THIRD_SUM, LEFT_REST, RIGHT);
        _tile_dpbf16ps(FOURTH_SUM, LEFT_REST, RIGHT_REST);
    }
    _tile_stored(FIRST_SUM, out, to);
    _tile_stored(SECOND_SUM, out + LANES, to);
    _tile_stored(THIRD_SUM, out + LANES * stride, to);
    _tile_stored(FOURTH_SUM, out + LANES * stride + LANES, to);
    SETTLE;
    if (factor != 1.0f) {
        const __m512 by = _mm512_set1_ps(factor);
        for (int j = 0; j < 2 * LANES; j++, out += stride) {
            _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), by));
            _mm512_storeu_ps(out + LANES, _mm512_mul_ps(_mm512_loadu_ps(out + LANES), by));
        }
    }
}

#define TWO_AND_TWO(a, b) _mm512_shuffle_i32x4(a, b, 0x88)
#define OTHER_TWO_AND_TWO(a, b) _mm512_shuffle_i32x4(a, b, 0xdd)

IN_TILES void amx_transpose_pairs(const uint16_t *in, uint16_t *out)
{
    __m512i a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++)
        a[i] = _mm512_loadu_si512(in + 2 * LANES * i);
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = TWO_AND_TWO(a[i], a[i + 4]);
        b[i + 4] = OTHER_TWO_AND_TWO(a[i], a[i + 4]);
        b[i + 8] = TWO_AND_TWO(a[i + 8], a[i + 12]);
        b[i + 12] = OTHER_TWO_AND_TWO(a[i + 8], a[i + 12]);
    }
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_si512(out + 2 * LANES * i, TWO_AND_TWO(b[i], b[i + 8]));
        _mm512_storeu_si512(out + 2 * LANES * (i + 8), OTHER_TWO_AND_TWO(b[i], b[i + 8]));
    }
}
#endif
