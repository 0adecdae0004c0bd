#ifndef SOTTOVOCE_WIRE_TABLES_H
#define SOTTOVOCE_WIRE_TABLES_H
#include <stdint.h>
#include <stddef.h>
/* The frequency tables of a stream (see peer/wire/ans.py), up to 16. `bounds` gets 257 entries for each: the first slot
   of every token, and 2^14 from the last one on. */

/* Tables for the `tokens` of a stream, cut into spans of `sizes`, each of which uses one of `tables`. `counts` gets how
   often each of 256 tokens occurs under each table; `num_tokens` the tokens of each table; `code`, of `capacity` zeroed
   bytes, the Rice code of the tables, of the parameter that is written to form[0]; form[1] whether they are coarse.
   Returns the bytes of the code, or -1 where they do not suffice. */
int64_t wire_make_tables(const uint8_t *tokens, const int64_t *sizes, const uint8_t *tables, uint64_t spans,
                         int num_tables, int64_t *counts, uint8_t *num_tokens, int64_t *bounds, int *form,
                         uint8_t *code, uint64_t capacity);
/* The tables in the Rice code that `data` begins with; `num_tokens` holds one less than the tokens of each. Returns how
   many bytes they take, -1 or -2 as wire_rice_decode does, and -3 where a table leaves the range of its weights. */
int64_t wire_read_tables(const uint8_t *data, uint64_t size, const uint8_t *num_tokens, int tables, int parameter,
                         int coarse, int64_t *bounds);
#endif
