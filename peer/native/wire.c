/* Kernels of the wire format: bit packing, tokens, entropy coding. Each has a numpy twin in peer/wire that returns the
   same bytes. What they read may come from a hostile peer: every kernel that follows foreign data checks that it stays
   within the sizes it is given. */
#include "wire.h"

#include "wire_bits.h"
#include "wire_reading.h"
#include "wire_writing.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels read words as they lie in memory; a big-endian machine uses numpy"
#endif

/* ---- bit packing ---- */

#define EACH_TYPE(itemsize, BODY)                                                                                      \
    switch (itemsize) {                                                                                                \
    case 1: BODY(uint8_t) break;                                                                                       \
    case 2: BODY(uint16_t) break;                                                                                      \
    case 4: BODY(uint32_t) break;                                                                                      \
    default: BODY(uint64_t) break;                                                                                     \
    }

static inline uint64_t load8(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

/* Eight bytes of `w` bits each to 8 w bits, by joining neighbours three times; and back. */
static inline uint64_t squeeze8(uint64_t x, int w) {
    x = (x & 0x00ff00ff00ff00ffull) | ((x & 0xff00ff00ff00ff00ull) >> (8 - w));
    x = (x & 0x0000ffff0000ffffull) | ((x & 0xffff0000ffff0000ull) >> (16 - 2 * w));
    return (x & 0x00000000ffffffffull) | ((x & 0xffffffff00000000ull) >> (32 - 4 * w));
}

static inline uint64_t spread8(uint64_t x, int w) {
    x = (x & low_bits(4 * w)) | ((x & low_bits(4 * w) << 4 * w) << (32 - 4 * w));
    uint64_t pair = low_bits(2 * w) * 0x0000000100000001ull;
    x = (x & pair) | ((x & pair << 2 * w) << (16 - 2 * w));
    uint64_t one = low_bits(w) * 0x0001000100010001ull;
    return (x & one) | ((x & one << w) << (8 - w));
}

void wire_pack(const void *values, int itemsize, uint64_t n, int width, uint8_t *out) {
    uint64_t size = (n * (uint64_t)width + 7) / 8, i = 0;
    bit_writer w = {out, out + size, 0, 0};
    if (itemsize == 1 && width < 8) {
        /* Stores of eight bytes of which `width` count; the last few integers go the slow way, for room. */
        for (; i + 8 <= n && (uint64_t)(w.end - w.at) >= 8; i += 8, w.at += width) {
            uint64_t x = squeeze8(load8((const uint8_t *)values + i), width);
            memcpy(w.at, &x, 8);
        }
    }
    if (itemsize == 4 && width == 24) {
        for (; i + 1 < n; i++, w.at += 3) memcpy(w.at, (const uint32_t *)values + i, 4);
    }
#define BODY(type)                                                                                                     \
    for (const type *in = values; i < n; i++) put_long(&w, in[i], width);
    EACH_TYPE(itemsize, BODY)
#undef BODY
    flush(&w);
}

int wire_unpack(const uint8_t *data, uint64_t size, uint64_t n, int width, void *out, int itemsize) {
    if (width < 1 || width > 8 * itemsize || size != (n * (uint64_t)width + 7) / 8) return -1;
    uint64_t i = 0;
    if (itemsize == 1 && width < 8) {
        for (; i + 8 <= n && size - i / 8 * width >= 8; i += 8) {
            uint64_t x = spread8(load8(data + i / 8 * width), width);
            memcpy((uint8_t *)out + i, &x, 8);
        }
    }
#define BODY(type)                                                                                                     \
    {                                                                                                                  \
        type *to = out;                                                                                                \
        if (width <= 56)                                                                                               \
            for (; i < n && i * width / 8 + 8 <= size; i++)                                                            \
                to[i] = (type)(load8(data + i * width / 8) >> (i * width & 7) & low_bits(width));                      \
        for (; i < n; i++) to[i] = (type)bits_at(data, size, i * width, width);                                        \
    }
    EACH_TYPE(itemsize, BODY)
#undef BODY
    return 0;
}

/* ---- Rice codes ---- */

uint64_t wire_rice_bits(const int64_t *values, uint64_t n, int r) {
    uint64_t bits = n * (uint64_t)(r + 1);
    for (uint64_t i = 0; i < n; i++) bits += (uint64_t)values[i] >> r;
    return bits;
}

void wire_rice_encode(const int64_t *values, uint64_t n, int r, uint8_t *out, uint64_t size) {
    bit_writer w = {out, out + size, 0, 0};
    for (uint64_t i = 0; i < n; i++) {
        uint64_t zeros = (uint64_t)values[i] >> r;
        for (; zeros >= 32; zeros -= 32) put(&w, 0, 32);
        put(&w, 1ull << zeros, (int)zeros + 1);
    }
    if (r)
        for (uint64_t i = 0; i < n; i++) put_long(&w, (uint64_t)values[i] & low_bits(r), r);
    flush(&w);
}

int64_t wire_rice_decode(const uint8_t *data, uint64_t size, uint64_t n, int r, uint64_t greatest_sum,
                         int64_t *values) {
    if (n == 0) return 0;
    if (r < 0 || r > 56) return -1;
    uint64_t longest = (n + (greatest_sum >> r) + 7) / 8, left = size < longest ? size : longest;
    uint64_t before = 0, found = 0, at = 0;
    while (found < n) {
        if (at >= left) return -1;
        uint64_t step = left - at < 8 ? left - at : 8, word = 0;
        memcpy(&word, data + at, step);
        for (; word && found < n; word &= word - 1) {
            uint64_t one = 8 * at + (uint64_t)__builtin_ctzll(word);
            if (values != NULL) values[found] = (int64_t)(one - before);
            found++;
            before = one + 1;
        }
        at += step;
    }
    /* `before` is the number of bits of the unary part. */
    uint64_t bits = before + n * (uint64_t)r, used = (bits + 7) / 8;
    if (used > size) return -1;
    if (bits % 8 && data[used - 1] >> bits % 8) return -2;
    if (r && values != NULL)
        for (uint64_t i = 0; i < n; i++)
            values[i] = values[i] << r | (int64_t)bits_at(data, used, before + i * (uint64_t)r, r);
    return (int64_t)used;
}

/* ---- tokens ---- */

static inline uint64_t folded(uint64_t v, int width, uint64_t centre, int folds) {
    uint64_t d = (v - centre) & low_bits(width);
    if (!folds) return d;
    uint64_t sign = -(d >> (width - 1) & 1);
    return ((d << 1) ^ sign) & low_bits(width);
}

static inline uint64_t unfolded(uint64_t z, int width, uint64_t centre, int folds) {
    if (folds) z = (z >> 1) ^ -(z & 1);
    return (z + centre) & low_bits(width);
}

static inline uint8_t token_of(uint64_t z, int raw_bits, int direct) {
    uint64_t h = z >> raw_bits;
    if (h >> direct == 0) return (uint8_t)h;
    int octave = 63 - __builtin_clzll(h);
    return (uint8_t)((1u << direct) + 4u * (unsigned)(octave - direct) + (unsigned)(h >> (octave - 2) & 3));
}

void wire_tokens(const void *values, int itemsize, uint64_t n, int width, uint64_t centre, int folds, int raw_bits,
                 int direct, uint8_t *tokens) {
    if (itemsize == 1) {
        uint8_t table[256];
        for (int v = 0; v < 256; v++) table[v] = token_of(folded((uint64_t)v, width, centre, folds), raw_bits, direct);
        const uint8_t *in = values;
        for (uint64_t i = 0; i < n; i++) tokens[i] = table[in[i]];
        return;
    }
    if (itemsize == 2 && n >> (width - 1) != 0) {
        uint8_t table[1 << 16];
        for (uint64_t v = 0; v < 1ull << width; v++) table[v] = token_of(folded(v, width, centre, folds), raw_bits, direct);
        const uint16_t *in = values;
        const uint16_t mask = (uint16_t)low_bits(width);
        for (uint64_t i = 0; i < n; i++) tokens[i] = table[in[i] & mask];
        return;
    }
    if (width <= raw_bits + direct) {
        /* All tokens are direct. */
#define BODY(type)                                                                                                     \
    for (uint64_t i = 0; i < n; i++)                                                                                   \
        tokens[i] = (uint8_t)(folded(((const type *)values)[i], width, centre, folds) >> raw_bits);
        EACH_TYPE(itemsize, BODY)
#undef BODY
        return;
    }
#define BODY(type)                                                                                                     \
    for (uint64_t i = 0; i < n; i++)                                                                                   \
        tokens[i] = token_of(folded(((const type *)values)[i], width, centre, folds), raw_bits, direct);
    EACH_TYPE(itemsize, BODY)
#undef BODY
}

static void count(const uint8_t *tokens, uint64_t n, int64_t *counts) {
    /* Four tables, so that runs of one token do not wait for each other's store. */
    uint32_t part[4][256];
    memset(counts, 0, 256 * sizeof *counts);
    for (uint64_t start = 0; start < n;) {
        uint64_t end = n - start > 1u << 30 ? start + (1u << 30) : n, i = start;
        memset(part, 0, sizeof part);
        for (; i + 4 <= end; i += 4)
            for (int k = 0; k < 4; k++) part[k][tokens[i + k]]++;
        for (; i < end; i++) part[0][tokens[i]]++;
        for (int t = 0; t < 256; t++) counts[t] += (int64_t)part[0][t] + part[1][t] + part[2][t] + part[3][t];
        start = end;
    }
}

void wire_counts(const uint8_t *tokens, const int64_t *sizes, uint64_t spans, int64_t *counts) {
    for (uint64_t span = 0; span < spans; tokens += sizes[span++]) {
        if (sizes[span] >= 1024) {
            count(tokens, (uint64_t)sizes[span], counts + 256 * span);
            continue;
        }
        memset(counts + 256 * span, 0, 256 * sizeof *counts);
        for (int64_t i = 0; i < sizes[span]; i++) counts[256 * span + tokens[i]]++;
    }
}

void wire_counts_of_groups(const uint8_t *tokens, const int64_t *sizes, const uint8_t *groups, uint64_t spans,
                           int64_t num_groups, int64_t *counts) {
    memset(counts, 0, (size_t)num_groups * 256 * sizeof *counts);
    for (uint64_t span = 0; span < spans; tokens += sizes[span++]) {
        int64_t *to = counts + 256 * groups[span], part[256];
        if (sizes[span] >= 1024) {
            count(tokens, (uint64_t)sizes[span], part);
            for (int t = 0; t < 256; t++) to[t] += part[t];
            continue;
        }
        for (int64_t i = 0; i < sizes[span]; i++) to[tokens[i]]++;
    }
}

/* The width that all tokens have, or -1. */
static int same_width(const uint8_t *raw_widths) {
    for (int t = 1; t < 256; t++)
        if (raw_widths[t] != raw_widths[0]) return -1;
    return raw_widths[0];
}

/* The raw bits of codes of up to 16 bits as far as stores of eight bytes reach, by a table; returns of how many. */
static uint64_t put_raw_codes(bit_writer *w, const uint16_t *values, uint64_t n, int width, uint64_t centre, int folds,
                              int raw_bits, int direct, const uint8_t *raw_widths) {
    struct {
        uint16_t bits, width;
    } table[1 << 16];
    for (uint64_t v = 0; v < 1ull << width; v++) {
        const uint64_t z = folded(v, width, centre, folds);
        table[v].width = raw_widths[token_of(z, raw_bits, direct)];
        table[v].bits = (uint16_t)(z & low_bits(table[v].width));
    }
    uint64_t i = 0, bits = 0;
    int filled = 0;
    for (; i < n && w->end - w->at >= 8; i++) {
        const uint16_t v = values[i] & (uint16_t)low_bits(width);
        bits |= (uint64_t)table[v].bits << filled;
        filled += table[v].width;
        if (filled < 48) continue;
        memcpy(w->at, &bits, 8);
        w->at += 6;
        bits >>= 48;
        filled -= 48;
    }
    for (; filled >= 8 && w->at < w->end; filled -= 8, bits >>= 8) *w->at++ = (uint8_t)bits;
    w->bits = bits;
    w->filled = filled;
    return i;
}

int wire_raw_bits(const void *values, int itemsize, uint64_t n, int width, uint64_t centre, int folds, int raw_bits,
                  int direct, const uint8_t *tokens, const uint8_t *raw_widths, uint8_t *out, uint64_t size) {
    bit_writer w = {out, out + size, 0, 0};
    int same = same_width(raw_widths);
    uint64_t i = 0;
    if (itemsize == 2 && same < 0 && n >> (width - 1) != 0)
        i = put_raw_codes(&w, values, n, width, centre, folds, raw_bits, direct, raw_widths);
#define BODY(type)                                                                                                     \
    {                                                                                                                  \
        const type *in = values;                                                                                       \
        if (same == 24)                                                                                                \
            for (; i < n && w.end - w.at >= 4; i++, w.at += 3) {                                                       \
                uint32_t z = (uint32_t)folded(in[i], width, centre, folds);                                            \
                memcpy(w.at, &z, 4);                                                                                   \
            }                                                                                                          \
        if (same > 0 && same <= 56)                                                                                    \
            for (; i < n; i++)                                                                                         \
                if (put(&w, folded(in[i], width, centre, folds) & low_bits(same), same)) return -1;                    \
        for (; i < n; i++) {                                                                                           \
            int raw = raw_widths[tokens[i]];                                                                           \
            if (put_long(&w, folded(in[i], width, centre, folds) & low_bits(raw), raw)) return -1;                     \
        }                                                                                                              \
    }
    EACH_TYPE(itemsize, BODY)
#undef BODY
    return flush(&w);
}

int wire_values(const uint8_t *tokens, uint64_t n, const uint8_t *raw, uint64_t size, const uint64_t *bases,
                const uint8_t *raw_widths, int width, uint64_t centre, int folds, void *out, int itemsize) {
    uint64_t i = 0, position = 0;
    int same = same_width(raw_widths);
    if (itemsize == 1 && same == 0 && n >= 256) {
        uint8_t table[256];
        for (int t = 0; t < 256; t++) table[t] = (uint8_t)unfolded(bases[t], width, centre, folds);
        for (; i < n; i++) ((uint8_t *)out)[i] = table[tokens[i]];
        return 0;
    }
    uint64_t masks[256];
    int longest = 0;
    for (int t = 0; t < 256; t++) {
        longest = raw_widths[t] > longest ? raw_widths[t] : longest;
        masks[t] = low_bits(raw_widths[t]);
    }
#define BODY(type)                                                                                                     \
    {                                                                                                                  \
        type *to = out;                                                                                                \
        if (same >= 0 && same <= 56) {                                                                                 \
            for (; i < n && position / 8 + 8 <= size; i++, position += (uint64_t)same) {                               \
                uint64_t more = load8(raw + position / 8) >> (position & 7) & low_bits(same);                          \
                to[i] = (type)unfolded(bases[tokens[i]] | more, width, centre, folds);                                 \
            }                                                                                                          \
        } else if (longest <= 56 && centre == 0 && !folds) {                                                           \
            for (; i < n && position / 8 + 8 <= size; i++) {                                                           \
                uint8_t token = tokens[i];                                                                             \
                to[i] = (type)(bases[token] | (load8(raw + position / 8) >> (position & 7) & masks[token]));           \
                position += raw_widths[token];                                                                         \
            }                                                                                                          \
        } else if (longest <= 56) {                                                                                    \
            for (; i < n && position / 8 + 8 <= size; i++) {                                                           \
                uint8_t token = tokens[i];                                                                             \
                uint64_t low = load8(raw + position / 8) >> (position & 7) & masks[token];                             \
                position += raw_widths[token];                                                                         \
                to[i] = (type)unfolded(bases[token] | low, width, centre, folds);                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (; i < n; i++) {                                                                                           \
            int more = raw_widths[tokens[i]];                                                                          \
            uint64_t z = bases[tokens[i]];                                                                             \
            if (more) {                                                                                                \
                if (8 * size - position < (uint64_t)more) return -1;                                                   \
                z |= bits_at(raw, size, position, more);                                                               \
                position += (uint64_t)more;                                                                            \
            }                                                                                                          \
            to[i] = (type)unfolded(z, width, centre, folds);                                                           \
        }                                                                                                              \
    }
    EACH_TYPE(itemsize, BODY)
#undef BODY
    return 0;
}

/* ---- rANS ---- */

#define LOWEST_STATE (1u << 16)
#define SCALE 14
#define SLOTS (1u << SCALE)

/* More tables than the format has would not fit the stack. */
#define MOST_TABLES 16
#define BOUNDS 257

typedef struct {
    uint64_t reciprocal; /* ceil(2^64 / frequency), so that a division is one multiplication */
    uint32_t greatest, bias, complement;
} encoder_entry;

static void fill_encoder(encoder_entry *table, const int64_t *first) {
    for (int t = 0; t < 256; t++) {
        uint32_t frequency = (uint32_t)(first[t + 1] - first[t]);
        encoder_entry *e = &table[t];
        /* From here on a state emits a word; 2^32 - 1, so never, where one token owns all slots. */
        e->greatest = (uint32_t)(((uint64_t)frequency << (32 - SCALE)) - 1);
        e->complement = (1u << SCALE) - frequency;
        e->bias = (uint32_t)first[t];
        if (frequency > 1) {
            e->reciprocal = ~0ull / frequency + 1;
        } else {
            /* 2^64 / 1 does not fit: with 2^64 - 1 the quotient is one too small, which the bias makes up for. */
            e->reciprocal = ~0ull;
            e->bias += (1u << SCALE) - 1;
        }
    }
}

/* The state before a token of which `x` is the state behind it, where a word is emitted if it must be. */
static inline uint32_t encoded(const encoder_entry *e, uint32_t x, uint16_t *words, int64_t *at) {
    int full = x > e->greatest;
    words[*at - 1] = (uint16_t)x;
    *at -= full;
    x = full ? x >> 16 : x;
    uint32_t quotient = (uint32_t)(((unsigned __int128)x * e->reciprocal) >> 64);
    return x + e->bias + quotient * e->complement;
}

int64_t wire_rans_encode(const uint8_t *tokens, const int64_t *first, int num_tables, const int64_t *sizes,
                         const uint8_t *tables, uint64_t spans, uint32_t *states, uint64_t lanes, uint16_t *words,
                         int64_t capacity) {
    encoder_entry entries[MOST_TABLES][256];
    uint64_t n = 0;
    if (num_tables < 1 || num_tables > MOST_TABLES) return -1;
    for (int t = 0; t < num_tables; t++) fill_encoder(entries[t], first + t * BOUNDS);
    for (uint64_t lane = 0; lane < lanes; lane++) states[lane] = LOWEST_STATE;
    for (uint64_t span = 0; span < spans; span++) n += (uint64_t)sizes[span];
    int64_t at = capacity;
    for (uint64_t span = spans; span-- > 0;) {
        const encoder_entry *table = entries[tables[span]];
        uint64_t begin = n - (uint64_t)sizes[span];
        if (lanes == 1) {
            /* The state stays in a register. */
            uint32_t x = states[0];
            if (at < (int64_t)(n - begin)) {
                /* Room for as many words as there are tokens is more than is needed, but what the last ones want. */
                for (; n > begin; n--) {
                    if (at == 0) return -1;
                    x = encoded(&table[tokens[n - 1]], x, words, &at);
                }
            }
            for (; n > begin; n--) x = encoded(&table[tokens[n - 1]], x, words, &at);
            states[0] = x;
            continue;
        }
        while (n > begin) {
            /* A row, or what of it lies in this span. */
            uint64_t start = (n - 1) & ~(lanes - 1), low = start > begin ? start : begin;
            if (at < (int64_t)(n - low)) return -1;
            uint32_t *state = states + (low - start);
            for (uint64_t i = n - low; i-- > 0;) state[i] = encoded(&table[tokens[low + i]], state[i], words, &at);
            n = low;
        }
    }
    return at;
}

/* ---- one lane ---- */

/* A token waits for the state that the one before it leaves, so what counts is how soon the slots of its token are
   known. They are found in one step from its bucket of slots, nearly all of which belong to the owner of the first. */
#define BUCKETS (1u << 8)
#define BUCKET_SLOTS (SLOTS / BUCKETS)

typedef struct {
    uint16_t counts[BUCKETS], firsts[BUCKETS], bounds[BOUNDS];
    uint8_t tokens[BUCKETS];
} bucket_table;

static int fill_buckets(bucket_table *d, const int64_t *first) {
    int64_t bucket = 0;
    for (int t = 0; t < 256; t++) {
        const int64_t begin = first[t], end = first[t + 1];
        if (end < begin || end > SLOTS) return -1;
        d->bounds[t] = (uint16_t)begin;
        for (; bucket * BUCKET_SLOTS < end; bucket++) {
            d->counts[bucket] = (uint16_t)(end - begin);
            d->firsts[bucket] = (uint16_t)begin;
            d->tokens[bucket] = (uint8_t)t;
        }
    }
    d->bounds[256] = SLOTS;
    return 0;
}

typedef struct {
    uint32_t x, slot;
    const uint8_t *next, *end;
} single_lane;

static inline __attribute__((always_inline)) uint8_t next_token(single_lane *lane, const bucket_table *d) {
    const uint32_t slot = lane->slot, bucket = slot / BUCKET_SLOTS;
    uint32_t token = d->tokens[bucket], count = d->counts[bucket], within = slot - d->firsts[bucket];
    if (__builtin_expect(within >= count, 0)) {
        while (slot >= d->bounds[token + 1]) token++;
        count = (uint32_t)d->bounds[token + 1] - d->bounds[token];
        within = slot - d->bounds[token];
    }
    lane->x = count * (lane->x >> SCALE) + within;
    lane->slot = lane->x & (SLOTS - 1);
    /* A branch: predicted rightly, it lets the token behind a word begin before this state is known. */
    if (lane->x < LOWEST_STATE) {
        uint16_t word;
        if (lane->next == lane->end) {
            /* No stream ends in this state, nor does it leave it. */
            lane->x = lane->slot = 0;
            return (uint8_t)token;
        }
        memcpy(&word, lane->next, 2);
        lane->x = lane->x << 16 | word;
        lane->slot = word & (SLOTS - 1);
        lane->next += 2;
    }
    return (uint8_t)token;
}

static int64_t decode_lane(uint32_t state, const uint8_t *words, uint64_t num_words, const int64_t *first,
                           int num_tables, const int64_t *sizes, const uint8_t *tables, uint64_t spans,
                           const uint8_t *restrict alphabet, uint8_t *restrict tokens, uint64_t n,
                           const uint8_t *raw_widths, uint64_t *raw_bits, raw_integers *meanwhile) {
    bucket_table decoders[MOST_TABLES];
    for (int table = 0; table < num_tables; table++, first += BOUNDS)
        if (fill_buckets(&decoders[table], first)) return -1;
    if (state < LOWEST_STATE) return -2;
    static const uint8_t no_widths[256];
    raw_integers none = {0}, other = meanwhile != NULL ? *meanwhile : none;
    const uint8_t *widths = raw_widths != NULL ? raw_widths : no_widths;
    single_lane lane = {state, state & (SLOTS - 1), words, words + 2 * num_words};
    uint64_t i = 0, raw = 0;
    for (uint64_t span = 0; span < spans; span++) {
        if (tables[span] >= num_tables || (uint64_t)sizes[span] > n - i) return -1;
        const bucket_table *d = &decoders[tables[span]];
        uint64_t end = i + (uint64_t)sizes[span];
        for (; span + 1 < spans && tables[span + 1] == tables[span]; end += (uint64_t)sizes[++span])
            if ((uint64_t)sizes[span + 1] > n - end) return -1;
        for (; i < end && put_together(&other); i++) {
            const uint8_t token = next_token(&lane, d);
            tokens[i] = alphabet[token];
            raw += widths[token];
        }
        for (; i < end; i++) {
            const uint8_t token = next_token(&lane, d);
            tokens[i] = alphabet[token];
            raw += widths[token];
        }
    }
    if (meanwhile != NULL) *meanwhile = other;
    if (raw_bits != NULL) *raw_bits = raw;
    return i == n && lane.x == LOWEST_STATE ? (lane.next - words) / 2 : -1;
}

/* ---- several lanes, which wait for nothing ---- */

typedef struct {
    uint8_t owners[SLOTS + 16];
    uint16_t counts[256], firsts[256];
} decoder_table;

static int fill_decoder(decoder_table *d, const int64_t *first) {
    for (int t = 0; t < 256; t++) {
        if (first[t + 1] == first[t]) continue;
        if (first[t + 1] < first[t] || first[t + 1] > SLOTS) return -1;
        d->counts[t] = (uint16_t)(first[t + 1] - first[t]);
        d->firsts[t] = (uint16_t)first[t];
        /* What is written beyond a token's slots are those of the next. */
        memset(d->owners + first[t], t, 16);
        if (d->counts[t] > 16) memset(d->owners + first[t] + 16, t, d->counts[t] - 16u);
    }
    return 0;
}

/* The state behind a token, before it takes a word if it must. */
static inline uint32_t decoded(const decoder_table *d, uint32_t x, uint8_t *token) {
    const uint32_t slot = x & (SLOTS - 1);
    *token = d->owners[slot];
    return d->counts[*token] * (x >> SCALE) + slot - d->firsts[*token];
}

static int64_t decode_lanes(uint32_t *states, uint64_t lanes, const uint8_t *words, uint64_t num_words,
                            const int64_t *first, int num_tables, const int64_t *sizes, const uint8_t *tables,
                            uint64_t spans, const uint8_t *alphabet, uint8_t *tokens, uint64_t n) {
    decoder_table decoders[MOST_TABLES];
    for (int table = 0; table < num_tables; table++, first += BOUNDS)
        if (fill_decoder(&decoders[table], first)) return -1;
    for (uint64_t lane = 0; lane < lanes; lane++)
        if (states[lane] < LOWEST_STATE) return -2;
    uint64_t at = 0, start = 0;
    uint8_t token;
    uint16_t word;
    for (uint64_t span = 0; span < spans; span++) {
        if (tables[span] >= num_tables || (uint64_t)sizes[span] > n - start) return -1;
        const decoder_table *d = &decoders[tables[span]];
        uint64_t end = start + (uint64_t)sizes[span];
        for (; span + 1 < spans && tables[span + 1] == tables[span]; end += (uint64_t)sizes[++span])
            if ((uint64_t)sizes[span + 1] > n - end) return -1;
        while (start < end) {
            /* A row, or what of it lies in this span. */
            uint64_t lane = start & (lanes - 1), count = lanes - lane < end - start ? lanes - lane : end - start;
            uint32_t *state = states + lane;
            uint8_t *to = tokens + start;
            start += count;
            if (num_words - at >= count) {
                /* Whether a lane takes a word is a coin's toss: no branch. */
                const uint8_t *next = words + 2 * at;
                for (uint64_t i = 0; i < count; i++) {
                    memcpy(&word, next, 2);
                    uint32_t x = decoded(d, state[i], &token), low = x < LOWEST_STATE;
                    to[i] = alphabet[token];
                    state[i] = x << (low << 4) | (word & -low);
                    next += 2 * low;
                }
                at = (uint64_t)(next - words) / 2;
                continue;
            }
            for (uint64_t i = 0; i < count; i++) {
                uint32_t x = decoded(d, state[i], &token);
                to[i] = alphabet[token];
                if (x < LOWEST_STATE) {
                    if (at == num_words) return -1;
                    memcpy(&word, words + 2 * at, 2);
                    at++;
                    x = x << 16 | word;
                }
                state[i] = x;
            }
        }
    }
    if (start != n) return -1;
    for (uint64_t lane = 0; lane < lanes; lane++)
        if (states[lane] != LOWEST_STATE) return -1;
    return (int64_t)at;
}

int64_t wire_decode_tokens(uint32_t *states, uint64_t lanes, const uint8_t *words, uint64_t num_words,
                           const int64_t *first, int num_tables, const int64_t *sizes, const uint8_t *tables,
                           uint64_t spans, const uint8_t *alphabet, uint8_t *tokens, uint64_t n,
                           const uint8_t *raw_widths, uint64_t *raw_bits, raw_integers *meanwhile) {
    if (num_tables < 1 || num_tables > MOST_TABLES) return -1;
    for (int table = 0; table < num_tables; table++)
        if (first[table * BOUNDS] != 0 || first[table * BOUNDS + 256] != SLOTS) return -1;
    if (lanes == 1)
        return decode_lane(states[0], words, num_words, first, num_tables, sizes, tables, spans, alphabet, tokens, n,
                           raw_widths, raw_bits, meanwhile);
    const int64_t used = decode_lanes(states, lanes, words, num_words, first, num_tables, sizes, tables, spans,
                                      alphabet, tokens, n);
    if (used >= 0 && raw_widths != NULL) {
        *raw_bits = 0;
        for (uint64_t i = 0; i < n; i++) *raw_bits += raw_widths[tokens[i]];
    }
    return used;
}

int64_t wire_rans_decode(uint32_t *states, uint64_t lanes, const uint8_t *words, uint64_t num_words,
                         const int64_t *first, int num_tables, const int64_t *sizes, const uint8_t *tables,
                         uint64_t spans, const uint8_t *alphabet, uint8_t *tokens, uint64_t n) {
    return wire_decode_tokens(states, lanes, words, num_words, first, num_tables, sizes, tables, spans, alphabet,
                              tokens, n, NULL, NULL, NULL);
}
