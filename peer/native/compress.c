/* Kernels of the compressors: random numbers, selection, quantization. */
#include "compress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#define LANES 16

/* LANES blocks of Philox, block numbers first to first + LANES - 1, their words in order. */
static inline __attribute__((always_inline)) void philox_blocks(uint32_t *restrict out, uint32_t first, uint32_t key0,
                                                                uint32_t key1, uint32_t layer, uint32_t round)
{
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
    for (int l = 0; l < LANES; l++) {
        c0[l] = first + (uint32_t)l;
        c1[l] = layer;
        c2[l] = round;
        c3[l] = 0;
    }
    for (int r = 0; r < 10; r++) {
        for (int l = 0; l < LANES; l++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[l];
            uint64_t p1 = (uint64_t)0xCD9E8D57u * c2[l];
            c0[l] = (uint32_t)(p1 >> 32) ^ c1[l] ^ key0;
            c1[l] = (uint32_t)p1;
            c2[l] = (uint32_t)(p0 >> 32) ^ c3[l] ^ key1;
            c3[l] = (uint32_t)p0;
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    for (int l = 0; l < LANES; l++) {
        out[4 * l] = c0[l];
        out[4 * l + 1] = c1[l];
        out[4 * l + 2] = c2[l];
        out[4 * l + 3] = c3[l];
    }
}

CLONES void philox_words(uint32_t *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                         uint32_t round)
{
    uint32_t block[4 * LANES];
    uint64_t done = 0;
    while (done < n) {
        uint64_t word = start + done, skip = word % 4;
        if (skip == 0 && n - done >= 4 * LANES) {
            philox_blocks(out + done, (uint32_t)(word / 4), key0, key1, layer, round);
            done += 4 * LANES;
        } else {
            uint64_t count = 4 * LANES - skip < n - done ? 4 * LANES - skip : n - done;
            philox_blocks(block, (uint32_t)(word / 4), key0, key1, layer, round);
            memcpy(out + done, block + skip, count * sizeof *out);
            done += count;
        }
    }
}

CLONES void philox_uniforms_f32(float *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                                uint32_t round)
{
    uint32_t block[4 * LANES];
    uint64_t done = 0;
    while (done < n) {
        uint64_t word = start + done, skip = word % 4;
        uint64_t count = 4 * LANES - skip < n - done ? 4 * LANES - skip : n - done;
        philox_blocks(block, (uint32_t)(word / 4), key0, key1, layer, round);
        if (count == 4 * LANES) {
            for (int i = 0; i < 4 * LANES; i++)
                out[done + i] = (float)(int32_t)(block[i] >> 8) * 0x1p-24f;
        } else {
            for (uint64_t i = 0; i < count; i++)
                out[done + i] = (float)(int32_t)(block[skip + i] >> 8) * 0x1p-24f;
        }
        done += count;
    }
}

CLONES void philox_uniforms_f64(double *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                                uint32_t round)
{
    uint32_t block[4 * LANES];
    uint64_t done = 0;
    while (done < n) {
        uint64_t word = 2 * (start + done), skip = word % 4;
        uint64_t count = (4 * LANES - skip) / 2 < n - done ? (4 * LANES - skip) / 2 : n - done;
        philox_blocks(block, (uint32_t)(word / 4), key0, key1, layer, round);
        for (uint64_t i = 0; i < count; i++) {
            uint32_t high = block[skip + 2 * i] >> 5, low = block[skip + 2 * i + 1] >> 6;
            out[done + i] = ((double)(int32_t)high * 0x1p26 + (double)(int32_t)low) * 0x1p-53;
        }
        done += count;
    }
}

/* As many coordinates as are worked on at a time: their draws and integers stay in the first-level cache. */
#define CHUNK 1024
#define SUM_LANES 1024

#define REAL float
#define WORD uint32_t
#define WHOLE int32_t
#define NAME(f) f##_f32
#define FLOOR floorf
#define CEIL ceilf
#define FABS fabsf
#include "compress_real.h"
#undef REAL
#undef WORD
#undef WHOLE
#undef NAME
#undef FLOOR
#undef CEIL
#undef FABS

#define REAL double
#define WORD uint64_t
#define WHOLE int64_t
#define NAME(f) f##_f64
#define FLOOR floor
#define CEIL ceil
#define FABS fabs
#include "compress_real.h"

/* The r-th largest of the keys (r from 1), by three counting passes over 11, 11 and 10 bits; `above` gets how many are
   larger. */
static uint32_t rth_largest(const uint32_t *keys, uint64_t n, uint64_t r, uint64_t *above)
{
    uint32_t counts[2048], prefix = 0, decided = 0;
    uint64_t larger = 0;
    static const int shifts[3] = {21, 10, 0};
    for (int pass = 0; pass < 3; pass++) {
        int shift = shifts[pass];
        uint32_t digits = pass < 2 ? 2047 : 1023;
        memset(counts, 0, sizeof counts);
        if (pass == 0)
            for (uint64_t i = 0; i < n; i++)
                counts[keys[i] >> 21]++;
        else
            for (uint64_t i = 0; i < n; i++)
                if ((keys[i] & decided) == prefix)
                    counts[(keys[i] >> shift) & digits]++;
        uint32_t digit = digits;
        while (larger + counts[digit] < r)
            larger += counts[digit--];
        prefix |= digit << shift;
        decided |= digits << shift;
    }
    *above = larger;
    return prefix;
}

/* Keys of at least `floor` and their positions, in order; stops after `room` of them. Returns how many. */
static inline __attribute__((always_inline)) uint64_t gather(const uint32_t *raw, uint64_t n, uint32_t mask,
                                                             uint32_t flip, uint32_t floor, uint32_t *keys,
                                                             uint32_t *positions, uint64_t room)
{
    uint64_t count = 0, i = 0;
    for (; i + 32 <= n; i += 32) {
        int any = 0;
        for (int l = 0; l < 32; l++)
            any |= ((raw[i + l] & mask) ^ flip) >= floor;
        if (!any)
            continue;
        if (count + 32 > room)
            return room + 1;
        for (int l = 0; l < 32; l++) {
            uint32_t key = (raw[i + l] & mask) ^ flip;
            keys[count] = key;
            positions[count] = (uint32_t)(i + l);
            count += key >= floor;
        }
    }
    for (; i < n; i++) {
        uint32_t key = (raw[i] & mask) ^ flip;
        if (key < floor)
            continue;
        if (count == room)
            return room + 1;
        keys[count] = key;
        positions[count++] = (uint32_t)i;
    }
    return count;
}

CLONES static uint64_t gather_keys(const uint32_t *raw, uint64_t n, uint32_t mask, uint32_t flip, uint32_t floor,
                                   uint32_t *keys, uint32_t *positions, uint64_t room)
{
    return gather(raw, n, mask, flip, floor, keys, positions, room);
}

int select_largest(const uint32_t *raw, uint64_t n, uint64_t k, uint32_t mask, uint32_t flip, int64_t *indices)
{
    /* An evenly spaced sample gives a floor that, nearly always, somewhat more than k keys reach. Only speed depends on
       it: if too few or too many do, all keys are looked at. */
    uint64_t sampled = n / 64 < 16384 ? n / 64 : 16384, room = n;
    uint32_t floor = 0;
    if (sampled >= 64) {
        uint32_t *sample = malloc(sampled * sizeof *sample);
        if (sample == NULL)
            return -1;
        for (uint64_t i = 0; i < sampled; i++)
            sample[i] = (raw[i * n / sampled] & mask) ^ flip;
        double expected = (double)sampled * (double)k / (double)n;
        uint64_t rank = (uint64_t)(expected + 4 * sqrt(expected) + 4), above;
        if (rank < sampled) {
            floor = rth_largest(sample, sampled, rank, &above);
            room = (uint64_t)((double)n * ((double)rank + 4 * sqrt((double)rank) + 4) / (double)sampled) + 32;
            room = room < n ? room : n;
        }
        free(sample);
    }
    for (;;) {
        uint32_t *keys = malloc((room + 32) * sizeof *keys * 2);
        if (keys == NULL)
            return -1;
        uint32_t *positions = keys + room + 32;
        uint64_t count = gather_keys(raw, n, mask, flip, floor, keys, positions, room + 32);
        if (count >= k && count <= room + 32) {
            uint64_t above, taken = 0;
            uint32_t last = rth_largest(keys, count, k, &above);
            uint64_t ties = k - above;
            for (uint64_t i = 0; i < count; i++) {
                int tie = keys[i] == last && ties > 0;
                ties -= (uint64_t)tie;
                if (keys[i] > last || tie)
                    indices[taken++] = positions[i];
            }
            free(keys);
            return 0;
        }
        free(keys);
        floor = 0;
        room = n;
    }
}

CLONES void stochastic_codes(const float *v, uint64_t n, float shrink, int32_t steps, float scale,
                             const float *uniforms, uint32_t key0, uint32_t key1, uint32_t layer, uint32_t round,
                             int width, uint8_t *codes)
{
    const float most = (float)steps;
    float drawn[CHUNK];
    int32_t code[CHUNK];
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        const float *part = v + done, *u = drawn;
        if (uniforms != NULL)
            u = uniforms + done;
        else
            philox_uniforms_f32(drawn, (uint64_t)count, done, key0, key1, layer, round);
        for (int i = 0; i < count; i++) {
            float exact = fabsf(part[i]) * shrink * most / scale;
            float level = floorf(exact);
            level += u[i] < exact - level ? 1.0f : 0.0f;
            level = level < most ? level : most;
            code[i] = steps + (int32_t)copysignf(level, part[i]);
        }
        if (width == 1)
            for (int i = 0; i < count; i++)
                codes[done + i] = (uint8_t)code[i];
        else
            for (int i = 0; i < count; i++)
                ((uint16_t *)codes)[done + i] = (uint16_t)code[i];
    }
}

#define ADD_LEVELS(TYPE, DIVIDED)                                                                  \
    for (uint64_t i = 0; i < n; i++) {                                                             \
        float value = (float)(base + step * (int32_t)((const TYPE *)codes)[i]) * scale DIVIDED;    \
        out[i] += value * weight;                                                                  \
    }

CLONES void add_levels(float *restrict out, const uint8_t *restrict codes, int width, uint64_t n, float scale,
                       int32_t base, int32_t step, float divisor, float weight)
{
    if (width == 1 && divisor == 1.0f) {
        ADD_LEVELS(uint8_t, )
    } else if (width == 1) {
        ADD_LEVELS(uint8_t, / divisor)
    } else if (divisor == 1.0f) {
        ADD_LEVELS(uint16_t, )
    } else {
        ADD_LEVELS(uint16_t, / divisor)
    }
}

CLONES void add_scaled(float *restrict out, const float *restrict v, uint64_t n, float weight)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] += v[i] * weight;
}

uint64_t add_sparse(float *restrict out, uint64_t size, const int64_t *restrict indices, const float *restrict v,
                    uint64_t k, float weight)
{
    uint64_t outside = 0;
    for (uint64_t i = 0; i < k; i++) {
        uint64_t at = (uint64_t)indices[i];
        if (at < size)
            out[at] += v[i] * weight;
        else
            outside++;
    }
    return outside;
}
