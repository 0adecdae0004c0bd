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
