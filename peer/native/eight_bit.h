#ifndef SOTTOVOCE_EIGHT_BIT_H
#define SOTTOVOCE_EIGHT_BIT_H
#include <stdint.h>
/* Kernels around the products of 8-bit training: what turns floats into codes, accumulators of int32 into codes or
   gradients, and gradients into codes. Each has a twin of torch operators in peer/train/eight_bit/kernels.py that
   returns the same bits.

   A code q stands for (q - zero) * scale. `inverse` is 1 / scale. Codes are int8, or uint8 where a kernel has a
   `flip`: 0 for int8, 128 for uint8, whose codes and zeros are those of int8 plus 128. bfloat16 comes as its bits. */

/* extremes[0] and extremes[1] become the least and the greatest of v and of what is there already; NaN stays. */
void eb_extremes(const float *v, uint64_t n, float *extremes);

/* The mean of v * v over the numbers that are not 0; 0 where there is none. */
double eb_mean_square(const float *v, uint64_t n);

/* Codes of v by rounding to nearest, ties to even, cut to [-128, 127]; extremes as above unless NULL. */
void eb_quantize(const float *v, uint64_t n, float inverse, int32_t zero, int8_t *codes, float *extremes);

/* Codes of a matrix [rows, columns] around zero, cut to [-127, 127], and the sum of the codes of each row. */
void eb_quantize_weights(const float *v, uint64_t rows, uint64_t columns, float inverse, int8_t *codes,
                         int32_t *row_sums);

/* y = (acc - offset[column]) * factor + bias[column], at least 0 where `relu`; acc is [rows, columns]; offset and bias
   may be NULL. Writes codes of y unless `codes` is NULL, y itself unless `floats` is NULL, and the extremes of y unless
   `extremes` is NULL. */
void eb_finish_forward(const int32_t *acc, uint64_t rows, uint64_t columns, const int32_t *offset, float factor,
                       const float *bias, int relu, float inverse, int32_t zero, int32_t flip, int8_t *codes,
                       float *floats, float *extremes);

/* g = acc * factor, 0 where mask[i] == masked unless mask is NULL, rounded to bfloat16; returns the bits of the
   largest magnitude as a float. */
float eb_finish_backward(const int32_t *acc, uint64_t n, float factor, const int8_t *mask, int32_t masked,
                         uint16_t *gradient);

/* The same for a gradient that is there already: 0 where mask[i] == masked, in place; mask may be NULL. */
float eb_mask_gradient(uint16_t *gradient, uint64_t n, const int8_t *mask, int32_t masked);

/* bfloat16 of v, rounded to nearest, ties to even; returns the largest magnitude. */
float eb_to_bfloat16(const float *v, uint64_t n, uint16_t *out);

/* Codes of a gradient by stochastic rounding: floor(g * inverse + u), cut to [-127, 127]; u is draw i of the stream
   (key0, key1), see eight_bit.c. */
void eb_quantize_gradient(const uint16_t *gradient, uint64_t n, float inverse, uint32_t key0, uint32_t key1,
                          int8_t *codes);

/* The same for n numbers of a gradient from number `first` on, which take the draws from `first` on; the bits of `flip`
   are turned over in each code, 128 for uint8. */
void eb_quantize_gradient_from(const uint16_t *gradient, uint64_t first, uint64_t n, float inverse, uint32_t key0,
                               uint32_t key1, uint8_t flip, int8_t *codes);

/* out = q - zero in bfloat16, which is exact. */
void eb_codes_to_bfloat16(const int8_t *codes, uint64_t n, int32_t zero, uint16_t *out);

/* out = v * factor in float32. */
void eb_scale_bfloat16(const uint16_t *v, uint64_t n, float factor, float *out);

/* Sum of each column of [rows, columns], added up in float64 row by row. */
void eb_column_sums(const uint16_t *v, uint64_t rows, uint64_t columns, float *sums);

/* gradient[i] + acc * factor, rounded to bfloat16, in place; returns the largest magnitude. */
float eb_add_backward(const int32_t *acc, uint64_t n, float factor, uint16_t *gradient);

/* g = acc * factor * slopes[code + 128], rounded to bfloat16: back through an activation that is a table. */
float eb_finish_backward_table(const int32_t *acc, uint64_t n, float factor, const int8_t *codes, const float *slopes,
                               uint16_t *gradient);

/* out[i] = table[codes[i] + 128]. */
void eb_look_up(const int8_t *codes, uint64_t n, const int8_t *table, int8_t *out);

/* gradient[row] * scales[row], rounded to bfloat16; returns the largest magnitude. */
float eb_scale_rows(const uint16_t *gradient, uint64_t rows, uint64_t columns, const float *scales, uint16_t *out);

/* Softmax of acc * factor over rows: codes = round(127 exp(s - max s)), weights[row] = 1 / sum of the row's codes, so
   that probability i is codes[i] * weights[row]. Columns where `hidden` is not 0 get none; hidden is [rows /
   rows_of_mask, columns] or NULL. */
void eb_softmax(const int32_t *acc, uint64_t rows, uint64_t columns, float factor, const uint8_t *hidden,
                uint64_t rows_of_mask, int8_t *codes, float *weights);

/* Back through it: p (g - sum p g) with p = codes * weights[row] and g = acc * factor, rounded to bfloat16; returns the
   largest magnitude. */
float eb_softmax_backward(const int32_t *acc, uint64_t rows, uint64_t columns, float factor, const int8_t *codes,
                          const float *weights, uint16_t *gradient);

/* Layer norm of x = acc * factor + bias + (residual - residual_zero) * residual_scale, all but acc optional
   as a whole: with floats given, x is that. n = (x - mean) * inverse deviation goes to `normal` around zero, and
   n * gamma + beta to `codes`; either may be NULL, then only its extremes are noted. */
void eb_layer_norm(const int32_t *acc, const float *floats, uint64_t rows, uint64_t columns, float factor,
                   const float *bias, const int8_t *residual, int32_t residual_zero, float residual_scale,
                   float epsilon, const float *gamma, const float *beta, float normal_inverse, int8_t *normal,
                   float *normal_extremes, float inverse, int32_t zero, int8_t *codes, float *extremes,
                   float *inverse_deviations);

/* Back through it, with n = normal * normal_scale and h = g * gamma:
   inverse_deviation * (h - mean h - n * mean(h n)), rounded to bfloat16; adds the columns of g * n to `gamma_sums`.
   Returns the largest magnitude. */
float eb_layer_norm_backward(const uint16_t *gradient, uint64_t rows, uint64_t columns, const int8_t *normal,
                             float normal_scale, const float *inverse_deviations, const float *gamma, uint16_t *out,
                             double *gamma_sums);
#endif
