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

/* Tiles of 32 pixels by 1 and 2 sixteens of results. */
Tile amx_tile_32_1, amx_tile_32_2;

/* out[j][i] = (out[j][i] or 0) + sum over `pairs` of g[j][pair] * x[pair][i], times factor, for 32 j and 32 i of pairs
   of bfloat16. `pairs` is a multiple of 16; a row of `x` is 64 numbers; `g` is twice sixteen j, each as
   amx_transpose_pairs writes them, sixteen pairs after the other. */
void amx_pairs_32_32(const uint16_t *g, const uint16_t *x, int pairs, int more, float factor, float *out,
                     size_t stride);

/* out[j][pair] = in[pair][j] for sixteen j and sixteen pairs. */
void amx_transpose_pairs(const uint16_t *in, uint16_t *out);
#endif
