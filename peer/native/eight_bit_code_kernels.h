/* Numbers to codes on a grid that is known, and their extremes in the same pass, once for each width of register; with
   the vectors of vectors.h and what eight_bit_extremes.h declares. */
#define ordered NAME(ordered)

/* As in eight_bit.c. */
INLINE Integers ordered(Floats v)
{
    const Integers bits = (Integers)v;
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

/* What is the same for all numbers, and the extremes so far. */
typedef struct {
    Floats low, high;
    float inverse;
    int32_t zero;
    Integers least, most;
} NAME(Grid);

INLINE NAME(Grid) NAME(grid)(float inverse, int32_t zero, const LaneExtremes *ends)
{
    return (NAME(Grid)){all(-128.0f - (float)zero), all(127.0f - (float)zero), inverse, zero,
                        load_integers(ends->low, LANES), load_integers(ends->high, LANES)};
}

/* `codes` may be NULL. */
INLINE void NAME(code_vector)(NAME(Grid) *g, Floats y, int8_t *codes, size_t at, int lanes)
{
    const Integers key = ordered(y);
    g->least = lesser(key, g->least);
    g->most = greater(key, g->most);
    if (codes != NULL) {
        const Integers level = __builtin_convertvector(nearest(cut(y * g->inverse, g->low, g->high)), Integers);
        store_codes((uint8_t *)codes + at, level + g->zero, lanes);
    }
}

INLINE void NAME(keep_extremes)(const NAME(Grid) *g, LaneExtremes *ends, int lanes)
{
    memcpy(ends->low, &g->least, (size_t)lanes * sizeof *ends->low);
    memcpy(ends->high, &g->most, (size_t)lanes * sizeof *ends->high);
}
#undef ordered
