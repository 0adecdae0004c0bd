/* Kernels around the products of 8-bit training.

   Plain loops, compiled once for each width of register: what counts is that every number is read and written once.

   Draw i of the stream (key0, key1) of stochastic rounding: with w = i div 2,
       h = w * 0x9E3779B9 + key0;   h ^= h >> 16;   h *= 0x85EBCA6B;   h ^= key1;
       h ^= h >> 13;   h *= 0xC2B2AE35;   h ^= h >> 16
   modulo 2^32 (the finalizer of MurmurHash3 over a Weyl sequence, with a second key in its middle); the draw is the low
   half of h for even i and the high half for odd i, divided by 65536. 16 bits keep the bias of a rounding below 2^-17
   of a step. Philox, which the messages use, costs several times as much, and nobody has to draw these again. */
#include "eight_bit.h"
#include "clones.h"
#include "eight_bit_extremes.h"
#include "tiers.h"

#include <math.h>

#define INLINE static inline __attribute__((always_inline))
/* Numbers that are worked on at a time where a loop needs an array in between: they stay in the first-level cache. */
#define CHUNK 1024

/* Round to nearest, ties to even. NaN is made quiet, so that rounding does not turn it into infinity. */
INLINE uint16_t narrow(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

/* NaN compares false, so that it is cut to the lower end. */
INLINE int32_t cut(float level, float low, float high)
{
    level = level > low ? level : low;
    return (int32_t)(level < high ? level : high);
}

/* Floats as integers in the same order: negative NaN below -infinity, NaN above infinity, -0 below 0. Minima and maxima
   of integers may be taken in any order, which is what lets compilers use wide registers. */
INLINE int32_t ordered(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

typedef struct {
    int32_t low, high;
} Extremes;

INLINE Extremes start_extremes(const float *from) { return (Extremes){ordered(from[0]), ordered(from[1])}; }

INLINE Extremes note_extremes(Extremes e, const float *v, int count)
{
    int32_t low = e.low, high = e.high;
    for (int i = 0; i < count; i++) {
        int32_t key = ordered(v[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    return (Extremes){low, high};
}

CLONES void eb_extremes(const float *v, uint64_t n, float *extremes)
{
    Extremes e = start_extremes(extremes);
    for (uint64_t done = 0; done < n; done += CHUNK)
        e = note_extremes(e, v + done, n - done < CHUNK ? (int)(n - done) : CHUNK);
    write_extremes(e.low, e.high, extremes);
}

/* Sums in eb_mean_square: enough for two registers of doubles on the widest tier. */
#define SUMS 16

/* Squares of floats are exact in double and each number has its sum on all tiers, so that the bits are the same. */
CLONES double eb_mean_square(const float *v, uint64_t n)
{
    double sums[SUMS] = {0}, sum = 0;
    int32_t counts[SUMS] = {0};
    uint64_t count = 0, done = 0;
    for (; done + SUMS <= n; done += SUMS) {
        for (int lane = 0; lane < SUMS; lane++) {
            double number = v[done + (uint64_t)lane];
            sums[lane] += number * number;
            counts[lane] += number != 0;
        }
    }
    for (; done < n; done++) {
        double number = v[done];
        sum += number * number;
        count += number != 0;
    }
    for (int lane = 0; lane < SUMS; lane++) {
        sum += sums[lane];
        count += (uint32_t)counts[lane];
    }
    return sum / (double)(count > 0 ? count : 1);
}

INLINE void quantize_chunk(const float *v, int count, float inverse, float zero, int32_t flip, int8_t *codes)
{
    for (int i = 0; i < count; i++)
        codes[i] = (int8_t)(cut(rintf(v[i] * inverse) + zero, -128.0f, 127.0f) + flip);
}

CLONES void eb_quantize(const float *v, uint64_t n, float inverse, int32_t zero, int8_t *codes, float *extremes)
{
    Extremes e = {0, 0};
    if (extremes != NULL)
        e = start_extremes(extremes);
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        quantize_chunk(v + done, count, inverse, (float)zero, 0, codes + done);
        if (extremes != NULL)
            e = note_extremes(e, v + done, count);
    }
    if (extremes != NULL)
        write_extremes(e.low, e.high, extremes);
}

CLONES void eb_quantize_weights(const float *v, uint64_t rows, uint64_t columns, float inverse, int8_t *codes,
                                int32_t *row_sums)
{
    for (uint64_t row = 0; row < rows; row++, v += columns, codes += columns) {
        int32_t sum = 0;
        for (uint64_t i = 0; i < columns; i++) {
            int32_t code = cut(rintf(v[i] * inverse), -127.0f, 127.0f);
            codes[i] = (int8_t)code;
            sum += code;
        }
        row_sums[row] = sum;
    }
}

INLINE void finish_chunk(const int32_t *acc, int count, const int32_t *offset, float factor, const float *bias,
                         int relu, float *y)
{
    if (offset != NULL)
        for (int i = 0; i < count; i++)
            y[i] = (float)(acc[i] - offset[i]) * factor;
    else
        for (int i = 0; i < count; i++)
            y[i] = (float)acc[i] * factor;
    if (bias != NULL)
        for (int i = 0; i < count; i++)
            y[i] = y[i] + bias[i];
    if (relu)
        for (int i = 0; i < count; i++)
            y[i] = y[i] < 0.0f ? 0.0f : y[i];
}

CLONES void eb_finish_forward(const int32_t *acc, uint64_t rows, uint64_t columns, const int32_t *offset, float factor,
                              const float *bias, int relu, float inverse, int32_t zero, int32_t flip, int8_t *codes,
                              float *floats, float *extremes)
{
    Extremes e = {0, 0};
    float own[CHUNK];
    if (extremes != NULL)
        e = start_extremes(extremes);
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t done = 0; done < columns; done += CHUNK) {
            int count = columns - done < CHUNK ? (int)(columns - done) : CHUNK;
            uint64_t at = row * columns + done;
            float *y = floats != NULL ? floats + at : own;
            finish_chunk(acc + at, count, offset != NULL ? offset + done : NULL, factor,
                         bias != NULL ? bias + done : NULL, relu, y);
            if (codes != NULL)
                quantize_chunk(y, count, inverse, (float)zero, flip, codes + at);
            if (extremes != NULL)
                e = note_extremes(e, y, count);
        }
    if (extremes != NULL)
        write_extremes(e.low, e.high, extremes);
}

/* Without its sign a float's bits are ordered like its value, with NaN above infinity. */
INLINE uint16_t note_magnitudes(uint16_t largest, const uint16_t *gradient, int count)
{
    for (int i = 0; i < count; i++) {
        uint16_t magnitude = gradient[i] & 0x7FFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

CLONES float eb_finish_backward(const int32_t *acc, uint64_t n, float factor, const int8_t *mask, int32_t masked,
                                uint16_t *gradient)
{
    uint16_t largest = 0;
    const int8_t gone = (int8_t)masked;
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        const int32_t *part = acc + done;
        uint16_t *out = gradient + done;
        for (int i = 0; i < count; i++)
            out[i] = narrow((float)part[i] * factor);
        if (mask != NULL)
            for (int i = 0; i < count; i++)
                out[i] = mask[done + (uint64_t)i] == gone ? 0 : out[i];
        largest = note_magnitudes(largest, out, count);
    }
    return widen(largest);
}

CLONES float eb_mask_gradient(uint16_t *gradient, uint64_t n, const int8_t *mask, int32_t masked)
{
    uint16_t largest = 0;
    const int8_t gone = (int8_t)masked;
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        uint16_t *out = gradient + done;
        if (mask != NULL)
            for (int i = 0; i < count; i++)
                out[i] = mask[done + (uint64_t)i] == gone ? 0 : out[i];
        largest = note_magnitudes(largest, out, count);
    }
    return widen(largest);
}

CLONES float eb_to_bfloat16(const float *v, uint64_t n, uint16_t *out)
{
    uint16_t largest = 0;
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        for (int i = 0; i < count; i++)
            out[done + (uint64_t)i] = narrow(v[done + (uint64_t)i]);
        largest = note_magnitudes(largest, out + done, count);
    }
    return widen(largest);
}

/* Two codes of a 32-bit word of two gradients, the first in its low half. */
INLINE uint16_t quantize_two(uint32_t two, float inverse, uint32_t word, uint32_t key0, uint32_t key1)
{
    uint32_t h = word * 0x9E3779B9u + key0;
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= key1;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    h ^= h >> 16;
    const uint32_t low = two << 16, high = two & 0xFFFF0000u;
    float first, second;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, &high, sizeof second);
    first = floorf(first * inverse + (float)(int32_t)(h & 0xFFFFu) * 0x1p-16f);
    second = floorf(second * inverse + (float)(int32_t)(h >> 16) * 0x1p-16f);
    return (uint16_t)((cut(first, -127.0f, 127.0f) & 255) | (cut(second, -127.0f, 127.0f) & 255) << 8);
}

CLONES void eb_quantize_gradient_from(const uint16_t *gradient, uint64_t first, uint64_t n, float inverse,
                                      uint32_t key0, uint32_t key1, uint8_t flip, int8_t *codes)
{
    const uint16_t flips = (uint16_t)(flip << 8 | flip);
    if (first % 2 && n > 0) {
        const uint32_t two = (uint32_t)*gradient++ << 16;
        *codes++ = (int8_t)((quantize_two(two, inverse, (uint32_t)(first / 2), key0, key1) ^ flips) >> 8);
        first++;
        n--;
    }
    const uint32_t word = (uint32_t)(first / 2);
    for (uint64_t done = 0; done < n / 2; done += CHUNK) {
        const int count = n / 2 - done < CHUNK ? (int)(n / 2 - done) : CHUNK;
        for (int i = 0; i < count; i++) {
            uint32_t two;
            memcpy(&two, gradient + 2 * (done + (uint64_t)i), sizeof two);
            const uint16_t both = quantize_two(two, inverse, word + (uint32_t)done + (uint32_t)i, key0, key1) ^ flips;
            memcpy(codes + 2 * (done + (uint64_t)i), &both, sizeof both);
        }
    }
    if (n % 2)
        codes[n - 1] = (int8_t)(quantize_two(gradient[n - 1], inverse, word + (uint32_t)(n / 2), key0, key1) ^ flips);
}

void eb_quantize_gradient(const uint16_t *gradient, uint64_t n, float inverse, uint32_t key0, uint32_t key1,
                          int8_t *codes)
{
    eb_quantize_gradient_from(gradient, 0, n, inverse, key0, key1, 0, codes);
}

CLONES void eb_codes_to_bfloat16(const int8_t *codes, uint64_t n, int32_t zero, uint16_t *out)
{
    for (uint64_t i = 0; i < n; i++) {
        float value = (float)(codes[i] - zero);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        out[i] = (uint16_t)(bits >> 16);
    }
}

CLONES void eb_scale_bfloat16(const uint16_t *v, uint64_t n, float factor, float *out)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] = widen(v[i]) * factor;
}

