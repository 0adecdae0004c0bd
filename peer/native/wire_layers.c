/* The sections of a frame for all layers in one call. peer/wire/section_writer.py and section_reader.py are the twins,
   which know every payload and every error; what is read here and is not as expected is left to them. */
#include "wire_layers.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "wire.h"
#include "wire_bits.h"
#include "wire_checksum.h"
#include "wire_groups.h"
#include "wire_reading.h"
#include "wire_streams.h"

enum { DENSE = 0, LEVELS = 1, RESIDUES = 2, SPARSE = 4 };
enum { TAG_DENSE = 0, TAG_LEVELS = 1, TAG_SPARSE = 2, TAG_RESIDUES = 3 };
enum { SAME = 1 << 3, SAME_THETA = 1 << 4, PREDICTED = 1 << 5, CODEC = 6, POOLED = 3 };
enum { FIXED = 29, ENTROPY = 30, ALL = 31, MAX_RICE = 28, MAX_FIXED = 8 };
enum { ENTROPY_CODEC = 1 };
/* Indices of all layers below which a table costs more than it can save. */
enum { WORTH_MODELLING = 48 };
#define ONE_BIT ((int64_t)1 << 16)
#define EXACT (1ull << 53)

static int bit_length(uint64_t v) { return v ? 64 - __builtin_clzll(v) : 0; }

/* ---- indices ---- */

/* Chooses for each set the best code that leaves the others' alone. Returns the bytes of all Rice codes, or -1. */
static int64_t choose_codes(const int64_t *indices, const int64_t *counts, const int64_t *sizes, uint64_t layers,
                            int64_t *gaps, uint8_t *codes) {
    int64_t rice_bytes = 0;
    for (uint64_t layer = 0; layer < layers; indices += counts[layer], gaps += counts[layer], layer++) {
        int64_t k = counts[layer], n = sizes[layer], next = 0;
        for (int64_t i = 0; i < k; i++) {
            if (indices[i] < next || indices[i] >= n) return -1;
            gaps[i] = indices[i] - next;
            next = indices[i] + 1;
        }
        codes[layer] = k == n ? ALL : 0;
        if (k == n || k == 0) continue;
        /* For geometric gaps the best parameter is about log2(ln 2 mean). */
        double scaled = 0.69 * (double)(n - k) / (double)k;
        int guess = bit_length((uint64_t)(scaled > 1.0 ? scaled : 1.0)) - 1, best = guess;
        uint64_t needed = UINT64_MAX;
        for (int r = guess - 1; r <= guess + 1; r++) {
            int parameter = r < 0 ? 0 : r > MAX_RICE ? MAX_RICE : r;
            uint64_t cost = wire_rice_bits(gaps, (uint64_t)k, parameter);
            if (cost < needed) {
                needed = cost;
                best = parameter;
            }
        }
        uint64_t bytes = (needed + 7) / 8, fixed = (uint64_t)k * (uint64_t)bit_length((uint64_t)(n - k));
        if (fixed <= 8 || (k <= MAX_FIXED && fixed < 8 * bytes)) {
            codes[layer] = FIXED;
        } else {
            codes[layer] = (uint8_t)best;
            rice_bytes += (int64_t)bytes;
        }
    }
    return rice_bytes;
}

static uint64_t write_fixed(const int64_t *gaps, const int64_t *counts, const int64_t *sizes, const uint8_t *codes,
                            uint64_t layers, uint8_t *out) {
    uint64_t bits = 0;
    for (uint64_t layer = 0; layer < layers; layer++)
        if (codes[layer] == FIXED) bits += (uint64_t)counts[layer] * (uint64_t)bit_length((uint64_t)(sizes[layer] - counts[layer]));
    bit_writer w = {out, out + (bits + 7) / 8, 0, 0};
    for (uint64_t layer = 0; layer < layers; gaps += counts[layer++]) {
        if (codes[layer] != FIXED) continue;
        int width = bit_length((uint64_t)(sizes[layer] - counts[layer]));
        for (int64_t i = 0; i < counts[layer]; i++) put_long(&w, (uint64_t)gaps[i], width);
    }
    flush(&w);
    return (bits + 7) / 8;
}

