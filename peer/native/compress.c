/* Kernels of the compressors: random numbers, selection, quantization. */
#include "compress.h"
#include "clones.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define WIDE 1
#include <immintrin.h>
#endif

/* No kernel looks at the floating-point exception flags; minding them keeps floorf and conversions scalar. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

int widest_registers = 8192;

/* As many coordinates as are worked on at a time: their draws and integers stay in the first-level cache. */
#define CHUNK 1024
#define SUM_LANES 1024

/* How many lanes a sum over n numbers needs: with fewer than all, those left out would be zero, and adding them would
   change no bit. */
static inline int lanes_for(uint64_t n)
{
    int used = SUM_LANES;
    while (used > 1 && (uint64_t)used / 2 >= n)
        used /= 2;
    return used;
}

/* Philox: groups of 32 blocks, whose 128 words come out in order. Compilers do not find the widening products in the
   portable loop, hence one version by hand for each of the wide registers. */
#define GROUP 32
#define M0 0xD2511F53u
#define M1 0xCD9E8D57u
#define W0 0x9E3779B9u
#define W1 0xBB67AE85u

static void philox_portable(uint32_t *out, uint32_t first, uint64_t groups, uint32_t key0, uint32_t key1,
                            uint32_t layer, uint32_t round)
{
    for (uint64_t block = 0; block < groups * GROUP; block++) {
        uint32_t c0 = first + (uint32_t)block, c1 = layer, c2 = round, c3 = 0, k0 = key0, k1 = key1;
        for (int r = 0; r < 10; r++) {
            uint64_t p0 = (uint64_t)M0 * c0, p1 = (uint64_t)M1 * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)p0;
            k0 += W0;
            k1 += W1;
        }
        out[4 * block] = c0;
        out[4 * block + 1] = c1;
        out[4 * block + 2] = c2;
        out[4 * block + 3] = c3;
    }
}

#ifdef WIDE
/* Each 64-bit lane holds one block; only the low halves of c0 to c3 count. Blocks are laid over the lanes so that the
   unpacking at the end puts their words in order: lane 2i is block i, lane 2i + 1 block i + half the lanes. */
__attribute__((target("avx512f"))) static void philox_avx512(uint32_t *out, uint32_t first, uint64_t groups,
                                                             uint32_t key0, uint32_t key1, uint32_t layer,
                                                             uint32_t round)
{
    const __m512i m0 = _mm512_set1_epi64(M0), m1 = _mm512_set1_epi64(M1);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (uint64_t g = 0; g < groups; g++) {
        __m512i c0[4], c1[4], c2[4], c3[4];
        uint32_t k0 = key0, k1 = key1;
        for (int j = 0; j < 4; j++) {
            c0[j] = _mm512_add_epi32(_mm512_set1_epi64((uint32_t)(first + g * GROUP + 8 * (unsigned)j)), order);
            c1[j] = _mm512_set1_epi64(layer);
            c2[j] = _mm512_set1_epi64(round);
            c3[j] = _mm512_setzero_si512();
        }
#pragma GCC unroll 10
        for (int r = 0; r < 10; r++) {
            __m512i key_a = _mm512_set1_epi64(k0), key_b = _mm512_set1_epi64(k1);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512i p0 = _mm512_mul_epu32(c0[j], m0), p1 = _mm512_mul_epu32(c2[j], m1);
                c0[j] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1[j], key_a, 0x96);
                c2[j] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3[j], key_b, 0x96);
                c1[j] = p1;
                c3[j] = p0;
            }
            k0 += W0;
            k1 += W1;
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m512i a = _mm512_mask_shuffle_epi32(c0[j], 0xAAAA, c1[j], _MM_PERM_CCAA);
            __m512i b = _mm512_mask_shuffle_epi32(c2[j], 0xAAAA, c3[j], _MM_PERM_CCAA);
            uint32_t *at = out + 4 * (g * GROUP + 8 * (unsigned)j);
            _mm512_storeu_si512(at, _mm512_unpacklo_epi64(a, b));
            _mm512_storeu_si512(at + 16, _mm512_unpackhi_epi64(a, b));
        }
    }
}

