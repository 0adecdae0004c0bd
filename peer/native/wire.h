#ifndef SOTTOVOCE_WIRE_H
#define SOTTOVOCE_WIRE_H
#include <stdint.h>
#include <stddef.h>
/* Integers are unsigned and of `itemsize` 1, 2, 4 or 8 bytes. Bit strings begin at the lowest bit of each byte. */

/* `n` integers below 2^width, back to back; `out` has exactly (n width + 7) / 8 bytes. */
void wire_pack(const void *values, int itemsize, uint64_t n, int width, uint8_t *out);
/* The inverse. Returns 0, or -1 if `size` is not that of such a string. */
int wire_unpack(const uint8_t *data, uint64_t size, uint64_t n, int width, void *out, int itemsize);

/* Rice codes (see peer/wire/rice.py) of `n` integers. `bits` returns the length without padding; `encode` fills exactly
   the bytes that this takes, zeroed before. `decode` returns how many of the `size` bytes it read, -1 if they do not
   suffice or if the unary part is longer than n + greatest_sum / 2^r bits, -2 if padding is not zero; with `values`
   NULL it writes nothing. */
uint64_t wire_rice_bits(const int64_t *values, uint64_t n, int r);
void wire_rice_encode(const int64_t *values, uint64_t n, int r, uint8_t *out, uint64_t size);
int64_t wire_rice_decode(const uint8_t *data, uint64_t size, uint64_t n, int r, uint64_t greatest_sum,
                         int64_t *values);

/* The tokens of `n` integers (see peer/wire/tokens.py), and how often each of the 256 occurs in each span of them. */
void wire_tokens(const void *values, int itemsize, uint64_t n, int width, uint64_t centre, int folds, int raw_bits,
                 int direct, uint8_t *tokens);
void wire_counts(const uint8_t *tokens, const int64_t *sizes, uint64_t spans, int64_t *counts);
/* The integers of `n` tokens and their raw bits. `bases` and `raw_widths` have 256 entries. Returns 0, or -1 if the
   raw bits end too early. */
int wire_values(const uint8_t *tokens, uint64_t n, const uint8_t *raw, uint64_t size, const uint64_t *bases,
                const uint8_t *raw_widths, int width, uint64_t centre, int folds, void *out, int itemsize);

/* rANS (see peer/wire/ans.py). `first` has 257 entries for each of up to 16 tables: the first slot of every token, and
   2^14 from the last one on. The stream's spans have `sizes` tokens each, and use `tables`. Writes alphabet[token] for
   each token. Returns how many of the words the `n` tokens take, -1 if they run out or the states do not end where they
   should, and -2 if the states cannot be those of any stream. */
int64_t wire_rans_decode(uint32_t *states, uint64_t lanes, const uint8_t *words, uint64_t num_words,
                         const int64_t *first, int num_tables, const int64_t *sizes, const uint8_t *tables,
                         uint64_t spans, const uint8_t *alphabet, uint8_t *tokens, uint64_t n);
#endif
