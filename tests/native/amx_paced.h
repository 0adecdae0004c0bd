/* Kernels with instructions on vectors in the place of those on tiles, which take about as long as Intel publishes, and
   read the same memory. What such kernels compute means nothing. The processor overlaps them with what surrounds them, as
   one with AMX does.

   - A load reads the sixteen lines of a tile, one after the other, into the register of vectors that stands for it.
   - A product waits for its operands and for the product before it, and takes 16 cycles: four multiply-adds of 4, each of
     which needs the last.
   - A store waits for the product before it as long as an AMX product takes to be read, 52 cycles: nine more of these.

   They need a processor whose multiply-adds take 4 cycles, as those of Zen 3 and 4 and of Intel do since Skylake. Zen 4
   loads half as many bytes a cycle as a processor with AMX, from a first level of 32 KiB and not 48, and has half the
   second level: kernels that wait for operands take longer here. Loads that leave the first level to others are loads
   like any. */
#ifndef SOTTOVOCE_AMX_PACED_H
#define SOTTOVOCE_AMX_PACED_H
#include "amx_replaced.h"
#include "amx_stored.h"

/* Tiles 0 to 7 are registers 20 to 27; 31 holds the last product, and 30 what a store waits for. No compiler keeps
   numbers there across these instructions, but code between them may use 31: the next product begins at once then. */
#define AMX_TEXT(number) #number
#define AMX_OF_TILE(kind, tile) "%%" kind "mm2" AMX_TEXT(tile)
#define AMX_NEXT_LINE(tile)                                                                                        \
    "add %[stride], %[line]\n\tvporq (%[line]), " AMX_OF_TILE("z", tile) ", " AMX_OF_TILE("z", tile) "\n\t"
#define AMX_FIVE_LINES(tile)                                                                      \
    AMX_NEXT_LINE(tile) AMX_NEXT_LINE(tile) AMX_NEXT_LINE(tile) AMX_NEXT_LINE(tile) AMX_NEXT_LINE(tile)
#define AMX_FOUR_CYCLES(number) "vfmadd231ss %%xmm" number ", %%xmm" number ", %%xmm" number "\n\t"
#define AMX_TWELVE_CYCLES(number) AMX_FOUR_CYCLES(number) AMX_FOUR_CYCLES(number) AMX_FOUR_CYCLES(number)

#define AMX_LOADED(tile, base, row)                                                                            \
    do {                                                                                                       \
        const void *line_ = (base);                                                                            \
        __asm__ volatile("vmovdqu64 (%[line]), " AMX_OF_TILE("z", tile) "\n\t"                                 \
                         AMX_FIVE_LINES(tile) AMX_FIVE_LINES(tile) AMX_FIVE_LINES(tile)                        \
                         : [line] "+r"(line_) : [stride] "r"((size_t)(row)) : "xmm2" AMX_TEXT(tile), "memory"); \
    } while (0)
#define AMX_MULTIPLIED(left, right)                                                                        \
    __asm__ volatile("vfmadd231ss " AMX_OF_TILE("x", left) ", " AMX_OF_TILE("x", right) ", %%xmm31\n\t" \
                     AMX_TWELVE_CYCLES("31") : : : "xmm31")

/* Zeros, once the last product can be read. */
__attribute__((target("avx512f"))) static inline __m512i amx_after_products(void)
{
    __m512i after;
    __asm__ volatile("vmovaps %%xmm31, %%xmm30\n\t"
                     AMX_TWELVE_CYCLES("30") AMX_TWELVE_CYCLES("30") AMX_TWELVE_CYCLES("30")
                     "vpbroadcastd %%xmm30, %0\n\tvpandd %1, %0, %0" : "=v"(after) : "v"(_mm512_setzero_si512()) : "xmm30");
    return after;
}

#define _tile_loadconfig(configuration) ((void)(configuration))
#define _tile_release() ((void)0)
#define _tile_zero(tile) ((void)0)
#define _tile_loadd(tile, base, stride) AMX_LOADED(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) AMX_LOADED(tile, base, stride)
#define _tile_stored(tile, base, stride) amx_some_stored(base, (size_t)(stride), amx_after_products())
#define _tile_dpbusd(sums, left, right) AMX_MULTIPLIED(left, right)
#define _tile_dpbf16ps(sums, left, right) AMX_MULTIPLIED(left, right)
#endif