CLONES void eb_column_sums(const uint16_t *v, uint64_t rows, uint64_t columns, float *sums)
{
    double totals[CHUNK];
    for (uint64_t start = 0; start < columns; start += CHUNK) {
        int count = columns - start < CHUNK ? (int)(columns - start) : CHUNK;
        for (int i = 0; i < count; i++)
            totals[i] = 0.0;
        for (uint64_t row = 0; row < rows; row++)
            for (int i = 0; i < count; i++)
                totals[i] += (double)widen(v[row * columns + start + (uint64_t)i]);
        for (int i = 0; i < count; i++)
            sums[start + (uint64_t)i] = (float)totals[i];
    }
}

CLONES float eb_add_backward(const int32_t *acc, uint64_t n, float factor, uint16_t *gradient)
{
    uint16_t largest = 0;
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        uint16_t *out = gradient + done;
        for (int i = 0; i < count; i++)
            out[i] = narrow(widen(out[i]) + (float)acc[done + (uint64_t)i] * factor);
        largest = note_magnitudes(largest, out, count);
    }
    return widen(largest);
}

CLONES float eb_finish_backward_table(const int32_t *acc, uint64_t n, float factor, const int8_t *codes,
                                      const float *slopes, uint16_t *gradient)
{
    uint16_t largest = 0;
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        uint16_t *out = gradient + done;
        for (int i = 0; i < count; i++)
            out[i] = narrow((float)acc[done + (uint64_t)i] * factor * slopes[codes[done + (uint64_t)i] + 128]);
        largest = note_magnitudes(largest, out, count);
    }
    return widen(largest);
}

