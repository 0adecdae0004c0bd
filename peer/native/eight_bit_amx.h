#ifndef SOTTOVOCE_EIGHT_BIT_AMX_H
#define SOTTOVOCE_EIGHT_BIT_AMX_H
/* Products in the tile registers of AMX. */
#include "eight_bit_tiles.h"

#include <stddef.h>
#include <stdint.h>

/* Configure this thread's tile registers for windows of runs of `run` bytes, and give them up again. Nothing in between
   may use them for something else, which torch does. */
void amx_begin_bytes(int run);
void amx_begin_pairs(void);
void amx_end(void);

/* Tiles of 32 pixels by 1 and 2 sixteens of results; one for windows that are read once; and those that add to the sums
   that are there. The runs of the latter are a multiple of 64. */
Tile amx_tile_32_1, amx_tile_32_2, amx_once_32_2, amx_more_32_1, amx_more_32_2;

/* out[j][i] = ((before[j][i] or 0) + the sum over `pairs` of g[j][pair] * x[pair][i]) * factor, for 32 j and 32 i of
   pairs of bfloat16; `before` may be NULL. `pairs` is a multiple of 16; a row of `x` is 64 numbers; `g` is, for sixteen
   pairs after the other, twice sixteen j as amx_transpose_pairs writes them. */
void amx_pairs_32_32(const uint16_t *g, const uint16_t *x, int pairs, const float *before, size_t before_stride,
                     float factor, float *out, size_t stride);

/* out[j][pair] = in[pair][j] for sixteen j and sixteen pairs. */
void amx_transpose_pairs(const uint16_t *in, uint16_t *out);

/* Where the pairs lie that a weight gradient of convolutions is a sum over: `groups` times `height` rows of `blocks` of
   sixteen, in numbers of bfloat16 from each to the next. */
typedef struct {
    int groups, height, blocks;
    size_t x_group, x_row, x_pair, g_block;
} PairRows;

/* sums[j][i] += g[j][pair] * x[pair][i] over these pairs for sixteen j and sixteen i: of `first` and, unless it is
   NULL, of `second`, whose sums are `second_sums` behind, and of `sixteens` of j, 1 or 2, which lie one after the
   other in `g` and in `sums`. Sixteen pairs of numbers are read at each place, whatever counts. */
void amx_pairs_of_rows(const PairRows *rows, const uint16_t *g, int sixteens, const uint16_t *first,
                       const uint16_t *second, float *sums, size_t second_sums);

/* Codes less their zero of `pixels` of two samples as pairs of bfloat16, which holds them exactly; `second` may be
   NULL. Sixteen channels of a pixel lie together, `sixteen` numbers from the next, and pixels are `pixel` numbers
   apart; they are read `step` codes apart. */
void amx_pair_codes(const uint8_t *first, const uint8_t *second, size_t step, int pixels, int channels, int zero,
                    uint16_t *out, size_t pixel, size_t sixteen);

/* out[sixteen][j][pair] for sixteen pairs of gradients first[pair][j] and second[pair][j], `results` in sixteens of j;
   what is NULL is 0, as is what the last sixteen lacks. */
void amx_pair_gradients(const uint16_t *const *first, const uint16_t *const *second, int results, uint16_t *out);
#endif
