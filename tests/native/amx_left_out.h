/* Kernels without their tile instructions: loads and products do nothing, and stores write numbers that are there. What
   such kernels compute means nothing. How long they take is how long everything around tiles takes: codes, packing, what
   becomes of sums, and the memory that these are written to. */
#ifndef SOTTOVOCE_AMX_LEFT_OUT_H
#define SOTTOVOCE_AMX_LEFT_OUT_H
#include "amx_replaced.h"
#include "amx_stored.h"

/* Where a tile would be loaded from is computed all the same. */
static inline void amx_not_loaded(const void *base, size_t stride)
{
    __asm__ volatile("" : : "r"(base), "r"(stride) : "memory");
}

#define _tile_loadconfig(configuration) ((void)(configuration))
#define _tile_release() ((void)0)
#define _tile_zero(tile) ((void)0)
#define _tile_loadd(tile, base, stride) amx_not_loaded(base, (size_t)(stride))
#define _tile_stream_loadd(tile, base, stride) amx_not_loaded(base, (size_t)(stride))
#define _tile_stored(tile, base, stride) amx_some_stored(base, (size_t)(stride), _mm512_setzero_si512())
#define _tile_dpbusd(sums, left, right) ((void)0)
#define _tile_dpbf16ps(sums, left, right) ((void)0)
#endif