/* Look up as many codes as these instructions take at a time, and return how many that were. */
#ifdef WIDE
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) static uint64_t look_up_many(const int8_t *codes, uint64_t n,
                                                                                   const int8_t *table, int8_t *out)
{
    const __m512i a = _mm512_loadu_si512(table), b = _mm512_loadu_si512(table + 64);
    const __m512i c = _mm512_loadu_si512(table + 128), d = _mm512_loadu_si512(table + 192);
    uint64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i code = _mm512_loadu_si512(codes + i);
        /* Seven bits count; codes below zero are the lower half of the table. */
        const __m512i below = _mm512_permutex2var_epi8(a, code, b), above = _mm512_permutex2var_epi8(c, code, d);
        _mm512_storeu_si512(out + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(code), above, below));
    }
    return i;
}
#elif defined(ARM_BYTES)
static uint64_t look_up_many(const int8_t *codes, uint64_t n, const int8_t *table, int8_t *out)
{
    int8x16x4_t quarter[4];
    for (int q = 0; q < 4; q++)
        for (int v = 0; v < 4; v++)
            quarter[q].val[v] = vld1q_s8(table + 64 * q + 16 * v);
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const uint8x16_t index = vreinterpretq_u8_s8(vsubq_s8(vld1q_s8(codes + i), vdupq_n_s8(-128)));
        /* What is beyond a quarter stays as it is. */
        int8x16_t found = vqtbl4q_s8(quarter[0], index);
        for (uint8_t q = 1; q < 4; q++)
            found = vqtbx4q_s8(found, quarter[q], vsubq_u8(index, vdupq_n_u8((uint8_t)(64 * q))));
        vst1q_s8(out + i, found);
    }
    return i;
}
#endif

