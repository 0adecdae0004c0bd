/* The kernels of evonorm.c, once for each width of register.

   Both layouts are runs of vectors, `step` numbers apart. Planes: the pixels of one channel, sixteen side by side, and
   one more vector with those that are left. Channels last: the pixels one after the other, each a vector of sixteen
   channels. */
#define SIXTEEN_LANES 1 /* Its sums are those of sixteen lanes, whatever a register holds. */
#include "vectors.h"

#define sigmoid NAME(sigmoid)
#define load_values NAME(load_values)
#define store_values NAME(store_values)
#define of_channels NAME(of_channels)
#define add_to_channels NAME(add_to_channels)
#define run_sum NAME(run_sum)
#define run_squares NAME(run_squares)
#define run_forward NAME(run_forward)
#define run_gradient_sums NAME(run_gradient_sums)
#define run_backward NAME(run_backward)

#ifndef SOTTOVOCE_EVONORM_KERNELS_H
#define SOTTOVOCE_EVONORM_KERNELS_H
/* Vectors added one to the other before their sum is added to that of all: bounds the rounding of long runs. */
#define BLOCK 64

/* Calls CALL(c, first, step, count, lanes) for every run of a sample, with `lanes` known to the compiler where there
   are sixteen. */
#define EACH_RUN(CALL)                                                               \
    if (channels_last) {                                                             \
        for (int c = 0; c < channels; c += LANES)                                    \
            if (channels - c >= LANES) {                                             \
                CALL(c, (size_t)c, channels, area, LANES);                           \
            } else {                                                                 \
                CALL(c, (size_t)c, channels, area, channels - c);                    \
            }                                                                        \
    } else {                                                                         \
        const int whole = area / LANES, rest = area % LANES;                         \
        for (int c = 0; c < channels; c++) {                                         \
            const size_t plane = (size_t)c * (size_t)area;                           \
            CALL(c, plane, LANES, whole, LANES);                                     \
            if (rest)                                                                \
                CALL(c, plane + (size_t)whole * LANES, 0, 1, rest);                  \
        }                                                                            \
    }

/* Calls CALL(halves, channels_last), known to the compiler. */
#define EACH_KIND(CALL)              \
    if (halves && channels_last)     \
        CALL(1, 1);                  \
    else if (halves)                 \
        CALL(1, 0);                  \
    else if (channels_last)          \
        CALL(0, 1);                  \
    else                             \
        CALL(0, 0);
#endif

/* 1 / (1 + e^-u) to 3e-7 of itself; below -87 that of -87, which is 2e-38. NaN stays.

   e^x is 2^k times the Taylor polynomial of degree 7 on [-ln 2 / 2, ln 2 / 2], which leaves out 6e-9. */
INLINE Floats sigmoid(Floats u)
{
#ifdef __AVX512F__
    Floats x = (Floats)_mm512_min_ps((__m512)all(87.0f), _mm512_max_ps((__m512)all(-87.0f), (__m512)-u));
#else
    Floats x = choose(u > 87.0f, all(-87.0f), choose(u < -87.0f, all(87.0f), -u));
#endif
    Floats k = nearest(x * 1.44269504f);
    Floats r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    Floats p = r * (1.0f / 5040.0f) + (1.0f / 720.0f);
    p = p * r + (1.0f / 120.0f);
    p = p * r + (1.0f / 24.0f);
    p = p * r + (1.0f / 6.0f);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Words power = (Words)(__builtin_convertvector(k, Integers) + 127) << 23;
    return 1.0f / (1.0f + p * (Floats)power);
}

INLINE Floats load_values(const void *from, size_t at, int lanes, int halves)
{
    return halves ? load_gradient((const uint16_t *)from + at, lanes) : load_floats((const float *)from + at, lanes);
}
INLINE void store_values(void *to, size_t at, Floats v, int lanes, int halves)
{
    if (halves)
        store_gradient((uint16_t *)to + at, v, lanes);
    else
        store_floats((float *)to + at, v, lanes);
}

/* What belongs to the channels of a run's lanes, of numbers for each channel. */
INLINE Floats of_channels(const float *from, int c, int lanes, int channels_last)
{
    return channels_last ? load_floats(from + c, lanes) : all(from[c]);
}
/* Adds the sum of a run to its channels: lane by lane, or half to half in planes. */
INLINE void add_to_channels(float *to, int c, Floats sum, int lanes, int channels_last)
{
    if (channels_last) {
        store_floats(to + c, load_floats(to + c, lanes) + sum, lanes);
        return;
    }
    float parts[LANES] = {0};
    store_floats(parts, sum, lanes);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++)
            parts[l] += parts[l + width];
    to[c] += parts[0];
}

