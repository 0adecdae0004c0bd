#ifndef SOTTOVOCE_EVONORM_H
#define SOTTOVOCE_EVONORM_H
#include <stdint.h>
/* EvoNorm-S0, y = x * sigmoid(v * x) * r * weight + bias, where r = 1 / sqrt(variance + epsilon) belongs to a group of
   channels of a sample; v, weight and bias to a channel.

   x, y and their gradients are float32, or bfloat16 with `halves`, and lie as [samples, channels, area], or as
   [samples, area, channels] with `channels_last`. Everything in between is float32. The groups are equal and their
   channels lie side by side.

   Every sum has a fixed order that depends on shape and layout alone, so the bits are the same on every processor.
   They are not those of the torch operators that the layer consists of where these kernels are not in use
   (peer/train/full_precision/norms.py): these add in another order. */

/* Writes y. `scratch` holds 2 * channels floats. */
void en_forward(const void *x, int halves, int channels_last, int samples, int channels, int area, int groups,
                const float *v, const float *weight, const float *bias, float epsilon, void *y, float *scratch);

/* Writes the gradients of x, v, weight and bias, of that of y. `scratch` holds (area + 6) * channels floats. */
void en_backward(const void *x, const void *gradient, int halves, int channels_last, int samples, int channels,
                 int area, int groups, const float *v, const float *weight, float epsilon, void *x_gradient,
                 float *v_gradient, float *weight_gradient, float *bias_gradient, float *scratch);

/* sigmoid(u) as the kernels compute it. */
void en_sigmoid(const float *u, uint64_t n, float *out);
#endif
