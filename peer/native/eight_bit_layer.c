/* Layers of 8-bit training in one call for each direction.

   Between the kernels lie a few numbers for each channel, which torch needs some sixty operators for: with the images of
   CIFAR-10, calling these took as long as a third of a step. They are computed here in the same order, each operation
   rounded by itself: of integers and float32 in float32, of all that torch promotes to it in float64. */
#include "eight_bit_layer.h"
#include "eight_bit.h"
#include "eight_bit_steps.h"
#include "tiers.h"

#include <math.h>
#include <stdlib.h>

int eb_conv_batch_norm_forward(const ConvBatchNorm *layer)
{
    const ConvShape *s = &layer->shape;
    const int channels = s->results, area = s->result_height * s->result_width;
    const int padded = (int)rounded_up(layer->inputs, 4);
    const int64_t count = (int64_t)s->samples * area;
    const size_t size = (size_t)channels;
    int64_t *wide = calloc(2 * size, sizeof *wide);
    int32_t *integers = malloc(4 * size * sizeof *integers);
    float *floats = malloc(2 * size * sizeof *floats);
    int status = -1;
    if (wide == NULL || integers == NULL || floats == NULL)
        goto end;
    int64_t *totals = wide, *squares = wide + size;
    int32_t *sums = integers, *offset = sums + size, *lows = offset + size, *highs = lows + size;
    float *factor = floats, *shift = factor + size;

    float ends[2] = {INFINITY, -INFINITY};
    eb_extremes(layer->weights, (uint64_t)size * (uint64_t)(layer->inputs * s->rows * s->columns), ends);
    const double largest = greatest(-ends[0], ends[1]);
    layer->found[2] = (float)largest;
    if (eb_conv_codes(layer->weights, channels, layer->inputs, s->rows, s->columns, (float)inverse_step(largest),
                      layer->codes, sums))
        goto end;
    if (s->depthwise)
        eb_conv_pack_depthwise(layer->codes, channels, s->rows, s->columns, NULL, s->rows, NULL, s->columns,
                               layer->packed, NULL);
    else
        eb_conv_pack_forward(layer->codes, channels, padded, s->rows, s->columns, layer->packed);

    const float step = (float)(layer->x_scale * (largest / 127.0));
    for (int c = 0; c < channels; c++) {
        const float reach = layer->running_largest[c];
        layer->steps[c] = reach == 0.0f ? 1.0f : reach / 127.0f;
        factor[c] = 1.0f / layer->steps[c] * step;
        shift[c] = 128.0f;
        offset[c] = (int32_t)((uint32_t)sums[c] * (uint32_t)s->filling);
        lows[c] = INT32_MAX;
        highs[c] = INT32_MIN;
    }
    if (eb_conv_forward(s, layer->x, layer->packed, offset, factor, shift, 1.0f, 255.0f, layer->before, lows, highs,
                        totals, squares))
        goto end;

    for (int c = 0; c < channels; c++) {
        const float reach = greatest((float)-lows[c], (float)highs[c]) * step;
        const float known = layer->running_largest[c];
        layer->running_largest[c] = greatest(reach, known + layer->narrowing * (reach - known));

        const double unit = layer->steps[c];
        const double mean = (double)((float)totals[c] / (float)count) * unit;
        const double variance = (double)((float)squares[c] / (float)count) * (unit * unit) - mean * mean;
        const double unbiased = variance * ((double)count / (double)(count > 2 ? count - 1 : 1));
        layer->running_mean[c] += layer->share * ((float)mean - layer->running_mean[c]);
        layer->running_variance[c] += layer->share * ((float)unbiased - layer->running_variance[c]);
        const double inverse = 1.0 / sqrt(variance + layer->epsilon);
        const double slope = (double)layer->gamma[c] * inverse;
        layer->mean[c] = mean;
        layer->inverse_deviation[c] = inverse;
        factor[c] = (float)(slope * unit * layer->inverse_step);
        shift[c] = (float)(((double)layer->beta[c] - slope * mean) * layer->inverse_step + layer->zero);
    }
    layer->found[0] = INFINITY;
    layer->found[1] = -INFINITY;
    const size_t sample = (size_t)area * size;
    ResidualSum sum = layer->sum == NULL ? (ResidualSum){0} : *layer->sum;
    for (size_t at = 0; at < (size_t)s->samples * sample; at += sample) {
        eb_norm_forward(layer->before + at, 1, area, channels, 0, NULL, factor, shift, layer->low, 255.0f,
                        layer->sum == NULL ? NULL : &sum, layer->out + at, layer->found);
        sum.other = sum.other == NULL ? NULL : sum.other + sample;
    }
    status = 0;
end:
    free(wide);
    free(integers);
    free(floats);
    return status;
}

