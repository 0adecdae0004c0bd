/* What the processor can do that torch makes use of. */
#include "processor.h"
#include "tiers.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif
#ifdef AMX
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#endif

int processor_bfloat16(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx512bf16"))
        return 0;
    /* Leaf 7, EDX, bit 22: not every compiler knows AMX by name. */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 ? 2 : 1;
#else
    return -1;
#endif
}

#ifdef AMX
static int tiles_granted(void)
{
    /* Leaf 7, EDX: products of bfloat16, tiles, products of bytes. */
    const unsigned needed = 1u << 22 | 1u << 24 | 1u << 25;
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx512bw") || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & needed) != needed)
        return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

int processor_tiles(void)
{
#ifdef AMX
    static int granted = -1;
    int known = __atomic_load_n(&granted, __ATOMIC_RELAXED);
    if (known < 0) {
        known = tiles_granted();
        __atomic_store_n(&granted, known, __ATOMIC_RELAXED);
    }
    return known;
#else
    return 0;
#endif
}

int processor_tier(void)
{
    const int tier = tier_of_this_processor();
#ifdef WIDE
    if (tier == 2 && widest_registers >= 8192 && processor_tiles())
        return 4;
    if (tier == 2 && __builtin_cpu_supports("avx512vnni"))
        return 3;
#endif
    return tier;
}
