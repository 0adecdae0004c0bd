#ifndef SOTTOVOCE_COMPRESS_H
#define SOTTOVOCE_COMPRESS_H
#include <stdint.h>
#include <stddef.h>
/* Philox 4x32-10: words or uniforms `start` to `start + n - 1` of the stream (key, layer, round). */
void philox_words(uint32_t *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                  uint32_t round);
void philox_uniforms_f32(float *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                         uint32_t round);
void philox_uniforms_f64(double *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                         uint32_t round);
#endif
