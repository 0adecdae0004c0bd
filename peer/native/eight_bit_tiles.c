/* Products of bytes for each kind of processor: uint8 codes by int8 weights into int32, exact in every version.

   Weights lie as four terms of sixteen results, which is what the instructions of x86 and the dot product of ARM take
   at a time. The tiles differ in how many sums fit into the registers. */
#include "eight_bit_tiles.h"
#include "eight_bit_amx.h"
#include "processor.h"
#include "tiers.h"

#define KERNELS "eight_bit_product_kernels.h"
#include "each_tier.h"

#ifdef WIDE
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define VNNI_TILE(P, V)                                                                                               \
    VNNI static void vnni_##P##_##V(const uint8_t *const *windows, size_t row_bytes, int rows, int run,               \
                                    const int8_t *weights, size_t block, int32_t *sums)                               \
    {                                                                                                                 \
        __m512i acc[P][V];                                                                                            \
        const uint8_t *x[P];                                                                                          \
        _Pragma("GCC unroll 16") for (int p = 0; p < P; p++)                                                          \
        {                                                                                                             \
            x[p] = windows[p];                                                                                        \
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) acc[p][v] = _mm512_setzero_si512();                   \
        }                                                                                                             \
        for (int r = 0; r < rows; r++) {                                                                              \
            const size_t row = (size_t)r * row_bytes;                                                                 \
            for (int k = 0; k < run; k += 4, weights += 4 * LANES) {                                                  \
                __m512i w[V];                                                                                         \
                _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) w[v] =                                            \
                    _mm512_loadu_si512(weights + (size_t)v * block);                                                  \
                _Pragma("GCC unroll 16") for (int p = 0; p < P; p++)                                                  \
                {                                                                                                     \
                    int32_t four;                                                                                     \
                    memcpy(&four, x[p] + row + k, sizeof four);                                                       \
                    const __m512i wide = _mm512_set1_epi32(four);                                                     \
                    _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) acc[p][v] =                                   \
                        _mm512_dpbusd_epi32(acc[p][v], wide, w[v]);                                                   \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
        _Pragma("GCC unroll 16") for (int p = 0; p < P; p++)                                                          \
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)                                                       \
                _mm512_storeu_si512(sums + (p * V + v) * LANES, acc[p][v]);                                           \
    }

VNNI_TILE(16, 1)
VNNI_TILE(12, 2)
VNNI_TILE(6, 4)

/* Without an instruction for bytes they come as 16 bits, of which vpmaddwd adds two products in 32 bits: nothing but
   products and sums is left. vpmaddubsw would take bytes as they are, but cuts the sum of two products to 16 bits. */