__attribute__((target("avx2"))) static void philox_avx2(uint32_t *out, uint32_t first, uint64_t groups, uint32_t key0,
                                                        uint32_t key1, uint32_t layer, uint32_t round)
{
    const __m256i m0 = _mm256_set1_epi64x(M0), m1 = _mm256_set1_epi64x(M1);
    const __m256i order = _mm256_setr_epi64x(0, 2, 1, 3);
    for (uint64_t g = 0; g < groups * (GROUP / 8); g++) {
        __m256i c0[2], c1[2], c2[2], c3[2];
        uint32_t k0 = key0, k1 = key1;
        for (int j = 0; j < 2; j++) {
            c0[j] = _mm256_add_epi32(_mm256_set1_epi64x((uint32_t)(first + g * 8 + 4 * (unsigned)j)), order);
            c1[j] = _mm256_set1_epi64x(layer);
            c2[j] = _mm256_set1_epi64x(round);
            c3[j] = _mm256_setzero_si256();
        }
#pragma GCC unroll 10
        for (int r = 0; r < 10; r++) {
            __m256i key_a = _mm256_set1_epi64x(k0), key_b = _mm256_set1_epi64x(k1);
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                __m256i p0 = _mm256_mul_epu32(c0[j], m0), p1 = _mm256_mul_epu32(c2[j], m1);
                c0[j] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1[j]), key_a);
                c2[j] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3[j]), key_b);
                c1[j] = p1;
                c3[j] = p0;
            }
            k0 += W0;
            k1 += W1;
        }
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m256i a = _mm256_blend_epi32(c0[j], _mm256_slli_epi64(c1[j], 32), 0xAA);
            __m256i b = _mm256_blend_epi32(c2[j], _mm256_slli_epi64(c3[j], 32), 0xAA);
            uint32_t *at = out + 4 * (g * 8 + 4 * (unsigned)j);
            _mm256_storeu_si256((__m256i *)at, _mm256_unpacklo_epi64(a, b));
            _mm256_storeu_si256((__m256i *)(at + 8), _mm256_unpackhi_epi64(a, b));
        }
    }
}
#endif

static void philox_groups(uint32_t *out, uint32_t first, uint64_t groups, uint32_t key0, uint32_t key1,
                          uint32_t layer, uint32_t round)
{
#ifdef WIDE
    if (widest_registers >= 512 && __builtin_cpu_supports("avx512f")) {
        philox_avx512(out, first, groups, key0, key1, layer, round);
        return;
    }
    if (widest_registers >= 256 && __builtin_cpu_supports("avx2")) {
        philox_avx2(out, first, groups, key0, key1, layer, round);
        return;
    }
#endif
    philox_portable(out, first, groups, key0, key1, layer, round);
}

void philox_words(uint32_t *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                  uint32_t round)
{
    uint32_t words[4 * GROUP];
    uint64_t done = 0;
    while (done < n) {
        uint64_t word = start + done, skip = word % 4, groups = (n - done) / (4 * GROUP);
        if (skip == 0 && groups > 0) {
            philox_groups(out + done, (uint32_t)(word / 4), groups, key0, key1, layer, round);
            done += groups * 4 * GROUP;
        } else {
            uint64_t count = 4 * GROUP - skip < n - done ? 4 * GROUP - skip : n - done;
            philox_groups(words, (uint32_t)(word / 4), 1, key0, key1, layer, round);
            memcpy(out + done, words + skip, count * sizeof *out);
            done += count;
        }
    }
}

CLONES void philox_uniforms_f32(float *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                                uint32_t round)
{
    uint32_t words[CHUNK];
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        philox_words(words, (uint64_t)count, start + done, key0, key1, layer, round);
        for (int i = 0; i < count; i++)
            out[done + i] = (float)(int32_t)(words[i] >> 8) * 0x1p-24f;
    }
}