INLINE Floats run_sum(const void *x, size_t at, int step, int count, int lanes, int halves)
{
    Floats sum = {};
    for (int p = 0; p < count;) {
        Floats block = {};
        const int end = count - p > BLOCK ? p + BLOCK : count;
        for (; p < end; p++, at += (size_t)step)
            block += load_values(x, at, lanes, halves);
        sum += block;
    }
    return sum;
}

INLINE Floats run_squares(const void *x, size_t at, int step, int count, int lanes, int halves, Floats mean)
{
    Floats sum = {};
    for (int p = 0; p < count;) {
        Floats block = {};
        const int end = count - p > BLOCK ? p + BLOCK : count;
        for (; p < end; p++, at += (size_t)step) {
            Floats centred = load_values(x, at, lanes, halves) - mean;
            block += centred * centred;
        }
        sum += block;
    }
    return sum;
}

INLINE void run_forward(const void *x, size_t at, int step, int count, int lanes, int halves, Floats v, Floats factor,
                        Floats bias, void *y)
{
    for (int p = 0; p < count; p++, at += (size_t)step) {
        Floats value = load_values(x, at, lanes, halves);
        store_values(y, at, value * sigmoid(v * value) * factor + bias, lanes, halves);
    }
}

/* Sums of g, of g x s and of g x^2 s (1 - s), with s the sigmoid; keeps g * factor * d(x s)/dx. */
INLINE void run_gradient_sums(const void *x, const void *gradient, size_t at, size_t kept_at, int step, int count,
                              int lanes, int halves, Floats v, Floats factor, float *kept, Floats sums[3])
{
    sums[0] = sums[1] = sums[2] = all(0.0f);
    for (int p = 0; p < count;) {
        Floats plain = {}, weighted = {}, gated = {};
        const int end = count - p > BLOCK ? p + BLOCK : count;
        for (; p < end; p++, at += (size_t)step, kept_at += (size_t)step) {
            Floats value = load_values(x, at, lanes, halves), g = load_values(gradient, at, lanes, halves);
            Floats s = sigmoid(v * value), slope = value * (s * (1.0f - s));
            plain += g;
            weighted += g * value * s;
            gated += g * value * slope;
            store_floats(kept + kept_at, g * factor * (s + v * slope), lanes);
        }
        sums[0] += plain;
        sums[1] += weighted;
        sums[2] += gated;
    }
}

/* What is kept, and what x gives by the variance. */
INLINE void run_backward(const void *x, size_t at, size_t kept_at, int step, int count, int lanes, int halves,
                         const float *kept, Floats mean, Floats slope, void *out)
{
    for (int p = 0; p < count; p++, at += (size_t)step, kept_at += (size_t)step) {
        Floats centred = load_values(x, at, lanes, halves) - mean;
        store_values(out, at, load_floats(kept + kept_at, lanes) + slope * centred, lanes, halves);
    }
}

/* The mean and r of a sample, for each channel those of its group. */
INLINE void NAME(statistics)(const void *x, size_t sample, const int halves, const int channels_last, int channels,
                             int area, int groups, float epsilon, float *mean_of, float *inverse_of)
{
    const int per = channels / groups;
    const float share = 1.0f / ((float)per * (float)area);
    float *sums = inverse_of;
#define SUM(C, FIRST, STEP, COUNT, L) \
    add_to_channels(sums, C, run_sum(x, sample + (FIRST), STEP, COUNT, L, halves), L, channels_last)
    memset(sums, 0, (size_t)channels * sizeof *sums);
    EACH_RUN(SUM)
#undef SUM
    for (int c = 0; c < channels; c += per) {
        float sum = 0.0f;
        for (int i = 0; i < per; i++)
            sum += sums[c + i];
        for (int i = 0; i < per; i++)
            mean_of[c + i] = sum * share;
    }
#define SQUARES(C, FIRST, STEP, COUNT, L)                                                                       \
    add_to_channels(sums, C,                                                                                    \
                    run_squares(x, sample + (FIRST), STEP, COUNT, L, halves,                                    \
                                of_channels(mean_of, C, L, channels_last)),                                     \
                    L, channels_last)
    memset(sums, 0, (size_t)channels * sizeof *sums);
    EACH_RUN(SQUARES)
#undef SQUARES
    for (int c = 0; c < channels; c += per) {
        float sum = 0.0f;
        for (int i = 0; i < per; i++)
            sum += sums[c + i];
        for (int i = 0; i < per; i++)
            inverse_of[c + i] = 1.0f / sqrtf(sum * share + epsilon);
    }
}

