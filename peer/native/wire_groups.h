#ifndef SOTTOVOCE_WIRE_GROUPS_H
#define SOTTOVOCE_WIRE_GROUPS_H
#include <stdint.h>
/* Which spans of `symbols`, cut into `sizes`, share a frequency table (see peer/wire/grouping.py); `logs` is the table
   of logarithms there. Writes how often each of the 256 symbols occurs in `all`, the group of each span, and about how
   many bits, times 2^16, symbols and tables take. Returns how many groups there are (with one, `groups` means nothing),
   or -1 if there is no memory. `width`, where it is not 0: the symbols are codes of that many bits; returns 0 where
   these are spread so evenly that they are better packed. */
int wire_group_spans(const uint8_t *symbols, const int64_t *sizes, uint64_t spans, int width, const int32_t *logs,
                     int64_t *all, uint8_t *groups, int64_t *needed);
#endif