CLONES void philox_uniforms_f64(double *out, uint64_t n, uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer,
                                uint32_t round)
{
    uint32_t words[2 * CHUNK];
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        philox_words(words, 2 * (uint64_t)count, 2 * (start + done), key0, key1, layer, round);
        for (int i = 0; i < count; i++)
            out[done + i] = ((double)(int32_t)(words[2 * i] >> 5) * 0x1p26 + (double)(int32_t)(words[2 * i + 1] >> 6))
                            * 0x1p-53;
    }
}

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

/* Keys of which it takes less to count all for each bit than to sort them into counters. */
#define FEW_KEYS 4096

/* The r-th largest of a few keys, bit by bit. */
CLONES static uint32_t rth_of_few(const uint32_t *keys, uint64_t n, uint64_t r, uint32_t floor, uint32_t largest,
                                  uint64_t *above)
{
    uint32_t found = 0, larger = 0;
    for (uint32_t bit = 1u << 31; bit > 0; bit /= 2) {
        uint32_t reached = 0, least = found | bit;
        if (least > largest - floor)
            continue;
        for (uint64_t i = 0; i < n; i++)
            reached += keys[i] - floor >= least;
        found = reached >= r ? least : found;
    }
    for (uint64_t i = 0; i < n; i++)
        larger += keys[i] - floor > found;
    *above = larger;
    return floor + found;
}

/* The r-th largest of the keys (r from 1), all of them at least `floor`, by a few counting passes; `above` gets how many
   are larger. Counting what exceeds the floor, from its highest bit in use, spreads the first pass over all counters:
   the keys of the largest magnitudes differ little in their upper bits, and increments of one counter wait for each other. */
static uint32_t rth_largest(const uint32_t *keys, uint64_t n, uint64_t r, uint32_t floor, uint64_t *above)
{
    uint32_t counts[2048], largest = 0, prefix = 0, decided = 0;
    uint64_t larger = 0;
    for (uint64_t i = 0; i < n; i++)
        largest = keys[i] > largest ? keys[i] : largest;
    *above = 0;
    if (r == 1)
        return largest;
    if (n <= FEW_KEYS)
        return rth_of_few(keys, n, r, floor, largest, above);
    const int most = 11;
    int bits = 0;
    while (bits < 32 && ((uint64_t)largest - floor) >> bits)
        bits++;
    while (bits > 0) {
        int shift = bits > most ? bits - most : 0;
        uint32_t digits = ((uint32_t)1 << (bits - shift)) - 1;
        memset(counts, 0, ((size_t)digits + 1) * sizeof *counts);
        for (uint64_t i = 0; i < n; i++) {
            uint32_t key = keys[i] - floor;
            if ((key & decided) == prefix)
                counts[(key >> shift) & digits]++;
        }
        uint32_t digit = digits;
        while (larger + counts[digit] < r)
            larger += counts[digit--];
        prefix |= digit << shift;
        decided |= digits << shift;
        bits = shift;
    }
    *above = larger;
    return floor + prefix;
}

/* Keys of at least `floor` and their positions, in order, both arrays having `room` entries and 32 to spare. Returns how
   many there are, or more than `room` where they did not fit. */
static uint64_t gather_portable(const uint32_t *raw, uint64_t n, uint32_t mask, uint32_t flip, uint32_t floor,
                                uint32_t *keys, uint32_t *positions, uint64_t room)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < n && count <= room; i += 32) {
        uint64_t end = n - i < 32 ? n : i + 32;
        int any = 0;
        for (uint64_t j = i; j < end; j++)
            any |= ((raw[j] & mask) ^ flip) >= floor;
        if (!any)
            continue;
        for (uint64_t j = i; j < end; j++) {
            uint32_t key = (raw[j] & mask) ^ flip;
            keys[count] = key;
            positions[count] = (uint32_t)j;
            count += key >= floor;
        }
    }
    return count;
}

