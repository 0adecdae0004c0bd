#ifndef SOTTOVOCE_TIERS_H
#define SOTTOVOCE_TIERS_H
/* For files whose kernels are compiled once for each width of register (each_tier.h): which of the versions
   this processor runs, and what all of them need. */
#include "compress.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE 1
#include <immintrin.h>
#if __GNUC__ >= 11 && defined(__linux__)
#define AMX 1
#endif
#if __GNUC__ >= 11
#define AVX_VNNI 1
#endif
#endif

#if defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#define ARM_BYTES 1
#include <arm_neon.h>
#endif

/* 2 for the kernels of x86-64-v4, 1 for those of v3, 0 for the portable ones. */
static inline int tier_of_this_processor(void)
{
#ifdef WIDE
    if (widest_registers >= 512 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (widest_registers >= 256 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")
        && __builtin_cpu_supports("fma"))
        return 1;
#endif
    return 0;
}

/* The version of a kernel that this processor runs. */
#ifdef WIDE
#define BEST(name)                                       \
    (tier_of_this_processor() == 2   ? name##_v4         \
     : tier_of_this_processor() == 1 ? name##_v3         \
                                     : name##_portable)
#else
#define BEST(name) name##_portable
#endif

/* float32 of bfloat16. */
static inline __attribute__((always_inline)) float widen(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline size_t rounded_up(int n, int to) { return (size_t)((n + to - 1) / to) * (size_t)to; }
#endif
