#ifndef SOTTOVOCE_WIRE_TABLES_H
#define SOTTOVOCE_WIRE_TABLES_H
#include <stdint.h>
#include <stddef.h>
/* The frequency tables of a stream (see peer/wire/ans.py), up to 16. `bounds` gets 257 entries for each: the first slot
   of every token, and 2^14 from the last one on. */

/* The tables in the Rice code that `data` begins with; `num_tokens` holds one less than the tokens of each. Returns how
   many bytes they take, -1 or -2 as wire_rice_decode does, and -3 where a table leaves the range of its weights. */
int64_t wire_read_tables(const uint8_t *data, uint64_t size, const uint8_t *num_tokens, int tables, int parameter,
                         int coarse, int64_t *bounds);
#endif
