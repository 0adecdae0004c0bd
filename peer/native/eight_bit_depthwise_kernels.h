/* Convolutions of one channel at a time: sixteen channels of a row of results, once for each width of register, in
   the vectors of eight_bit_tile_kernels.h. */

/* sums[pixel][lane] += codes times weights, over `rows` and `columns` of one window for each pixel, of as many of the
   sixteen lanes as a register holds. As many codes are read whatever counts; weights[row * columns_apart + column][wide] are 0 where none does. */
INLINE void NAME(depthwise_window)(const uint8_t *x, size_t row, size_t channels, size_t step, const int32_t *weights,
                                   size_t wide, int columns_apart, int rows, int columns, int pixels, int32_t *sums)
{
    Integers w[9];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            w[r * columns + c] = load_integers(weights + (size_t)(r * columns_apart + c) * wide, LANES);
    for (int p = 0; p < pixels; p++, x += step, sums += SIXTEEN) {
        Integers sum = load_integers(sums, LANES);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sum += load_codes(x + (size_t)r * row + (size_t)c * channels, LANES) * w[r * columns + c];
        memcpy(sums, &sum, sizeof sum);
    }
}

static void NAME(depthwise)(const uint8_t *x, size_t row, size_t channels, size_t step, const int32_t *weights,
                            size_t wide, int rows, int columns, int pixels, int32_t *sums)
{
    memset(sums, 0, (size_t)(pixels * SIXTEEN) * sizeof *sums);
    for (int i = 0; i < SIXTEEN; i += LANES, x += LANES, weights += LANES, sums += LANES)
        if (rows == 3 && columns == 3)
            NAME(depthwise_window)(x, row, channels, step, weights, wide, 3, 3, 3, pixels, sums);
        else if (rows == 2 && columns == 2)
            NAME(depthwise_window)(x, row, channels, step, weights, wide, 2, 2, 2, pixels, sums);
        else
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < columns; c++)
                    NAME(depthwise_window)(x + (size_t)r * row + (size_t)c * channels, row, channels, step,
                                           weights + (size_t)(r * columns + c) * wide, wide, 1, 1, 1, pixels, sums);
}

/* sums[row * columns_apart + column][wide] += gradients times codes less their zero, over a row of pixels. */
INLINE void NAME(depthwise_pixels)(const uint8_t *x, size_t row, size_t channels, size_t step, const uint16_t *gradient,
                                   size_t results, int zero, int columns_apart, int rows, int columns, int pixels,
                                   int lanes, float *sums, size_t wide)
{
    Floats sum[9] = {};
    for (int p = 0; p < pixels; p++, x += step, gradient += results) {
        const Floats g = load_gradient(gradient, lanes);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) {
                const Integers code = load_codes(x + (size_t)r * row + (size_t)c * channels, LANES) - zero;
                sum[r * columns + c] += __builtin_convertvector(code, Floats) * g;
            }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float *to = sums + (size_t)(r * columns_apart + c) * wide;
            store_floats(to, load_floats(to, LANES) + sum[r * columns + c], LANES);
        }
}

static void NAME(depthwise_gradient)(const uint8_t *x, size_t row, size_t channels, size_t step,
                                     const uint16_t *gradient, size_t results, int zero, int rows, int columns,
                                     int pixels, int count, float *sums, size_t wide)
{
    for (; count > 0; count -= LANES, x += LANES, gradient += LANES, sums += LANES)
        if (rows == 3 && columns == 3 && count >= LANES)
            NAME(depthwise_pixels)(x, row, channels, step, gradient, results, zero, 3, 3, 3, pixels, LANES, sums, wide);
        else
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < columns; c++)
                    NAME(depthwise_pixels)(x + (size_t)r * row + (size_t)c * channels, row, channels, step, gradient,
                                           results, zero, 1, 1, 1, pixels, count < LANES ? count : LANES,
                                           sums + (size_t)(r * columns + c) * wide, wide);
}
