/* half_6_1: a tile of 6 pixels by sixteen results in registers of 256 bits. DPBUSD is the intrinsic that adds four
   products of bytes to each 32 bits: that of AVX-VNNI, or in tests its equal of AVX-512, which more processors have. */
#ifndef HALF_TARGET
#define HALF_TARGET "avx2,avxvnni"
#endif
__attribute__((target(HALF_TARGET))) static void half_6_1(const uint8_t *const *windows, size_t row_bytes, int rows,
                                                         int run, const int8_t *weights, size_t block, int32_t *sums)
{
    __m256i acc[6][2];
    (void)block;
    _Pragma("GCC unroll 6") for (int p = 0; p < 6; p++) acc[p][0] = acc[p][1] = _mm256_setzero_si256();
    for (int r = 0; r < rows; r++) {
        const size_t row = (size_t)r * row_bytes;
        for (int k = 0; k < run; k += 4, weights += 4 * LANES) {
            const __m256i low = _mm256_loadu_si256((const __m256i *)weights);
            const __m256i high = _mm256_loadu_si256((const __m256i *)(weights + 2 * LANES));
            _Pragma("GCC unroll 6") for (int p = 0; p < 6; p++)
            {
                int32_t four;
                memcpy(&four, windows[p] + row + k, sizeof four);
                const __m256i x = _mm256_set1_epi32(four);
                acc[p][0] = DPBUSD(acc[p][0], x, low);
                acc[p][1] = DPBUSD(acc[p][1], x, high);
            }
        }
    }
    memcpy(sums, acc, sizeof acc);
}
