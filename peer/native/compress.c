/* Kernels of the compressors: random numbers, selection, quantization. */
#include "compress.h"
