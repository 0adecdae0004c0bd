"""How the native kernels are compiled: one extension module out of every `.c` file here, declared by the `.h` files.

No -march=native, no fast-math, no contraction: what is shipped must run on any processor of the family and return the
same bits on each, which are those of the numpy fall-back, `evonorm.c` excepted. Kernels that gain from wider registers
are compiled several times and chosen at load time (`target_clones`).
"""

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = (
    "compress.c",
    "compress_layers.c",
    "eight_bit.c",
    "eight_bit_attention.c",
    "eight_bit_conv.c",
    "eight_bit_norm.c",
    # After those whose types it takes.
    "eight_bit_layer.c",
    "eight_bit_linear.c",
    "evonorm.c",
    "factors.c",
    "processor.c",
    "wire.c",
    "wire_checksum.c",
    "wire_groups.c",
    "wire_layers.c",
    "wire_streams.c",
    "wire_tables.c",
)
INTERNAL = ("eight_bit_amx.c", "eight_bit_tiles.c")
"""What no Python calls."""
OPTIONS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi")


def declarations() -> str:
    """Return what the headers declare, without the lines of the preprocessor, which cffi cannot read."""
    lines = [line for source in SOURCES for line in (HERE / source).with_suffix(".h").read_text().splitlines()]
    return "\n".join(line for line in lines if not line.startswith("#"))


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "peer.native._kernels",
    "\n".join(f'#include "{Path(source).with_suffix(".h")}"' for source in SOURCES),
    sources=[f"peer/native/{source}" for source in SOURCES + INTERNAL],
    include_dirs=["peer/native"],
    extra_compile_args=list(OPTIONS),
    optional=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
