#ifndef SOTTOVOCE_WIRE_GROUPS_H
#define SOTTOVOCE_WIRE_GROUPS_H
#include <stdint.h>
/* Which spans share a frequency table (see peer/wire/grouping.py): `counts` has 256 for each span, `logs` is the table
   of logarithms there. Writes the group of each span, and about how many bits, times 2^16, tokens and tables take.
   Returns how many groups there are (with one, `groups` means nothing), or -1 if there is no memory. */
int wire_group_spans(const int64_t *counts, uint64_t spans, const int32_t *logs, uint8_t *groups, int64_t *needed);
#endif
