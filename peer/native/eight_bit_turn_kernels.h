/* Columns of numbers as rows, once for each width of register. Sixteen bytes at a time in all of them: what is turned
   has few columns (nine taps), or lies too far apart for more to be gained. */
#ifndef SOTTOVOCE_EIGHT_BIT_TURN_KERNELS_H
#define SOTTOVOCE_EIGHT_BIT_TURN_KERNELS_H
typedef float FourFloats __attribute__((vector_size(16)));
typedef uint64_t TwoLongs __attribute__((vector_size(16)));
typedef uint8_t SixteenBytes __attribute__((vector_size(16)));

/* The bytes of a and b by turns: of their first halves, and of their second ones. */
#define FIRST_BYTES(a, b) SHUFFLED(SixteenBytes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define LAST_BYTES(a, b) SHUFFLED(SixteenBytes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#endif

/* Eight columns of sixteen rows of codes. Taking rows that are half of them apart by turns puts, after as many times as
   it takes to halve them to one, every column in a row. */
INLINE void NAME(turn_eight_columns)(const int8_t *from, size_t from_row, int8_t *to, size_t to_row)
{
    SixteenBytes rows[SIXTEEN], v[8], w[8];
    _Pragma("GCC unroll 16") for (int i = 0; i < SIXTEEN; i++)
    {
        /* Through a register: of a copy into half of a vector, compilers make two stores, and wait for both. */
        uint64_t eight;
        memcpy(&eight, from + (size_t)i * from_row, sizeof eight);
        rows[i] = (SixteenBytes)(TwoLongs){eight, 0};
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) v[i] = FIRST_BYTES(rows[i], rows[i + 8]);
    _Pragma("GCC unroll 3") for (int round = 0; round < 3; round++)
    {
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
        {
            w[2 * i] = FIRST_BYTES(v[i], v[i + 4]);
            w[2 * i + 1] = LAST_BYTES(v[i], v[i + 4]);
        }
        memcpy(v, w, sizeof v);
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) memcpy(to + (size_t)i * to_row, &v[i], sizeof v[i]);
}

/* Codes [rows, columns] as [columns, rows], whose rows are `to_row` apart. */
static inline void NAME(turn_codes)(const int8_t *from, int rows, int columns, int8_t *to, size_t to_row)
{
    int row = 0;
    for (; row + SIXTEEN <= rows; row += SIXTEEN, from += SIXTEEN * columns) {
        int column = 0;
        for (; column + 8 <= columns; column += 8)
            NAME(turn_eight_columns)(from + column, (size_t)columns, to + (size_t)column * to_row + row, to_row);
        for (; column < columns; column++)
            for (int i = 0; i < SIXTEEN; i++)
                to[(size_t)column * to_row + (size_t)(row + i)] = from[i * columns + column];
    }
    for (; row < rows; row++, from += columns)
        for (int column = 0; column < columns; column++)
            to[(size_t)column * to_row + (size_t)row] = from[column];
}

/* Numbers [rows, columns] times `factor` as [columns, rows]. */
static inline void NAME(turn_floats)(const float *from, size_t from_row, int rows, int columns, float factor, float *to,
                              size_t to_row)
{
    int column = 0;
    for (; column + 4 <= columns; column += 4, from += 4, to += 4 * to_row) {
        int row = 0;
        for (; row + 4 <= rows; row += 4) {
            FourWords v[4];
            for (int i = 0; i < 4; i++) {
                memcpy(&v[i], from + (size_t)(row + i) * from_row, sizeof v[i]);
                v[i] = (FourWords)((FourFloats)v[i] * factor);
            }
            NAME(turn_four)(v);
            for (int i = 0; i < 4; i++)
                memcpy(to + (size_t)i * to_row + row, &v[i], sizeof v[i]);
        }
        for (; row < rows; row++)
            for (int i = 0; i < 4; i++)
                to[(size_t)i * to_row + (size_t)row] = from[(size_t)row * from_row + (size_t)i] * factor;
    }
    for (; column < columns; column++, from++, to += to_row)
        for (int row = 0; row < rows; row++)
            to[row] = from[(size_t)row * from_row] * factor;
}