#define WIDE_TILE(P, V)                                                                                               \
    __attribute__((target("avx512f,avx512bw,avx512vl"))) static void wide512_##P##_##V(                               \
        const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights, size_t block,      \
        int32_t *sums)                                                                                                \
    {                                                                                                                 \
        __m512i acc[P][V];                                                                                            \
        _Pragma("GCC unroll 16") for (int p = 0; p < P; p++) _Pragma("GCC unroll 2") for (int v = 0; v < V; v++)      \
            acc[p][v] = (__m512i){};                                                                                  \
        for (int r = 0; r < rows; r++) {                                                                              \
            const size_t row = (size_t)r * row_bytes;                                                                 \
            for (size_t k = 0; k < 2 * (size_t)run; k += 4, weights += 4 * LANES) {                                   \
                __m512i w[V];                                                                                         \
                _Pragma("GCC unroll 2") for (int v = 0; v < V; v++)                                                   \
                    memcpy(&w[v], weights + (size_t)v * block, sizeof w[v]);                                          \
                _Pragma("GCC unroll 16") for (int p = 0; p < P; p++)                                                  \
                {                                                                                                     \
                    int32_t two;                                                                                      \
                    memcpy(&two, windows[p] + row + k, sizeof two);                                                   \
                    const __m512i x = _mm512_set1_epi32(two);                                                         \
                    _Pragma("GCC unroll 2") for (int v = 0; v < V; v++)                                               \
                        acc[p][v] = _mm512_add_epi32(acc[p][v], _mm512_madd_epi16(x, w[v]));                          \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
        memcpy(sums, acc, sizeof acc);                                                                                \
    }

WIDE_TILE(16, 1)
WIDE_TILE(12, 2)

/* The same with sixteen registers of 256 bits. The instructions for a window are written out, since compilers move its
   product away from its sum, and keep sums in memory for lack of registers. */
#define AVX2 __attribute__((target("avx2")))
AVX2 static void wide_6_1(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                          size_t block, int32_t *sums)
{
    __m256i acc[6][2];
    (void)block;
    _Pragma("GCC unroll 6") for (int p = 0; p < 6; p++) acc[p][0] = acc[p][1] = _mm256_setzero_si256();
    for (int r = 0; r < rows; r++) {
        const uint8_t *x[6];
        _Pragma("GCC unroll 6") for (int p = 0; p < 6; p++) x[p] = windows[p] + (size_t)r * row_bytes;
        for (size_t k = 0; k < 2 * (size_t)run; k += 8, weights += 8 * LANES)
            _Pragma("GCC unroll 2") for (int pair = 0; pair < 2; pair++)
            {
                const __m256i *const w = (const __m256i *)weights + 2 * pair;
                const __m256i low = _mm256_loadu_si256(w);
                _Pragma("GCC unroll 6") for (int p = 0; p < 6; p++)
                    __asm__ volatile("vpbroadcastd %3, %%ymm13\n\t"
                                     "vpmaddwd %2, %%ymm13, %%ymm14\n\t"
                                     "vpmaddwd %4, %%ymm13, %%ymm15\n\t"
                                     "vpaddd %%ymm14, %0, %0\n\t"
                                     "vpaddd %%ymm15, %1, %1"
                                     : "+x"(acc[p][0]), "+x"(acc[p][1])
                                     : "x"(low), "m"(*(const int32_t *)(x[p] + k + 4 * pair)), "m"(w[1])
                                     : "xmm13", "xmm14", "xmm15");
            }
    }
    /* One by one: of a copy of the array, compilers make one that lies in memory all the time. */
    _Pragma("GCC unroll 6") for (int p = 0; p < 6; p++) _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
        _mm256_storeu_si256((__m256i *)(sums + p * LANES) + i, acc[p][i]);
}

AVX2 static void widen_codes(const uint8_t *codes, size_t n, uint8_t flip, uint8_t *to)
{
    const __m128i turned = _mm_set1_epi8((char)flip);
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(to + 2 * i),
                            _mm256_cvtepu8_epi16(_mm_xor_si128(_mm_loadu_si128((const __m128i *)(codes + i)), turned)));
    for (; i < n; i++) {
        const uint16_t code = codes[i] ^ flip;
        memcpy(to + 2 * i, &code, sizeof code);
    }
}

/* Of four terms of sixteen results the first two of each, then the last two. A byte becomes the upper half of 16 bits,
   and is shifted down. */
AVX2 static void widen_weights(const int8_t *packed, size_t fours, int8_t *to)
{
    const __m256i first = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13));
    const __m256i last = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15));
    for (size_t i = 0; i < fours; i++, packed += 4 * LANES, to += 8 * LANES) {
        const __m256i low = _mm256_loadu_si256((const __m256i *)packed);
        const __m256i high = _mm256_loadu_si256((const __m256i *)packed + 1);
        const __m256i wide[4] = {_mm256_shuffle_epi8(low, first), _mm256_shuffle_epi8(high, first),
                                 _mm256_shuffle_epi8(low, last), _mm256_shuffle_epi8(high, last)};
        _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++)
            _mm256_storeu_si256((__m256i *)to + v, _mm256_srai_epi16(wide[v], 8));
    }
}

