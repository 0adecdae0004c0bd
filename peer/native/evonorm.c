/* EvoNorm-S0 in full precision: what torch does in dozens of passes over memory, in a few over each sample. */
#include "evonorm.h"
#include "tiers.h"

#define KERNELS "evonorm_kernels.h"
#include "each_tier.h"

void en_forward(const void *x, int halves, int channels_last, int samples, int channels, int area, int groups,
                const float *v, const float *weight, const float *bias, float epsilon, void *y, float *scratch)
{
    BEST(en_forward)(x, halves, channels_last, samples, channels, area, groups, v, weight, bias, epsilon, y, scratch);
}

void en_backward(const void *x, const void *gradient, int halves, int channels_last, int samples, int channels,
                 int area, int groups, const float *v, const float *weight, float epsilon, void *x_gradient,
                 float *v_gradient, float *weight_gradient, float *bias_gradient, float *scratch)
{
    BEST(en_backward)(x, gradient, halves, channels_last, samples, channels, area, groups, v, weight, epsilon,
                      x_gradient, v_gradient, weight_gradient, bias_gradient, scratch);
}

void en_sigmoid(const float *u, uint64_t n, float *out) { BEST(en_sigmoid)(u, n, out); }