#ifdef WIDE
/* Without a branch: one that is taken now and then costs more than writing sixteen lanes for nothing. */
__attribute__((target("avx512f,popcnt"))) static uint64_t gather_avx512(const uint32_t *raw, uint64_t n, uint32_t mask,
                                                                        uint32_t flip, uint32_t floor, uint32_t *keys,
                                                                        uint32_t *positions, uint64_t room)
{
    const __m512i masks = _mm512_set1_epi32((int)mask), flips = _mm512_set1_epi32((int)flip);
    const __m512i floors = _mm512_set1_epi32((int)floor), sixteen = _mm512_set1_epi32(16);
    __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    uint64_t count = 0, i = 0;
    for (; i + 16 <= n && count <= room; i += 16) {
        __m512i key = _mm512_xor_si512(_mm512_and_si512(_mm512_loadu_si512(raw + i), masks), flips);
        __mmask16 enough = _mm512_cmpge_epu32_mask(key, floors);
        _mm512_storeu_si512(keys + count, _mm512_maskz_compress_epi32(enough, key));
        _mm512_storeu_si512(positions + count, _mm512_maskz_compress_epi32(enough, at));
        count += (uint64_t)__builtin_popcount(enough);
        at = _mm512_add_epi32(at, sixteen);
    }
    for (; i < n && count <= room; i++) {
        keys[count] = (raw[i] & mask) ^ flip;
        positions[count] = (uint32_t)i;
        count += keys[count] >= floor;
    }
    return count;
}
#endif

static uint64_t gather(const uint32_t *raw, uint64_t n, uint32_t mask, uint32_t flip, uint32_t floor, uint32_t *keys,
                       uint32_t *positions, uint64_t room)
{
#ifdef WIDE
    if (widest_registers >= 512 && __builtin_cpu_supports("avx512f"))
        return gather_avx512(raw, n, mask, flip, floor, keys, positions, room);
#endif
    return gather_portable(raw, n, mask, flip, floor, keys, positions, room);
}

int select_largest(const uint32_t *raw, uint64_t n, uint64_t k, uint32_t mask, uint32_t flip, int64_t *indices)
{
    /* An evenly spaced sample gives a floor that, nearly always, somewhat more than k keys reach. Only speed depends on
       it: if too few or too many do, all keys are looked at. */
    uint64_t few = n / 8 < 256 ? n / 8 : 256, sampled = n / 64 > few ? n / 64 : few, room = n;
    sampled = sampled < 16384 ? sampled : 16384;
    uint32_t floor = 0;
    if (sampled >= 64) {
        uint32_t *sample = malloc(sampled * sizeof *sample);
        if (sample == NULL)
            return -1;
        for (uint64_t i = 0, at = 0, rest = 0; i < sampled; i++) {
            sample[i] = (raw[at] & mask) ^ flip;
            at += n / sampled;
            rest += n % sampled;
            at += rest >= sampled;
            rest -= rest >= sampled ? sampled : 0;
        }
        double expected = (double)sampled * (double)k / (double)n;
        uint64_t rank = (uint64_t)(expected + 4 * sqrt(expected) + 4), above;
        if (rank < sampled) {
            floor = rth_largest(sample, sampled, rank, 0, &above);
            room = (uint64_t)((double)n * ((double)rank + 4 * sqrt((double)rank) + 4) / (double)sampled);
            room = room < n ? room : n;
        }
        free(sample);
    }
    for (;;) {
        uint32_t *keys = malloc((room + 32) * sizeof *keys * 2);
        if (keys == NULL)
            return -1;
        uint32_t *positions = keys + room + 32;
        uint64_t count = gather(raw, n, mask, flip, floor, keys, positions, room);
        if (count >= k && count <= room) {
            uint64_t above, taken = 0;
            uint32_t last = rth_largest(keys, count, k, floor, &above);
            uint64_t ties = k - above;
            for (uint64_t i = 0; taken < k; i++) {
                int tie = (keys[i] == last) & (ties > 0);
                ties -= (uint64_t)tie;
                indices[taken] = positions[i];
                taken += (uint64_t)((keys[i] > last) | tie);
            }
            free(keys);
            return 0;
        }
        free(keys);
        floor = 0;
        room = n;
    }
}

int select_largest_of_each(const uint32_t *raw, const int64_t *sizes, const int64_t *counts, uint64_t layers,
                           uint32_t mask, uint32_t flip, int64_t *indices) {
    for (uint64_t layer = 0; layer < layers; layer++) {
        if (counts[layer] == sizes[layer]) {
            for (int64_t i = 0; i < sizes[layer]; i++) indices[i] = i;
        } else if (select_largest(raw, (uint64_t)sizes[layer], (uint64_t)counts[layer], mask, flip, indices)) {
            return -1;
        }
        raw += sizes[layer];
        indices += counts[layer];
    }
    return 0;
}

