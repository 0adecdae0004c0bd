#ifndef SOTTOVOCE_EIGHT_BIT_TILES_H
#define SOTTOVOCE_EIGHT_BIT_TILES_H
#include <stddef.h>
#include <stdint.h>
/* What the products of convolutions and of linear layers share: tiles of results that stay in registers. */

#define MOST_PIXELS 32
#define MOST_SUMS 1024

/* One tile: sums[pixel][result] for `windows[pixel]` and 16 * V results, whose weights start at `weights`, `block`
   bytes from one sixteen to the next. A window is `rows` runs of `run` codes, `row_bytes` apart. */
typedef void Tile(const uint8_t *const *windows, size_t row_bytes, int rows, int run, const int8_t *weights,
                  size_t block, int32_t *sums);

/* What multiplies bytes on this processor. */
typedef struct {
    /* Whether they take less time than products of floats would. */
    int fast;
    /* Bytes of a code where a tile reads it, and of a weight: 1, or 2 where no instruction takes bytes. Then these make
       16 bits of them: of codes, whose bits of `flip` are turned over first, and of so many fours of sixteen weights,
       which may lie in the second half of what they become. */
    int size;
    void (*widen_codes)(const uint8_t *codes, size_t n, uint8_t flip, uint8_t *to);
    void (*widen_weights)(const int8_t *packed, size_t fours, int8_t *to);
    /* Called before products with runs of `run` bytes, and after them, where there is something to prepare: in between,
       this thread may call nothing that does likewise. */
    void (*begin)(int run);
    void (*end)(void);
    /* Tiles of 1, 2 and 4 sixteens of results, as many as there are, and of how many pixels each is. */
    int kinds;
    Tile *tile[3];
    int pixels[3];
    /* The same for rows of a linear layer, of which each is read once for so many results; and added to the sums that
       are there, only where there is a `depth`. */
    Tile *once[3], *more[3];
    /* How linear layers use them. Runs are padded to a multiple of `terms`. Of long ones `depth` terms are summed for all
       rows before the next, so that their weights stay in the first-level cache (0: all). `block` bytes of rows are
       worked on at a time, a part of the second-level cache. With `odd_lines` rows lie an odd number of its lines apart,
       so that those of a tile do not fall on a few sets. */
    int terms, depth, block, odd_lines;
    /* As many windows in a row are read without being copied if they lie at one distance from each other; 0 where
       distances do not matter. */
    int even;
} ByteTiles;

ByteTiles tiles_of_this_processor(void);

/* Where `terms` weights for sixteen results, or several times sixteen, are to be packed that a tile reads at `to`, and
   what makes of them what it reads. */
static inline int8_t *packed_for(const ByteTiles *tiles, int8_t *to, size_t terms)
{
    return to + (size_t)(tiles->size - 1) * terms * 16;
}
static inline void finish_packing(const ByteTiles *tiles, int8_t *to, size_t terms)
{
    if (tiles->size > 1)
        tiles->widen_weights(packed_for(tiles, to, terms), terms / 4, to);
}

/* Which of its tiles is next where so many sixteens of results are left. */
static inline int kind_of_tile(const ByteTiles *tiles, int left)
{
    return left >= 4 && tiles->kinds == 3 ? 2 : left >= 2 && tiles->kinds >= 2 ? 1 : 0;
}

/* How far rows of so many bytes are to lie apart. */
static inline size_t row_distance(const ByteTiles *tiles, size_t bytes)
{
    return bytes + (tiles->odd_lines && bytes / 64 % 2 == 0 ? 64 : 0);
}

/* The windows of a tile from rows of which `there` are left; what it takes more is the last one again. */
static inline void rows_as_windows(const uint8_t *rows, size_t distance, int there, int pixels,
                                   const uint8_t **windows)
{
    for (int p = 0; p < pixels; p++)
        windows[p] = rows + (size_t)(p < there ? p : there - 1) * distance;
}
#endif
