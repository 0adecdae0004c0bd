#ifndef SOTTOVOCE_PROCESSOR_H
#define SOTTOVOCE_PROCESSOR_H

/* 2 if this processor multiplies tiles of bfloat16 (AMX), 1 if vectors of it, 0 if none, -1 if this is not an x86-64
   and nobody looked. */
int processor_bfloat16(void);

/* Whether this process may use the tiles of AMX, for bytes and for bfloat16. The first call asks the kernel for them,
   which a container can refuse. */
int processor_tiles(void);

/* The instructions for products of bytes that kernels may use: 2 all of them, 1 none that multiply matrices (i8mm), 0
   none at all (nor VNNI, nor the dot product of ARM). Tests lower it, and widest_registers, to reach other versions. */
extern int byte_instructions;

/* Which kernels run here: 0 portable ones, 1 those of AVX2, 2 of AVX-512, 3 of AVX-512 with VNNI, 4 those and AMX, 5 of
   AVX2 with AVX-VNNI, 6 portable ones and the dot product of ARM, 7 those and i8mm. */
#define TIER_PORTABLE 0
#define TIER_AVX2 1
#define TIER_AVX512 2
#define TIER_AVX512_VNNI 3
#define TIER_AMX 4
#define TIER_AVX_VNNI 5
#define TIER_NEON_DOT 6
#define TIER_NEON_I8MM 7
int processor_tier(void);
#endif
