#ifndef SOTTOVOCE_WIRE_CHECKSUM_H
#define SOTTOVOCE_WIRE_CHECKSUM_H
#include <stdint.h>
#include <stddef.h>
/* The CRC-32 of zlib: `checksum` is that of what comes before, 0 for nothing. */
uint32_t wire_crc32(const uint8_t *data, uint64_t size, uint32_t checksum);
/* Whether this processor multiplies polynomials, so that the above is faster than zlib. */
int wire_crc32_is_fast(void);
#endif
