#ifndef SOTTOVOCE_WIRE_LAYERS_H
#define SOTTOVOCE_WIRE_LAYERS_H
#include <stdint.h>
#include <stddef.h>
/* All layers of a message at once. Arrays have one entry for each layer, in order. `forms` are those of
   peer/compress/columns.py: bits 0 and 1 are 0 for reals, 1 for levels, 2 for residues; bit 2 is set for sparse layers.
   `counts` say how many reals or codes a layer has. */

/* Of sparse layers, whose indices follow one another: their gaps, and of each the code of its indices as
   peer/wire/indices.py chooses it, leaving out the entropy code. `rice_bytes` gets the bytes of all
   Rice codes. Returns 0, or -1 where indices do not ascend strictly below `sizes`. */
int wire_index_codes(const int64_t *indices, const int64_t *counts, const int64_t *sizes, uint64_t layers,
                     int64_t *gaps, uint8_t *codes, int64_t *rice_bytes);
/* The bit string of the fixed gaps; `out` has exactly the bytes that it takes, zeroed. */
void wire_fixed_gaps(const int64_t *gaps, const int64_t *counts, const int64_t *sizes, const uint8_t *codes,
                     uint64_t layers, uint8_t *out, uint64_t size);

/* The sections of a frame, all of whose streams are pooled. `codes` and `gaps`: of the sparse layers. `described`: the
   parameters of levels or residues, as the first section that has them gives them. `checks` and `predicted` may be
   NULL. Returns how many bytes were written, or -1 if `capacity` does not suffice. */
int64_t wire_write_sections(uint64_t layers, const uint8_t *forms, const int64_t *counts, const uint8_t *codes,
                            const int64_t *gaps, int value_type, const uint8_t *described, uint64_t described_size,
                            const double *scalars, int wide, const uint64_t *checks, const uint8_t *predicted,
                            uint8_t *out, uint64_t capacity);
/* The inverse, of sections all of whose streams are pooled, whose reals have one type, and whose codes have one set of
   parameters. `codes` and `places`: of the sparse layers, the codes of their indices and where their Rice codes begin.
   `summary`: the value type, or -1; divisor, base, step and bits of levels, the bits 0 where there are none; the byte
   that describes residues, or -1; how many indices, reals and codes there are, how many indices are in the fixed
   and how many in the entropy code, the bits of the former and the largest of the layers of the latter; how many layers
   are predicted. `single`: no float64.
   Returns where the sections end, or -1: a reader that knows more has to read them, or to say what is wrong. */
int64_t wire_read_sections(const uint8_t *data, uint64_t size, const int64_t *sizes, uint64_t layers, int wide,
                           int single, uint8_t *forms, int64_t *counts, uint8_t *codes, int64_t *places,
                           double *scalars, uint64_t *checks, uint8_t *predicted, int64_t *summary);
/* The indices of the sparse layers among these; `entropy`: the gaps that were in the entropy code. Returns 0, or -1 where
   any index leaves its layer. */
int wire_read_indices(const uint8_t *data, uint64_t size, const int64_t *sizes, uint64_t layers, const uint8_t *forms,
                      const int64_t *counts, const uint8_t *codes, const int64_t *places, const uint8_t *fixed,
                      uint64_t fixed_size, const int64_t *entropy, int64_t *indices);
#endif
