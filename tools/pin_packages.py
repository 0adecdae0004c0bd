"""Writes `deploy/requirements.txt`: the versions of `deploy/constraints.txt` with the hashes that pip has to find.

    python tools/pin_packages.py            # needs uv, PyPI and the index of PyTorch
    python tools/pin_packages.py --check    # only compares the versions of the two files; needs no network

The hashes of all files of a version are taken from PyPI, so that one list serves every processor and Python. PyTorch is
the exception: the build without CUDA is not on PyPI. Its hashes are those of the wheels on PyTorch's own index for the
Python of the image. Where that index does not answer, the hashes of the old list stay as long as the version does.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ROOT / "deploy" / "constraints.txt"
HASHED = ROOT / "deploy" / "requirements.txt"
PYPI = "https://pypi.org/simple"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
IMAGE_PYTHON = "cp311"
PROCESSORS = ("x86_64", "aarch64")
_HEADER = """\
# What the image holds, each file with its hash. Written by `python tools/pin_packages.py`; do not edit.
# Linux with glibc, x86-64 or arm64; for PyTorch, Python 3.11:
#   pip install --require-hashes --no-deps --extra-index-url https://download.pytorch.org/whl/cpu -r requirements.txt
"""


def versions(text: str) -> dict[str, str]:
    """Return the version of each package that a list pins, by normalized name."""
    return {normalized(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==([^\s;\\]+)", text)}


def normalized(name: str) -> str:
    """Return a name as indexes write it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel_hashes(page: str, version: str) -> dict[str, str]:
    """Return the SHA-256 of each wheel of torch for the image, by file name, from a page of an index (PEP 503)."""
    wanted = re.compile(
        rf"torch-{re.escape(version)}\+cpu-{IMAGE_PYTHON}-{IMAGE_PYTHON}-manylinux\w*_({'|'.join(PROCESSORS)})\.whl"
    )
    links = _Links()
    links.feed(page)
    found = {}
    for link in links.targets:
        address, _, digest = link.partition("#sha256=")
        name = unquote(address.rsplit("/", 1)[-1])
        if wanted.fullmatch(name) and re.fullmatch(r"[0-9a-f]{64}", digest):
            found[name] = digest
    return found


def torch_section(version: str, hashes: dict[str, str]) -> str:
    """Return the lines that pin torch to wheels, given by file name. Raises SystemExit if a processor has none."""
    for processor in PROCESSORS:
        if not any(name.endswith(f"_{processor}.whl") for name in hashes):
            raise SystemExit(f"no hash of torch {version} for {processor}: run this where {TORCH_INDEX} can be reached")
    names = sorted(hashes)
    lines = [f"# {name}" for name in names]
    lines += [" \\\n    ".join([f"torch=={version}+cpu", *(f"--hash=sha256:{hashes[name]}" for name in names)])]
    return "\n".join(lines) + "\n"


def kept_hashes(text: str, version: str) -> dict[str, str]:
    """Return the hashes of the wheels of torch in a written list, by file name; none if it has another version."""
    found = re.search(rf"(?m)((?:^# torch-.*\n)+)torch=={re.escape(version)}\+cpu((?: \\\n    --hash=\S+)+)", text)
    if found is None:
        return {}
    names = re.findall(r"(?m)^# (torch-\S+)", found[1])
    return dict(zip(names, re.findall(r"sha256:([0-9a-f]{64})", found[2]), strict=True))


def differences(pinned: str, hashed: str) -> list[str]:
    """Return a sentence for each package that the list with hashes lacks, or holds in another version."""
    wanted, written = versions(pinned), versions(hashed)
    wanted["torch"] += "+cpu"
    return [
        f"{name}: {wanted.get(name, 'not')} in {VERSIONS.name}, {written.get(name, 'not')} in {HASHED.name}"
        for name in sorted(wanted.keys() | written.keys())
        if wanted.get(name) != written.get(name)
    ]


class _Links(HTMLParser):
    """Collects the targets of the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _from_pypi(pins: dict[str, str], uv: str) -> str:
    """Return the lines of all packages but torch. Raises SystemExit where uv or PyPI fails."""
    command = [uv, "--no-config", "pip", "compile", "--quiet", "--no-deps", "--universal", "--python-version", "3.11",
               "--generate-hashes", "--no-annotate", "--no-header", "--default-index", PYPI, "-"]  # fmt: skip
    wanted = "".join(f"{name}=={version}\n" for name, version in pins.items() if name != "torch")
    done = subprocess.run(command, input=wanted, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"uv finds no hashes:\n{done.stderr}")
    return done.stdout


def _from_pytorch(version: str) -> dict[str, str]:
    """Return the hashes of the wheels of torch, or none where its index does not answer."""
    try:
        with urllib.request.urlopen(f"{TORCH_INDEX}/torch/", timeout=60) as page:
            return wheel_hashes(page.read().decode(), version)
    except OSError as error:
        print(f"{TORCH_INDEX} does not answer ({error}): keeping the hashes of torch")
        return {}


def main() -> int:
    """Return the exit code: 0, or 1 if --check found that the two lists differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 where versions differ")
    pinned = VERSIONS.read_text()
    if parser.parse_args().check:
        found = differences(pinned, HASHED.read_text())
        print(*found, sep="\n", end="\n" if found else "")
        return 1 if found else 0
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise SystemExit("uv is missing: pip install uv")
    pins = versions(pinned)
    old = HASHED.read_text() if HASHED.exists() else ""
    torch = _from_pytorch(pins["torch"]) or kept_hashes(old, pins["torch"])
    HASHED.write_text(_HEADER + torch_section(pins["torch"], torch) + _from_pypi(pins, uv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
