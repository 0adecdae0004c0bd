"""Generates `peer/proto/` from `proto/`; with --check, only proves that it is up to date.

The generated modules are checked in, so that installing needs no protoc. They run with
the protobuf of their compiler and newer ones, up to the end of the next major version; so pyproject.toml pins the
compiler that belongs to the oldest protobuf it allows. `--check` compares the modules with freshly generated ones,
leaving aside the version, since newer compilers write the same code.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto"
TARGET = ROOT / "peer" / "proto"


def generate(target: Path) -> None:
    """Write the modules of every file in `proto/` below `target`. Raises SystemExit if protoc finds an error."""
    sources = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.proto"))
    well_known_types = str(resources.files("grpc_tools") / "_proto")
    arguments = ["protoc", f"-I{SOURCE}", f"-I{well_known_types}", f"--python_out={target}", f"--pyi_out={target}"]
    if status := protoc.main([*arguments, *sources]):
        raise SystemExit(status)
    for stub in target.rglob("*_pb2.pyi"):
        # protoc leaves out the types of keys and values of a mapping.
        stub.write_text(re.sub(r"\b_Mapping\](?!\[)", "_Mapping[str, object]]", stub.read_text()))


def differences(fresh: Path, checked_in: Path) -> list[str]:
    """Return a sentence for each generated module that is missing, left over or different."""
    new = {path.relative_to(fresh): path for path in _modules(fresh)}
    old = {path.relative_to(checked_in): path for path in _modules(checked_in)}
    found = [f"{path} is missing" for path in sorted(new.keys() - old.keys())]
    found += [f"{path} has no source any more" for path in sorted(old.keys() - new.keys())]
    for path in sorted(new.keys() & old.keys()):
        if _without_version(new[path].read_text()) != _without_version(old[path].read_text()):
            found.append(f"{path} is out of date")
    return found


def _modules(folder: Path) -> list[Path]:
    return [path for pattern in ("*_pb2.py", "*_pb2.pyi") for path in folder.rglob(pattern)]


def _without_version(text: str) -> str:
    text = re.sub(r"(?m)^# Protobuf Python Version: .*$", "", text)
    return re.sub(r"(?s)ValidateProtobufRuntimeVersion\(.*?\)", "", text)


def main() -> int:
    """Return the exit code: 0, or 1 if --check found the generated code out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the generated code is stale")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        found = differences(Path(folder), TARGET)
    for sentence in found:
        print(f"peer/proto/{sentence}; run tools/generate_proto.py", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
