/* The kernels of eight_bit_norm.c, once for each width of register. */
#include "vectors.h"

/* Runs CALL(lanes, ...) for every vector of channels of every sample, with `lanes` known to the compiler where all of
   them are there, as is what follows. */
#define EACH_VECTOR(CALL, ...)                                                           \
    for (int n = 0; n < samples; n++)                                                     \
        for (int c = 0; c < channels; c += LANES) {                                       \
            const size_t first = (size_t)n * (size_t)area * (size_t)channels + (size_t)c; \
            const size_t at = (size_t)n * (size_t)channels + (size_t)c;                   \
            if (channels - c >= LANES) {                                                  \
                CALL(LANES, ##__VA_ARGS__);                                               \
            } else {                                                                      \
                CALL(channels - c, ##__VA_ARGS__);                                        \
            }                                                                             \
        }

/* The same with CALL(lanes, gate). */
#define EACH_VECTOR_GATED(CALL) \
    if (gate == 0)               \
        EACH_VECTOR(CALL, 0)    \
    else if (gate == 1)          \
        EACH_VECTOR(CALL, 1)    \
    else                         \
        EACH_VECTOR(CALL, 2)

INLINE void NAME(statistics)(const uint8_t *codes, int area, int channels, int lanes, int32_t *sums, int32_t *squares,
                             uint8_t *lows, uint8_t *highs)
{
    Integers sum = {}, square = {}, low = (Integers){} + 255, high = {};
    for (int p = 0; p < area; p++, codes += channels) {
        Integers code = load_codes(codes, lanes), q = code - 128;
        sum += q;
        square += q * q;
        low = lesser(code, low);
        high = greater(code, high);
    }
    memcpy(sums, &sum, (size_t)lanes * sizeof *sums);
    memcpy(squares, &square, (size_t)lanes * sizeof *squares);
    store_codes(lows, low, lanes);
    store_codes(highs, high, lanes);
}

static void NAME(eb_norm_statistics)(const uint8_t *codes, int samples, int area, int channels, int32_t *sums,
                                     int32_t *squares, uint8_t *lows, uint8_t *highs)
{
#define STATISTICS(L) NAME(statistics)(codes + first, area, channels, L, sums + at, squares + at, lows + at, highs + at)
    EACH_VECTOR(STATISTICS)
#undef STATISTICS
}

INLINE void NAME(ties)(const uint8_t *codes, int area, int channels, int lanes, const uint8_t *lows,
                       const uint8_t *highs, int32_t *at_low, int32_t *at_high)
{
    Integers low = load_codes(lows, lanes), high = load_codes(highs, lanes), least = {}, most = {};
    for (int p = 0; p < area; p++, codes += channels) {
        Integers code = load_codes(codes, lanes);
        least -= code == low;
        most -= code == high;
    }
    memcpy(at_low, &least, (size_t)lanes * sizeof *at_low);
    memcpy(at_high, &most, (size_t)lanes * sizeof *at_high);
}

static void NAME(eb_norm_ties)(const uint8_t *codes, int samples, int area, int channels, const uint8_t *lows,
                               const uint8_t *highs, int32_t *at_low, int32_t *at_high)
{
#define TIES(L) NAME(ties)(codes + first, area, channels, L, lows + at, highs + at, at_low + at, at_high + at)
    EACH_VECTOR(TIES)
#undef TIES
}

INLINE void NAME(forward)(const uint8_t *codes, int area, int channels, int lanes, int gate, const float *inner,
                          const float *factor, const float *shift, float low, float high, const ResidualSum *sum,
                          const uint8_t *other, uint8_t *out, float *extremes)
{
    const Floats f = load_floats(factor, lanes), s = load_floats(shift, lanes);
    const Floats i = gate ? load_floats(inner, lanes) : all(0.0f);
    Floats least = all(INFINITY), most = all(-INFINITY), least_sum = least, most_sum = most;
    /* What is written might be a part of it, for all that the compiler knows. */
    const ResidualSum given = sum == NULL ? (ResidualSum){0} : *sum;
    for (int p = 0; p < area; p++, codes += channels) {
        Floats t = __builtin_convertvector(load_codes(codes, lanes) - 128, Floats);
        if (gate)
            t = t * gate_of(gate, t * i);
        Floats level = t * f + s;
        least = lower(level, least);
        most = higher(level, most);
        if (out != NULL) {
            level = nearest(cut(level, all(low), all(high)));
            if (sum != NULL) {
                level = (level * given.factor
                         + __builtin_convertvector(load_codes(other, lanes), Floats) * given.other_factor) + given.shift;
                least_sum = lower(level, least_sum);
                most_sum = higher(level, most_sum);
                level = nearest(cut(level, all(given.low), all(given.high)));
                other += channels;
            }
            store_codes(out, __builtin_convertvector(level, Integers), lanes);
            out += channels;
        }
    }
    note(least, most, lanes, extremes);
    if (sum != NULL)
        note(least_sum, most_sum, lanes, given.extremes);
}

static void NAME(eb_norm_forward)(const uint8_t *codes, int samples, int area, int channels, int gate,
                                  const float *inner, const float *factor, const float *shift, float low, float high,
                                  const ResidualSum *sum, uint8_t *codes_out, float *extremes)
{
#define FORWARD(L, GATE)                                                                                        \
    NAME(forward)(codes + first, area, channels, L, GATE, inner + c, factor + at, shift + at, low, high, NULL, NULL,  \
                  codes_out == NULL ? NULL : codes_out + first, extremes)
#define SUM_FORWARD(L, GATE)                                                                                    \
    NAME(forward)(codes + first, area, channels, L, GATE, inner + c, factor + at, shift + at, low, high, sum,         \
                  sum->other + first, codes_out + first, extremes)
    if (sum == NULL)
        EACH_VECTOR_GATED(FORWARD)
    else
        EACH_VECTOR_GATED(SUM_FORWARD)
#undef FORWARD
#undef SUM_FORWARD
}

INLINE void NAME(backward_sums)(const uint8_t *codes, const uint16_t *gradient, int area, int channels, int lanes,
                                int gate, const float *inner, float *plain, float *weighted, float *gated)
{
    const Floats i = gate ? load_floats(inner, lanes) : all(0.0f);
    Floats sum = {}, with_t = {}, with_gate = {};
    for (int p = 0; p < area; p++, codes += channels, gradient += channels) {
        const Floats q = __builtin_convertvector(load_codes(codes, lanes) - 128, Floats);
        const Floats g = load_gradient(gradient, lanes);
        sum += g;
        if (gate) {
            const Floats u = q * i, value = gate_of(gate, u);
            with_t += g * (q * value);
            with_gate += (g * (q * q)) * gate_slope(gate, u, value);
        } else {
            with_t += g * q;
        }
    }
    store_floats(plain, sum, lanes);
    store_floats(weighted, with_t, lanes);
    if (gate)
        store_floats(gated, with_gate, lanes);
}

static void NAME(eb_norm_backward_sums)(const uint8_t *codes, const uint16_t *gradient, int samples, int area,
                                        int channels, int gate, const float *inner, float *plain, float *weighted,
                                        float *gated)
{
#define SUMS(L, GATE)                                                                                          \
    NAME(backward_sums)(codes + first, gradient + first, area, channels, L, GATE, inner + c, plain + at,          \
                        weighted + at, gated + at)
    EACH_VECTOR_GATED(SUMS)
#undef SUMS
}

INLINE Words NAME(backward)(const uint8_t *codes, const uint16_t *gradient, int area, int channels, int lanes,
                            int gate, int ends, const float *inner, const float *slope, const float *linear,
                            const float *constant, const uint8_t *lows, const uint8_t *highs, const float *at_low,
                            const float *at_high, uint16_t *out)
{
    const Floats i = gate ? load_floats(inner, lanes) : all(0.0f);
    const Floats a = load_floats(slope, lanes), b = load_floats(linear, lanes), d = load_floats(constant, lanes);
    const Integers low = ends ? load_codes(lows, lanes) : (Integers){};
    const Integers high = ends ? load_codes(highs, lanes) : (Integers){};
    const Floats low_term = ends ? load_floats(at_low, lanes) : all(0.0f);
    const Floats high_term = ends ? load_floats(at_high, lanes) : all(0.0f);
    Words largest = {};
    for (int p = 0; p < area; p++, codes += channels, gradient += channels, out += channels) {
        const Integers code = load_codes(codes, lanes);
        const Floats q = __builtin_convertvector(code - 128, Floats);
        Floats g = load_gradient(gradient, lanes);
        if (gate) {
            const Floats u = q * i, value = gate_of(gate, u);
            g = g * (value + u * gate_slope(gate, u, value));
        }
        Floats result = (g * a + q * b) + d;
        if (ends) {
            result = result + choose(code == low, low_term, all(0.0f));
            result = result + choose(code == high, high_term, all(0.0f));
        }
        largest = larger(store_gradient(out, result, lanes), largest);
    }
    return largest;
}

static float NAME(eb_norm_backward)(const uint8_t *codes, const uint16_t *gradient, int samples, int area,
                                    int channels, int gate, const float *inner, const float *slope,
                                    const float *linear, const float *constant, const uint8_t *lows,
                                    const uint8_t *highs, const float *at_low, const float *at_high, uint16_t *out)
{
    float largest = 0.0f;
#define BACKWARD(L, GATE, ENDS)                                                                                      \
    {                                                                                                               \
        const float found = largest_of(                                                                             \
            NAME(backward)(codes + first, gradient + first, area, channels, L, GATE, ENDS, inner + c, slope + at,   \
                           linear + at, constant + at, lows + at, highs + at, at_low + at, at_high + at,            \
                           out + first),                                                                            \
            L);                                                                                                     \
        largest = (found > largest) | (found != found) ? found : largest;                                           \
    }
    if (gate == 0 && lows == NULL)
        EACH_VECTOR(BACKWARD, 0, 0)
    else if (gate == 0)
        EACH_VECTOR(BACKWARD, 0, 1)
    else if (gate == 1)
        EACH_VECTOR(BACKWARD, 1, 0)
    else
        EACH_VECTOR(BACKWARD, 2, 1)
#undef BACKWARD
    return largest;
}

static void NAME(eb_sum_forward)(const uint8_t *a, const uint8_t *b, uint64_t n, float a_factor, float b_factor,
                                 float shift, float low, float high, uint8_t *codes, float *extremes)
{
    Floats least = all(INFINITY), most = all(-INFINITY);
    uint64_t i = 0;
#define SUM(L)                                                                                                     \
    Floats level = (__builtin_convertvector(load_codes(a + i, L), Floats) * a_factor                               \
                    + __builtin_convertvector(load_codes(b + i, L), Floats) * b_factor) + shift;                   \
    if (codes != NULL)                                                                                             \
        store_codes(codes + i, __builtin_convertvector(nearest(cut(level, all(low), all(high))), Integers), L);
    for (; i + LANES <= n; i += LANES) {
        SUM(LANES)
        least = lower(level, least);
        most = higher(level, most);
    }
    note(least, most, n >= LANES ? LANES : 0, extremes);
    if (i < n) {
        const int lanes = (int)(n - i);
        SUM(lanes)
        note(level, level, lanes, extremes);
    }
#undef SUM
}

static float NAME(eb_sum_backward)(const uint16_t *a, const uint16_t *b, uint64_t n, const uint8_t *mask, int masked,
                                   uint16_t *out)
{
    Words largest = {};
    for (uint64_t i = 0; i < n; i += LANES) {
        const int lanes = n - i < LANES ? (int)(n - i) : LANES;
#define SUM(L)                                                                         \
    Floats sum = load_gradient(a + i, L) + load_gradient(b + i, L);                    \
    if (mask != NULL)                                                                  \
        sum = choose(load_codes(mask + i, L) == masked, all(0.0f), sum);               \
    largest = larger(store_gradient(out + i, sum, L), largest);
        if (lanes == LANES) {
            SUM(LANES)
        } else {
            SUM(lanes)
        }
#undef SUM
    }
    return largest_of(largest, LANES);
}

static void NAME(eb_max_pool_forward)(const uint8_t *codes, int samples, int height, int width, int channels,
                                      int kernel, int stride, int padding, uint8_t *out, uint8_t *places)
{
    const int rows = (height + 2 * padding - kernel) / stride + 1;
    const int columns = (width + 2 * padding - kernel) / stride + 1;
    for (int n = 0; n < samples; n++, codes += (size_t)height * (size_t)width * (size_t)channels)
        for (int r = 0; r < rows; r++)
            for (int col = 0; col < columns; col++, out += channels, places += channels) {
                int first = 1;
                for (int k = 0; k < kernel * kernel; k++) {
                    const int y = r * stride - padding + k / kernel, x = col * stride - padding + k % kernel;
                    if (y < 0 || y >= height || x < 0 || x >= width)
                        continue;
                    const uint8_t *from = codes + ((size_t)y * (size_t)width + (size_t)x) * (size_t)channels;
                    if (first) {
                        memcpy(out, from, (size_t)channels);
                        memset(places, k, (size_t)channels);
                        first = 0;
                        continue;
                    }
                    for (int c = 0; c < channels; c++) {
                        const uint8_t more = from[c] > out[c];
                        places[c] = more ? (uint8_t)k : places[c];
                        out[c] = more ? from[c] : out[c];
                    }
                }
            }
}

static float NAME(eb_max_pool_backward)(const uint8_t *places, const uint16_t *gradient, int samples, int height,
                                        int width, int channels, int kernel, int stride, int padding, float *sums,
                                        uint16_t *result)
{
    const int rows = (height + 2 * padding - kernel) / stride + 1;
    const int columns = (width + 2 * padding - kernel) / stride + 1;
    const size_t size = (size_t)height * (size_t)width * (size_t)channels;
    Words largest = {};
    for (int n = 0; n < samples; n++, result += size) {
        memset(sums, 0, size * sizeof *sums);
        for (int r = 0; r < rows; r++)
            for (int col = 0; col < columns; col++) {
                for (int k = 0; k < kernel * kernel; k++) {
                    const int y = r * stride - padding + k / kernel, x = col * stride - padding + k % kernel;
                    if (y < 0 || y >= height || x < 0 || x >= width)
                        continue;
                    float *to = sums + ((size_t)y * (size_t)width + (size_t)x) * (size_t)channels;
                    for (int c = 0; c < channels; c++)
                        to[c] = to[c] + (places[c] == k ? widen(gradient[c]) : 0.0f);
                }
                places += channels;
                gradient += channels;
            }
        size_t i = 0;
        for (; i + LANES <= size; i += LANES)
            largest = larger(store_gradient(result + i, load_floats(sums + i, LANES), LANES), largest);
        if (i < size)
            largest = larger(
                store_gradient(result + i, load_floats(sums + i, (int)(size - i)), (int)(size - i)), largest);
    }
    return largest_of(largest, LANES);
}
