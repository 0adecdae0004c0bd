/* The kernels that exist for both float types. Included by compress.c once for each, with
   REAL       float or double
   WORD       the unsigned integer of its size
   WHOLE      the signed integer of its size
   NAME(f)    f with the suffix of the type
   FLOOR, CEIL, FABS */

CLONES REAL NAME(max_magnitude)(const REAL *v, uint64_t n)
{
    /* Without its sign a float's bits are ordered like its value, with NaN above infinity. */
    WORD largest = 0;
    for (uint64_t i = 0; i < n; i++) {
        WORD bits;
        memcpy(&bits, v + i, sizeof bits);
        bits &= (WORD)-1 >> 1;
        largest = bits > largest ? bits : largest;
    }
    REAL result;
    memcpy(&result, &largest, sizeof result);
    return result;
}

CLONES REAL NAME(copy_reaching)(const uint8_t *restrict source, uint64_t n, REAL *restrict out)
{
    WORD largest = 0;
    for (uint64_t i = 0; i < n; i++) {
        WORD bits;
        memcpy(&bits, source + i * sizeof bits, sizeof bits);
        memcpy(out + i, &bits, sizeof bits);
        bits &= (WORD)-1 >> 1;
        largest = bits > largest ? bits : largest;
    }
    REAL result;
    memcpy(&result, &largest, sizeof result);
    return result;
}

#define SUM_IN_LANES(TERM)                                  \
    double lanes[SUM_LANES];                                \
    const int used = lanes_for(n);                          \
    memset(lanes, 0, (size_t)used * sizeof *lanes);         \
    uint64_t i = 0;                                         \
    for (; i + SUM_LANES <= n; i += SUM_LANES)              \
        for (int l = 0; l < SUM_LANES; l++) {               \
            double x = (double)v[i + l];                    \
            lanes[l] += TERM;                               \
        }                                                   \
    for (int l = 0; i + l < n; l++) {                       \
        double x = (double)v[i + l];                        \
        lanes[l] += TERM;                                   \
    }                                                       \
    for (int half = used / 2; half > 0; half /= 2)          \
        for (int l = 0; l < half; l++)                      \
            lanes[l] += lanes[l + half];                    \
    return lanes[0];

CLONES double NAME(sum_of_squares)(const REAL *v, uint64_t n) { SUM_IN_LANES(x * x) }

CLONES double NAME(sum_of_magnitudes)(const REAL *v, uint64_t n) { SUM_IN_LANES(fabs(x)) }

#undef SUM_IN_LANES

static inline __attribute__((always_inline)) void NAME(write_integers)(const WHOLE *k, int count, uint64_t done,
                                                                       int bits, int64_t *integers, int width,
                                                                       uint8_t *residues)
{
    if (integers != NULL)
        for (int i = 0; i < count; i++)
            integers[done + i] = k[i];
    if (residues == NULL)
        return;
    WHOLE mask = ((WHOLE)1 << bits) - 1;
    if (width == 1)
        for (int i = 0; i < count; i++)
            residues[done + i] = (uint8_t)(k[i] & mask);
    else {
        uint16_t *wide = (uint16_t *)residues;
        for (int i = 0; i < count; i++)
            wide[done + i] = (uint16_t)(k[i] & mask);
    }
}

/* The canonical value of K: (K + offset) * (b / L), the offset being half, nothing, or half - omega. */
static inline __attribute__((always_inline)) void NAME(write_values)(const WHOLE *k, int count, const REAL *omega,
                                                                     int dither, REAL scale, REAL *values)
{
    const REAL half = (REAL)0.5;
    if (dither == 0)
        for (int i = 0; i < count; i++)
            values[i] = ((REAL)k[i] + half) * scale;
    else if (dither == 1)
        for (int i = 0; i < count; i++)
            values[i] = (REAL)k[i] * scale;
    else
        for (int i = 0; i < count; i++)
            values[i] = ((REAL)k[i] + (half - omega[i])) * scale;
}

CLONES int NAME(modulo_encode)(const REAL *x, uint64_t n, REAL b, int bits, int dither, REAL limit, const REAL *omega,
                               uint64_t start, uint32_t key0, uint32_t key1, uint32_t layer, uint32_t round,
                               int64_t *integers, int width, uint8_t *residues, REAL *values)
{
    const REAL levels = (REAL)(1 << bits), scale = b / levels;
    REAL drawn[CHUNK];
    WHOLE k[CHUNK];
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK, bad = 0;
        const REAL *part = x + done, *w = drawn;
        if (dither == 0) {
            for (int i = 0; i < count; i++) {
                REAL t = FLOOR(part[i] / b * levels);
                int fits = FABS(t) <= limit;
                bad |= !fits;
                k[i] = (WHOLE)(fits ? t : 0);
            }
        } else {
            if (omega != NULL)
                w = omega + done;
            else
                NAME(philox_uniforms)(drawn, (uint64_t)count, start + done, key0, key1, layer, round);
            for (int i = 0; i < count; i++) {
                REAL t = FLOOR(part[i] / b * levels + w[i]);
                int fits = FABS(t) <= limit;
                bad |= !fits;
                k[i] = (WHOLE)(fits ? t : 0);
            }
        }
        if (bad)
            return 0;
        NAME(write_integers)(k, count, done, bits, integers, width, residues);
        if (values != NULL)
            NAME(write_values)(k, count, w, dither, scale, values + done);
    }
    return 1;
}

CLONES int NAME(modulo_recover)(const uint8_t *residues, int width, const REAL *y, uint64_t n, REAL b, int bits,
                                int dither, REAL limit, const REAL *omega, uint64_t start, uint32_t key0,
                                uint32_t key1, uint32_t layer, uint32_t round, int64_t *integers, REAL *values)
{
    const REAL levels = (REAL)(1 << bits), scale = b / levels, one_level = 1 / levels, half = (REAL)0.5;
    const WHOLE turn = (WHOLE)1 << bits;
    REAL drawn[CHUNK];
    WHOLE k[CHUNK], r[CHUNK];
    for (uint64_t done = 0; done < n; done += CHUNK) {
        int count = n - done < CHUNK ? (int)(n - done) : CHUNK, bad = 0;
        const REAL *part = y + done, *w = drawn;
        if (width == 1)
            for (int i = 0; i < count; i++)
                r[i] = residues[done + i];
        else
            for (int i = 0; i < count; i++)
                r[i] = ((const uint16_t *)residues)[done + i];
        if (dither != 0) {
            if (omega != NULL)
                w = omega + done;
            else
                NAME(philox_uniforms)(drawn, (uint64_t)count, start + done, key0, key1, layer, round);
        }
#define RECOVER(OFFSET)                                                       \
    for (int i = 0; i < count; i++) {                                         \
        REAL t = part[i] / b * levels;                                        \
        int fits = FABS(t) <= limit;                                          \
        bad |= !fits;                                                         \
        t = fits ? t : 0;                                                     \
        t = CEIL((t - (REAL)r[i] OFFSET) * one_level - half);                 \
        k[i] = (WHOLE)t * turn + r[i];                                        \
    }
        if (dither == 0) {
            RECOVER(-half)
        } else if (dither == 1) {
            RECOVER()
        } else {
            RECOVER(-(half - w[i]))
        }
#undef RECOVER
        if (bad)
            return 0;
        NAME(write_integers)(k, count, done, bits, integers, 1, NULL);
        if (values != NULL)
            NAME(write_values)(k, count, w, dither, scale, values + done);
    }
    return 1;
}
