/* Norms, activations, residual sums and pooling of 8-bit training.

   Statistics of codes are integers, so their order does not matter; sums of gradients run over the pixels one by
   one. */
#include "eight_bit_norm.h"
#include "tiers.h"

#define KERNELS "eight_bit_norm_kernels.h"
#include "each_tier.h"

void eb_norm_statistics(const uint8_t *codes, int samples, int area, int channels, int32_t *sums, int32_t *squares,
                        uint8_t *lows, uint8_t *highs)
{
    BEST(eb_norm_statistics)(codes, samples, area, channels, sums, squares, lows, highs);
}

void eb_norm_ties(const uint8_t *codes, int samples, int area, int channels, const uint8_t *lows, const uint8_t *highs,
                  int32_t *at_low, int32_t *at_high)
{
    BEST(eb_norm_ties)(codes, samples, area, channels, lows, highs, at_low, at_high);
}

void eb_norm_forward(const uint8_t *codes, int samples, int area, int channels, int gate, const float *inner,
                     const float *factor, const float *shift, float low, float high, const ResidualSum *sum,
                     uint8_t *codes_out, float *extremes)
{
    BEST(eb_norm_forward)(codes, samples, area, channels, gate, inner, factor, shift, low, high, sum, codes_out,
                          extremes);
}

void eb_norm_backward_sums(const uint8_t *codes, const uint16_t *gradient, int samples, int area, int channels,
                           int gate, const float *inner, float *plain, float *weighted, float *gated)
{
    BEST(eb_norm_backward_sums)(codes, gradient, samples, area, channels, gate, inner, plain, weighted, gated);
}

float eb_norm_backward(const uint8_t *codes, const uint16_t *gradient, int samples, int area, int channels, int gate,
                       const float *inner, const float *slope, const float *linear, const float *constant,
                       const uint8_t *lows, const uint8_t *highs, const float *at_low, const float *at_high,
                       uint16_t *out)
{
    return BEST(eb_norm_backward)(codes, gradient, samples, area, channels, gate, inner, slope, linear,
                                  constant, lows, highs, at_low, at_high, out);
}

void eb_sum_forward(const uint8_t *a, const uint8_t *b, uint64_t n, float a_factor, float b_factor, float shift,
                    float low, float high, uint8_t *codes, float *extremes)
{
    BEST(eb_sum_forward)(a, b, n, a_factor, b_factor, shift, low, high, codes, extremes);
}

float eb_sum_backward(const uint16_t *a, const uint16_t *b, uint64_t n, const uint8_t *mask, int masked, uint16_t *out)
{
    return BEST(eb_sum_backward)(a, b, n, mask, masked, out);
}

void eb_max_pool_forward(const uint8_t *codes, int samples, int height, int width, int channels, int kernel, int stride,
                         int padding, uint8_t *out, uint8_t *places)
{
    BEST(eb_max_pool_forward)(codes, samples, height, width, channels, kernel, stride, padding, out, places);
}

float eb_max_pool_backward(const uint8_t *places, const uint16_t *gradient, int samples, int height, int width,
                           int channels, int kernel, int stride, int padding, float *sums, uint16_t *result)
{
    return BEST(eb_max_pool_backward)(places, gradient, samples, height, width, channels, kernel, stride, padding,
                                      sums, result);
}
