/* Streams of integers in one call, entropy-coded or packed. The twins are peer/wire/integers.py and plans.py, which also
   know what is wrong with a stream that this does not read. */
#include "wire_streams.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "wire.h"
#include "wire_bits.h"
#include "wire_reading.h"
#include "wire_tables.h"
#include "wire_writing.h"

enum { PACKED = 0, ENTROPY = 1 };
enum { SEVERAL = 1 << 3, UNUSED = 1 << 4, COARSE = 1 << 7, FOLDS = 1 << 4, HAS_RAW_BITS = 1 << 5 };
enum { MOST_TABLES = 16, MOST_TABLE_BYTES = 608, MIN_DIRECT = 2, MAX_DIRECT = 8, MOST_LANES_LOG2 = 7 };
#define SCALE 14
/* Codes from which the order of the tokens in a table does not matter. */
#define WORTH_ORDERING (1 << 12)

static void fill_map(token_map *map, int width, int raw_bits, int direct) {
    const int high = width - raw_bits, direct_tokens = 1 << (high < direct ? high : direct);
    int most = direct_tokens + (high > direct ? 4 * (high - direct) : 0);
    most = most < TOKENS ? most : TOKENS;
    map->most_tokens = most;
    map->has_raw_bits = width > direct || raw_bits > 0;
    memset(map->bases, 0, sizeof map->bases);
    memset(map->raw_widths, raw_bits, sizeof map->raw_widths);
    for (int t = 0; t < direct_tokens && t < most; t++) map->bases[t] = (uint64_t)t << raw_bits;
    for (int t = direct_tokens; t < most; t++) {
        const int beyond = t - direct_tokens, more = beyond / 4 + direct - 2;
        map->bases[t] = (uint64_t)(4 + beyond % 4) << more << raw_bits;
        map->raw_widths[t] = (uint8_t)(more + raw_bits);
    }
}

static int bits_below(int count) { return count > 1 ? 32 - __builtin_clz((unsigned)(count - 1)) : 0; }

/* ---- writing ---- */

static uint8_t *put_bytes(uint8_t *at, const void *bytes, uint64_t size) {
    if (size > 0) memcpy(at, bytes, size);
    return at + size;
}

static double bits_needed(const int64_t *counts, const int64_t *bounds, int num_tables) {
    double bits = 0;
    for (int table = 0; table < num_tables; table++, counts += TOKENS, bounds += TOKENS + 1)
        for (int t = 0; t < TOKENS; t++)
            if (counts[t]) bits += (double)counts[t] * (SCALE - log2((double)(bounds[t + 1] - bounds[t])));
    return bits;
}

