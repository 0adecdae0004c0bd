/* LANES numbers at a time: sixteen, in vectors that compilers know how to lower to what a processor has, or with AVX2
   alone the eight that a register holds, since of a comparison of two registers compilers make one number after the
   other. Included once for each width of register, between the pragmas that name it, with TIER its suffix: what is
   lowered for one must not be used for another. Where SIXTEEN_LANES is defined, there are sixteen of them in any
   case. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#undef JOINED
#undef JOIN
#undef NAME
#define JOINED(name, tier) name##tier
#define JOIN(name, tier) JOINED(name, tier)
#define NAME(name) JOIN(name, TIER)

#undef LANES
#undef EIGHT_LANES
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(SIXTEEN_LANES)
#define EIGHT_LANES 1
#define LANES 8
#else
#define LANES SIXTEEN
#endif

#define Floats NAME(Floats)
#define Integers NAME(Integers)
#define Words NAME(Words)
#define Halves NAME(Halves)
#define Bytes NAME(Bytes)
#define all NAME(all)
#define choose NAME(choose)
#define cut NAME(cut)
#define lower NAME(lower)
#define higher NAME(higher)
#define nearest NAME(nearest)
#define lesser NAME(lesser)
#define greater NAME(greater)
#define load_integers NAME(load_integers)
#define load_floats NAME(load_floats)
#define store_floats NAME(store_floats)
#define load_codes NAME(load_codes)
#define store_codes NAME(store_codes)
#define load_gradient NAME(load_gradient)
#define rounded_gradient NAME(rounded_gradient)
#define store_gradient NAME(store_gradient)
#define larger NAME(larger)
#define largest_of NAME(largest_of)
#define note NAME(note)
#define exponential NAME(exponential)
#define gate_of NAME(gate_of)
#define gate_slope NAME(gate_slope)

#ifndef SOTTOVOCE_VECTORS_H
#define SOTTOVOCE_VECTORS_H
#define INLINE static inline __attribute__((always_inline))
/* Of results or channels that lie together in memory, whatever a register holds. */
#define SIXTEEN 16
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

INLINE Floats all(float value) { return (Floats){} + value; }
INLINE Floats choose(Integers mask, Floats yes, Floats no)
{
    return (Floats)(((Integers)yes & mask) | ((Integers)no & ~mask));
}
#ifdef __AVX512F__
/* What the other versions say, an instruction each: of max and min the second operand is returned if there is a NaN. */
INLINE Floats cut(Floats v, Floats low, Floats high)
{
    return (Floats)_mm512_min_ps(_mm512_max_ps((__m512)v, (__m512)low), (__m512)high);
}
INLINE Floats nearest(Floats v) { return (Floats)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
INLINE Integers lesser(Integers a, Integers b) { return (Integers)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE Integers greater(Integers a, Integers b) { return (Integers)_mm512_max_epi32((__m512i)a, (__m512i)b); }
#elif defined(EIGHT_LANES)
INLINE Floats cut(Floats v, Floats low, Floats high)
{
    return (Floats)_mm256_min_ps(_mm256_max_ps((__m256)v, (__m256)low), (__m256)high);
}
INLINE Floats nearest(Floats v)
{
    return (Floats)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE Integers lesser(Integers a, Integers b) { return (Integers)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE Integers greater(Integers a, Integers b) { return (Integers)_mm256_max_epi32((__m256i)a, (__m256i)b); }
#else
/* NaN compares false: it is cut to the lower end. */
INLINE Floats cut(Floats v, Floats low, Floats high)
{
    v = choose(v > low, v, low);
    return choose(v < high, v, high);
}
/* Nearest integer, ties to even, of magnitudes below 2^22. */
INLINE Floats nearest(Floats v) { return (v + 12582912.0f) - 12582912.0f; }
INLINE Integers lesser(Integers a, Integers b) { return (a & (a < b)) | (b & ~(a < b)); }
INLINE Integers greater(Integers a, Integers b) { return (a & (a > b)) | (b & ~(a > b)); }
#endif
/* These note NaN and keep it. */
INLINE Floats lower(Floats a, Floats b) { return choose((a < b) | (a != a), a, b); }
INLINE Floats higher(Floats a, Floats b) { return choose((a > b) | (a != a), a, b); }

INLINE Integers load_integers(const int32_t *from, int lanes)
{
    Integers v = {};
    memcpy(&v, from, (size_t)lanes * sizeof *from);
    return v;
}
INLINE Floats load_floats(const float *from, int lanes)
{
    Floats v = {};
    memcpy(&v, from, (size_t)lanes * sizeof *from);
    return v;
}
INLINE void store_floats(float *to, Floats v, int lanes) { memcpy(to, &v, (size_t)lanes * sizeof *to); }
INLINE Integers load_codes(const uint8_t *from, int lanes)
{
    Bytes v = {};
    memcpy(&v, from, (size_t)lanes);
#ifdef __AVX512F__
    return (Integers)_mm512_cvtepu8_epi32((__m128i)v);
#elif defined(EIGHT_LANES)
    return (Integers)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)v));
#else
    /* In two steps: of one, compilers make sixteen. */
    return __builtin_convertvector(__builtin_convertvector(v, Halves), Integers);
#endif
}
INLINE void store_codes(uint8_t *to, Integers v, int lanes)
{
#ifdef __AVX512F__
    if (lanes == LANES)
        _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)v));
    else
        _mm512_mask_cvtepi32_storeu_epi8(to, (__mmask16)((1u << lanes) - 1u), (__m512i)v);
