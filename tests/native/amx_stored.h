/* Numbers that stand for the sums of a tile where no products are computed.

   Whatever is in fresh memory would become ranges, and may be no number; all sums alike would be variances of 0; and sums
   of 2^30, as the bits of 1.0f are, grow from layer to layer until they are infinite. So these are of the size that sums
   of bytes have, and differ from each other. As sums of float32 they are denormal, which would take its time: let the
   processor flush such numbers to zero. */
#ifndef SOTTOVOCE_AMX_STORED_H
#define SOTTOVOCE_AMX_STORED_H
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

/* Number n is the upper bits of n times an odd constant. Stores wait for `after`, which is zeros. */
__attribute__((target("avx512f"))) static inline void amx_some_stored(void *base, size_t stride, __m512i after)
{
    const __m512i odd = _mm512_set1_epi32((int)2654435761u);
    __m512i n = _mm512_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16);
    for (size_t row = 0; row < 16; row++, n = _mm512_add_epi32(n, _mm512_set1_epi32(16))) {
        const __m512i number = _mm512_srli_epi32(_mm512_mullo_epi32(n, odd), 15);
        _mm512_storeu_si512((uint8_t *)base + row * stride, _mm512_or_si512(number, after));
    }
}
#endif
