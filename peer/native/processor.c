/* What the processor can do that torch makes use of. */
#include "processor.h"
#include "tiers.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif
#ifdef ARM_BYTES
#include <asm/hwcap.h>
#include <sys/auxv.h>
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

int byte_instructions = 2;

#ifdef AVX_VNNI
static int has_avx_vnni(void)
{
    /* Leaf 7, part 1, EAX, bit 4. */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}
#endif

int processor_tier(void)
{
#ifdef WIDE
    const int tier = tier_of_this_processor();
    if (tier == 2 && widest_registers >= 8192 && byte_instructions >= 2 && processor_tiles())
        return TIER_AMX;
    if (tier == 2)
        return byte_instructions >= 1 && __builtin_cpu_supports("avx512vnni") ? TIER_AVX512_VNNI : TIER_AVX512;
#ifdef AVX_VNNI
    if (tier == 1 && byte_instructions >= 1 && has_avx_vnni())
        return TIER_AVX_VNNI;
#endif
    if (tier == 1)
        return TIER_AVX2;
#endif
#ifdef ARM_BYTES
    if (byte_instructions >= 2 && getauxval(AT_HWCAP2) & HWCAP2_I8MM)
        return TIER_NEON_I8MM;
    if (byte_instructions >= 1 && getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
        return TIER_NEON_DOT;
#endif
    return TIER_PORTABLE;
}
