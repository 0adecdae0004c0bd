/* The tile registers of AMX in software: its intrinsics call the functions of amx_model.c.

   What a processor refuses ends the program with a sentence: tiles that were not configured, a configuration or sizes
   that the instructions do not take. It cannot show what the compiler does around the real instructions, which do not
   tell it that they read memory. */
#ifndef SOTTOVOCE_AMX_MODEL_H
#define SOTTOVOCE_AMX_MODEL_H
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

/* Macros here and there. */
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbusd
#undef _tile_dpbf16ps

void amx_model_configure(const void *configuration);
void amx_model_release(void);
void amx_model_zero(int tile);
void amx_model_load(int tile, const void *base, size_t stride);
void amx_model_store(int tile, void *base, size_t stride);
/* `sums` += `left` times `right`: four terms of uint8 by int8 in each 32 bits, or two of bfloat16. */
void amx_model_multiply_bytes(int sums, int left, int right);
void amx_model_multiply_pairs(int sums, int left, int right);

#define _tile_loadconfig amx_model_configure
#define _tile_release amx_model_release
#define _tile_zero amx_model_zero
#define _tile_loadd(tile, base, stride) amx_model_load(tile, base, (size_t)(stride))
/* With a hint that is of no matter here. */
#define _tile_stream_loadd(tile, base, stride) amx_model_load(tile, base, (size_t)(stride))
#define _tile_stored(tile, base, stride) amx_model_store(tile, base, (size_t)(stride))
#define _tile_dpbusd amx_model_multiply_bytes
#define _tile_dpbf16ps amx_model_multiply_pairs
#endif