int64_t wire_write_stream(const void *values, int itemsize, uint64_t n, int width, uint64_t centre, int folds,
                          int raw_bits, int direct, const uint8_t *tokens, const int64_t *sizes,
                          const uint8_t *tables, uint64_t spans, uint8_t *out, uint64_t limit) {
    token_map map;
    int64_t counts[MOST_TABLES * TOKENS], bounds[MOST_TABLES * (TOKENS + 1)];
    uint8_t num_tokens[MOST_TABLES], code[MOST_TABLES * MOST_TABLE_BYTES], header[16 + MOST_TABLES], *at = header;
    int form[2], codes_anything = 0, num_tables = 1;
    for (uint64_t span = 0; span < spans; span++) num_tables = tables[span] >= num_tables ? tables[span] + 1 : num_tables;
    if (num_tables > MOST_TABLES) return -1;
    fill_map(&map, width, raw_bits, direct);
    uint8_t *own = tokens == NULL ? malloc(n) : NULL;
    if (tokens == NULL) {
        if (own == NULL) return -1;
        wire_tokens(values, itemsize, n, width, centre, folds, raw_bits, direct, own);
        tokens = own;
    }
    uint16_t *words = NULL;
    int64_t written = 0, begin = 0, capacity = 0;
    memset(code, 0, (size_t)num_tables * MOST_TABLE_BYTES);
    int64_t code_bytes = wire_make_tables(tokens, sizes, tables, spans, num_tables, counts, num_tokens, bounds, form,
                                          code, (uint64_t)num_tables * MOST_TABLE_BYTES);
    uint64_t raw = 0, names = num_tables > 1 ? (spans * (uint64_t)bits_below(num_tables) + 7) / 8 : 0;
    for (int t = 0; t < num_tables; t++) codes_anything |= num_tokens[t] > 0;
    if (map.has_raw_bits)
        for (int t = 0; t < num_tables * TOKENS; t++) raw += (uint64_t)counts[t] * map.raw_widths[t % TOKENS];
    const double cost = bits_needed(counts, bounds, num_tables);
    int lanes_log2 = 0;
    if (codes_anything && cost >= 8192) lanes_log2 = 31 - __builtin_clz((unsigned)(cost / 8192 < 128 ? cost / 8192 : 128));
    const uint64_t lanes = 1ull << lanes_log2, raw_bytes = (raw + 7) / 8;
    *at++ = (uint8_t)(lanes_log2 | (num_tables > 1 ? SEVERAL : 0) | form[0] << 5 | (form[1] ? COARSE : 0));
    *at++ = (uint8_t)(direct | (folds ? FOLDS : 0) | (raw_bits ? HAS_RAW_BITS : 0));
    if (raw_bits) *at++ = (uint8_t)raw_bits;
    at = put_varint(at, centre);
    if (num_tables > 1) *at++ = (uint8_t)(num_tables - 1);
    const uint64_t head = (uint64_t)(at - header), heads = head + names + (uint64_t)num_tables + (uint64_t)code_bytes;
    uint32_t states[1 << MOST_LANES_LOG2];
    if (code_bytes < 0 || (double)heads + (cost + (double)raw) / 8 >= (double)limit) goto done;
    if (codes_anything) {
        /* Nearly always room enough, as a state keeps fractions of bits only so exactly; the kernel wants room for a
           whole row before it begins one. */
        const uint64_t likely = (uint64_t)(cost * 1.02) / 16 + 16;
        begin = -1;
        for (int attempt = 0; attempt < 2 && begin < 0; attempt++) {
            capacity = (int64_t)((likely < n && attempt == 0 ? likely : n) + lanes);
            free(words);
            words = malloc((size_t)capacity * sizeof *words);
            if (words == NULL) break;
            begin = wire_rans_encode(tokens, bounds, num_tables, sizes, tables, spans, states, lanes, words,
                                     capacity);
        }
        if (begin < 0) {
            written = -1;
            goto done;
        }
    }
    const uint64_t word_bytes = 2 * (uint64_t)(capacity - begin), state_bytes = codes_anything ? 4 * lanes : 0;
    if (heads + state_bytes + word_bytes + raw_bytes >= limit) goto done;
    at = put_bytes(out, header, head);
    if (names > 0) wire_pack(tables, 1, spans, bits_below(num_tables), at);
    at = put_bytes(at + names, num_tokens, (uint64_t)num_tables);
    at = put_bytes(at, code, (uint64_t)code_bytes);
    at = put_bytes(at, states, state_bytes);
    at = put_bytes(at, words + begin, word_bytes);
    if (raw_bytes > 0) {
        memset(at, 0, raw_bytes);
        wire_raw_bits(values, itemsize, n, width, centre, folds, raw_bits, direct, tokens, map.raw_widths, at, raw_bytes);
    }
    written = (int64_t)(at + raw_bytes - out);
done:
    free(own);
    free(words);
    return written;
}

