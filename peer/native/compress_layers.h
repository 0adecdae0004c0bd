#ifndef SOTTOVOCE_COMPRESS_LAYERS_H
#define SOTTOVOCE_COMPRESS_LAYERS_H
#include <stdint.h>
#include <stddef.h>
/* Kernels of the compressors for layers that follow one another, with `sizes` numbers each. */

/* For each layer the codes on the levels scale * (code - steps) / steps nearest to it, with the best of the scales
   max |v| * shrinks[i]: see nearest_levels in peer/compress/levels.py. `codes` has room for all codes and, behind them,
   twice for those of the largest layer. Returns -1, or the first layer whose numbers are too large or not finite. */
int64_t nearest_levels_of_each(const float *v, const int64_t *sizes, uint64_t layers, int32_t steps,
                               const double *shrinks, int num_shrinks, int width, uint8_t *codes, double *scales);
/* Likewise with one bit: whether a number is at least 0; the scales are the means of the magnitudes. */
int64_t signs_of_each(const float *v, const int64_t *sizes, uint64_t layers, uint8_t *codes, double *scales);
void sums_of_squares_of_each(const float *v, const int64_t *sizes, uint64_t layers, double *sums);
/* stochastic_codes of each layer with numbers drawn from its own stream; the code of zero where the scale is 0. */
void stochastic_codes_of_each(const float *v, const int64_t *sizes, uint64_t layers, int32_t steps,
                              const double *scales, uint32_t key0, uint32_t key1, uint32_t round, int width,
                              uint8_t *codes);
/* The residues of each layer, and its integers unless that is NULL, with B of `moduli`. Returns -1, or the first layer
   that has an integer beyond `limit`. */
int64_t modulo_encode_of_each(const float *x, const int64_t *sizes, uint64_t layers, const double *moduli, int bits,
                              int dither, float limit, uint32_t key0, uint32_t key1, uint32_t round,
                              int64_t *integers, int width, uint8_t *residues);
/* The inverse, against y: the values and, unless that is NULL, the integers. Returns -1, or the first layer that has
   a number beyond `limit`. */
int64_t modulo_recover_of_each(const uint8_t *residues, int width, const float *y, const int64_t *sizes,
                               uint64_t layers, const double *moduli, int bits, int dither, float limit,
                               uint32_t key0, uint32_t key1, uint32_t round, int64_t *integers, float *values);
/* out += weight * values of a payload by columns (peer/compress/columns.py) without residues. Returns how many indices
   lie outside of their layer, which are left out; or adds nothing and returns 2^64 - 1, where a scale times
   `greatest_level` is beyond float32. */
uint64_t add_columns(float *out, const int64_t *sizes, const uint8_t *forms, const int64_t *counts,
                     const double *scalars, uint64_t layers, const int64_t *indices, const float *reals,
                     const uint8_t *codes, int width, int32_t base, int32_t step, float divisor, double greatest_level, float weight);
#endif
