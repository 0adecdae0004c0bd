#ifndef SOTTOVOCE_EIGHT_BIT_LAYER_H
#define SOTTOVOCE_EIGHT_BIT_LAYER_H
#include "eight_bit_conv.h"
#include "eight_bit_norm.h"

#include <stdint.h>
/* Whole layers of 8-bit training in one call for each direction: kernels of eight_bit.h, eight_bit_conv.h and
   eight_bit_norm.h one after the other, and the few numbers for each channel between them. Every call returns the bits
   of what peer/train/eight_bit composes of the same kernels and operators of torch.

   All return 0, or -1 where there was no memory. */

/* A convolution, its batch norm in training, and a ReLU where `low` is `zero`. */
typedef struct {
    /* What the convolution reads, codes around shape.filling of this scale. */
    ConvShape shape;
    const uint8_t *x;
    double x_scale;
    /* float32 [shape.results, inputs, rows, columns] and, of the norm, [results] each; the running numbers move on. */
    const float *weights;
    int inputs;
    float *running_largest;
    float narrowing;
    const float *gamma, *beta;
    float *running_mean, *running_variance;
    float share;
    double epsilon;
    /* The grid of the output: steps in 1, its zero point and the least code. */
    double inverse_step, zero;
    float low;
    /* Room for the codes of the weights in the two orders of eight_bit_conv.h. */
    int8_t *codes, *packed;
    /* What is kept for the backward pass: what the norm reads, and of each channel what one step of it is, the mean and
       one over the deviation. */
    uint8_t *before;
    float *steps;
    double *mean, *inverse_deviation;
    /* What is added to the output before it is handed on, or NULL. */
    const ResidualSum *sum;
    /* Codes of the output; the extremes of the norm's levels and the largest magnitude of the weights. */
    uint8_t *out;
    float *found;
} ConvBatchNorm;

int eb_conv_batch_norm_forward(const ConvBatchNorm *layer);

/* The gradient with regard to what a batch norm read, bfloat16 [samples, area, channels], from that of what it returned
   and, for each channel, its sum and that of gradient * q; and the gradients of gamma and beta. `count` numbers were
   averaged for each channel, infinitely many if the norm was not in training. */
int eb_batch_norm_backward(const uint8_t *codes, const uint16_t *gradient, int samples, int area, int channels,
                           const float *steps, const double *mean, const double *inverse_deviation, const float *gamma,
                           const double *sums, const double *sums_with_q, double count, float *gamma_gradient,
                           float *beta_gradient, uint16_t *out, float *largest);

/* The gradient with regard to what a convolution read: kernel * kernel pixels every `stride`; where it is `depthwise`,
   each output read one channel, so that inputs is 1 and there are as many channels as outputs. */
typedef struct {
    int samples, height, width, inputs, kernel, stride, depthwise;
    /* bfloat16 [samples, height of the result, its width, outputs], outputs a multiple of 4; how many of its steps make
       1, and the keys of its stochastic rounding. */
    const uint16_t *gradient;
    int result_height, result_width, outputs;
    float gradient_inverse;
    uint32_t key0, key1;
    /* float32 [outputs, inputs, kernel, kernel] and how many of their steps make 1. */
    const float *weights;
    float weights_inverse;
    /* What one step of each together makes. */
    float factor;
    /* NULL, or what is added to the result, bfloat16 of its size; every pixel has to be read by a window then. */
    const uint16_t *added;
    /* NULL, or uint8 of the size of the result, which is 0 where the two are equal. */
    const uint8_t *mask;
    int masked;
    /* Room for the codes of the gradient, and for those of the weights in the two orders of eight_bit_conv.h. */
    int8_t *gradient_codes, *codes, *packed;
    /* bfloat16 [samples, height, width, channels rounded up to 4], and its largest magnitude. */
    uint16_t *out;
    float *largest;
} ConvInputGradient;

int eb_conv_input_gradient(const ConvInputGradient *layer);
#endif
