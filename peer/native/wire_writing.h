#ifndef SOTTOVOCE_WIRE_WRITING_H
#define SOTTOVOCE_WIRE_WRITING_H
/* The steps of writing a stream (wire_streams.c), which no Python calls. */
#include <stdint.h>

/* How often each of 256 tokens occurs in each group of spans; `groups` are below `num_groups`. */
void wire_counts_of_groups(const uint8_t *tokens, const int64_t *sizes, const uint8_t *groups, uint64_t spans,
                           int64_t num_groups, int64_t *counts);
/* The raw bits of `n` integers whose tokens are known; `out` has `size` zeroed bytes. Returns 0, or -1 if too few. */
int wire_raw_bits(const void *values, int itemsize, uint64_t n, int width, uint64_t centre, int folds, int raw_bits,
                  int direct, const uint8_t *tokens, const uint8_t *raw_widths, uint8_t *out, uint64_t size);

/* Tables for the `tokens` of a stream, cut into spans of `sizes`, each of which uses one of `tables`. `counts` gets how
   often each of 256 tokens occurs under each table; `num_tokens` the tokens of each table; `code`, of `capacity` zeroed
   bytes, the Rice code of the tables, of the parameter that is written to form[0]; form[1] whether they are coarse.
   Returns the bytes of the code, or -1 where they do not suffice. */
int64_t wire_make_tables(const uint8_t *tokens, const int64_t *sizes, const uint8_t *tables, uint64_t spans,
                         int num_tables, int64_t *counts, uint8_t *num_tokens, int64_t *bounds, int *form,
                         uint8_t *code, uint64_t capacity);

/* The inverse of wire_rans_decode, with the same tables and spans. Words are written from the end of `words` backwards;
   returns where they begin, or -1 if `capacity` does not suffice. */
int64_t wire_rans_encode(const uint8_t *tokens, const int64_t *first, int num_tables, const int64_t *sizes,
                         const uint8_t *tables, uint64_t spans, uint32_t *states, uint64_t lanes, uint16_t *words,
                         int64_t capacity);
#endif
