#ifndef SOTTOVOCE_EIGHT_BIT_EXTREMES_H
#define SOTTOVOCE_EIGHT_BIT_EXTREMES_H
/* Extremes that kernels find in sixteen lanes, ordered as integers (eight_bit.c). */
#include <math.h>
#include <stdint.h>
#include <string.h>

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
static inline void extremes_of_lanes(const LaneExtremes *e, float *extremes)
{
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int l = 0; l < 16; l++) {
        least = e->low[l] < least ? e->low[l] : least;
        most = e->high[l] > most ? e->high[l] : most;
    }
    const float low = unordered(least), high = unordered(most);
    const int wrong = (low != low) | (high != high);
    extremes[0] = wrong ? NAN : low;
    extremes[1] = wrong ? NAN : high;
}
#endif
