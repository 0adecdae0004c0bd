#ifndef SOTTOVOCE_EIGHT_BIT_TILES_H
#define SOTTOVOCE_EIGHT_BIT_TILES_H
#include <stddef.h>
#include <stdint.h>
/* What the products of convolutions and of linear layers share: tiles of results that stay in registers. */

#define MOST_PIXELS 16
#define MOST_RESULTS 64

/* One tile: sums[pixel][result] for `windows[pixel]` and 16 * V results, whose weights start at `weights`, `block`
   bytes from one sixteen to the next. A window is `rows` runs of `run` bytes, `row_bytes` apart. */
typedef void Tile(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                  size_t block, int32_t *sums);

/* The tiles of 1, 2 and 4 sixteens of results, and of how many pixels each is; returns whether this processor
   multiplies bytes in one instruction. */
int tiles_of_this_processor(Tile *tiles[3], int pixels[3]);
#endif
