/* Products of bytes in plain C, once for each width of register. */
#include "vectors.h"

#define PORTABLE_TILE(P, V)                                                                                   \
    static void NAME(tile_##P##_##V)(const uint8_t *const *windows, size_t row_bytes, int rows, int run, \
                                          const int8_t *weights, size_t block, int32_t *sums)                 \
    {                                                                                                         \
        memset(sums, 0, sizeof *sums * P * V * SIXTEEN);                                                        \
        for (int r = 0; r < rows; r++)                                                                        \
            for (int k = 0; k < run; k += 4, weights += 4 * SIXTEEN)                                            \
                for (int p = 0; p < P; p++) {                                                                 \
                    const uint8_t *x = windows[p] + (size_t)r * row_bytes + k;                                \
                    for (int v = 0; v < V; v++) {                                                             \
                        const int8_t *w = weights + (size_t)v * block;                                        \
                        int32_t *sum = sums + (p * V + v) * SIXTEEN;                                            \
                        for (int lane = 0; lane < SIXTEEN; lane++)                                              \
                            sum[lane] += x[0] * w[4 * lane] + x[1] * w[4 * lane + 1] + x[2] * w[4 * lane + 2] \
                                         + x[3] * w[4 * lane + 3];                                            \
                    }                                                                                         \
                }                                                                                             \
    }

PORTABLE_TILE(16, 1)
PORTABLE_TILE(12, 2)
PORTABLE_TILE(6, 4)

static const ByteTiles NAME(plain_tiles) = {.kinds = 3,
                                            .tile = {NAME(tile_16_1), NAME(tile_12_2), NAME(tile_6_4)},
                                            .pixels = {16, 12, 6}};
