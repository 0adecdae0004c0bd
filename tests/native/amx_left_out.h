/* Kernels without their tile instructions: loads and products do nothing, and stores write numbers that are there. What
   such kernels compute means nothing. How long they take is how long everything around tiles takes: codes, packing, what
   becomes of sums, and the memory that these are written to.

   Whatever is in fresh memory would become ranges, and may be no number; all sums alike would be variances of 0; and sums
   of 2^30, as the bits of 1.0f are, grow from layer to layer until they are infinite. So these are of the size that sums
   of bytes have, and differ from each other. As sums of float32 they are denormal, which would take its time: let the
   processor flush such numbers to zero. */
#ifndef SOTTOVOCE_AMX_LEFT_OUT_H
#define SOTTOVOCE_AMX_LEFT_OUT_H
#include "amx_replaced.h"

/* Where a tile would be loaded from is computed all the same. */
static inline void amx_not_loaded(const void *base, size_t stride)
{
    __asm__ volatile("" : : "r"(base), "r"(stride) : "memory");
}

/* Number n is the upper bits of n times an odd constant. */
__attribute__((target("avx512f"))) static inline void amx_some_stored(void *base, size_t stride)
{
    const __m512i odd = _mm512_set1_epi32((int)2654435761u);
    __m512i n = _mm512_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16);
    for (size_t row = 0; row < 16; row++, n = _mm512_add_epi32(n, _mm512_set1_epi32(16)))
        _mm512_storeu_si512((uint8_t *)base + row * stride, _mm512_srli_epi32(_mm512_mullo_epi32(n, odd), 15));
}

#define _tile_loadconfig(configuration) ((void)(configuration))
#define _tile_release() ((void)0)
#define _tile_zero(tile) ((void)0)
#define _tile_loadd(tile, base, stride) amx_not_loaded(base, (size_t)(stride))
#define _tile_stream_loadd(tile, base, stride) amx_not_loaded(base, (size_t)(stride))
#define _tile_stored(tile, base, stride) amx_some_stored(base, (size_t)(stride))
#define _tile_dpbusd(sums, left, right) ((void)0)
#define _tile_dpbf16ps(sums, left, right) ((void)0)
#endif
