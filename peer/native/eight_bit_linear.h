#ifndef SOTTOVOCE_EIGHT_BIT_LINEAR_H
#define SOTTOVOCE_EIGHT_BIT_LINEAR_H
#include <stdint.h>
/* Linear layers of 8-bit training: int8 x int8 into int32 with what follows in the same pass, while the sums of a tile
   are still in registers and the first-level cache; and the weight gradient in bfloat16, summed in float32. Every
   product of integers returns the bits of the operators in peer/train/eight_bit/linear_kernels.py that run elsewhere;
   the weight gradient agrees to the rounding of its sums.

   `room` is memory to work in, kept by the caller, since fresh pages cost more than what is done in them: as many bytes
   as eb_linear_room says for these rows and terms, and eb_linear_gradient_room for the weight gradient. */
uint64_t eb_linear_room(int rows, int terms);
uint64_t eb_linear_gradient_room(int rows, int outputs);

/* Bit 0: this processor multiplies bytes in one instruction; bit 1: it multiplies bfloat16. */
int eb_linear_speed(void);

/* Codes of weights float32 [outputs, inputs], rounded to nearest (ties to even) and cut to [-127, 127], in the order in
   which a product reads them: [results / 16, terms / 4, 16, 4], both rounded up and filled with zeros. Results are the
   outputs and terms the inputs; the other way round where `transposed`. sums: of each result's codes. `room` has 64 rows
   of inputs rounded up to 16. */
void eb_linear_pack(const float *weights, int outputs, int inputs, float inverse, int transposed, int8_t *packed,
                    int32_t *sums, int8_t *room);

/* With acc = the sum over terms of codes * weights, less `offset`, for int8 codes [rows, terms]; offset[results] must
   hold 128 + zero point times the sum of each result's codes. y = acc * factor + bias, at least 0 with `relu`; `bias`
   may be NULL. Codes of y and its extremes as eb_finish_forward; `codes` may be NULL. */
void eb_linear_codes(const int8_t *x, int rows, int terms, const int8_t *packed, int results, const int32_t *offset,
                    float factor, const float *bias, int relu, float inverse, int32_t zero, int8_t *codes,
                    float *extremes, uint8_t *room);

/* y in float32, without a ReLU. */
void eb_linear_floats(const int8_t *x, int rows, int terms, const int8_t *packed, int results, const int32_t *offset,
                     float factor, const float *bias, float *y, uint8_t *room);

/* acc itself. */
void eb_linear_product(const int8_t *x, int rows, int terms, const int8_t *packed, int results, const int32_t *offset,
                      int32_t *acc, uint8_t *room);

/* g = acc * factor in bfloat16, times slopes[code + 128] of the codes `mask`, or 0 where `mask` equals `masked`
   (`slopes`, or both, NULL), or added to what is in `gradient` if `add`. largest[0] becomes the largest magnitude. */
void eb_linear_backward(const int8_t *x, int rows, int terms, const int8_t *packed, int results, const int32_t *offset,
                       float factor, const int8_t *mask, int32_t masked, const float *slopes, int add,
                       uint16_t *gradient, float *largest, uint8_t *room);

/* weights [outputs, inputs] = factor * sum over rows of gradient [rows, outputs] (bfloat16) and codes [rows, inputs]
   less `zero`; and bias [outputs], the sums of the gradient, as eb_column_sums. */
void eb_linear_weight_gradient(const uint16_t *gradient, const int8_t *codes, int32_t zero, int rows, int outputs,
                              int inputs, float factor, float *weights, float *bias, uint8_t *room);
#endif
