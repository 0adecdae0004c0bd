/* CRC-32 by products of polynomials: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
   Instruction", Intel 2009, for the reflected polynomial 04C11DB7. Where a processor has no such products, a byte at a
   time; Python asks zlib there. */
#include "wire_checksum.h"

#include <string.h>

#define POLYNOMIAL 0xedb88320u

static uint32_t by_bytes(const uint8_t *data, uint64_t size, uint32_t state) {
    for (uint64_t i = 0; i < size; i++) {
        state ^= data[i];
        for (int bit = 0; bit < 8; bit++) state = (state >> 1) ^ (state & 1 ? POLYNOMIAL : 0);
    }
    return state;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FOLDS __attribute__((target("pclmul,sse4.1")))

int wire_crc32_is_fast(void) { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

FOLDS static inline __m128i load(const uint8_t *data) { return _mm_loadu_si128((const __m128i *)data); }

/* x moved on by the distance that `by` stands for, and what is there. */
FOLDS static inline __m128i fold(__m128i x, __m128i by, __m128i there) {
    __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

/* What blocks of 16 bytes leave, one behind the other, and the data behind them, a multiple of 16 bytes. */
FOLDS static uint32_t joined(const __m128i *blocks, int count, const uint8_t *data, uint64_t size) {
    const __m128i by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i to_64 = _mm_set_epi64x(0, 0x163cd6124), barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i all = blocks[0];
    for (int i = 1; i < count; i++) all = fold(all, by_16, blocks[i]);
    for (; size >= 16; data += 16, size -= 16) all = fold(all, by_16, load(data));
    /* From 128 bits to 64, and to 32. */
    all = _mm_xor_si128(_mm_srli_si128(all, 8), _mm_clmulepi64_si128(all, by_16, 0x10));
    all = _mm_xor_si128(_mm_srli_si128(all, 4), _mm_clmulepi64_si128(_mm_and_si128(all, low_words), to_64, 0x00));
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(all, low_words), barrett, 0x10);
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(all, quotient), 1);
}

/* At least 64 bytes, and a multiple of 16. */
FOLDS static uint32_t by_products(const uint8_t *data, uint64_t size, uint32_t state) {
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    __m128i x[4];
    for (int i = 0; i < 4; i++) x[i] = load(data + 16 * i);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)state));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
        for (int i = 0; i < 4; i++) x[i] = fold(x[i], by_64, load(data + 16 * i));
    return joined(x, 4, data, size);
}

#define WIDE_FOLDS __attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq")))

static int has_wide_products(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

/* The same with sixteen blocks at a time. At least 256 bytes. */
WIDE_FOLDS static uint32_t by_wide_products(const uint8_t *data, uint64_t size, uint32_t state) {
    const __m512i by_256 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1322d1430, 0x11542778a));
    __m512i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(data + 64 * i);
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (data += 256, size -= 256; size >= 256; data += 256, size -= 256)
        for (int i = 0; i < 4; i++) {
            __m512i low = _mm512_clmulepi64_epi128(x[i], by_256, 0x00), high = _mm512_clmulepi64_epi128(x[i], by_256, 0x11);
            x[i] = _mm512_xor_si512(_mm512_xor_si512(low, high), _mm512_loadu_si512(data + 64 * i));
        }
    __m128i blocks[16];
    memcpy(blocks, x, sizeof blocks);
    return joined(blocks, 16, data, size);
}
#else
int wire_crc32_is_fast(void) { return 0; }
#endif

uint32_t wire_crc32(const uint8_t *data, uint64_t size, uint32_t checksum) {
    uint32_t state = ~checksum;
#ifdef FOLDS
    if (size >= 64 && wire_crc32_is_fast()) {
        uint64_t folded = size / 16 * 16;
        state = size >= 512 && has_wide_products() ? by_wide_products(data, folded, state)
                                                   : by_products(data, folded, state);
        data += folded;
        size -= folded;
    }
#endif
    return ~by_bytes(data, size, state);
}
