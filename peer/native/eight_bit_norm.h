#ifndef SOTTOVOCE_EIGHT_BIT_NORM_H
#define SOTTOVOCE_EIGHT_BIT_NORM_H
#include <stdint.h>
/* Norms, activations, residual sums and pooling of 8-bit training, on codes [samples, area, channels] in uint8. Codes
   before a norm stand for q = code - 128 steps of their channel. What is given for each channel of each sample lies as
   [samples, channels]. Each kernel has a twin of torch operators in peer/train/eight_bit/norm_kernels.py that returns
   the same bits.

   With u = q * inner[channel], `gate` makes t of q: 0: t = q; 1: t = q * sigmoid(u); 2: t = q * hardsigmoid(u). */

/* Of each channel of each sample: the sum of q, that of its squares, and the least and greatest code. */
void eb_norm_statistics(const uint8_t *codes, int samples, int area, int channels, int32_t *sums, int32_t *squares,
                        uint8_t *lows, uint8_t *highs);

/* How many codes equal `lows` and `highs`. */
void eb_norm_ties(const uint8_t *codes, int samples, int area, int channels, const uint8_t *lows, const uint8_t *highs,
                  int32_t *at_low, int32_t *at_high);

/* What is added to the codes that a norm returns, in the same pass: `other`, codes of the same shape, as by eb_sum_forward
   with the norm's as `a`. */
typedef struct {
    const uint8_t *other;
    float factor, other_factor, shift, low, high;
    float *extremes;
} ResidualSum;

/* Codes of t * factor + shift, cut to [low, high]; extremes[0] and [1] become the least and the greatest before the
   cut, and of what is there already. `codes_out` may be NULL. It gets the codes of `sum` unless that is NULL. */
void eb_norm_forward(const uint8_t *codes, int samples, int area, int channels, int gate, const float *inner,
                     const float *factor, const float *shift, float low, float high, const ResidualSum *sum,
                     uint8_t *codes_out, float *extremes);

/* Sums over the pixels, one after the other, of g, of g * t and, with a gate, of g * q * q * gate'(u). */
void eb_norm_backward_sums(const uint8_t *codes, const uint16_t *gradient, int samples, int area, int channels,
                           int gate, const float *inner, float *plain, float *weighted, float *gated);

/* g * t'(q) * slope + q * linear + constant, plus `at_low` where the code equals `lows` and `at_high` where it equals
   `highs` (NULL all four without), in bfloat16; returns the largest magnitude. */
float eb_norm_backward(const uint8_t *codes, const uint16_t *gradient, int samples, int area, int channels, int gate,
                       const float *inner, const float *slope, const float *linear, const float *constant,
                       const uint8_t *lows, const uint8_t *highs, const float *at_low, const float *at_high,
                       uint16_t *out);

/* Codes of a * a_factor + b * b_factor + shift, cut to [low, high]; extremes as above, `codes` may be NULL. */
void eb_sum_forward(const uint8_t *a, const uint8_t *b, uint64_t n, float a_factor, float b_factor, float shift,
                    float low, float high, uint8_t *codes, float *extremes);

/* a + b in bfloat16, 0 where mask[i] == masked unless `mask` is NULL; returns the largest magnitude. */
float eb_sum_backward(const uint16_t *a, const uint16_t *b, uint64_t n, const uint8_t *mask, int masked, uint16_t *out);

/* The greatest codes of windows, which do not leave [samples, height, width, channels] but for `padding`, and the place
   (row * kernel + column) of the first of them. */
void eb_max_pool_forward(const uint8_t *codes, int samples, int height, int width, int channels, int kernel, int stride,
                         int padding, uint8_t *out, uint8_t *places);

/* Gradients at these places, added up in float32 in the order of rows and columns of windows. `sums` holds
   height * width * channels floats. Returns the largest magnitude. */
float eb_max_pool_backward(const uint8_t *places, const uint16_t *gradient, int samples, int height, int width,
                           int channels, int kernel, int stride, int padding, float *sums, uint16_t *result);
#endif
