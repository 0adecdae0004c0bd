#ifndef SOTTOVOCE_WIRE_LAYERS_H
#define SOTTOVOCE_WIRE_LAYERS_H
#include <stdint.h>
#include <stddef.h>
/* All layers of a message at once. Arrays have one entry for each layer, in order. `forms` are those of
   peer/compress/columns.py: bits 0 and 1 are 0 for reals, 1 for levels, 2 for residues; bit 2 is set for sparse layers.
   `counts` say how many reals or codes a layer has. */

/* How sparse layers, whose indices follow one another, send them (see peer/wire/indices.py): the gaps and the code of
   each. Writes what belongs behind the sections, at most 9 bytes an index, to `out`; `plain`: without the entropy code.
   `logs` are those of wire_group_spans. Returns how many bytes that is, -1 where indices do not ascend strictly below
   `sizes`, -2 where there is no memory. */
int64_t wire_write_indices(const int64_t *indices, const int64_t *counts, const int64_t *sizes, uint64_t layers,
                           int plain, const int32_t *logs, int64_t *gaps, uint8_t *codes, uint8_t *out);

/* The sections of a frame, all of whose streams are pooled. `codes` and `gaps`: of the sparse layers. `described`: the
   parameters of levels or residues, as the first section that has them gives them; `greatest_level`: 1, or the largest
   magnitude of a level. `checks` and `predicted` may be NULL. Returns how many bytes were written, -1 if `capacity`
   does not suffice, or -2 if a scale is not finite, or a level times it. */
int64_t wire_write_sections(uint64_t layers, const uint8_t *forms, const int64_t *counts, const uint8_t *codes,
                            const int64_t *gaps, int value_type, const uint8_t *described, uint64_t described_size,
                            const double *scalars, double greatest_level, int wide, const uint64_t *checks,
                            const uint8_t *predicted, uint8_t *out, uint64_t capacity);
/* Whether every one of `n` numbers is a float32. */
int wire_are_singles(const double *v, uint64_t n);
/* A frame up to where its sections end, of a message that has all layers of the layout: all of their streams are pooled,
   reals have one type, and codes have one set of parameters. `bytes` has rows of `layers` each for forms, codes of
   indices, and whether a layer is predicted; `words` for counts, where the Rice codes of indices begin, and checks. What
   is about indices is of the sparse layers alone. `summary`: the value type, or -1; divisor, base, step and bits of
   levels, the bits 0 where there are none; the byte that describes residues, or -1; how many indices, reals and codes
   there are, how many indices are in the fixed and how many in the entropy code, the bits of the former and the largest
   of the layers of the latter; how many layers are predicted; and of the header the kind, whether there is an earlier
   message, sender, round, phase, and the earlier message's round and phase, or 0. `weights`: mixing and push weight. `single`: no
   float64. The checksum is compared where wire_crc32_is_fast, and otherwise left to the caller. Returns where the
   sections end, or -1: a reader that knows more has to read the frame, or to say what is wrong. */
int64_t wire_read_frame(const uint8_t *frame, uint64_t size, const int64_t *sizes, uint64_t layers, int single,
                        uint8_t *bytes, int64_t *words, double *scalars, double *weights, int64_t *summary);
/* What follows the sections of a frame without its checksum, which end at `behind`: the indices of the sparse layers
   among these and, unless `pool` is NULL, the first pool, of reals where there are any and else of codes, `width` bits
   and `itemsize` bytes each. Returns how many bytes that takes, or -1 where an index leaves its layer, the pool is not
   one of wire_read_stream, or anything else is wrong. */
int64_t wire_read_behind(const uint8_t *data, uint64_t size, uint64_t behind, const int64_t *sizes, uint64_t layers,
                         const uint8_t *bytes, const int64_t *words, const int64_t *summary, int64_t *indices,
                         int width, void *pool, int itemsize);
/* The pool that `data` begins with: of all `n` codes or, rotated where they were, of the bit patterns of all reals.
   Returns how many bytes it takes, or -1 as above. */
int64_t wire_read_pool(const uint8_t *data, uint64_t size, const uint8_t *forms, const int64_t *counts,
                       uint64_t layers, int of_reals, int width, uint64_t n, void *out, int itemsize);
#endif
