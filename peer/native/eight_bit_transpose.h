/* transpose: sixteen rows of sixteen words of 32 bits become columns. Included under AVX-512, with TRANSPOSE_TARGET what
   says so where no pragma does. */
#define TWO_AND_TWO(a, b) _mm512_shuffle_i32x4(a, b, 0x88)
#define OTHER_TWO_AND_TWO(a, b) _mm512_shuffle_i32x4(a, b, 0xdd)

TRANSPOSE_TARGET static inline void transpose(__m512i *a)
{
    __m512i b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = TWO_AND_TWO(a[i], a[i + 4]);
        b[i + 4] = OTHER_TWO_AND_TWO(a[i], a[i + 4]);
        b[i + 8] = TWO_AND_TWO(a[i + 8], a[i + 12]);
        b[i + 12] = OTHER_TWO_AND_TWO(a[i + 8], a[i + 12]);
    }
    for (int i = 0; i < 8; i++) {
        a[i] = TWO_AND_TWO(b[i], b[i + 8]);
        a[i + 8] = OTHER_TWO_AND_TWO(b[i], b[i + 8]);
    }
}
#undef TWO_AND_TWO
#undef OTHER_TWO_AND_TWO
#undef TRANSPOSE_TARGET
