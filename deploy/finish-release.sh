#!/usr/bin/env bash
# Adds to a folder of wheels a bill of materials (CycloneDX) of what the wheel for this machine installs, and the
# checksums of all files: deploy/finish-release.sh wheelhouse
#
# PIP_OPTIONS says where packages come from, as in deploy/Dockerfile.
set -euo pipefail
folder=$(cd "$1" && pwd)
options=${PIP_OPTIONS-"--extra-index-url https://download.pytorch.org/whl/cpu"}
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/installed"
python3 -m venv "$work/tool"
wheel=$(find "$folder" -name "sottovoce-*-cp311-abi3-*$(uname -m).whl" | sort | tail -1)
# shellcheck disable=SC2086  # Several options.
"$work/installed/bin/pip" install --quiet --disable-pip-version-check $options "$wheel"
"$work/installed/bin/pip" uninstall --quiet --yes pip setuptools
"$work/tool/bin/pip" install --quiet --disable-pip-version-check "cyclonedx-bom>=7"
"$work/tool/bin/cyclonedx-py" environment --output-reproducible --output-format JSON \
  --pyproject "$(dirname "$0")/../pyproject.toml" --output-file "$folder/sottovoce.cdx.json" "$work/installed"
rm -f "$folder/SHA256SUMS"
(cd "$folder" && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" SHA256SUMS && sha256sum --check --quiet SHA256SUMS)
echo "$folder: $(grep -c . "$folder/SHA256SUMS") files, $(grep -c '"bom-ref"' "$folder/sottovoce.cdx.json") components"