/* The gaps that have Rice codes in the entropy code where that is shorter. Returns its bytes, 0 where it is not, or -2
   where there is no memory. */
static int64_t write_entropy(const int64_t *gaps, const int64_t *counts, const int64_t *sizes, uint64_t layers,
                             const int32_t *logs, int64_t rice_bytes, uint8_t *codes, uint8_t *out) {
    uint64_t n = 0, spans = 0;
    int64_t largest = 0, needed, all[256], written = -2;
    for (uint64_t layer = 0; layer < layers; layer++) {
        if (codes[layer] > MAX_RICE || counts[layer] == 0) continue;
        n += (uint64_t)counts[layer];
        spans++;
        largest = sizes[layer] > largest ? sizes[layer] : largest;
    }
    if (n < WORTH_MODELLING) return 0;
    const int width = bit_length((uint64_t)largest), direct = width > 4 ? 4 : width < 2 ? 2 : width;
    int64_t *plain = malloc((n + spans) * sizeof *plain);
    uint8_t *tokens = malloc(n + spans);
    if (plain == NULL || tokens == NULL) goto done;
    int64_t *held = plain + n, *to = plain;
    uint8_t *groups = tokens + n;
    for (uint64_t layer = 0, span = 0; layer < layers; gaps += counts[layer++]) {
        if (codes[layer] > MAX_RICE || counts[layer] == 0) continue;
        memcpy(to, gaps, (size_t)counts[layer] * sizeof *to);
        to += held[span++] = counts[layer];
    }
    wire_tokens(plain, 8, n, width, 0, 0, 0, direct, tokens);
    const int found = wire_group_spans(tokens, held, spans, 0, logs, all, groups, &needed);
    if (found < 0) goto done;
    if (found == 1) memset(groups, 0, spans);
    for (int t = 1 << direct; t < 256; t++) needed += all[t] * ((t - (1 << direct)) / 4 + direct - 2) * ONE_BIT;
    written = 0;
    if (needed >= 8 * rice_bytes * ONE_BIT) goto done;
    written = wire_write_stream(plain, 8, n, width, 0, 0, 0, direct, tokens, held, groups, spans, out,
                                (n * (uint64_t)width + 7) / 8);
    if (written < 0) written = -2;
    for (uint64_t layer = 0; written > 0 && layer < layers; layer++)
        if (codes[layer] <= MAX_RICE && counts[layer] > 0) codes[layer] = ENTROPY;
done:
    free(plain);
    free(tokens);
    return written;
}

int64_t wire_write_indices(const int64_t *indices, const int64_t *counts, const int64_t *sizes, uint64_t layers,
                           int plain, const int32_t *logs, int64_t *gaps, uint8_t *codes, uint8_t *out) {
    const int64_t rice_bytes = choose_codes(indices, counts, sizes, layers, gaps, codes);
    if (rice_bytes < 0) return -1;
    const uint64_t fixed = write_fixed(gaps, counts, sizes, codes, layers, out);
    if (plain) return (int64_t)fixed;
    const int64_t coded = write_entropy(gaps, counts, sizes, layers, logs, rice_bytes, codes, out + fixed);
    return coded < 0 ? coded : (int64_t)fixed + coded;
}

/* ---- writing ---- */

typedef struct {
    uint8_t *at, *end;
    const uint8_t *described;
    uint64_t described_size;
    const double *scalars;
    int value_type, wide, has_described;
} section_writer;

static uint8_t *put_scalar(uint8_t *at, double value, int wide) {
    if (wide) {
        memcpy(at, &value, 8);
        return at + 8;
    }
    float single = (float)value;
    memcpy(at, &single, 4);
    return at + 4;
}

