#ifndef SOTTOVOCE_FACTORS_H
#define SOTTOVOCE_FACTORS_H
#include <stdint.h>

/* The direction of what is left of a vector of n numbers without its shares in `count` orthonormal rows, in the
   order of operations of factors.py. Returns 1, or 0 where no more than the part `dependent` is left. `scratch`:
   2 n + count. */
int new_direction(const double *vector, const double *before, uint64_t count, uint64_t n, double dependent, double *out,
                  double *scratch);

/* Rows `first` to `count` − 1 of `out`, count rows of n numbers: each the direction that a row of `vectors` adds to the
   rows of `out` before it, up to the first row that adds none. Returns the number of that row, or count. `scratch`:
   2 n + count. */
uint64_t orthonormal(const double *vectors, uint64_t first, uint64_t count, uint64_t n, double dependent, double *out,
                     double *scratch);

/* The sum over k of column k times row k, in this order, rounded after each operation: `out` has m rows of n numbers,
   `columns` is count vectors of m, `rows` count vectors of n, and count is not 0. */
void multiply_out_f32(const float *columns, const float *rows, uint64_t count, uint64_t m, uint64_t n, float *out);
void multiply_out_f64(const double *columns, const double *rows, uint64_t count, uint64_t m, uint64_t n, double *out);
#endif
