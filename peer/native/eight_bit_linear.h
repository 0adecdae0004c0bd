#ifndef SOTTOVOCE_EIGHT_BIT_LINEAR_H
#define SOTTOVOCE_EIGHT_BIT_LINEAR_H
#include <stdint.h>
/* Linear layers of 8-bit training, a call for each product: codes of the weights, int8 x int8 into int32, and what
   follows in the same pass, while the sums of a tile are still in registers and the first-level cache; and the weight
   gradient of bfloat16, summed in float32. Every
   product of integers returns the bits of the operators in peer/train/eight_bit/linear_kernels.py that run elsewhere;
   the weight gradient agrees to the rounding of its sums.

   `room` is memory to work in, kept by the caller, since fresh pages cost more than what is done in them: as many bytes
   as eb_linear_room says, and eb_linear_gradient_room for the weight gradient. */
typedef struct {
    int rows, outputs, inputs;
    /* float32 [outputs, inputs], or the codes themselves if they are `levels`. */
    const float *weights;
    int levels;
    /* Their largest magnitude; found where this is negative. */
    float largest;
    uint8_t *room;
} LinearLayer;

uint64_t eb_linear_room(int rows, int outputs, int inputs, int transposed);
uint64_t eb_linear_gradient_room(int rows, int outputs);

/* Bit 0: products of bytes take less time here than torch's; bit 1: weight gradients do; bit 2: these are products of
   floats. */
int eb_linear_speed(void);

/* Codes of the weights are rounded to nearest (ties to even) and cut to [-127, 127]. With acc = the sum over inputs of
   (x - x_zero) * weights, for codes int8 [rows, inputs]: y = acc * factor + bias, at least 0 with `relu`, where factor is
   what one step of both makes; `bias` may be NULL. Codes of y and its extremes as eb_finish_forward; `codes` may be
   NULL. These return the largest magnitude of the weights. */
float eb_linear_codes(const LinearLayer *layer, const int8_t *x, int32_t x_zero, double x_scale, const float *bias,
                      int relu, float inverse, int32_t zero, int8_t *codes, float *extremes);

/* y in float32, without a ReLU. */
float eb_linear_floats(const LinearLayer *layer, const int8_t *x, int32_t x_zero, double x_scale, const float *bias,
                       float *y);

/* acc itself. */
float eb_linear_product(const LinearLayer *layer, const int8_t *x, int32_t x_zero, int32_t *acc);

/* The input gradient: that of the result, bfloat16 [rows, outputs] of this largest magnitude, is rounded to codes as by
   eb_quantize_gradient and multiplied by the weights. In bfloat16 [rows, inputs], times slopes[code + 128] of the codes
   `mask`, or 0 where `mask` equals `masked` (`slopes`, or both, NULL), or added to what is in `out` if `add`. Returns the
   largest magnitude. */
float eb_linear_backward(const LinearLayer *layer, const uint16_t *gradient, float largest, uint32_t key0,
                         uint32_t key1, const int8_t *mask, int32_t masked, const float *slopes, int add,
                         uint16_t *out);

/* weights [outputs, inputs] = factor * sum over rows of gradient [rows, outputs] (bfloat16) and codes [rows, inputs]
   less `zero`; and bias [outputs], the sums of the gradient, as eb_column_sums. */
void eb_linear_weight_gradient(const uint16_t *gradient, const int8_t *codes, int32_t zero, int rows, int outputs,
                              int inputs, float factor, float *weights, float *bias, uint8_t *room);
#endif