#elif defined(EIGHT_LANES)
    /* The lowest byte of each, four and four. */
    const __m256i fours = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0C080400));
    const long long narrow =
        _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1)));
    memcpy(to, &narrow, (size_t)lanes);
#else
    /* In two steps: of one, compilers make sixteen. */
    Bytes narrow = __builtin_convertvector(__builtin_convertvector(v, Halves), Bytes);
    memcpy(to, &narrow, (size_t)lanes);
#endif
}
INLINE Floats load_gradient(const uint16_t *from, int lanes)
{
    Halves v = {};
    memcpy(&v, from, (size_t)lanes * sizeof *from);
#ifdef EIGHT_LANES
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)v), 16);
#else
    return (Floats)(__builtin_convertvector(v, Words) << 16);
#endif
}
/* The bits of bfloat16: rounded to nearest, ties to even, quiet NaN. */
INLINE Words rounded_gradient(Floats v)
{
    Words bits = (Words)v;
    Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
#ifdef EIGHT_LANES
    /* Of signed numbers, which is what the processor compares. */
    Words none = (Words)((Integers)(bits & 0x7FFFFFFFu) > 0x7F800000);
#else
    Words none = (Words)((bits & 0x7FFFFFFFu) > 0x7F800000u);
#endif
    return (rounded & ~none) | (0x7FC0u & none);
}
/* Returns the magnitudes' bits. */
INLINE Words store_gradient(uint16_t *to, Floats v, int lanes)
{
    const Words rounded = rounded_gradient(v);
#ifdef __AVX512F__
    const Halves narrow = (Halves)_mm512_cvtepi32_epi16((__m512i)rounded);
#elif defined(EIGHT_LANES)
    const Halves narrow = (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)rounded),
                                                   _mm256_extracti128_si256((__m256i)rounded, 1));
#else
    const Halves narrow = __builtin_convertvector(rounded, Halves);
#endif
    memcpy(to, &narrow, (size_t)lanes * sizeof *to);
    return rounded & 0x7FFFu;
}
INLINE Words larger(Words a, Words b)
{
#ifdef __AVX512F__
    return (Words)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(EIGHT_LANES)
    return (Words)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
    Words mask = (Words)(a > b);
    return (a & mask) | (b & ~mask);
#endif
}
INLINE float largest_of(Words magnitudes, int lanes)
{
    uint32_t largest = 0;
    for (int l = 0; l < lanes; l++)
        largest = magnitudes[l] > largest ? magnitudes[l] : largest;
    largest <<= 16;
    float value;
    memcpy(&value, &largest, sizeof value);
    return value;
}
INLINE void note(Floats low, Floats high, int lanes, float *extremes)
{
    for (int l = 0; l < lanes; l++) {
        extremes[0] = (low[l] < extremes[0]) | (low[l] != low[l]) ? low[l] : extremes[0];
        extremes[1] = (high[l] > extremes[1]) | (high[l] != high[l]) ? high[l] : extremes[1];
    }
}

/* e^x to 3e-6 of itself: 2^k times a polynomial. Magnitudes above 87 count as 87. */
INLINE Floats exponential(Floats x)
{
    x = cut(x, all(-87.0f), all(87.0f));
    Floats k = nearest(x * 1.44269504f);
    Floats r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    Floats p = r * (1.0f / 120.0f) + (1.0f / 24.0f);
    p = p * r + (1.0f / 6.0f);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Integers power = (__builtin_convertvector(k, Integers) + 127) << 23;
    return p * (Floats)power;
}

INLINE Floats gate_of(int gate, Floats u)
{
    if (gate == 1)
        return 1.0f / (1.0f + exponential(-u));
    return cut((u + 3.0f) * (1.0f / 6.0f), all(0.0f), all(1.0f));
}

/* gate'(u), where `value` is gate(u). */
INLINE Floats gate_slope(int gate, Floats u, Floats value)
{
    if (gate == 1)
        return value * (1.0f - value);
    return choose((u > -3.0f) & (u < 3.0f), all(1.0f / 6.0f), all(0.0f));
}
