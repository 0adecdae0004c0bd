/* What every peer computes of the same factors, and has to get the same bits of: sums of outer products, and the steps
   of Gram and Schmidt. */
#include "factors.h"
#include "clones.h"

#include <math.h>

/* Into each clone of its caller. */
#define INLINED static inline __attribute__((always_inline))

/* The sum by halves, which overwrites v. */
INLINED double sum(double *v, uint64_t n)
{
    while (n > 1) {
        uint64_t half = n / 2;
        for (uint64_t i = 0; i < half; i++)
            v[i] += v[half + i];
        if (n % 2)
            v[half] = v[2 * half];
        n = half + n % 2;
    }
    return v[0];
}

INLINED double product(const double *restrict a, const double *restrict b, uint64_t n, double *restrict scratch)
{
    for (uint64_t i = 0; i < n; i++)
        scratch[i] = a[i] * b[i];
    return sum(scratch, n);
}

INLINED int direction(const double *restrict vector, const double *restrict before, uint64_t count, uint64_t n,
                      double dependent, double *restrict out, double *restrict scratch)
{
    double *rest = scratch, *products = scratch + n, *shares = scratch + 2 * n, largest = 0.0;
    for (uint64_t i = 0; i < n; i++)
        largest = fabs(vector[i]) > largest ? fabs(vector[i]) : largest;
    if (largest == 0.0)
        return 0;
    int exponent;
    frexp(largest, &exponent);
    double scale = ldexp(1.0, -exponent);
    if (isnormal(scale))
        for (uint64_t i = 0; i < n; i++)
            rest[i] = vector[i] * scale;
    else
        for (uint64_t i = 0; i < n; i++)
            rest[i] = ldexp(vector[i], -exponent);
    double whole = sqrt(product(rest, rest, n, products));
    for (int pass = 0; pass < 2; pass++) {
        for (uint64_t j = 0; j < count; j++)
            shares[j] = product(before + j * n, rest, n, products);
        for (uint64_t j = 0; j < count; j++)
            for (uint64_t i = 0; i < n; i++)
                rest[i] -= shares[j] * before[j * n + i];
    }
    double left = sqrt(product(rest, rest, n, products));
    if (left <= dependent * whole)
        return 0;
    for (uint64_t i = 0; i < n; i++)
        out[i] = rest[i] / left;
    return 1;
}

CLONES int new_direction(const double *vector, const double *before, uint64_t count, uint64_t n, double dependent,
                         double *out, double *scratch)
{
    return direction(vector, before, count, n, dependent, out, scratch);
}

CLONES uint64_t orthonormal(const double *vectors, uint64_t first, uint64_t count, uint64_t n, double dependent,
                            double *out, double *scratch)
{
    while (first < count && direction(vectors + first * n, out, first, n, dependent, out + first * n, scratch))
        first++;
    return first;
}

/* One row of the result after the other, which stays in the first-level cache while all products are added to it. */
#define MULTIPLY_OUT(name, real)                                                                                       \
    CLONES void name(const real *restrict columns, const real *restrict rows, uint64_t count, uint64_t m, uint64_t n,  \
                     real *restrict out)                                                                               \
    {                                                                                                                  \
        for (uint64_t i = 0; i < m; i++, out += n) {                                                                   \
            for (uint64_t j = 0; j < n; j++)                                                                           \
                out[j] = columns[i] * rows[j];                                                                         \
            for (uint64_t k = 1; k < count; k++)                                                                       \
                for (uint64_t j = 0; j < n; j++)                                                                       \
                    out[j] += columns[k * m + i] * rows[k * n + j];                                                    \
        }                                                                                                              \
    }

MULTIPLY_OUT(multiply_out_f32, float)
MULTIPLY_OUT(multiply_out_f64, double)
