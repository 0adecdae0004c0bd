/* Which spans of a stream share a frequency table. All sums are of integers below 2^53, also those in doubles, so that
   they are exact in any order and peer/wire/grouping.py comes to the same groups. */
#include "wire_groups.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "wire.h"

#if defined(__x86_64__) && defined(__has_attribute) && __has_attribute(target_clones)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#define MOST_GROUPS 16
#define ROUNDS 3
#define LOG_INDEX_BITS 13
#define ONE_BIT ((int64_t)1 << 16)
#define HEADER_BITS (48 * ONE_BIT)
#define TABLE_BITS (8 * ONE_BIT)
#define TOKEN_BITS 157286
#define SMOOTHING 50

static inline int64_t log_of(const int32_t *logs, int64_t count) {
    int bits = count > 0 ? 64 - __builtin_clzll((uint64_t)count) : 0;
    int shift = bits > LOG_INDEX_BITS ? bits - LOG_INDEX_BITS : 0;
    int64_t index = shift ? (count + (1ll << (shift - 1))) >> shift : count;
    return logs[index] + shift * ONE_BIT;
}

/* About how many bits tokens that occur so often take, and their table. */
static int64_t needs(const int64_t *counts, const int64_t *more, int tokens, const int32_t *logs) {
    int64_t total = 0, inner = 0, present = 0;
    for (int t = 0; t < tokens; t++) total += counts[t] + (more ? more[t] : 0);
    for (int t = 0; t < tokens; t++) {
        int64_t c = counts[t] + (more ? more[t] : 0);
        inner += c * (total >> LOG_INDEX_BITS ? log_of(logs, c) : logs[c]);
        present += c > 0;
    }
    return total * log_of(logs, total) - inner + TABLE_BITS + TOKEN_BITS * present;
}

typedef struct {
    int64_t key;
    uint64_t span;
} ranked;

static int by_key(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return x->span < y->span ? -1 : x->span > y->span;
}

/* The tokens that occur in each span, one span after another: those of span s end at ends[s]. */
typedef struct {
    int token;
    int count;
} occurrence;

static void sum_up(const occurrence *found, const uint64_t *ends, uint64_t spans, int tokens, const uint8_t *groups,
                   int64_t sums[MOST_GROUPS][256]) {
    for (int g = 0; g < MOST_GROUPS; g++) memset(sums[g], 0, (size_t)tokens * sizeof(int64_t));
    uint64_t i = 0;
    for (uint64_t s = 0; s < spans; s++)
        for (; i < ends[s]; i++) sums[groups[s]][found[i].token] += found[i].count;
}

/* One number for each group. */
typedef double Scores __attribute__((vector_size(MOST_GROUPS * sizeof(double))));

/* Moves every span to the group whose table suits it best, the first of several. */
CLONES static void move(const occurrence *found, const uint64_t *ends, uint64_t spans, const Scores *share,
                        uint8_t *groups) {
    uint64_t i = 0;
    for (uint64_t s = 0; s < spans; s++) {
        Scores score = {0};
        for (; i < ends[s]; i++) score += (double)found[i].count * share[found[i].token];
        int best = 0;
        double most = score[0];
        for (int g = 1; g < MOST_GROUPS; g++) {
            best = score[g] > most ? g : best;
            most = score[g] > most ? score[g] : most;
        }
        groups[s] = (uint8_t)best;
    }
}

/* Merges neighbours down to the number of groups that needs the fewest bits; returns it. */
static int merge(int64_t sums[MOST_GROUPS][256], uint64_t spans, int tokens, const int32_t *logs, uint8_t *groups,
                 int64_t *needed) {
    int64_t own[MOST_GROUPS], joined[MOST_GROUPS], least = INT64_MAX;
    int names[MOST_GROUPS], renamed[MOST_GROUPS], best[MOST_GROUPS], count = 0, chosen = 0;
    for (int g = 0; g < MOST_GROUPS; g++) {
        int held = 0;
        for (int t = 0; t < tokens; t++) held |= sums[g][t] != 0;
        renamed[g] = best[g] = g;
        if (!held) continue;
        if (count != g) memcpy(sums[count], sums[g], (size_t)tokens * sizeof(int64_t));
        own[count] = needs(sums[count], NULL, tokens, logs);
        names[count++] = g;
    }
    for (int at = 0; at + 1 < count; at++) joined[at] = needs(sums[at], sums[at + 1], tokens, logs);
    for (;;) {
        int64_t sum = 0;
        int name_bits = count > 1 ? 32 - __builtin_clz((unsigned)(count - 1)) : 0;
        for (int at = 0; at < count; at++) sum += own[at];
        sum += (int64_t)spans * name_bits * ONE_BIT;
        if (sum < least) {
            least = sum;
            chosen = count;
            for (int g = 0; g < MOST_GROUPS; g++) {
                best[g] = 0;
                for (int at = 0; at < count; at++)
                    if (names[at] == renamed[g]) best[g] = at;
            }
        }
        if (count == 1) break;
        int at = 0;
        for (int i = 1; i + 1 < count; i++)
            if (joined[i] - own[i] - own[i + 1] < joined[at] - own[at] - own[at + 1]) at = i;
        for (int g = 0; g < MOST_GROUPS; g++)
            if (renamed[g] == names[at + 1]) renamed[g] = names[at];
        for (int t = 0; t < tokens; t++) sums[at][t] += sums[at + 1][t];
        own[at] = joined[at];
        for (int i = at + 1; i + 1 < count; i++) {
            memcpy(sums[i], sums[i + 1], (size_t)tokens * sizeof(int64_t));
            own[i] = own[i + 1];
            names[i] = names[i + 1];
            if (i + 2 < count) joined[i] = joined[i + 1];
        }
        count--;
        if (at > 0) joined[at - 1] = needs(sums[at - 1], sums[at], tokens, logs);
        if (at + 1 < count) joined[at] = needs(sums[at], sums[at + 1], tokens, logs);
    }
    for (uint64_t s = 0; s < spans; s++) groups[s] = (uint8_t)best[groups[s]];
    *needed = least + HEADER_BITS + TABLE_BITS;
    return chosen;
}

