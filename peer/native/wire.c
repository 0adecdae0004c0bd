/* Kernels of the wire format: bit packing and index coding. */
#include "wire.h"
