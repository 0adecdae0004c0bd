/* What the tile instructions do, as Intel's Software Developer's Manual says under LDTILECFG, TILELOADD, TILESTORED,
   TDPBUSD and TDPBF16PS. */
#include "amx_model.h"
#include "processor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILES 8
#define MOST_ROWS 16
#define MOST_BYTES 64

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Configuration;

typedef union {
    uint8_t bytes[MOST_BYTES];
    int8_t signed_bytes[MOST_BYTES];
    uint16_t halves[MOST_BYTES / 2];
    int32_t integers[MOST_BYTES / 4];
    float floats[MOST_BYTES / 4];
} Row;

typedef struct {
    int rows, row_bytes;
    Row row[MOST_ROWS];
} Register;

static _Thread_local int configured;
static _Thread_local Register registers[TILES];
static int granted;

/* In the place of that of processor.c: this processor has tiles, and the process may use them once it has asked. */
int processor_tiles(void)
{
    __atomic_store_n(&granted, 1, __ATOMIC_RELAXED);
    return 1;
}

static void require(int holds, const char *otherwise)
{
    if (holds)
        return;
    fprintf(stderr, "AMX: %s\n", otherwise);
    abort();
}

static Register *tile(int number)
{
    require(configured, "a tile is used before the configuration");
    require(number >= 0 && number < TILES, "there is no such tile");
    require(registers[number].rows > 0, "a tile is used that was not configured");
    return &registers[number];
}

void amx_model_configure(const void *configuration)
{
    Configuration c;
    require(__atomic_load_n(&granted, __ATOMIC_RELAXED), "tiles are configured before the kernel granted them");
    memcpy(&c, configuration, sizeof c);
    require(c.palette == 1, "the palette is not 1");
    /* The instruction takes others, to go on with a load that was interrupted. */
    require(c.start_row == 0, "the first row is not 0");
    for (size_t i = 0; i < sizeof c.reserved; i++)
        require(c.reserved[i] == 0, "reserved bytes are not 0");
    for (int i = 0; i < 16; i++) {
        require(i < TILES || (c.rows[i] == 0 && c.row_bytes[i] == 0), "there is no such tile");
        require(c.rows[i] <= MOST_ROWS, "a tile has more than 16 rows");
        require(c.row_bytes[i] <= MOST_BYTES, "a row has more than 64 bytes");
        require((c.rows[i] == 0) == (c.row_bytes[i] == 0), "a tile has rows or bytes, but not both");
    }
    memset(registers, 0, sizeof registers);
    for (int i = 0; i < TILES; i++) {
        registers[i].rows = c.rows[i];
        registers[i].row_bytes = c.row_bytes[i];
    }
    configured = 1;
}

void amx_model_release(void)
{
    configured = 0;
    memset(registers, 0, sizeof registers);
}

void amx_model_zero(int number)
{
    Register *t = tile(number);
    memset(t->row, 0, sizeof t->row);
}

void amx_model_load(int number, const void *base, size_t stride)
{
    Register *t = tile(number);
    memset(t->row, 0, sizeof t->row);
    for (int r = 0; r < t->rows; r++)
        memcpy(t->row[r].bytes, (const uint8_t *)base + (size_t)r * stride, (size_t)t->row_bytes);
}

void amx_model_store(int number, void *base, size_t stride)
{
    const Register *t = tile(number);
    for (int r = 0; r < t->rows; r++)
        memcpy((uint8_t *)base + (size_t)r * stride, t->row[r].bytes, (size_t)t->row_bytes);
}

static Register *fitting(int sums, int left, int right)
{
    const Register *c = tile(sums), *a = tile(left), *b = tile(right);
    require(sums != left && sums != right && left != right, "two operands of a product are the same tile");
    require(c->row_bytes % 4 == 0 && a->row_bytes % 4 == 0 && b->row_bytes % 4 == 0,
            "a product takes rows of whole 32 bits");
    require(c->rows == a->rows, "the left tile of a product has not as many rows as the sums");
    require(c->row_bytes == b->row_bytes, "the right tile of a product has not as many columns as the sums");
    require(a->row_bytes / 4 == b->rows, "the left tile of a product has not as many columns as the right one rows");
    return &registers[sums];
}

void amx_model_multiply_bytes(int sums, int left, int right)
{
    Register *c = fitting(sums, left, right);
    const Register *a = &registers[left], *b = &registers[right];
    for (int m = 0; m < c->rows; m++)
        for (int k = 0; k < a->row_bytes / 4; k++)
            for (int n = 0; n < c->row_bytes / 4; n++)
                for (int i = 0; i < 4; i++)
                    /* Sums wrap around, as those of the instruction do. */
                    c->row[m].integers[n] = (int32_t)((uint32_t)c->row[m].integers[n]
                                                      + (uint32_t)(a->row[m].bytes[4 * k + i]
                                                                   * b->row[k].signed_bytes[4 * n + i]));
}

static float widened(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* "FP32 FMA with DAZ=FTZ=1, RNE rounding": the first and the second of the pairs have a sum each, the two are added,
   and then to the tile. */
__attribute__((noinline, target("avx512f,fma"))) static void multiply_pairs(Register *c, const Register *a,
                                                                           const Register *b)
{
    for (int m = 0; m < c->rows; m++) {
        float first[MOST_BYTES / 4] = {0}, second[MOST_BYTES / 4] = {0};
        for (int k = 0; k < a->row_bytes / 4; k++)
            for (int n = 0; n < c->row_bytes / 4; n++) {
                first[n] = fmaf(widened(a->row[m].halves[2 * k]), widened(b->row[k].halves[2 * n]), first[n]);
                second[n] = fmaf(widened(a->row[m].halves[2 * k + 1]), widened(b->row[k].halves[2 * n + 1]), second[n]);
            }
        for (int n = 0; n < c->row_bytes / 4; n++) {
            const float both = first[n] + second[n];
            c->row[m].floats[n] = c->row[m].floats[n] + both;
        }
    }
}

void amx_model_multiply_pairs(int sums, int left, int right)
{
    Register *c = fitting(sums, left, right);
    /* Denormal numbers are taken as zero and returned as zero, rounding is to nearest, and no exception is raised. */
    const unsigned kept = _mm_getcsr();
    _mm_setcsr(_MM_MASK_MASK | _MM_ROUND_NEAREST | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    multiply_pairs(c, &registers[left], &registers[right]);
    _mm_setcsr(kept);
}