/* Of `n` numbers up to 255, in the order in which numpy adds. */
static double sum_of(const double *v, int n) {
    if (n > 128) {
        const int half = n / 2 - n / 2 % 8;
        return sum_of(v, half) + sum_of(v + half, n - half);
    }
    double lanes[8], sum = 0;
    int i = 0;
    if (n >= 8) {
        memcpy(lanes, v, sizeof lanes);
        for (i = 8; i + 8 <= n; i += 8)
            for (int l = 0; l < 8; l++) lanes[l] += v[i + l];
        sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    }
    for (; i < n; i++) sum += v[i];
    return sum;
}

void wire_map_codes(const uint8_t *sample, uint64_t sampled, uint64_t n, int width, const double *logs,
                    int32_t *form) {
    int64_t counts[TOKENS], size = (int64_t)sampled;
    double steps[2][TOKENS];
    const int all = 1 << width;
    int centre = 0, first = 0, longest = 0, last = -1;
    wire_counts(sample, &size, 1, counts);
    for (int v = 0; v < all; v++) {
        if (counts[v] > counts[centre]) centre = v;
        if (counts[v]) last = v;
    }
    form[0] = centre;
    form[1] = 1;
    if (n >= WORTH_ORDERING) return;
    /* Codes in two heaps: see peer/wire/plans.py. */
    last -= all;
    for (int v = 0; v < all; v++) {
        if (counts[v] == 0) continue;
        if (v - last > longest) {
            longest = v - last;
            first = v;
        }
        last = v;
    }
    for (int t = 1; t < all; t++) {
        int now = (t >> 1) ^ -(t & 1), before = ((t - 1) >> 1) ^ -((t - 1) & 1);
        steps[0][t - 1] = fabs(logs[counts[(centre + now) & (all - 1)]] - logs[counts[(centre + before) & (all - 1)]]);
        steps[1][t - 1] = fabs(logs[counts[(first + t) & (all - 1)]] - logs[counts[(first + t - 1) & (all - 1)]]);
    }
    if (sum_of(steps[1], all - 1) < sum_of(steps[0], all - 1)) {
        form[0] = first;
        form[1] = 0;
    }
}

/* ---- reading ---- */

static int is_padded(const uint8_t *data, uint64_t num_bits) {
    return num_bits % 8 == 0 || data[num_bits / 8] >> num_bits % 8 == 0;
}

static int64_t read_packed(const uint8_t *data, uint64_t size, int width, uint64_t n, void *out, int itemsize) {
    const uint64_t num_bits = n * (uint64_t)width, used = (num_bits + 7) / 8;
    if (used > size || !is_padded(data, num_bits)) return -1;
    if (width == 8 * itemsize) {
        put_bytes(out, data, used);
    } else if (wire_unpack(data, used, n, width, out, itemsize)) {
        return -1;
    }
    return (int64_t)used;
}

