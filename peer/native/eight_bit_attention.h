#ifndef SOTTOVOCE_EIGHT_BIT_ATTENTION_H
#define SOTTOVOCE_EIGHT_BIT_ATTENTION_H
#include <stdint.h>
/* Attention of 8-bit training: all heads in a call for each step of it, on tensors as they lie. Products are of int8
   and summed in int32. What a call returns has the bits of the operators in peer/train/eight_bit/attention_kernels.py
   that run elsewhere. */

/* Codes around zero int8 [batch, n, heads * width], of which a head is `width` columns; codes of the softmax
   [batch, heads, n, n], between 0 and 127, and the weights of their rows [batch, heads, n]. `room` is memory to work
   in, kept by the caller: as many bytes as eb_attention_room says. */
typedef struct {
    int batch, heads, n, width;
    const int8_t *query, *key, *value;
    int8_t *probabilities;
    float *weights;
    uint8_t *room;
} AttentionHeads;

uint64_t eb_attention_room(int n, int width);

/* Writes the softmax of factor * query . key as eb_softmax does; codes [batch, n, heads * width] of probabilities .
   values as eb_quantize does, unless `codes` is NULL; and the extremes of what these stand for. The mask `hidden`, or
   NULL, has a row for each `rows_of_mask` positions of a sample, and that of the next sample lies `mask_of_sample`
   numbers further. */
void eb_attention_mix(const AttentionHeads *a, float factor, const uint8_t *hidden, uint64_t mask_of_sample,
                      uint64_t rows_of_mask, float value_scale, float inverse, int32_t zero, int8_t *codes,
                      float *extremes);

/* What follows goes back, from gradients in bfloat16 whose codes are drawn as by eb_quantize_gradient: head by head,
   number i of [batch, heads, n, width] or of [batch, heads, n, n] takes draw i. What is written is bfloat16, and its
   largest magnitude is returned.

   The gradient of the values, from that of what was mixed; both [batch, n, heads * width]. */
float eb_attention_of_value(const AttentionHeads *a, const uint16_t *gradient, uint32_t key0, uint32_t key1,
                            uint16_t *out);

/* That of the scores [batch, heads, n, n], from the same, whose largest magnitude is known. */
float eb_attention_of_scores(const AttentionHeads *a, const uint16_t *gradient, float largest, uint32_t key0,
                             uint32_t key1, double value_scale, uint16_t *out);

/* Those of queries and of keys, from that of the scores: sums of codes, times `query_factor` and `key_factor`. Their
   largest magnitudes go to `found`, that of the queries first. */
void eb_attention_of_query_and_key(const AttentionHeads *a, const uint16_t *of_scores, float largest, uint32_t key0,
                                   uint32_t key1, float query_factor, float key_factor, uint16_t *of_query,
                                   uint16_t *of_key, float *found);
#endif
