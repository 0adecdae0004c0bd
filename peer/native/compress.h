#ifndef SOTTOVOCE_COMPRESS_H
#define SOTTOVOCE_COMPRESS_H
#include <stdint.h>
#include <stddef.h>
#endif