/* The head of reals or levels; an empty stream has nothing to pool. */
static void put_values(section_writer *w, int form, int64_t count, double scalar) {
    uint8_t codec = count > 0 ? POOLED << CODEC : 0;
    if ((form & 3) == DENSE) {
        *w->at++ = (uint8_t)(TAG_DENSE | w->value_type << 3 | codec);
        return;
    }
    *w->at++ = (uint8_t)(TAG_LEVELS | codec | (w->has_described ? SAME : 0));
    if (!w->has_described) {
        memcpy(w->at, w->described, w->described_size);
        w->at += w->described_size;
        w->has_described = 1;
    }
    w->at = put_scalar(w->at, scalar, w->wide);
}

int64_t wire_write_sections(uint64_t layers, const uint8_t *forms, const int64_t *counts, const uint8_t *codes,
                            const int64_t *gaps, int value_type, const uint8_t *described, uint64_t described_size,
                            const double *scalars, double greatest_level, int wide, const uint64_t *checks,
                            const uint8_t *predicted, uint8_t *out, uint64_t capacity) {
    section_writer w = {out, out + capacity, described, described_size, scalars, value_type, wide, 0};
    double theta = 0;
    int has_theta = 0;
    /* Two tags, a varint, a scalar and a check, beside what describes the codes. */
    const uint64_t room = 2 + 10 + 8 + 8 + described_size;
    const double most = wide ? DBL_MAX : FLT_MAX;
    for (uint64_t layer = 0; layer < layers; layer++) {
        if (!(fabs(scalars[layer]) * greatest_level <= most)) return -2;
        int form = forms[layer];
        int64_t count = counts[layer];
        if ((uint64_t)(w.end - w.at) < room) return -1;
        if (form & SPARSE) {
            int code = *codes++;
            *w.at++ = (uint8_t)(TAG_SPARSE | code << 3);
            w.at = put_varint(w.at, (uint64_t)count);
            if (code <= MAX_RICE && count > 0) {
                uint64_t bytes = (wire_rice_bits(gaps, (uint64_t)count, code) + 7) / 8;
                if ((uint64_t)(w.end - w.at) < bytes + room) return -1;
                memset(w.at, 0, bytes);
                wire_rice_encode(gaps, (uint64_t)count, code, w.at, bytes);
                w.at += bytes;
            }
            gaps += count;
        }
        if ((form & 3) != RESIDUES) {
            put_values(&w, form, count, scalars[layer]);
            continue;
        }
        int same_theta = has_theta && theta == scalars[layer];
        *w.at++ = (uint8_t)(TAG_RESIDUES | (count > 0 ? POOLED << CODEC : 0) | (w.has_described ? SAME : 0)
                            | (same_theta ? SAME_THETA : 0) | (predicted != NULL && predicted[layer] ? PREDICTED : 0));
        if (!w.has_described) {
            memcpy(w.at, described, described_size);
            w.at += described_size;
            w.has_described = 1;
        }
        if (!same_theta) w.at = put_scalar(w.at, scalars[layer], wide);
        theta = scalars[layer];
        has_theta = 1;
        if (checks != NULL) {
            memcpy(w.at, checks + layer, 8);
            w.at += 8;
        }
    }
    return w.at - out;
}

int wire_are_singles(const double *v, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        if ((double)(float)v[i] != v[i]) return 0;
    return 1;
}

/* ---- reading ---- */

enum {
    VALUE_TYPE, DIVISOR, BASE, STEP, BITS, RESIDUE_BYTE, NUM_INDICES, NUM_REALS, NUM_CODES, NUM_FIXED, NUM_ENTROPY,
    FIXED_BITS, LARGEST_ENTROPY, NUM_PREDICTED, HEAD
};

typedef struct {
    const uint8_t *at, *end;
    int64_t *summary;
    double greatest_level, greatest_scalar, theta;
    int wide, single, has_theta, failed;
} section_reader;