int eb_batch_norm_backward(const uint8_t *codes, const uint16_t *gradient, int samples, int area, int channels,
                           const float *steps, const double *mean, const double *inverse_deviation, const float *gamma,
                           const double *sums, const double *sums_with_q, double count, float *gamma_gradient,
                           float *beta_gradient, uint16_t *out, float *largest)
{
    const size_t size = (size_t)channels, sample = (size_t)area * size;
    float *slopes = malloc(3 * size * sizeof *slopes);
    if (slopes == NULL)
        return -1;
    float *linears = slopes + size, *constants = linears + size;
    for (int c = 0; c < channels; c++) {
        const double unit = steps[c], inverse = inverse_deviation[c];
        const double weighted = sums_with_q[c] * unit - mean[c] * sums[c];
        const double slope = (double)gamma[c] * inverse;
        /* dx = gamma / sigma (g - mean(g) - (x - mu) / sigma^2 mean(g (x - mu))) */
        const double linear = -slope * (inverse * inverse) * weighted / count;
        gamma_gradient[c] = (float)(weighted * inverse);
        beta_gradient[c] = (float)sums[c];
        slopes[c] = (float)slope;
        linears[c] = (float)(linear * unit);
        constants[c] = (float)(-slope * sums[c] / count - linear * mean[c]);
    }
    *largest = 0.0f;
    for (int n = 0; n < samples; n++, codes += sample, gradient += sample, out += sample)
        *largest = greatest(*largest, eb_norm_backward(codes, gradient, 1, area, channels, 0, NULL, slopes, linears,
                                                       constants, NULL, NULL, NULL, NULL, out));
    free(slopes);
    return 0;
}

/* The taps of a window that reach pixels stride * j + parity of the input, in the order of the results that they belong
   to; returns how many, and the first of these results less j. */
static int taps_of(int kernel, int stride, int parity, int32_t *taps, int *first)
{
    const int padding = kernel / 2;
    int count = 0;
    for (int tap = kernel - 1; tap >= 0; tap--)
        if ((parity + padding - tap) % stride == 0)
            taps[count++] = tap;
    *first = count ? (parity + padding - taps[0]) / stride : 0;
    return count;
}

int eb_conv_input_gradient(const ConvInputGradient *layer)
{
    const ConvInputGradient l = *layer;
    const int padded = l.depthwise ? l.outputs : (int)rounded_up(l.inputs, 4);
    const size_t numbers = (size_t)l.samples * (size_t)l.result_height * (size_t)l.result_width * (size_t)l.outputs;
    const size_t results = (size_t)l.samples * (size_t)l.height * (size_t)l.width * (size_t)padded;
    int32_t *integers = malloc(((size_t)l.outputs + (size_t)padded + 2 * (size_t)l.kernel) * sizeof *integers);
    if (integers == NULL)
        return -1;
    int32_t *sums = integers, *offset = sums + l.outputs, *row_taps = offset + padded;
    int32_t *column_taps = row_taps + l.kernel;
    int status = eb_conv_codes(l.weights, l.outputs, l.inputs, l.kernel, l.kernel, l.weights_inverse, l.codes, sums);
    eb_quantize_gradient(l.gradient, numbers, l.gradient_inverse, l.key0, l.key1, l.gradient_codes);
    /* Pixels between the windows get no gradient. */
    if (l.kernel < l.stride)
        memset(l.out, 0, results * sizeof *l.out);
    *l.largest = 0.0f;
    for (int y = 0; y < l.stride && y < l.height && status == 0; y++)
        for (int x = 0; x < l.stride && x < l.width && status == 0; x++) {
            ConvShape shape = {.samples = l.samples, .height = l.result_height, .width = l.result_width,
                               .channels = l.outputs, .step = 1, .results = padded, .out_height = l.height,
                               .out_width = l.width, .out_step = l.stride, .out_top = y, .out_left = x,
                               .filling = 128, .flip = 128, .depthwise = l.depthwise};
            shape.rows = taps_of(l.kernel, l.stride, y, row_taps, &shape.top);
            shape.columns = taps_of(l.kernel, l.stride, x, column_taps, &shape.left);
            if (shape.rows == 0 || shape.columns == 0)
                continue;
            shape.result_height = (l.height - y + l.stride - 1) / l.stride;
            shape.result_width = (l.width - x + l.stride - 1) / l.stride;
            if (l.depthwise)
                eb_conv_pack_depthwise(l.codes, padded, l.kernel, l.kernel, row_taps, shape.rows, column_taps,
                                       shape.columns, l.packed, offset);
            else
                eb_conv_pack_backward(l.codes, l.outputs, padded, l.kernel, l.kernel, row_taps, shape.rows,
                                      column_taps, shape.columns, l.packed, offset);
            for (int i = 0; i < padded; i++)
                offset[i] *= 128;
            status = eb_conv_backward(&shape, l.gradient_codes, l.packed, offset, l.factor, l.added, l.mask, l.masked,
                                      l.out, l.largest);
        }
    free(integers);
    return status;
}
