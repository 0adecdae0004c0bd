/* The kernels of eight_bit_attention.c, once for each width of register. */
#include "eight_bit_tile_kernels.h"
#include "eight_bit_turn_kernels.h"
#include "eight_bit_code_kernels.h"

#ifdef __AVX512F__
#define transpose NAME(transpose)
#define first_bytes NAME(first_bytes)
#define add_fours NAME(add_fours)

INLINE __mmask64 first_bytes(int count) { return count >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << count) - 1; }

/* Add up the bytes of each word. */
INLINE __m512i add_fours(__m512i sum, __m512i bytes)
{
    const __m512i two = _mm512_maddubs_epi16(_mm512_set1_epi8(1), bytes);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(two, _mm512_set1_epi16(1)));
}
#endif

/* Codes [results, terms], rows `stride` apart, in the order in which a product reads them,
   [results / 16, run / 4, 16, 4], filled with zeros, and the sum of each result's. */
static void NAME(pack_rows)(const int8_t *from, size_t stride, int results, int terms, int run, int8_t *packed,
                            int32_t *sums)
{
    for (int first = 0; first < results; first += SIXTEEN, from += SIXTEEN * stride, sums += SIXTEEN) {
        const int count = results - first < SIXTEEN ? results - first : SIXTEEN;
#ifdef __AVX512F__
        __m512i sum = _mm512_setzero_si512();
        for (int k = 0; k < run; k += 4 * LANES) {
            const int words = run - k < 4 * LANES ? (run - k) / 4 : LANES;
            const __mmask64 there = first_bytes(terms - k);
            __m512i four[LANES];
            for (int lane = 0; lane < LANES; lane++)
                four[lane] = _mm512_maskz_loadu_epi8(lane < count ? there : 0, from + (size_t)lane * stride + k);
            transpose(four);
            for (int i = 0; i < words; i++, packed += 4 * LANES) {
                sum = add_fours(sum, four[i]);
                _mm512_storeu_si512(packed, four[i]);
            }
        }
        _mm512_storeu_si512(sums, sum);
#else
        const int whole = count == SIXTEEN && terms == run;
        if (whole)
            NAME(turn_fours)(from, stride, run / 4, packed);
        else
            memset(packed, 0, (size_t)run * SIXTEEN);
        memset(sums, 0, SIXTEEN * sizeof *sums);
        for (int lane = 0; lane < count; lane++) {
            const int8_t *const codes = from + (size_t)lane * stride;
            for (int k = 0; k < terms && !whole; k++)
                packed[(k / 4 * SIXTEEN + lane) * 4 + k % 4] = codes[k];
            int32_t sum = 0;
            for (int k = 0; k < terms; k++)
                sum += codes[k];
            sums[lane] = sum;
        }
        packed += (size_t)run * SIXTEEN;
#endif
    }
}

#ifdef __AVX512F__
/* Up to 64 codes of four rows side by side, in sixteens `block` bytes apart, and added to their sums. */
INLINE void NAME(interleave_many)(const __m512i *row, int sixteens, int8_t *packed, size_t block, __m512i *sums)
{
    const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]), b = _mm512_unpackhi_epi8(row[0], row[1]);
    const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]), d = _mm512_unpackhi_epi8(row[2], row[3]);
    /* Four of each sixteen, and where they belong. */
    const __m512i first = _mm512_unpacklo_epi16(a, c), second = _mm512_unpackhi_epi16(a, c);
    const __m512i third = _mm512_unpacklo_epi16(b, d), fourth = _mm512_unpackhi_epi16(b, d);
    const __m512i low = _mm512_shuffle_i32x4(first, second, 0x44), high = _mm512_shuffle_i32x4(first, second, 0xee);
    const __m512i low_rest = _mm512_shuffle_i32x4(third, fourth, 0x44);
    const __m512i high_rest = _mm512_shuffle_i32x4(third, fourth, 0xee);
    const __m512i four[4] = {
        _mm512_shuffle_i32x4(low, low_rest, 0x88), _mm512_shuffle_i32x4(low, low_rest, 0xdd),
        _mm512_shuffle_i32x4(high, high_rest, 0x88), _mm512_shuffle_i32x4(high, high_rest, 0xdd)};
    for (int i = 0; i < sixteens; i++) {
        sums[i] = add_fours(sums[i], four[i]);
        _mm512_storeu_si512(packed + (size_t)i * block, four[i]);
    }
}
#endif

/* The same of codes [terms, results]. */
static void NAME(pack_columns)(const int8_t *from, size_t stride, int results, int terms, int run, int8_t *packed,
                               int32_t *sums)
{
    const size_t block = (size_t)run * SIXTEEN;
#ifdef __AVX512F__
    for (int first = 0; first < results; first += 4 * LANES, packed += 4 * block, sums += 4 * LANES) {
        const __mmask64 there = first_bytes(results - first);
        const int sixteens = results - first < 4 * LANES ? (results - first + LANES - 1) / LANES : 4;
        __m512i sum[4] = {};
        for (int k = 0; k < run; k += 4) {
            __m512i row[4];
            for (int q = 0; q < 4; q++)
                row[q] = _mm512_maskz_loadu_epi8(k + q < terms ? there : 0, from + (size_t)(k + q) * stride + first);
            if (sixteens == 4)
                NAME(interleave_many)(row, 4, packed + k * LANES, block, sum);
            else
                NAME(interleave_many)(row, sixteens, packed + k * LANES, block, sum);
        }
        memcpy(sums, sum, (size_t)sixteens * sizeof *sum);
    }
#else
    for (int first = 0; first < results; first += SIXTEEN, packed += block, sums += SIXTEEN) {
        const int count = results - first < SIXTEEN ? results - first : SIXTEEN;
        int8_t own[4][SIXTEEN] = {{0}};
        memset(sums, 0, SIXTEEN * sizeof *sums);
        for (int k = 0; k < run; k += 4) {
            const int8_t *four[4];
            for (int q = 0; q < 4; q++) {
                const int8_t *const row = from + (size_t)(k + q) * stride + first;
                if (k + q < terms && count == SIXTEEN) {
                    four[q] = row;
                    continue;
                }
                four[q] = own[q];
                if (k + q < terms)
                    memcpy(own[q], row, (size_t)count);
                else
                    memset(own[q], 0, SIXTEEN);
            }
            NAME(interleave)(four, packed + k * SIXTEEN, sums);
        }
    }
#endif
}

