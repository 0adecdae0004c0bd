#ifndef SOTTOVOCE_WIRE_H
#define SOTTOVOCE_WIRE_H
#include <stdint.h>
#include <stddef.h>
#endif
