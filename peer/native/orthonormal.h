#ifndef SOTTOVOCE_ORTHONORMAL_H
#define SOTTOVOCE_ORTHONORMAL_H
#include <stdint.h>

/* The direction of what is left of a vector of n numbers without its shares in `count` orthonormal rows, in the
   order of operations of factors.py. Returns 1, or 0 where no more than the part `dependent` is left. `scratch`:
   2 n + count. */
int new_direction(const double *vector, const double *before, uint64_t count, uint64_t n, double dependent, double *out,
                  double *scratch);
#endif