CLONES void stochastic_codes(const float *v, uint64_t n, int32_t steps, float scale,
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
            float exact = fabsf(part[i]) * most / scale;
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

CLONES void round_to_bfloat16(const float *restrict v, uint64_t n, float *restrict out)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits, largest = 0x7F7F0000u;
        memcpy(&bits, v + i, sizeof bits);
        uint32_t magnitude = bits & 0x7FFFFFFFu;
        magnitude = (magnitude + 0x7FFFu + ((magnitude >> 16) & 1)) & 0xFFFF0000u;
        magnitude = magnitude < largest ? magnitude : largest;
        bits = (bits & 0x80000000u) | magnitude;
        memcpy(out + i, &bits, sizeof bits);
    }
}

CLONES void grid_multiples(const float *restrict v, uint64_t n, float step, int stochastic,
                           const float *restrict uniforms, uint32_t key0, uint32_t key1, uint32_t layer,
                           uint32_t round, float *restrict multiples, float *restrict ends)
{
    float drawn[CHUNK], lowest[16], highest[16];
    for (int l = 0; l < 16; l++) {
        lowest[l] = INFINITY;
        highest[l] = -INFINITY;
    }
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK;
        const float *part = v + done, *u = drawn;
        float *out = multiples + done;
        if (!stochastic) {
            for (int i = 0; i < count; i++)
                out[i] = floorf(part[i] / step + 0.5f);
        } else {
            if (uniforms != NULL)
                u = uniforms + done;
            else
                philox_uniforms_f32(drawn, (uint64_t)count, done, key0, key1, layer, round);
            for (int i = 0; i < count; i++) {
                float exact = part[i] / step, down = floorf(exact);
                out[i] = down + (u[i] <= exact - down ? 1.0f : 0.0f);
            }
        }
        int i = 0;
        for (; i + 16 <= count; i += 16)
            for (int l = 0; l < 16; l++) {
                lowest[l] = out[i + l] < lowest[l] ? out[i + l] : lowest[l];
                highest[l] = out[i + l] > highest[l] ? out[i + l] : highest[l];
            }
        for (; i < count; i++) {
            lowest[0] = out[i] < lowest[0] ? out[i] : lowest[0];
            highest[0] = out[i] > highest[0] ? out[i] : highest[0];
        }
    }
    ends[0] = lowest[0];
    ends[1] = highest[0];
    for (int l = 1; l < 16; l++) {
        ends[0] = lowest[l] < ends[0] ? lowest[l] : ends[0];
        ends[1] = highest[l] > ends[1] ? highest[l] : ends[1];
    }
}

CLONES double nearest_codes(const float *v, uint64_t n, float scale, int32_t steps, int width, uint8_t *codes)
{
    double lanes[SUM_LANES];
    const int used = lanes_for(n);
    const float most = (float)steps;
    memset(lanes, 0, (size_t)used * sizeof *lanes);
    for (uint64_t done = 0; done < n; done += SUM_LANES) {
        int count = n - done < SUM_LANES ? (int)(n - done) : SUM_LANES;
        int32_t code[SUM_LANES];
        for (int i = 0; i < count; i++) {
            float ratio = v[done + i] / scale;
            ratio = ratio > 1.0f ? 1.0f : ratio;
            ratio = ratio < -1.0f ? -1.0f : ratio;
            float level = rintf(ratio * most);
            code[i] = (int32_t)level + steps;
            double error = (double)(level * scale / most - v[done + i]);
            lanes[i] += error * error;
        }
        if (width == 1)
            for (int i = 0; i < count; i++)
                codes[done + i] = (uint8_t)code[i];
        else
            for (int i = 0; i < count; i++)
                ((uint16_t *)codes)[done + i] = (uint16_t)code[i];
    }
    for (int half = used / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lanes[l] += lanes[l + half];
    return lanes[0];
}