#ifdef __AVX512F__
/* Rows [results, run] of what is packed, with the highest bit turned over where `flip` is 128; 64 bytes of them are
   written at a time. */
static void NAME(unpack)(const int8_t *packed, int results, int run, uint8_t flip, uint8_t *rows, size_t stride)
{
    for (int first = 0; first < results; first += LANES, rows += LANES * stride) {
        const int count = results - first < LANES ? results - first : LANES;
        const __m512i turned = _mm512_set1_epi8((char)flip);
        for (int k = 0; k < run; k += 4 * LANES) {
            const int words = run - k < 4 * LANES ? (run - k) / 4 : LANES;
            __m512i four[LANES] = {};
            for (int i = 0; i < words; i++, packed += 4 * LANES)
                four[i] = _mm512_loadu_si512(packed);
            transpose(four);
            for (int lane = 0; lane < count; lane++)
                _mm512_storeu_si512(rows + (size_t)lane * stride + k, _mm512_xor_si512(four[lane], turned));
        }
    }
}
#endif

/* Rows of codes, with the highest bit turned over where `flip` is 128. */
static void NAME(copy_rows)(const int8_t *from, size_t from_stride, int rows, int width, uint8_t flip, uint8_t *to,
                            size_t stride)
{
    for (int row = 0; row < rows; row++, from += from_stride, to += stride)
        for (int i = 0; i < width; i++)
            to[i] = (uint8_t)from[i] ^ flip;
}

/* These finish `rows` of a tile for a sixteen of results, of which `lanes` are there. */
INLINE void NAME(scores)(Finish *f, const int32_t *sums, int width, int rows, size_t at, Integers offset, int lanes)
{
    for (int p = 0; p < rows; p++, sums += width, at += f->stride) {
        const Integers acc = load_integers(sums, lanes) - offset;
        memcpy(f->scores + at, &acc, (size_t)lanes * sizeof *f->scores);
    }
}

INLINE void NAME(mixed)(Finish *f, const int32_t *sums, int width, int rows, size_t at, int row, int lanes)
{
    NAME(Grid) grid = NAME(grid)(f->inverse, f->zero, &f->ends);
    for (int p = 0; p < rows; p++, sums += width, at += f->stride) {
        const Floats scale = all(f->weights[row + p] * f->factor);
        const Floats y = __builtin_convertvector(load_integers(sums, lanes), Floats) * scale;
        NAME(code_vector)(&grid, y, f->codes, at, lanes);
    }
    NAME(keep_extremes)(&grid, &f->ends, lanes);
}

INLINE void NAME(gradient)(Finish *f, const int32_t *sums, int width, int rows, size_t at, Integers offset, int lanes)
{
    Words largest;
    memcpy(&largest, f->largest, sizeof largest);
    for (int p = 0; p < rows; p++, sums += width, at += f->stride) {
        const Floats g = __builtin_convertvector(load_integers(sums, lanes) - offset, Floats) * f->factor;
        largest = larger(store_gradient(f->gradient + at, g, lanes), largest);
    }
    memcpy(f->largest, &largest, (size_t)lanes * sizeof *f->largest);
}

static void NAME(finish)(Finish *f, const int32_t *sums, int width, int rows, int row, int result, int count)
{
#define FINISH(LANES_THERE)                                                                  \
    {                                                                                        \
        const Integers offset = load_integers(f->offset + result, LANES_THERE);              \
        if (f->scores != NULL)                                                               \
            NAME(scores)(f, sums, width, rows, at, offset, LANES_THERE);                     \
        else if (f->gradient != NULL)                                                        \
            NAME(gradient)(f, sums, width, rows, at, offset, LANES_THERE);                   \
        else                                                                                 \
            NAME(mixed)(f, sums, width, rows, at, row, LANES_THERE);                         \
    }
    for (; count > 0; count -= LANES, result += LANES, sums += LANES) {
        const size_t at = (size_t)row * f->stride + (size_t)result;
        if (count >= LANES)
            FINISH(LANES)
        else
            FINISH(count)
    }
#undef FINISH
}

static const Kernels NAME(kernels) = {
    .pack_rows = NAME(pack_rows),
    .pack_columns = NAME(pack_columns),
#ifdef __AVX512F__
    .unpack = NAME(unpack),
#endif
    .turn_codes = NAME(turn_codes),
    .copy_rows = NAME(copy_rows),
    .finish = NAME(finish),
};
#undef transpose
#undef first_bytes
#undef add_fours