static uint8_t get_byte(section_reader *r) {
    if (r->at >= r->end) {
        r->failed = 1;
        return 0;
    }
    return *r->at++;
}

static uint64_t next_varint(section_reader *r) {
    uint64_t value = 0;
    const uint8_t *at = r->failed ? NULL : get_varint(r->at, r->end, &value);
    r->failed = at == NULL;
    if (at != NULL) r->at = at;
    return value;
}

static double get_scalar(section_reader *r, double greatest_level) {
    double value = 0;
    uint64_t bytes = r->wide ? 8 : 4;
    if ((uint64_t)(r->end - r->at) < bytes) {
        r->failed = 1;
        return 0;
    }
    if (r->wide) {
        memcpy(&value, r->at, 8);
    } else {
        float single;
        memcpy(&single, r->at, 4);
        value = single;
    }
    r->at += bytes;
    if (!isfinite(value) || !(fabs(value) * greatest_level <= r->greatest_scalar)) r->failed = 1;
    return value;
}

/* divisor, base, step and bits of levels, as check_level_parameters in peer/wire/sections.py lets them by. */
static void get_level_parameters(section_reader *r) {
    int64_t *s = r->summary;
    int bits = get_byte(r) + 1;
    uint64_t divisor = next_varint(r), zigzag = next_varint(r), step = next_varint(r);
    uint64_t magnitude = (zigzag >> 1) + (zigzag & 1);
    if (bits > 16 || divisor < 1 || divisor > EXACT || step < 1 || magnitude > EXACT
        || step > (EXACT - magnitude) >> bits) {
        r->failed = 1;
        return;
    }
    int64_t base = zigzag & 1 ? -(int64_t)magnitude : (int64_t)magnitude, highest = base + ((int64_t)step << bits);
    s[DIVISOR] = (int64_t)divisor;
    s[BASE] = base;
    s[STEP] = (int64_t)step;
    s[BITS] = bits;
    double low = fabs((double)base), high = fabs((double)highest);
    r->greatest_level = low > high ? low : high;
}

/* Whether a stream of `count` integers has the codec that a writer that pools gives it. */
static int is_pooled(uint8_t tag, int64_t count) { return tag >> CODEC == (count > 0 ? POOLED : 0); }

static int get_values(section_reader *r, uint8_t tag, int64_t count, double *scalar) {
    int64_t *s = r->summary;
    *scalar = 0;
    if (!is_pooled(tag, count)) r->failed = 1;
    if ((tag & 7) == TAG_DENSE && !(tag & PREDICTED)) {
        int value_type = tag >> 3 & 3;
        if ((s[VALUE_TYPE] >= 0 && s[VALUE_TYPE] != value_type) || (r->single && value_type == 0)) r->failed = 1;
        s[VALUE_TYPE] = value_type;
        s[NUM_REALS] += count;
        return DENSE;
    }
    if ((tag & 7) != TAG_LEVELS || tag & (SAME_THETA | PREDICTED) || s[RESIDUE_BYTE] >= 0) r->failed = 1;
    if (!(tag & SAME) == (s[BITS] > 0)) r->failed = 1;
    if (!(tag & SAME)) get_level_parameters(r);
    *scalar = get_scalar(r, r->greatest_level);
    s[NUM_CODES] += count;
    return LEVELS;
}

static void get_residues(section_reader *r, uint8_t tag, int64_t count, double *scalar, uint64_t *check,
                         uint8_t *predicted) {
    int64_t *s = r->summary;
    if (!is_pooled(tag, count) || s[BITS] > 0 || !(tag & SAME) == (s[RESIDUE_BYTE] >= 0)) r->failed = 1;
    if (!(tag & SAME)) {
        uint8_t byte = get_byte(r);
        if (byte >> 7 || (byte >> 4 & 3) > 2) r->failed = 1;
        s[RESIDUE_BYTE] = byte;
    }
    if (!(tag & SAME_THETA)) {
        r->theta = get_scalar(r, 1.0);
        r->has_theta = 1;
    }
    if (!r->has_theta) r->failed = 1;
    *scalar = r->theta;
    *check = 0;
    if (s[RESIDUE_BYTE] & 64) {
        if (r->end - r->at < 8) {
            r->failed = 1;
            return;
        }
        memcpy(check, r->at, 8);
        r->at += 8;
    }
    *predicted = tag & PREDICTED ? 1 : 0;
    s[NUM_PREDICTED] += *predicted;
    s[NUM_CODES] += count;
}

