/* Frequency tables of the entropy coder: made from counts, written, and read. The twin is in peer/wire/ans.py. */
#include "wire_tables.h"

#include <math.h>
#include <string.h>

#include "wire.h"
#include "wire_writing.h"

#define SLOTS (1 << 14)
#define TOKENS 256
#define MOST_TABLES 16
#define FIRST_Q 60
#define LAST_Q 63

static int64_t weight(int64_t q) { return (4 + q % 4) << (q / 4); }

/* The bounds of tokens with these q, one or more. */
static void share_slots(const int64_t *quantized, int tokens, int64_t *bounds) {
    int64_t total = 0, before = 0;
    for (int t = 0; t < tokens; t++) total += weight(quantized[t]);
    for (int t = 0; t < tokens; t++) {
        /* Both are integers below 2^40, so what the quotient is rounded by reaches no other integer. */
        bounds[t] = (int64_t)((double)(before * (SLOTS - tokens)) / (double)total) + t;
        before += weight(quantized[t]);
    }
    for (int t = tokens; t <= TOKENS; t++) bounds[t] = SLOTS;
}

/* Octaves cost about 1/32 of a bit a token more than their quarters, and save about two bits of table for each. */
static int worth_being_coarse(const int64_t *counts, int tables) {
    int64_t all = 0, present = 0;
    for (int t = 0; t < tables * TOKENS; t++) {
        all += counts[t];
        present += counts[t] > 0;
    }
    return all < 64 * present;
}

int64_t wire_make_tables(const uint8_t *tokens, const int64_t *sizes, const uint8_t *tables, uint64_t spans,
                         int num_tables, int64_t *counts, uint8_t *num_tokens, int64_t *bounds, int *form,
                         uint8_t *code, uint64_t capacity) {
    int64_t steps[MOST_TABLES * TOKENS], quantized[TOKENS], num_steps = 0;
    double between[LAST_Q];
    if (num_tables < 1 || num_tables > MOST_TABLES) return -1;
    wire_counts_of_groups(tokens, sizes, tables, spans, num_tables, counts);
    const int coarse = form[1] = worth_being_coarse(counts, num_tables);
    for (int q = 0; q < LAST_Q; q++) between[q] = sqrt((double)weight(q) * (double)weight(q + 1));
    for (int table = 0; table < num_tables; table++, counts += TOKENS, bounds += TOKENS + 1) {
        int64_t most = 1;
        int present = 1;
        for (int t = 0; t < TOKENS; t++) {
            most = counts[t] > most ? counts[t] : most;
            present = counts[t] ? t + 1 : present;
        }
        double scale = (double)weight(FIRST_Q) / (double)most;
        for (int t = 0; t < present; t++) {
            /* A token that does not occur is given a little: the less its weight falls, the shorter the table. */
            double relative = (counts[t] ? (double)counts[t] : 0.4) * scale;
            int low = 0, high = LAST_Q;
            while (low < high) {
                int middle = (low + high) / 2;
                if (between[middle] <= relative) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            quantized[t] = coarse ? (low + 2) / 4 * 4 : low;
        }
        num_tokens[table] = (uint8_t)(present - 1);
        share_slots(quantized, present, bounds);
        int64_t before = coarse ? FIRST_Q / 4 : FIRST_Q;
        for (int t = 0; present > 1 && t < present; t++) {
            int64_t scaled = coarse ? quantized[t] / 4 : quantized[t], step = scaled - before;
            steps[num_steps++] = step >= 0 ? 2 * step : -2 * step - 1;
            before = scaled;
        }
    }
    form[0] = 0;
    if (num_steps == 0) return 0;
    uint64_t needed = UINT64_MAX;
    for (int r = 0; r < 4; r++) {
        uint64_t bits = wire_rice_bits(steps, (uint64_t)num_steps, r);
        if (bits < needed) {
            needed = bits;
            form[0] = r;
        }
    }
    uint64_t bytes = (needed + 7) / 8;
    if (bytes > capacity) return -1;
    wire_rice_encode(steps, (uint64_t)num_steps, form[0], code, bytes);
    return (int64_t)bytes;
}

int64_t wire_read_tables(const uint8_t *data, uint64_t size, const uint8_t *num_tokens, int tables, int parameter,
                         int coarse, int64_t *bounds) {
    int64_t steps[MOST_TABLES * TOKENS];
    uint64_t total = 0;
    if (tables < 1 || tables > MOST_TABLES) return -1;
    for (int table = 0; table < tables; table++)
        if (num_tokens[table] > 0) total += num_tokens[table] + 1u;
    int64_t used = wire_rice_decode(data, size, total, parameter, total * 2 * (LAST_Q + 1), steps);
    if (used < 0) return used;
    const int64_t *step = steps, first[1] = {FIRST_Q};
    for (int table = 0; table < tables; table++, bounds += TOKENS + 1) {
        int64_t quantized[TOKENS], q = coarse ? FIRST_Q / 4 : FIRST_Q;
        int tokens = num_tokens[table] + 1;
        if (tokens == 1) {
            share_slots(first, 1, bounds);
            continue;
        }
        for (int t = 0; t < tokens; t++, step++) {
            q += *step & 1 ? -(*step >> 1) - 1 : *step >> 1;
            quantized[t] = coarse ? 4 * q : q;
            if (quantized[t] < 0 || quantized[t] > LAST_Q) return -3;
        }
        share_slots(quantized, tokens, bounds);
    }
    return used;
}
