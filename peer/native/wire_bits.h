#ifndef SOTTOVOCE_WIRE_BITS_H
#define SOTTOVOCE_WIRE_BITS_H
/* Bit strings, as the kernels of the wire format read and write them: from the lowest bit of each byte. */
#include <stdint.h>
#include <string.h>

static inline uint64_t low_bits(int width) { return width >= 64 ? ~0ull : (1ull << width) - 1; }

/* Writes bits one integer after another, and never beyond `end`. */
typedef struct {
    uint8_t *at, *end;
    uint64_t bits;
    int filled;
} bit_writer;

/* Appends up to 56 bits. Far from the end it always stores eight bytes, of which the full ones count. */
static inline int put(bit_writer *w, uint64_t v, int width) {
    w->bits |= v << w->filled;
    w->filled += width;
    if (w->end - w->at >= 8) {
        memcpy(w->at, &w->bits, 8);
    } else if (w->end - w->at >= w->filled >> 3) {
        memcpy(w->at, &w->bits, (size_t)(w->filled >> 3));
    } else {
        return -1;
    }
    w->at += w->filled >> 3;
    w->bits >>= w->filled & 56;
    w->filled &= 7;
    return 0;
}

static inline int put_long(bit_writer *w, uint64_t v, int width) {
    if (width <= 56) return put(w, v, width);
    return put(w, v & 0xffffffff, 32) || put(w, v >> 32, width - 32) ? -1 : 0;
}

static inline int flush(bit_writer *w) {
    if (w->filled == 0) return 0;
    if (w->at >= w->end) return -1;
    *w->at++ = (uint8_t)w->bits;
    return 0;
}

/* A varint, of up to 10 bytes; returns where it ends. */
static inline uint8_t *put_varint(uint8_t *at, uint64_t v) {
    for (; v >= 0x80; v >>= 7) *at++ = (uint8_t)(v | 0x80);
    *at++ = (uint8_t)v;
    return at;
}

/* The inverse; NULL where there is none, or not in its shortest form. */
static inline const uint8_t *get_varint(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    *value = 0;
    for (int shift = 0; shift < 64 && at < end; shift += 7) {
        uint8_t byte = *at++;
        if (shift == 63 && byte > 1) break;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) return byte == 0 && shift ? NULL : at;
    }
    return NULL;
}

/* Reads `width` (0 to 64) bits at bit `position`, which with them lies within `size` bytes. */
static inline uint64_t bits_at(const uint8_t *data, uint64_t size, uint64_t position, int width) {
    uint64_t at = position >> 3, word = 0;
    int shift = position & 7;
    uint64_t left = size - at;
    memcpy(&word, data + at, left < 8 ? left : 8);
    word >>= shift;
    if (width + shift > 64) word |= (uint64_t)data[at + 8] << (64 - shift);
    return word & low_bits(width);
}
#endif