/* Of one type of numbers in one layout. */
INLINE void NAME(forward)(const void *x, const int halves, const int channels_last, int samples, int channels,
                          int area, int groups, const float *v, const float *weight, const float *bias, float epsilon,
                          void *y, float *scratch)
{
    float *mean_of = scratch, *factors = scratch + channels;
    for (int n = 0; n < samples; n++) {
        const size_t sample = (size_t)n * (size_t)area * (size_t)channels;
        NAME(statistics)(x, sample, halves, channels_last, channels, area, groups, epsilon, mean_of, factors);
        for (int c = 0; c < channels; c++)
            factors[c] *= weight[c];
#define FORWARD(C, FIRST, STEP, COUNT, L)                                                             \
    run_forward(x, sample + (FIRST), STEP, COUNT, L, halves, of_channels(v, C, L, channels_last),     \
                of_channels(factors, C, L, channels_last), of_channels(bias, C, L, channels_last), y)
        EACH_RUN(FORWARD)
#undef FORWARD
    }
}

INLINE void NAME(backward)(const void *x, const void *gradient, const int halves, const int channels_last, int samples,
                           int channels, int area, int groups, const float *v, const float *weight, float epsilon,
                           void *x_gradient, float *v_gradient, float *weight_gradient, float *bias_gradient,
                           float *scratch)
{
    const int per = channels / groups;
    const float share = 1.0f / ((float)per * (float)area);
    float *mean_of = scratch, *inverse_of = mean_of + channels, *factors = inverse_of + channels;
    float *plain = factors + channels, *weighted = plain + channels, *gated = weighted + channels;
    float *kept = gated + channels;
    memset(v_gradient, 0, (size_t)channels * sizeof *v_gradient);
    memset(weight_gradient, 0, (size_t)channels * sizeof *weight_gradient);
    memset(bias_gradient, 0, (size_t)channels * sizeof *bias_gradient);
    for (int n = 0; n < samples; n++) {
        const size_t sample = (size_t)n * (size_t)area * (size_t)channels;
        NAME(statistics)(x, sample, halves, channels_last, channels, area, groups, epsilon, mean_of, inverse_of);
        for (int c = 0; c < channels; c++)
            factors[c] = inverse_of[c] * weight[c];
#define SUMS(C, FIRST, STEP, COUNT, L)                                                                     \
    do {                                                                                                   \
        Floats sums[3];                                                                                    \
        run_gradient_sums(x, gradient, sample + (FIRST), FIRST, STEP, COUNT, L, halves,                    \
                          of_channels(v, C, L, channels_last), of_channels(factors, C, L, channels_last),  \
                          kept, sums);                                                                     \
        add_to_channels(plain, C, sums[0], L, channels_last);                                              \
        add_to_channels(weighted, C, sums[1], L, channels_last);                                           \
        add_to_channels(gated, C, sums[2], L, channels_last);                                              \
    } while (0)
        memset(plain, 0, 3 * (size_t)channels * sizeof *plain);
        EACH_RUN(SUMS)
#undef SUMS
        for (int c = 0; c < channels; c++) {
            bias_gradient[c] += plain[c];
            weight_gradient[c] += inverse_of[c] * weighted[c];
            v_gradient[c] += factors[c] * gated[c];
        }
        float *slopes = factors;
        for (int c = 0; c < channels; c += per) {
            const float r = inverse_of[c];
            float sum = 0.0f;
            for (int i = 0; i < per; i++)
                sum += weight[c + i] * weighted[c + i];
            for (int i = 0; i < per; i++)
                slopes[c + i] = -(sum * share * r) * (r * r);
        }
#define BACKWARD(C, FIRST, STEP, COUNT, L)                                                           \
    run_backward(x, sample + (FIRST), FIRST, STEP, COUNT, L, halves, kept,                           \
                 of_channels(mean_of, C, L, channels_last), of_channels(slopes, C, L, channels_last), \
                 x_gradient)
        EACH_RUN(BACKWARD)
#undef BACKWARD
    }
}

static void NAME(en_forward)(const void *x, int halves, int channels_last, int samples, int channels, int area,
                             int groups, const float *v, const float *weight, const float *bias, float epsilon,
                             void *y, float *scratch)
{
#define CALL(HALVES, LAST) \
    NAME(forward)(x, HALVES, LAST, samples, channels, area, groups, v, weight, bias, epsilon, y, scratch)
    EACH_KIND(CALL)
#undef CALL
}

static void NAME(en_backward)(const void *x, const void *gradient, int halves, int channels_last, int samples,
                              int channels, int area, int groups, const float *v, const float *weight, float epsilon,
                              void *x_gradient, float *v_gradient, float *weight_gradient, float *bias_gradient,
                              float *scratch)
{
#define CALL(HALVES, LAST)                                                                                 \
    NAME(backward)(x, gradient, HALVES, LAST, samples, channels, area, groups, v, weight, epsilon,         \
                   x_gradient, v_gradient, weight_gradient, bias_gradient, scratch)
    EACH_KIND(CALL)
#undef CALL
}

static void NAME(en_sigmoid)(const float *u, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i += LANES) {
        const int lanes = n - i < LANES ? (int)(n - i) : LANES;
        store_floats(out + i, sigmoid(load_floats(u + i, lanes)), lanes);
    }
}