/* Of a frame, in which they begin at `at`. Returns where they end, or -1. */
static int64_t read_sections(const uint8_t *data, uint64_t at, uint64_t size, const int64_t *sizes, uint64_t layers,
                             int wide, int single, uint8_t *bytes, int64_t *words, double *scalars, int64_t *summary) {
    uint8_t *forms = bytes, *codes = bytes + layers, *predicted = bytes + 2 * layers;
    int64_t *counts = words, *places = words + layers;
    uint64_t *checks = (uint64_t *)words + 2 * layers;
    section_reader r = {data + at, data + size, summary, 0, wide ? DBL_MAX : FLT_MAX, 0, wide,
                        single, 0, 0};
    memset(summary, 0, (NUM_PREDICTED + 1) * sizeof *summary);
    summary[VALUE_TYPE] = summary[RESIDUE_BYTE] = -1;
    for (uint64_t layer = 0; layer < layers && !r.failed; layer++) {
        int64_t n = sizes[layer], count = n;
        uint8_t tag = get_byte(&r), form = 0;
        if ((tag & 7) == TAG_RESIDUES) {
            forms[layer] = RESIDUES;
            counts[layer] = n;
            get_residues(&r, tag, n, &scalars[layer], &checks[layer], &predicted[layer]);
            continue;
        }
        checks[layer] = predicted[layer] = 0;
        if ((tag & 7) == TAG_SPARSE) {
            uint64_t told = next_varint(&r);
            if (told > (uint64_t)n) return -1;
            count = (int64_t)told;
            int code = tag >> 3;
            form = SPARSE;
            *codes++ = (uint8_t)code;
            *places++ = r.at - data;
            summary[NUM_INDICES] += count;
            if (code == FIXED) {
                summary[NUM_FIXED]++;
                summary[FIXED_BITS] += count * bit_length((uint64_t)(n - count));
            } else if (code == ENTROPY) {
                summary[NUM_ENTROPY]++;
                if (n > summary[LARGEST_ENTROPY]) summary[LARGEST_ENTROPY] = n;
            } else if (code == ALL) {
                if (count != n) return -1;
            } else {
                int64_t used = wire_rice_decode(r.at, (uint64_t)(r.end - r.at), told, code, (uint64_t)n - told, NULL);
                if (used < 0) return -1;
                r.at += used;
            }
            tag = get_byte(&r);
        }
        counts[layer] = count;
        forms[layer] = (uint8_t)(form | get_values(&r, tag, count, &scalars[layer]));
    }
    return r.failed ? -1 : r.at - data;
}

static double get_weight(section_reader *r) {
    const uint64_t form = next_varint(r);
    double weight = form > 1 ? 1.0 / (double)(form - 1) : 0.0;
    if (form != 1) return weight;
    if (r->end - r->at < 8) {
        r->failed = 1;
        return 0.0;
    }
    memcpy(&weight, r->at, 8);
    r->at += 8;
    if (!isfinite(weight)) r->failed = 1;
    return weight;
}