#ifdef AVX_VNNI
#define DPBUSD _mm256_dpbusd_avx_epi32
#include "eight_bit_half_tile.h"
#endif
#endif

#ifdef ARM_BYTES
/* sdot takes signed bytes: with the highest bit turned over a code is 128 too low, which costs 128 times the sum of the
   weights. Sixteen codes of a window are loaded at once, and the instruction takes four of them by number. Weights are
   loaded where they are needed: compilers would load them all first, and keep sums in memory for lack of registers. */
#define DOT __attribute__((target("arch=armv8.2-a+dotprod")))
#define DOT_FOUR(LANE)                                                                                                \
    __asm__ volatile("" ::: "memory");                                                                                \
    _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++, weights += 16)                                            \
    {                                                                                                                 \
        const int8x16_t w = vld1q_s8(weights);                                                                        \
        too_low[i] = vdotq_s32(too_low[i], w, highest);                                                               \
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) acc[p][i] = vdotq_laneq_s32(acc[p][i], w, x[p], LANE);    \
    }
DOT static void dot_4_1(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                        size_t block, int32_t *sums)
{
    enum { P = 4, PARTS = LANES / 4 };
    int32x4_t acc[P][PARTS], too_low[PARTS];
    const int8x16_t highest = vdupq_n_s8(-128);
    (void)block;
    _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)
    {
        too_low[i] = vdupq_n_s32(0);
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) acc[p][i] = vdupq_n_s32(0);
    }
    for (int r = 0; r < rows; r++) {
        const size_t row = (size_t)r * row_bytes;
        int8x16_t x[P];
        int k = 0;
        for (; k + 16 <= run; k += 16) {
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) x[p] =
                veorq_s8(vreinterpretq_s8_u8(vld1q_u8(windows[p] + row + k)), highest);
            DOT_FOUR(0)
            DOT_FOUR(1)
            DOT_FOUR(2)
            DOT_FOUR(3)
        }
        for (; k < run; k += 4) {
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++)
            {
                int32_t four;
                memcpy(&four, windows[p] + row + k, sizeof four);
                x[p] = veorq_s8(vreinterpretq_s8_s32(vdupq_n_s32(four)), highest);
            }
            DOT_FOUR(0)
        }
    }
    _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)
        vst1q_s32(sums + p * LANES + 4 * i, vsubq_s32(acc[p][i], too_low[i]));
}

/* Eight terms of two pixels by eight terms of two results, at a time; the last four terms of a run with zeros. */
#define I8MM __attribute__((target("arch=armv8.2-a+i8mm")))
I8MM static inline __attribute__((always_inline)) void i8mm_terms(int32x4_t acc[2][LANES / 2], const int8_t *weights,
                                                                  int terms, const uint8_t *const *windows, size_t at)
{
    uint8x16_t x[2];
    for (int pair = 0; pair < 2; pair++) {
        uint64_t first = 0, second = 0;
        memcpy(&first, windows[2 * pair] + at, (size_t)terms);
        memcpy(&second, windows[2 * pair + 1] + at, (size_t)terms);
        x[pair] = vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(first), vcreate_u64(second)));
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < LANES / 4; i++)
    {
        const int32x4_t early = vreinterpretq_s32_s8(vld1q_s8(weights + 16 * i));
        const int32x4_t late =
            terms == 8 ? vreinterpretq_s32_s8(vld1q_s8(weights + 4 * LANES + 16 * i)) : vdupq_n_s32(0);
        const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(early, late));
        const int8x16_t high = vreinterpretq_s8_s32(vzip2q_s32(early, late));
        _Pragma("GCC unroll 2") for (int pair = 0; pair < 2; pair++)
        {
            acc[pair][2 * i] = vusmmlaq_s32(acc[pair][2 * i], x[pair], low);
            acc[pair][2 * i + 1] = vusmmlaq_s32(acc[pair][2 * i + 1], x[pair], high);
        }
    }
}