void eb_look_up(const int8_t *codes, uint64_t n, const int8_t *table, int8_t *out)
{
    uint64_t i = 0;
#ifdef WIDE
    if (tier_of_this_processor() == 2 && __builtin_cpu_supports("avx512vbmi"))
        i = look_up_many(codes, n, table, out);
#elif defined(ARM_BYTES)
    i = look_up_many(codes, n, table, out);
#endif
    for (; i < n; i++)
        out[i] = table[codes[i] + 128];
}

CLONES float eb_scale_rows(const uint16_t *gradient, uint64_t rows, uint64_t columns, const float *scales,
                           uint16_t *out)
{
    uint16_t largest = 0;
    for (uint64_t row = 0; row < rows; row++, gradient += columns, out += columns) {
        const float scale = scales[row];
        for (uint64_t i = 0; i < columns; i++)
            out[i] = narrow(widen(gradient[i]) * scale);
        largest = note_magnitudes(largest, out, (int)columns);
    }
    return widen(largest);
}

/* Sums are added up in this many lanes, number i in lane i mod LANES, and the lanes then by halves: an order that both
   wide registers and torch operators can follow. */
#define LANES 64

INLINE float sum_of_lanes(float *lanes)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lanes[l] += lanes[l + half];
    return lanes[0];
}

#define SUM_IN_LANES(total, n, term)                    \
    do {                                                \
        float lanes[LANES] = {0};                       \
        uint64_t i = 0;                                 \
        for (; i + LANES <= (n); i += LANES)            \
            for (uint64_t l = 0; l < LANES; l++) {      \
                const uint64_t at = i + l;              \
                lanes[l] += (term);                     \
            }                                           \
        for (uint64_t l = 0; i + l < (n); l++) {        \
            const uint64_t at = i + l;                  \
            lanes[l] += (term);                         \
        }                                               \
        (total) = sum_of_lanes(lanes);                  \
    } while (0)

/* exp(x) for x <= 0 by 2^(x / ln 2) with Taylor's polynomial of 2^f, |f| <= 1/2, to about 2^-18; 2^-30 where it is
   less. The same operations one by one in kernels.py. */
INLINE float exponential(float x)
{
    float t = x * 1.44269504f;
    t = t > -30.0f ? t : -30.0f;
    float whole = rintf(t), f = t - whole;
    float p = 0.00133335581f;
    p = p * f + 0.00961812911f;
    p = p * f + 0.0555041087f;
    p = p * f + 0.240226507f;
    p = p * f + 0.693147181f;
    p = p * f + 1.0f;
    int32_t bits;
    memcpy(&bits, &p, sizeof bits);
    bits += (int32_t)whole * 0x800000;
    memcpy(&p, &bits, sizeof p);
    return p;
}

CLONES void eb_softmax(const int32_t *acc, uint64_t rows, uint64_t columns, float factor, const uint8_t *hidden,
                       uint64_t rows_of_mask, int8_t *codes, float *weights)
{
    for (uint64_t row = 0; row < rows; row++, acc += columns, codes += columns) {
        const uint8_t *none = hidden == NULL ? NULL : hidden + row / rows_of_mask * columns;
        int32_t most = INT32_MIN, sum = 0;
        if (none == NULL)
            for (uint64_t i = 0; i < columns; i++)
                most = acc[i] > most ? acc[i] : most;
        else
            for (uint64_t i = 0; i < columns; i++) {
                int32_t value = none[i] ? INT32_MIN : acc[i];
                most = value > most ? value : most;
            }
        for (uint64_t i = 0; i < columns; i++) {
            /* Wraps where all are hidden, which no code tells of. */
            float below = (float)(int32_t)((uint32_t)acc[i] - (uint32_t)most) * factor;
            codes[i] = (int8_t)cut(rintf(127.0f * exponential(below < 0.0f ? below : 0.0f)), 0.0f, 127.0f);
        }
        if (none != NULL)
            for (uint64_t i = 0; i < columns; i++)
                codes[i] = none[i] ? 0 : codes[i];
        for (uint64_t i = 0; i < columns; i++)
            sum += codes[i];
        weights[row] = sum > 0 ? 1.0f / (float)sum : 0.0f;
    }
}