int64_t wire_begin_stream(stream_reader *s, const uint8_t *data, uint64_t size, int width, const int64_t *sizes,
                          uint64_t spans, uint64_t n, void *out, int itemsize, raw_integers *meanwhile) {
    const uint8_t *at = data, *end = data + size;
    s->memory = NULL;
    if (size < 3) return -1;
    const int first = *at++, form = *at++, raw_bits = form & HAS_RAW_BITS ? *at++ : 0, direct = form & 15;
    s->width = width;
    s->folds = (form & FOLDS) != 0;
    at = get_varint(at, end, &s->centre);
    if (at == NULL || first & UNUSED || form >> 6 || direct < MIN_DIRECT || direct > MAX_DIRECT || raw_bits >= width
        || (width < 64 && s->centre >> width))
        return -1;
    int num_tables = 1, most = 0;
    fill_map(&s->map, width, raw_bits, direct);
    uint8_t *which = s->memory = malloc(spans + n), alphabet[TOKENS];
    int64_t bounds[MOST_TABLES * (TOKENS + 1)];
    if (s->memory == NULL) return -1;
    if (first & SEVERAL) {
        num_tables = at < end ? *at++ + 1 : 0;
        if (num_tables < 2 || num_tables > MOST_TABLES) return -1;
        const int64_t names = read_packed(at, (uint64_t)(end - at), bits_below(num_tables), spans, which, 1);
        if (names < 0) return -1;
        at += names;
        for (uint64_t span = 0; span < spans; span++)
            if (which[span] >= num_tables) return -1;
    } else {
        memset(which, 0, spans);
    }
    if (end - at < num_tables) return -1;
    const uint8_t *num_tokens = at;
    at += num_tables;
    for (int table = 0; table < num_tables; table++) most = num_tokens[table] > most ? num_tokens[table] : most;
    if (most >= s->map.most_tokens) return -1;
    const int64_t table_bytes = wire_read_tables(at, (uint64_t)(end - at), num_tokens, num_tables, first >> 5 & 3,
                                                 first & COARSE, bounds);
    if (table_bytes < 0) return -1;
    at += table_bytes;
    /* A code of up to eight bits without raw ones is its token's alone. */
    s->is_whole = !s->map.has_raw_bits && itemsize == 1;
    uint8_t *tokens = s->is_whole ? out : s->memory + spans;
    for (int t = 0; t <= most; t++) alphabet[t] = (uint8_t)t;
    if (s->is_whole)
        wire_values(alphabet, (uint64_t)most + 1, NULL, 0, s->map.bases, s->map.raw_widths, width, s->centre, s->folds,
                    alphabet, 1);
    uint64_t raw = 0;
    if (most > 0) {
        uint32_t states[1 << MOST_LANES_LOG2];
        const uint64_t lanes = 1ull << (first & 7);
        if ((uint64_t)(end - at) < 4 * lanes) return -1;
        memcpy(states, at, 4 * lanes);
        at += 4 * lanes;
        const int64_t words = wire_decode_tokens(states, lanes, at, (uint64_t)(end - at) / 2, bounds, num_tables, sizes,
                                                 which, spans, alphabet, tokens, n,
                                                 s->map.has_raw_bits ? s->map.raw_widths : NULL, &raw, meanwhile);
        if (words < 0) return -1;
        at += 2 * words;
    } else {
        memset(tokens, alphabet[0], n);
        raw = n * s->map.raw_widths[0];
    }
    const uint64_t raw_bytes = (raw + 7) / 8;
    if ((uint64_t)(end - at) < raw_bytes || !is_padded(at, raw)) return -1;
    s->rest = (raw_integers){tokens, at, (uint64_t)(end - at), 0, n, 0, s->map.bases, s->map.raw_widths, NULL};
    s->raw_bytes = raw_bytes;
    return at + (int64_t)raw_bytes - data;
}

int wire_finish_stream(stream_reader *s, void *out, int itemsize) {
    if (s->is_whole) return 0;
    if (s->rest.done == 0)
        return wire_values(s->rest.tokens, s->rest.n, s->rest.raw, s->raw_bytes, s->map.bases, s->map.raw_widths,
                           s->width, s->centre, s->folds, out, itemsize);
    while (put_together(&s->rest)) {
    }
    /* Within eight bytes of the end. */
    for (raw_integers *r = &s->rest; r->done < r->n; r->done++) {
        const uint8_t token = r->tokens[r->done];
        r->out[r->done] = r->bases[token] | bits_at(r->raw, s->raw_bytes, r->position, r->raw_widths[token]);
        r->position += r->raw_widths[token];
    }
    return 0;
}

int64_t wire_read_stream(const uint8_t *data, uint64_t size, int codec, int width, const int64_t *sizes,
                         uint64_t spans, uint64_t n, void *out, int itemsize) {
    if (codec == PACKED) return read_packed(data, size, width, n, out, itemsize);
    if (codec != ENTROPY) return -1;
    stream_reader s;
    int64_t used = wire_begin_stream(&s, data, size, width, sizes, spans, n, out, itemsize, NULL);
    if (used >= 0 && wire_finish_stream(&s, out, itemsize)) used = -1;
    free(s.memory);
    return used;
}
