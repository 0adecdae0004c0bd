#ifndef SOTTOVOCE_COMPRESS_H
#define SOTTOVOCE_COMPRESS_H
#include <stdint.h>
#include <stddef.h>
/* Bits of the widest registers that hand-written kernels may use, 8192 those of AMX; tests lower it to reach the
   narrower versions. */
extern int widest_registers;

/* Philox 4x32-10: words or uniforms `start` to `start + n - 1` of the stream (key, layer, round). */
void philox_words(uint32_t *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                  uint32_t round);
void philox_uniforms_f32(float *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                         uint32_t round);
void philox_uniforms_f64(double *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                         uint32_t round);

/* The largest magnitude; infinity or NaN if there is any. */
float max_magnitude_f32(const float *v, uint64_t n);
double max_magnitude_f64(const double *v, uint64_t n);
/* The same of n numbers that lie anywhere, copied on the way. */
float copy_reaching_f32(const uint8_t *source, uint64_t n, float *out);
double copy_reaching_f64(const uint8_t *source, uint64_t n, double *out);

/* Sums in the order that norms.py defines. */
double sum_of_squares_f32(const float *v, uint64_t n);
double sum_of_squares_f64(const double *v, uint64_t n);
double sum_of_magnitudes_f32(const float *v, uint64_t n);
double sum_of_magnitudes_f64(const double *v, uint64_t n);

/* The indices of the k largest keys `(raw & mask) ^ flip`, ascending, ties won by the lowest; 0, or -1 for no memory. */
int select_largest(const uint32_t *raw, uint64_t n, uint64_t k, uint32_t mask, uint32_t flip, int64_t *indices);
/* Likewise of layers that follow one another; each index is counted from the beginning of its layer. */
int select_largest_of_each(const uint32_t *raw, const int64_t *sizes, const int64_t *counts, uint64_t layers,
                           uint32_t mask, uint32_t flip, int64_t *indices);

/* Codes steps + sign(v) * level, level = floor(steps |v| / scale), plus one where the uniform is below the
   fraction. `uniforms` NULL: drawn from the stream. `codes`: uint8 or uint16, by `width`. */
void stochastic_codes(const float *v, uint64_t n, int32_t steps, float scale, const float *uniforms,
                      uint32_t key0, uint32_t key1, uint32_t layer, uint32_t round, int width, uint8_t *codes);

/* v rounded to bfloat16, ties to even, no further than its largest number. */
void round_to_bfloat16(const float *v, uint64_t n, float *out);

/* The multiples of `step` that v is rounded to; ends[0] and ends[1] get the lowest and the highest. */
void grid_multiples(const float *v, uint64_t n, float step, int stochastic, const float *uniforms, uint32_t key0,
                    uint32_t key1, uint32_t layer, uint32_t round, float *multiples, float *ends);

/* Codes of the nearest levels scale * (code - steps) / steps; returns the sum of the squared errors. */
double nearest_codes(const float *v, uint64_t n, float scale, int32_t steps, int width, uint8_t *codes);

/* out += weight * (scale * (base + step * code) / divisor). */
void add_levels(float *out, const uint8_t *codes, int width, uint64_t n, float scale, int32_t base, int32_t step,
                float divisor, float weight);
/* out += weight * v. */
void add_scaled(float *out, const float *v, uint64_t n, float weight);
/* out[index] += weight * v; returns how many indices lie outside of `size`, which are left out. */
uint64_t add_sparse(float *out, uint64_t size, const int64_t *indices, const float *v, uint64_t k, float weight);

/* Moniqua's code: K of x, its residues and its values, each written where its pointer is not NULL. `dither`: 0 for
   nearest, 1 for stochastic, 2 for dither. `start` is the number of the first coordinate in its layer, for
   the stream that is drawn from where `omega` is NULL. Returns 1 where every |K| is at most `limit`, else 0. */
int modulo_encode_f32(const float *x, uint64_t n, float b, int bits, int dither, float limit, const float *omega,
                      uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer, uint32_t round,
                      int64_t *integers, int width, uint8_t *residues, float *values);
int modulo_encode_f64(const double *x, uint64_t n, double b, int bits, int dither, double limit, const double *omega,
                      uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer, uint32_t round,
                      int64_t *integers, int width, uint8_t *residues, double *values);
/* The integers with these residues whose values lie within b/2 of y. Returns 1 where every |y| L/b is at most `limit`. */
int modulo_recover_f32(const uint8_t *residues, int width, const float *y, uint64_t n, float b, int bits, int dither,
                       float limit, const float *omega, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                       uint32_t round, int64_t *integers, float *values);
int modulo_recover_f64(const uint8_t *residues, int width, const double *y, uint64_t n, double b, int bits, int dither,
                       double limit, const double *omega, uint64_t start, uint32_t key0, uint32_t key1,
                       uint32_t layer, uint32_t round, int64_t *integers, double *values);
#endif
