#ifndef SOTTOVOCE_EIGHT_BIT_CONV_H
#define SOTTOVOCE_EIGHT_BIT_CONV_H
#include <stdint.h>
/* Convolutions of 8-bit training: the products of forward and input gradient, int8 x int8 into int32, and that of the
   weight gradient in bfloat16. Activations lie as [samples, height, width, channels]; their codes are uint8 around a
   zero point. Every product of integers has a twin of torch operators in peer/train/eight_bit/conv_kernels.py that
   returns the same bits; the weight gradient agrees to the rounding of its sums.

   All return 0, or -1 where there was no memory. */

/* Weights of a convolution as codes [outputs, rows, columns, inputs rounded up to 4], from float32 [outputs, inputs,
   rows, columns]: nearest, ties to even, cut to [-127, 127]; and the sum of the codes of each output. */
int eb_conv_codes(const float *weights, int outputs, int inputs, int rows, int columns, float inverse, int8_t *codes,
                  int32_t *sums);

/* Codes in the order in which the products read them: [outputs / 16, rows, columns * inputs / 4, 16, 4], outputs
   rounded up to 16 and filled with zeros. `inputs` is a multiple of 4. */
void eb_conv_pack_forward(const int8_t *codes, int outputs, int inputs, int rows, int columns, int8_t *packed);

/* The same for the input gradient, where inputs and outputs change places and only the taps `row_taps[rows]` and
   `column_taps[columns]` take part, in this order: [inputs / 16, rows, columns * outputs / 4, 16, 4], outputs
   rounded up to 4; and the sum of these codes for each input. */
void eb_conv_pack_backward(const int8_t *codes, int outputs, int inputs, int all_rows, int all_columns,
                           const int32_t *row_taps, int rows, const int32_t *column_taps, int columns, int8_t *packed,
                           int32_t *sums);

/* Codes [channels, rows, columns, 4] with one input as [rows, columns, channels], where only the taps `row_taps[rows]`
   and `column_taps[columns]` take part, or all if these are NULL; and, unless NULL, the sum of these codes for each
   channel. */
void eb_conv_pack_depthwise(const int8_t *codes, int channels, int all_rows, int all_columns, const int32_t *row_taps,
                            int rows, const int32_t *column_taps, int columns, int8_t *packed, int32_t *sums);

/* What a product reads and where its results go. Result (y, x) of a sample covers the pixels that start at row
   y * step + top and column x * step + left of x: [samples, height, width, channels]; outside of it there is `filling`.
   It lies at row y * out_step + out_top, column x * out_step + out_left of [out_height, out_width, results]. Where it
   is `depthwise`, there are as many results as channels, and result i reads channel i alone. */
typedef struct {
    int samples, height, width, channels;
    int rows, columns, step, top, left;
    int result_height, result_width, results;
    int out_height, out_width, out_step, out_top, out_left;
    int filling, flip, depthwise;
} ConvShape;

/* Codes of acc * scale + shift, a factor and a summand for each result, cut to [low, high] and rounded to nearest,
   where acc is the product less `offset`; lows and highs become the extremes of acc for each result, and of what is
   there already. Unless they are NULL, `totals` and `squares` grow by the sums of q = code - 128 and of its square for
   each result. `codes` may be NULL without these. */
int eb_conv_forward(const ConvShape *shape, const uint8_t *x, const int8_t *packed, const int32_t *offset,
                    const float *scale, const float *shift, float low, float high, uint8_t *codes, int32_t *lows,
                    int32_t *highs, int64_t *totals, int64_t *squares);

/* Gradients acc * factor in bfloat16, for a gradient's codes x: int8, of which `flip` = 128 makes uint8. `offset` as
   above. `added`, bfloat16 of the same size, is added to them unless it is NULL. They are 0 where `mask`, uint8 of the
   same size, equals `masked`, unless it is NULL. largest[0] becomes the largest magnitude, and of what is there already. */
int eb_conv_backward(const ConvShape *shape, const int8_t *x, const int8_t *packed, const int32_t *offset,
                     float factor, const uint16_t *added, const uint8_t *mask, int masked, uint16_t *gradient,
                     float *largest);

/* weights[result, channel, row, column] = factor * sum over samples and pixels of (x - filling) * gradient, where
   `gradient` is bfloat16 [samples, result_height, result_width, results] and `inputs` of the channels count; with one
   channel for each result, weights[result, row, column]. */
int eb_conv_weight_gradient(const ConvShape *shape, const uint8_t *x, const uint16_t *gradient, int inputs,
                            float factor, float *weights);
#endif