/* `which` numbers the tokens that occur at all. */
static void find_occurrences(const uint8_t *symbols, const int64_t *sizes, uint64_t spans, const uint8_t *which,
                             int tokens, occurrence *found, uint64_t *ends) {
    uint64_t i = 0;
    for (uint64_t s = 0; s < spans; symbols += sizes[s++]) {
        int64_t counts[256], of_all[256];
        memset(counts, 0, (size_t)tokens * sizeof *counts);
        if (sizes[s] >= 1024) {
            wire_counts(symbols, sizes + s, 1, of_all);
            for (int t = 0; t < 256; t++)
                if (of_all[t]) counts[which[t]] = of_all[t];
        } else {
            for (int64_t j = 0; j < sizes[s]; j++) counts[which[symbols[j]]]++;
        }
        for (int t = 0; t < tokens; t++) {
            found[i] = (occurrence){t, (int)counts[t]};
            i += counts[t] > 0;
        }
        ends[s] = i;
    }
}

/* Whether the spans that have enough codes of `width` bits to tell use all alike, and are nearly all there is. */
static int are_spread_evenly(const occurrence *found, const uint64_t *ends, const int64_t *sizes, uint64_t spans,
                             int width) {
    double bits = 0;
    int64_t whole = 0, telling = 0;
    for (uint64_t s = 0; s < spans; s++) {
        whole += sizes[s];
        if (sizes[s] >= 4ll << width) telling += sizes[s];
    }
    if (16 * telling < 15 * whole) return 0;
    uint64_t i = 0;
    for (uint64_t s = 0; s < spans; s++) {
        if (sizes[s] < 4ll << width) {
            i = ends[s];
            continue;
        }
        bits += (double)sizes[s] * log2((double)sizes[s]);
        for (; i < ends[s]; i++) bits -= found[i].count * log2((double)found[i].count);
    }
    return bits > 0.99 * width * (double)telling;
}

int wire_group_spans(const uint8_t *symbols, const int64_t *sizes, uint64_t spans, int width, const int32_t *logs,
                     int64_t *all, uint8_t *groups, int64_t *needed) {
    int64_t total[256], sums[MOST_GROUPS][256], whole = 0;
    Scores share[256];
    uint8_t which[256];
    int tokens = 0;
    for (uint64_t s = 0; s < spans; s++) whole += sizes[s];
    wire_counts(symbols, &whole, 1, all);
    for (int t = 0; t < 256; t++)
        if (all[t]) {
            total[tokens] = all[t];
            which[t] = (uint8_t)tokens++;
        }
    const int64_t overhead = HEADER_BITS + TABLE_BITS + TOKEN_BITS * tokens;
    const int64_t alone = needs(total, NULL, tokens, logs) + HEADER_BITS;
    const int is_one = spans < 2 || alone < 8 * overhead;
    *needed = alone;
    if (is_one && width == 0) return 1;
    occurrence *found = malloc((spans * (uint64_t)tokens + 1) * sizeof *found);
    uint64_t *ends = malloc(spans * sizeof *ends);
    ranked *order = malloc(spans * sizeof *order);
    int chosen = -1;
    if (found == NULL || ends == NULL || order == NULL) goto done;
    find_occurrences(symbols, sizes, spans, which, tokens, found, ends);
    chosen = width > 0 && are_spread_evenly(found, ends, sizes, spans, width) ? 0 : 1;
    if (chosen == 0 || is_one) goto done;
    for (int t = 0; t < tokens; t++) total[t] = log_of(logs, whole) - log_of(logs, total[t]);
    for (uint64_t s = 0, i = 0; s < spans; s++) {
        int64_t cost = 0;
        for (; i < ends[s]; i++) cost += found[i].count * total[found[i].token];
        order[s] = (ranked){cost / (sizes[s] > 0 ? sizes[s] : 1), s};
    }
    qsort(order, spans, sizeof *order, by_key);
    int64_t before = 0;
    for (uint64_t i = 0; i < spans; i++) {
        int64_t size = sizes[order[i].span], group = (2 * before + size) * MOST_GROUPS / (2 * whole);
        groups[order[i].span] = (uint8_t)(group < MOST_GROUPS ? group : MOST_GROUPS - 1);
        before += size;
    }
    for (int round = 0; round < ROUNDS; round++) {
        sum_up(found, ends, spans, tokens, groups, sums);
        for (int g = 0; g < MOST_GROUPS; g++) {
            int64_t held = 0;
            for (int t = 0; t < tokens; t++) held += sums[g][t];
            int64_t most = log_of(logs, SMOOTHING * held + tokens);
            for (int t = 0; t < tokens; t++)
                share[t][g] = (double)(log_of(logs, SMOOTHING * sums[g][t] + 1) - most);
        }
        move(found, ends, spans, share, groups);
    }
    sum_up(found, ends, spans, tokens, groups, sums);
    chosen = merge(sums, spans, tokens, logs, groups, needed);
    if (*needed >= alone) {
        *needed = alone;
        chosen = 1;
    }
done:
    free(found);
    free(ends);
    free(order);
    return chosen;
}
