#!/usr/bin/env bash
# Makes FOLDER/python, a Python for arm64 that runs in qemu-user with this checkout, its kernels and PyTorch, on Debian:
#
#   tools/emulate_arm64.sh FOLDER
#   FOLDER/python -m peer version -v
#
# FOLDER/checkout has the tests, which need pytest and hypothesis in FOLDER/packages (pip install --target, with the
# platforms below); those that start a Python of their own fail, unless the kernel hands programs for arm64 to QEMU.
#
# Needs qemu-user, gcc-aarch64-linux-gnu and the environment of `make`. Debian's packages are unpacked in FOLDER, and
# nothing is installed. CPU chooses the processor (qemu-aarch64 -cpu help): neoverse-n1 has the dot product, "max" has
# i8mm too. PyTorch 2.8 is the version whose wheel for arm64 is small; later ones hold CUDA.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:?usage: tools/emulate_arm64.sh FOLDER}"
folder=$(cd "$1" && pwd)
python=$checkout/.venv/bin/python

mkdir -p "$folder"/apt/state/lists/partial "$folder"/apt/cache/archives/partial "$folder"/{debs,system,packages,checkout}
touch "$folder/apt/status"
own=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root -o "Dir::State=$folder/apt/state"
  -o "Dir::State::status=$folder/apt/status" -o "Dir::Cache=$folder/apt/cache")
apt-get "${own[@]}" update -qq
cd "$folder/debs"
apt-get "${own[@]}" download -qq python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libpython3.11-dev libc6 \
  libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libssl3 libffi8 libsqlite3-0 libbz2-1.0 liblzma5 libuuid1 libncursesw6 \
  libtinfo6 libreadline8 libcrypt1
for package in *.deb; do dpkg -x "$package" "$folder/system"; done

install=("$python" -m pip install --quiet --target "$folder/packages" --implementation cp --python-version 3.11
  --abi cp311 --abi abi3 --abi none --only-binary=:all: --no-compile)
for tag in manylinux_2_34 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
  install+=(--platform "${tag}_aarch64")
done
"${install[@]}" --no-deps torch==2.8.0
"${install[@]}" cffi click cryptography grpcio numpy 'protobuf>=6.31,<8' pydantic rich safetensors tomlkit xxhash \
  zstandard filelock typing-extensions sympy networkx jinja2 fsspec setuptools

cd "$checkout"
tar cf - --exclude='*.so' --exclude=__pycache__ peer pyproject.toml tests tools | tar xf - -C "$folder/checkout"
"$python" -c "from peer.native.build import ffibuilder; ffibuilder.emit_c_code('$folder/kernels.c')"
mapfile -t options < <("$python" -c "from peer.native import build; print(*build.OPTIONS, sep='\n')")
mapfile -t sources < <("$python" -c "from peer.native import build; print(*(f'peer/native/{s}' for s in build.SOURCES + build.INTERNAL), sep='\n')")
aarch64-linux-gnu-gcc -shared -fPIC "${options[@]}" -I"$folder/system/usr/include/python3.11" \
  -I"$folder/system/usr/include" -Ipeer/native "$folder/kernels.c" "${sources[@]}" -lm \
  -o "$folder/checkout/peer/native/_kernels.abi3.so"

cat > "$folder/python" <<END
#!/bin/sh
export PYTHONPATH=$folder/checkout:$folder/packages PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
exec qemu-aarch64 -cpu "\${CPU:-neoverse-n1}" -L $folder/system $folder/system/usr/bin/python3.11 "\$@"
END
chmod +x "$folder/python"