I8MM static void i8mm_4_1(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                          size_t block, int32_t *sums)
{
    int32x4_t acc[2][LANES / 2];
    (void)block;
    for (int pair = 0; pair < 2; pair++)
        for (int i = 0; i < LANES / 2; i++)
            acc[pair][i] = vdupq_n_s32(0);
    for (int r = 0; r < rows; r++) {
        const size_t row = (size_t)r * row_bytes;
        int k = 0;
        for (; k + 8 <= run; k += 8, weights += 8 * LANES)
            i8mm_terms(acc, weights, 8, windows, row + (size_t)k);
        if (k < run) {
            i8mm_terms(acc, weights, 4, windows, row + (size_t)k);
            weights += 4 * LANES;
        }
    }
    /* A register holds two results of one pixel, then those of the next. */
    for (int pair = 0; pair < 2; pair++)
        for (int i = 0; i < LANES / 2; i++) {
            vst1_s32(sums + 2 * pair * LANES + 2 * i, vget_low_s32(acc[pair][i]));
            vst1_s32(sums + (2 * pair + 1) * LANES + 2 * i, vget_high_s32(acc[pair][i]));
        }
}
#endif

static ByteTiles tiles_of_tier(void)
{
    switch (processor_tier()) {
#ifdef WIDE
#ifdef AMX
    case TIER_AMX:
        return (ByteTiles){.fast = 1, .begin = amx_begin_bytes, .end = amx_end, .kinds = 2,
                           .tile = {amx_tile_32_1, amx_tile_32_2}, .pixels = {32, 32},
                           .once = {amx_tile_32_1, amx_once_32_2}, .more = {amx_more_32_1, amx_more_32_2},
                           .even = LANES, .terms = 64, .depth = 1024,
                           .block = 512 * 1024, .odd_lines = 1};
#endif
    case TIER_AVX512_VNNI:
        return (ByteTiles){.fast = 1, .kinds = 3, .tile = {vnni_16_1, vnni_12_2, vnni_6_4}, .pixels = {16, 12, 6}};
    case TIER_AVX512:
        return (ByteTiles){.fast = 1, .size = 2, .widen_codes = widen_codes, .widen_weights = widen_weights,
                           .kinds = 2, .tile = {wide512_16_1, wide512_12_2}, .pixels = {16, 12}, .odd_lines = 1};
#ifdef AVX_VNNI
    case TIER_AVX_VNNI:
        return (ByteTiles){.fast = 1, .kinds = 1, .tile = {half_6_1}, .pixels = {6}};
#endif
    case TIER_AVX2:
        return (ByteTiles){.fast = 1, .size = 2, .widen_codes = widen_codes, .widen_weights = widen_weights,
                           .kinds = 1, .tile = {wide_6_1}, .pixels = {6}, .odd_lines = 1};
#endif
#ifdef ARM_BYTES
    case TIER_NEON_I8MM:
        return (ByteTiles){.fast = 1, .kinds = 1, .tile = {i8mm_4_1}, .pixels = {4}};
    case TIER_NEON_DOT:
        return (ByteTiles){.fast = 1, .kinds = 1, .tile = {dot_4_1}, .pixels = {4}};
#endif
    default:
        return plain_tiles_portable;
    }
}

ByteTiles tiles_of_this_processor(void)
{
    ByteTiles tiles = tiles_of_tier();
    for (int kind = 0; kind < tiles.kinds; kind++)
        if (tiles.once[kind] == NULL)
            tiles.once[kind] = tiles.tile[kind];
    if (tiles.size == 0)
        tiles.size = 1;
    if (tiles.terms == 0)
        tiles.terms = 4;
    if (tiles.block == 0)
        tiles.block = 256 * 1024;
    return tiles;
}