CLONES float eb_softmax_backward(const int32_t *acc, uint64_t rows, uint64_t columns, float factor,
                                 const int8_t *codes, const float *weights, uint16_t *gradient)
{
    uint16_t largest = 0;
    for (uint64_t row = 0; row < rows; row++, acc += columns, codes += columns, gradient += columns) {
        const float weight = weights[row];
        float mean;
        SUM_IN_LANES(mean, columns, (float)codes[at] * weight * ((float)acc[at] * factor));
        for (uint64_t i = 0; i < columns; i++)
            gradient[i] = narrow((float)codes[i] * weight * ((float)acc[i] * factor - mean));
        largest = note_magnitudes(largest, gradient, (int)columns);
    }
    return widen(largest);
}

#define MOST_COLUMNS 8192

CLONES void eb_layer_norm(const int32_t *acc, const float *floats, uint64_t rows, uint64_t columns, float factor,
                          const float *bias, const int8_t *residual, int32_t residual_zero, float residual_scale,
                          float epsilon, const float *gamma, const float *beta, float normal_inverse, int8_t *normal,
                          float *normal_extremes, float inverse, int32_t zero, int8_t *codes, float *extremes,
                          float *inverse_deviations)
{
    float x[MOST_COLUMNS];
    Extremes of_normal = start_extremes(normal_extremes), of_result = start_extremes(extremes);
    const float count = (float)columns;
    for (uint64_t row = 0; row < rows; row++) {
        const uint64_t at_row = row * columns;
        if (floats != NULL)
            memcpy(x, floats + at_row, columns * sizeof *x);
        else {
            finish_chunk(acc + at_row, (int)columns, NULL, factor, bias, 0, x);
            for (uint64_t i = 0; i < columns; i++)
                x[i] = x[i] + (float)(residual[at_row + i] - residual_zero) * residual_scale;
        }
        float mean, variance;
        SUM_IN_LANES(mean, columns, x[at]);
        mean = mean / count;
        for (uint64_t i = 0; i < columns; i++)
            x[i] = x[i] - mean;
        SUM_IN_LANES(variance, columns, x[at] * x[at]);
        const float by = 1.0f / sqrtf(variance / count + epsilon);
        inverse_deviations[row] = by;
        for (uint64_t i = 0; i < columns; i++)
            x[i] = x[i] * by;
        of_normal = note_extremes(of_normal, x, (int)columns);
        if (normal != NULL)
            for (uint64_t i = 0; i < columns; i++)
                normal[at_row + i] = (int8_t)cut(rintf(x[i] * normal_inverse), -127.0f, 127.0f);
        for (uint64_t i = 0; i < columns; i++)
            x[i] = x[i] * gamma[i] + beta[i];
        of_result = note_extremes(of_result, x, (int)columns);
        if (codes != NULL)
            quantize_chunk(x, (int)columns, inverse, (float)zero, 0, codes + at_row);
    }
    write_extremes(of_normal.low, of_normal.high, normal_extremes);
    write_extremes(of_result.low, of_result.high, extremes);
}

CLONES float eb_layer_norm_backward(const uint16_t *gradient, uint64_t rows, uint64_t columns, const int8_t *normal,
                                    float normal_scale, const float *inverse_deviations, const float *gamma,
                                    uint16_t *out, double *gamma_sums)
{
    uint16_t largest = 0;
    float h[MOST_COLUMNS], n[MOST_COLUMNS];
    const float count = (float)columns;
    for (uint64_t row = 0; row < rows; row++, gradient += columns, normal += columns, out += columns) {
        for (uint64_t i = 0; i < columns; i++) {
            n[i] = (float)normal[i] * normal_scale;
            h[i] = widen(gradient[i]);
        }
        for (uint64_t i = 0; i < columns; i++)
            gamma_sums[i] += (double)(h[i] * n[i]);
        for (uint64_t i = 0; i < columns; i++)
            h[i] = h[i] * gamma[i];
        float mean, slope;
        SUM_IN_LANES(mean, columns, h[at]);
        SUM_IN_LANES(slope, columns, h[at] * n[at]);
        mean = mean / count;
        slope = slope / count;
        const float by = inverse_deviations[row];
        for (uint64_t i = 0; i < columns; i++)
            out[i] = narrow((h[i] - mean - n[i] * slope) * by);
        largest = note_magnitudes(largest, out, (int)columns);
    }
    return widen(largest);
}