int64_t wire_read_frame(const uint8_t *frame, uint64_t size, const int64_t *sizes, uint64_t layers, int single,
                        uint8_t *bytes, int64_t *words, double *scalars, double *weights, int64_t *summary) {
    uint32_t checksum;
    if (size < 8 || frame[0] != 'S' || frame[1] != 'V' || frame[2] != 1) return -1;
    size -= 4;
    memcpy(&checksum, frame + size, 4);
    if (wire_crc32_is_fast() && wire_crc32(frame, size, 0) != checksum) return -1;
    const int kind = frame[3] & 15, wide = frame[3] >> 4 & 1, predicted = frame[3] >> 5 & 1;
    if ((kind != 0 && kind != 4 && kind != 5) || frame[3] >> 6 || (wide && single)) return -1;
    section_reader r = {.at = frame + 4, .end = frame + size};
    int64_t *head = summary + HEAD;
    *head++ = kind;
    *head++ = predicted;
    for (int i = 0; i < 3; i++) *head++ = (int64_t)next_varint(&r);
    weights[0] = get_weight(&r);
    weights[1] = get_weight(&r);
    for (int i = 0; i < 2; i++) *head++ = predicted ? (int64_t)next_varint(&r) : 0;
    /* What Python would read as negative is for it to read. */
    for (int64_t *number = summary + HEAD; number < head; number++) r.failed |= *number < 0;
    if (next_varint(&r) != layers || r.failed || weights[1] < 0) return -1;
    return read_sections(frame, (uint64_t)(r.at - frame), size, sizes, layers, wide, single, bytes, words, scalars,
                         summary);
}

/* Begins to read the gaps of the layers that have theirs in the entropy code. Returns the bytes of the stream, or -1. */
static int64_t begin_gaps(stream_reader *s, const uint8_t *data, uint64_t size, uint64_t layers, const uint8_t *forms,
                          const int64_t *counts, const uint8_t *codes, const int64_t *summary) {
    uint64_t n = 0, spans = 0;
    int64_t *held = malloc((uint64_t)summary[NUM_ENTROPY] * sizeof *held);
    if (held == NULL) return -1;
    for (uint64_t layer = 0; layer < layers; layer++)
        if (forms[layer] & SPARSE && *codes++ == ENTROPY) n += (uint64_t)(held[spans++] = counts[layer]);
    const int width = bit_length((uint64_t)summary[LARGEST_ENTROPY]);
    const int64_t used = wire_begin_stream(s, data, size, width, held, spans, n, NULL, 8, NULL);
    free(held);
    return used;
}

/* `fixed` has the bits of the fixed code, `gaps` those of the entropy code. Returns 0, or -1. */
static int read_indices(const uint8_t *data, uint64_t size, const uint8_t *fixed, uint64_t fixed_size,
                        const int64_t *gaps, const int64_t *sizes, uint64_t layers, const uint8_t *forms,
                        const int64_t *counts, const uint8_t *codes, const int64_t *places, int64_t *indices) {
    uint64_t position = 0;
    for (uint64_t layer = 0; layer < layers; layer++) {
        if (!(forms[layer] & SPARSE)) continue;
        const int64_t k = counts[layer], n = sizes[layer], *from = indices;
        int64_t next = 0;
        const int code = *codes++;
        const uint64_t place = (uint64_t)*places++;
        if (code == FIXED) {
            const int width = bit_length((uint64_t)(n - k));
            for (int64_t i = 0; i < k; i++, position += (uint64_t)width)
                indices[i] = width ? (int64_t)bits_at(fixed, fixed_size, position, width) : 0;
        } else if (code == ENTROPY) {
            from = gaps;
            gaps += k;
        } else if (code == ALL) {
            memset(indices, 0, (size_t)k * sizeof *indices);
        } else if (place > size
                   || wire_rice_decode(data + place, size - place, (uint64_t)k, code, (uint64_t)(n - k), indices) < 0) {
            return -1;
        }
        for (int64_t i = 0; i < k; i++) {
            if ((uint64_t)from[i] >= (uint64_t)(n - next)) return -1;
            next += from[i] + 1;
            indices[i] = next - 1;
        }
        indices += k;
    }
    return 0;
}

