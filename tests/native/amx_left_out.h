/* Kernels without their tile instructions: included after immintrin.h, loads and products do nothing, and stores write
   numbers that are there. What such kernels compute means nothing. How long they take is how long everything around tiles
   takes: codes, packing, what becomes of sums, and the memory that these are written to.

   What would be left in fresh memory may be denormal or no number, and zeros would make ranges and variances of 0: these
   take other ways. The bits of 1 and -1 by rows are sums like others, of integers and of float32. */
#ifndef SOTTOVOCE_AMX_LEFT_OUT_H
#define SOTTOVOCE_AMX_LEFT_OUT_H
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

/* Where a tile would be loaded from is computed all the same. */
static inline void amx_not_loaded(const void *base, size_t stride)
{
    __asm__ volatile("" : : "r"(base), "r"(stride) : "memory");
}

__attribute__((target("avx512f"))) static inline void amx_ones_stored(void *base, size_t stride)
{
    for (size_t row = 0; row < 16; row += 2) {
        _mm512_storeu_ps((uint8_t *)base + row * stride, _mm512_set1_ps(1.0f));
        _mm512_storeu_ps((uint8_t *)base + (row + 1) * stride, _mm512_set1_ps(-1.0f));
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbusd
#undef _tile_dpbf16ps
#define _tile_loadconfig(configuration) ((void)(configuration))
#define _tile_release() ((void)0)
#define _tile_zero(tile) ((void)0)
#define _tile_loadd(tile, base, stride) amx_not_loaded(base, (size_t)(stride))
#define _tile_stream_loadd(tile, base, stride) amx_not_loaded(base, (size_t)(stride))
#define _tile_stored(tile, base, stride) amx_ones_stored(base, (size_t)(stride))
#define _tile_dpbusd(sums, left, right) ((void)0)
#define _tile_dpbf16ps(sums, left, right) ((void)0)
#endif
