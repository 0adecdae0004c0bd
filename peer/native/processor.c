/* What the processor can do that torch makes use of. */
#include "processor.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
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
