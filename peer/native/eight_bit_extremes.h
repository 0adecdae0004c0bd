#ifndef SOTTOVOCE_EIGHT_BIT_EXTREMES_H
#define SOTTOVOCE_EIGHT_BIT_EXTREMES_H
/* Extremes and largest magnitudes that kernels find: of floats as integers in the same order (`ordered` in eight_bit.c),
   of gradients the bits of bfloat16 without a sign. */
#include "tiers.h"

#include <math.h>

/* Of sixteen lanes, so far. */
typedef struct {
    int32_t low[16], high[16];
} LaneExtremes;

static inline LaneExtremes no_extremes(void)
{
    LaneExtremes e;
    for (int l = 0; l < 16; l++) {
        e.low[l] = INT32_MAX;
        e.high[l] = INT32_MIN;
    }
    return e;
}

static inline float unordered(int32_t bits)
{
    bits ^= (bits >> 31) & 0x7FFFFFFF;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Both NaN if one is. */
static inline void write_extremes(int32_t least, int32_t most, float *to)
{
    const float low = unordered(least), high = unordered(most);
    const int wrong = (low != low) | (high != high);
    to[0] = wrong ? NAN : low;
    to[1] = wrong ? NAN : high;
}

static inline void extremes_of_lanes(const LaneExtremes *e, float *to)
{
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int l = 0; l < 16; l++) {
        least = e->low[l] < least ? e->low[l] : least;
        most = e->high[l] > most ? e->high[l] : most;
    }
    write_extremes(least, most, to);
}

static inline float largest_of_lanes(const uint32_t *lanes)
{
    uint32_t most = 0;
    for (int l = 0; l < 16; l++)
        most = lanes[l] > most ? lanes[l] : most;
    return widen((uint16_t)most);
}
#endif
