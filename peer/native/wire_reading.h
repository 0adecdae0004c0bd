#ifndef SOTTOVOCE_WIRE_READING_H
#define SOTTOVOCE_WIRE_READING_H
/* The steps of reading a stream (wire_streams.c), which no Python calls. */
#include <stdint.h>
#include <string.h>

#include "wire_bits.h"

/* Integers of 64 bits that are put together from tokens and raw bits one after another. `size` bytes can be read from
   `raw` on, at least those of the raw bits; up to 56 of them are a token's. */
typedef struct {
    const uint8_t *tokens, *raw;
    uint64_t size, position, n, done;
    const uint64_t *bases;
    const uint8_t *raw_widths;
    uint64_t *out;
} raw_integers;

/* Puts the next integer together, or returns 0 where there is none or eight bytes cannot be read. */
static inline int put_together(raw_integers *r) {
    if (r->done == r->n || r->position / 8 + 8 > r->size) return 0;
    const uint8_t token = r->tokens[r->done];
    uint64_t word;
    memcpy(&word, r->raw + r->position / 8, 8);
    r->out[r->done++] = r->bases[token] | (word >> (r->position & 7) & low_bits(r->raw_widths[token]));
    r->position += r->raw_widths[token];
    return 1;
}

/* wire_rans_decode; `raw_bits` gets the sum of the `raw_widths` of the tokens unless these are NULL. Where there is one
   lane, whose tokens wait for each other, integers of `meanwhile` are put together in that time, unless that is NULL. */
int64_t wire_decode_tokens(uint32_t *states, uint64_t lanes, const uint8_t *words, uint64_t num_words,
                           const int64_t *first, int num_tables, const int64_t *sizes, const uint8_t *tables,
                           uint64_t spans, const uint8_t *alphabet, uint8_t *tokens, uint64_t n,
                           const uint8_t *raw_widths, uint64_t *raw_bits, raw_integers *meanwhile);

/* How tokens stand for integers: each for its base, and for as many raw bits behind it. */
enum { TOKENS = 256 };
typedef struct {
    uint64_t bases[TOKENS];
    uint8_t raw_widths[TOKENS];
    int most_tokens, has_raw_bits;
} token_map;

/* A stream in the entropy codec, of which the tokens have been read. */
typedef struct {
    token_map map;
    uint8_t *memory;
    int width, folds, is_whole;
    uint64_t centre, raw_bytes;
    raw_integers rest;
} stream_reader;

/* Reads the tokens of the stream that `data` begins with (see wire_read_stream), while integers of `meanwhile` are put
   together. Returns how many bytes the stream takes, or -1. `memory` is to be freed in either case. */
int64_t wire_begin_stream(stream_reader *s, const uint8_t *data, uint64_t size, int width, const int64_t *sizes,
                          uint64_t spans, uint64_t n, void *out, int itemsize, raw_integers *meanwhile);
/* Puts the integers together, or what is left of them; returns 0, or -1 where anything is wrong with them. */
int wire_finish_stream(stream_reader *s, void *out, int itemsize);
/* What puts the integers of such a stream together while another is read, and writes them to `out`; NULL if it is not
   made of bases and raw bits alone. */
static inline raw_integers *wire_leave_for_later(stream_reader *s, uint64_t *out) {
    s->rest.out = out;
    return s->width <= 56 && s->centre == 0 && !s->folds && !s->is_whole ? &s->rest : NULL;
}
#endif
