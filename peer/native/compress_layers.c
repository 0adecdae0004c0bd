/* The kernels of the compressors, called for each of many layers: of small ones a call from Python takes longer than
   the work. */
#include "compress_layers.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "compress.h"

/* The float nearest to a scale, unless `steps` times it could overflow: then infinity. NaN is told as infinity, too. */
static float checked_scale(double scale, int32_t steps) {
    float held = (float)scale;
    return (double)held * steps <= FLT_MAX / 2.0 ? held : INFINITY;
}

int64_t nearest_levels_of_each(const float *v, const int64_t *sizes, uint64_t layers, int32_t steps,
                               const double *shrinks, int num_shrinks, int width, uint8_t *codes, double *scales) {
    int64_t total = 0, most = 0;
    for (uint64_t layer = 0; layer < layers; layer++) {
        total += sizes[layer];
        most = sizes[layer] > most ? sizes[layer] : most;
    }
    uint8_t *tried = codes + total * width, *best = tried + most * width;
    for (uint64_t layer = 0; layer < layers; v += sizes[layer], codes += sizes[layer] * width, layer++) {
        uint64_t n = (uint64_t)sizes[layer];
        float largest = checked_scale(max_magnitude_f32(v, n), steps);
        if (isinf(largest)) return (int64_t)layer;
        double least = INFINITY;
        scales[layer] = 0.0;
        for (uint64_t i = 0; i < n; i++) {
            if (width == 1) {
                best[i] = (uint8_t)steps;
            } else {
                ((uint16_t *)best)[i] = (uint16_t)steps;
            }
        }
        for (int i = 0; i < num_shrinks && least > 0.0; i++) {
            float scale = (float)((double)largest * shrinks[i]);
            /* A step of this scale would be denormal, or the layer is zero. */
            if (scale < (double)FLT_MIN * steps) break;
            double error = nearest_codes(v, n, scale, steps, width, tried);
            if (!(error < least)) continue;
            least = error;
            scales[layer] = scale;
            uint8_t *spare = best;
            best = tried;
            tried = spare;
        }
        memcpy(codes, best, n * (uint64_t)width);
    }
    return -1;
}

int64_t signs_of_each(const float *v, const int64_t *sizes, uint64_t layers, uint8_t *codes, double *scales) {
    for (uint64_t layer = 0; layer < layers; v += sizes[layer], codes += sizes[layer], layer++) {
        float mean = checked_scale(sum_of_magnitudes_f32(v, (uint64_t)sizes[layer]) / (double)sizes[layer], 1);
        if (isinf(mean)) return (int64_t)layer;
        scales[layer] = mean;
        for (int64_t i = 0; i < sizes[layer]; i++) codes[i] = v[i] >= 0;
    }
    return -1;
}

void sums_of_squares_of_each(const float *v, const int64_t *sizes, uint64_t layers, double *sums) {
    for (uint64_t layer = 0; layer < layers; v += sizes[layer], layer++)
        sums[layer] = sum_of_squares_f32(v, (uint64_t)sizes[layer]);
}

void stochastic_codes_of_each(const float *v, const int64_t *sizes, uint64_t layers, int32_t steps,
                              const double *scales, uint32_t key0, uint32_t key1, uint32_t round, int width,
                              uint8_t *codes) {
    for (uint64_t layer = 0; layer < layers; v += sizes[layer], codes += sizes[layer] * width, layer++) {
        uint64_t n = (uint64_t)sizes[layer];
        if (scales[layer] != 0.0) {
            stochastic_codes(v, n, steps, (float)scales[layer], NULL, key0, key1, (uint32_t)layer, round, width, codes);
        } else if (width == 1) {
            memset(codes, steps, n);
        } else {
            for (uint64_t i = 0; i < n; i++) ((uint16_t *)codes)[i] = (uint16_t)steps;
        }
    }
}

int64_t modulo_encode_of_each(const float *x, const int64_t *sizes, uint64_t layers, const double *moduli, int bits,
                              int dither, float limit, uint32_t key0, uint32_t key1, uint32_t round,
                              int64_t *integers, int width, uint8_t *residues) {
    for (uint64_t layer = 0; layer < layers; layer++) {
        uint64_t n = (uint64_t)sizes[layer];
        if (!modulo_encode_f32(x, n, (float)moduli[layer], bits, dither, limit, NULL, 0, key0, key1, (uint32_t)layer,
                               round, integers, width, residues, NULL))
            return (int64_t)layer;
        x += n;
        residues += n * (uint64_t)width;
        if (integers != NULL) integers += n;
    }
    return -1;
}

int64_t modulo_recover_of_each(const uint8_t *residues, int width, const float *y, const int64_t *sizes,
                               uint64_t layers, const double *moduli, int bits, int dither, float limit,
                               uint32_t key0, uint32_t key1, uint32_t round, int64_t *integers, float *values) {
    for (uint64_t layer = 0; layer < layers; layer++) {
        uint64_t n = (uint64_t)sizes[layer];
        if (!modulo_recover_f32(residues, width, y, n, (float)moduli[layer], bits, dither, limit, NULL, 0, key0, key1,
                                (uint32_t)layer, round, integers, values))
            return (int64_t)layer;
        y += n;
        values += n;
        residues += n * (uint64_t)width;
        if (integers != NULL) integers += n;
    }
    return -1;
}

#define ADD_AT(VALUE)                                      \
    for (int64_t i = 0; i < k; i++) {                      \
        if ((uint64_t)indices[i] < (uint64_t)sizes[layer]) \
            out[indices[i]] += (VALUE) * weight;           \
        else                                               \
            outside++;                                     \
    }
#define LEVEL(TYPE) (float)(base + step * (int32_t)((const TYPE *)codes)[i]) * scale / divisor

uint64_t add_columns(float *out, const int64_t *sizes, const uint8_t *forms, const int64_t *counts,
                     const double *scalars, uint64_t layers, const int64_t *indices, const float *reals,
                     const uint8_t *codes, int width, int32_t base, int32_t step, float divisor, double greatest_level,
                     float weight) {
    uint64_t outside = 0;
    for (uint64_t layer = 0; layer < layers; layer++)
        if (!(greatest_level * fabs(scalars[layer]) < FLT_MAX)) return UINT64_MAX;
    for (uint64_t layer = 0; layer < layers; out += sizes[layer], layer++) {
        int64_t k = counts[layer];
        int is_sparse = forms[layer] & 4, is_levels = forms[layer] & 1;
        const float scale = (float)scalars[layer];
        if (is_sparse && !is_levels) {
            ADD_AT(reals[i])
        } else if (is_sparse && width == 1) {
            ADD_AT(LEVEL(uint8_t))
        } else if (is_sparse) {
            ADD_AT(LEVEL(uint16_t))
        } else if (is_levels) {
            add_levels(out, codes, width, (uint64_t)k, scale, base, step, divisor, weight);
        } else {
            add_scaled(out, reals, (uint64_t)k, weight);
        }
        if (is_sparse) indices += k;
        if (is_levels) codes += k * width;
        if (!is_levels) reals += k;
    }
    return outside;
}
