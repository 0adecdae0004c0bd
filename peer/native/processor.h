#ifndef SOTTOVOCE_PROCESSOR_H
#define SOTTOVOCE_PROCESSOR_H

/* 2 if this processor multiplies tiles of bfloat16 (AMX), 1 if vectors of it, 0 if none, -1 if this is not an x86-64
   and nobody looked. */
int processor_bfloat16(void);

/* Whether this process may use the tiles of AMX, for bytes and for bfloat16. The first call asks the kernel for them,
   which a container can refuse. */
int processor_tiles(void);

/* Which kernels run here: 0 portable ones, 1 those of AVX2, 2 of AVX-512, 3 of AVX-512 with VNNI, 4 those and AMX. */
int processor_tier(void);
#endif
