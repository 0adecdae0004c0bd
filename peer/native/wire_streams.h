#ifndef SOTTOVOCE_WIRE_STREAMS_H
#define SOTTOVOCE_WIRE_STREAMS_H
#include <stdint.h>
/* A stream of integers in one call (see peer/wire/integers.py): `n` integers of `width` bits and `itemsize` bytes, in
   `spans` of `sizes`. */

/* The entropy-coded stream of `values` with the map of tokens that the four numbers after `width` describe (see
   peer/wire/tokens.py); `tokens` may be NULL. Each span uses one of `tables`, up to 16. Writes less than `limit` bytes
   to `out` and returns how many, 0 where that does not suffice, or -1 where there is no memory. */
int64_t wire_write_stream(const void *values, int itemsize, uint64_t n, int width, uint64_t centre, int folds,
                          int raw_bits, int direct, const uint8_t *tokens, const int64_t *sizes,
                          const uint8_t *tables, uint64_t spans, uint8_t *out, uint64_t limit);
/* The integers of the stream that `data` begins with, packed (codec 0) or entropy-coded (1). Returns how many bytes it
   takes, or -1 where anything is wrong with it, there is no memory, or the codec is another. */
int64_t wire_read_stream(const uint8_t *data, uint64_t size, int codec, int width, const int64_t *sizes,
                         uint64_t spans, uint64_t n, void *out, int itemsize);
/* The map of `n` codes of up to 8 bits, of which `sample` has some: form[0] is its centre, form[1] whether it folds.
   `logs` are log2 of 0.4, 1, 2, 3 and so on. */
void wire_map_codes(const uint8_t *sample, uint64_t sampled, uint64_t n, int width, const double *logs,
                    int32_t *form);
#endif
