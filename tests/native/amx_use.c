/* Uses the model of the tile registers rightly, or in one of the ways that a processor refuses.

   Usage: amx_use WAY */
#include "amx_model.h"
#include "processor.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Configuration;

static uint32_t room[16 * 16];

static uint32_t pair(float first, float second)
{
    uint32_t low, high;
    memcpy(&low, &first, sizeof low);
    memcpy(&high, &second, sizeof high);
    return low >> 16 | (high & 0xFFFF0000u);
}

static int differs(const char *what, float found, float wanted)
{
    if (memcmp(&found, &wanted, sizeof found) == 0)
        return 0;
    fprintf(stderr, "%s: %a instead of %a\n", what, (double)found, (double)wanted);
    return 1;
}

/* sums[0][0] of one product of the first row of `left` by the first column of `right`, all else being 0. */
static float product(const uint32_t *left, const uint32_t *right, int pairs, float before)
{
    uint32_t column[16 * 16] = {0}, row[16 * 16] = {0};
    float sums[16 * 16] = {before};
    for (int k = 0; k < pairs; k++) {
        row[k] = left[k];
        column[16 * k] = right[k];
    }
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, row, 64);
    _tile_loadd(2, column, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, sums, 64);
    return sums[0];
}

static int wrong(void)
{
    const float tiny = 0x1p-130f;
    int is = 0;
    /* 1 + 2^-24 + 2^-24 is 1 where each addition rounds; the second of the pairs have a sum of their own. */
    const uint32_t ones[] = {pair(1, 1), pair(1, 0), pair(1, 0)};
    const uint32_t small[] = {pair(1, 0), pair(0x1p-24f, 0), pair(0x1p-24f, 0)};
    const uint32_t apart[] = {pair(1, 0x1p-24f), pair(0, 0x1p-24f)}, two[] = {pair(1, 1), pair(1, 1)};
    is |= differs("each addition rounds", product(ones, small, 3, 0), 1);
    is |= differs("the second numbers have their own sum", product(two, apart, 2, 0), 1 + 0x1p-23f);
    is |= differs("it is added to the tile last", product(ones, small, 3, -1), 0);
    /* (1 + 2^-7)^2 = 1 + 2^-6 + 2^-14, less 1 + 2^-6: nothing is rounded before it is added. */
    const uint32_t square[] = {pair(-1, 0), pair(1 + 0x1p-7f, 0)}, by[] = {pair(1 + 0x1p-6f, 0), pair(1 + 0x1p-7f, 0)};
    is |= differs("products are exact", product(square, by, 2, 0), 0x1p-14f);
    const uint32_t denormal[] = {pair(tiny, 0)}, large[] = {pair(0x1p120f, 0)};
    is |= differs("denormal numbers count as zero", product(denormal, large, 1, 0), 0);
    const uint32_t half[] = {pair(0x1p-100f, 0)}, other[] = {pair(0x1p-30f, 0)};
    is |= differs("denormal results are zero", product(half, other, 1, 0), 0);
    is |= differs("denormal sums are zero", product(half, other, 1, tiny), 0);
    const uint32_t infinite[] = {pair(INFINITY, 0)}, none[] = {pair(0, 0)};
    const float no_number = product(infinite, none, 1, 0);
    if (no_number == no_number) {
        fprintf(stderr, "infinity times zero is %a\n", (double)no_number);
        is = 1;
    }
    return is;
}

int main(int count, char **values)
{
    const char *way = count > 1 ? values[1] : "";
    Configuration c = {.palette = 1};
    for (int i = 0; i < 4; i++) {
        c.rows[i] = 16;
        c.row_bytes[i] = 64;
    }
#define WAY(name) if (strcmp(way, name) == 0)
    WAY("not-granted") _tile_loadconfig(&c);
    processor_tiles();
    WAY("early") _tile_zero(0);
    WAY("palette") c.palette = 2;
    WAY("rows") c.rows[3] = 17;
    WAY("row-bytes") c.row_bytes[3] = 65;
    WAY("half") c.row_bytes[3] = 0;
    WAY("ninth") c.rows[8] = c.row_bytes[8] = 4;
    WAY("fewer-rows") c.rows[1] = 8;
    WAY("fewer-columns") c.row_bytes[2] = 32;
    WAY("fewer-terms") c.row_bytes[1] = 32;
    _tile_loadconfig(&c);
    WAY("late") _tile_release();
    WAY("unconfigured") _tile_loadd(5, room, 64);
    WAY("twice") _tile_dpbusd(0, 1, 1);
    _tile_loadd(1, room, 64);
    _tile_dpbusd(0, 1, 2);
    return wrong();
}
