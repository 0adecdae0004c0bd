#ifndef SOTTOVOCE_PROCESSOR_H
#define SOTTOVOCE_PROCESSOR_H

/* 2 if this processor multiplies tiles of bfloat16 (AMX), 1 if vectors of it, 0 if none, -1 if this is not an x86-64
   and nobody looked. */
int processor_bfloat16(void);
#endif