static int64_t read_pool(const uint8_t *data, uint64_t size, const uint8_t *forms, const int64_t *counts,
                         uint64_t layers, int of_reals, int width, uint64_t n, void *out, int itemsize,
                         raw_integers *meanwhile) {
    int64_t *held = malloc(layers * sizeof *held), used = -1;
    uint64_t spans = 0;
    if (held == NULL || size == 0) goto done;
    for (uint64_t layer = 0; layer < layers; layer++)
        if (((forms[layer] & 3) == DENSE) == (of_reals != 0) && counts[layer] > 0) held[spans++] = counts[layer];
    if (data[0] != ENTROPY_CODEC) {
        used = wire_read_stream(data + 1, size - 1, data[0], width, held, spans, n, out, itemsize);
        goto done;
    }
    stream_reader s;
    used = wire_begin_stream(&s, data + 1, size - 1, width, held, spans, n, out, itemsize, meanwhile);
    if (used >= 0 && wire_finish_stream(&s, out, itemsize)) used = -1;
    free(s.memory);
    if (used < 0 || !of_reals) goto done;
    if (itemsize == 2) {
        uint16_t *v = out;
        for (uint64_t i = 0; i < n; i++) v[i] = (uint16_t)(v[i] >> 1 | v[i] << 15);
    } else if (itemsize == 4) {
        uint32_t *v = out;
        for (uint64_t i = 0; i < n; i++) v[i] = v[i] >> 1 | v[i] << 31;
    } else {
        uint64_t *v = out;
        for (uint64_t i = 0; i < n; i++) v[i] = v[i] >> 1 | v[i] << 63;
    }
done:
    free(held);
    return used < 0 ? -1 : used + 1;
}

int64_t wire_read_pool(const uint8_t *data, uint64_t size, const uint8_t *forms, const int64_t *counts,
                       uint64_t layers, int of_reals, int width, uint64_t n, void *out, int itemsize) {
    return read_pool(data, size, forms, counts, layers, of_reals, width, n, out, itemsize, NULL);
}

int64_t wire_read_behind(const uint8_t *data, uint64_t size, uint64_t behind, const int64_t *sizes, uint64_t layers,
                         const uint8_t *bytes, const int64_t *words, const int64_t *summary, int64_t *indices,
                         int width, void *pool, int itemsize) {
    const uint8_t *forms = bytes, *codes = bytes + layers, *fixed = data + behind;
    const int64_t *counts = words, *places = words + layers;
    const uint64_t fixed_bits = (uint64_t)summary[FIXED_BITS], fixed_size = (fixed_bits + 7) / 8, begin = behind;
    int64_t *gaps = NULL, used = -1;
    stream_reader s = {.memory = NULL};
    raw_integers *meanwhile = NULL;
    if (size - behind < fixed_size || (fixed_bits % 8 && fixed[fixed_size - 1] >> fixed_bits % 8)) return -1;
    behind += fixed_size;
    if (summary[NUM_ENTROPY] > 0) {
        gaps = malloc((uint64_t)summary[NUM_INDICES] * sizeof *gaps + 1);
        const int64_t stream = begin_gaps(&s, data + behind, size - behind, layers, forms, counts, codes, summary);
        if (gaps == NULL || stream < 0) goto done;
        behind += (uint64_t)stream;
        meanwhile = wire_leave_for_later(&s, (uint64_t *)gaps);
    }
    if (pool != NULL) {
        const int of_reals = summary[NUM_REALS] > 0;
        const int64_t pooled = read_pool(data + behind, size - behind, forms, counts, layers, of_reals, width,
                                         (uint64_t)summary[of_reals ? NUM_REALS : NUM_CODES], pool, itemsize,
                                         meanwhile);
        if (pooled < 0) goto done;
        behind += (uint64_t)pooled;
    }
    if (summary[NUM_ENTROPY] > 0 && wire_finish_stream(&s, gaps, 8)) goto done;
    if (read_indices(data, size, fixed, fixed_size, gaps, sizes, layers, forms, counts, codes, places, indices) == 0)
        used = (int64_t)(behind - begin);
done:
    free(gaps);
    free(s.memory);
    return used;
}
