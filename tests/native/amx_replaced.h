/* Takes the intrinsics of tiles away, which are macros here and there: included before others take their place. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbusd
#undef _tile_dpbf16ps
