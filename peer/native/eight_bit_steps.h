#ifndef SOTTOVOCE_EIGHT_BIT_STEPS_H
#define SOTTOVOCE_EIGHT_BIT_STEPS_H
/* What turns magnitudes into steps of codes, as peer/train/eight_bit/ranges.py does. */
#include <math.h>

/* The larger, NaN if one is. */
static inline float greatest(float a, float b) { return (a > b) | (a != a) ? a : b; }

/* How many of 127 steps that reach to `largest` make 1; 0 where nothing but 0 is, NaN of NaN. */
static inline double inverse_step(double largest)
{
    return largest > 0.0 ? 127.0 / largest : largest != largest ? (double)NAN : 0.0;
}
#endif
