"""The list with hashes pins everything that the image installs, and nothing stands in it that a machine made up."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import audit_packages, pin_packages

HASHED = pin_packages.HASHED.read_text()
PINS = {name: version.removesuffix("+cpu") for name, version in pin_packages.versions(HASHED).items()}
CUDA = ("nvidia-", "cuda-", "triton")
"""What PyTorch's build on PyPI asks for, and the one without CUDA does not."""


def test_it_pins_what_the_list_of_versions_pins() -> None:
    assert pin_packages.differences(pin_packages.VERSIONS.read_text(), HASHED) == []


def test_each_package_has_hashes_and_no_line_names_an_index_or_a_path() -> None:
    for line in filter(None, HASHED.splitlines()):
        assert re.fullmatch(
            r"#.*|[a-z0-9-]+==[\w.+]+( ; [^/]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line
        ), line  # fmt: skip
    for package in re.split(r"(?m)^(?=[a-z])", HASHED)[1:]:
        assert package.count("--hash=sha256:") >= 1, package
    addresses = re.findall(r"https?://[^\s/]+|file:\S+", HASHED)
    assert set(addresses) == {"https://download.pytorch.org"}


def test_it_pins_all_that_its_packages_ask_for() -> None:
    project = tomllib.loads((pin_packages.ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]["metrics"]
    to_see = [*project["project"]["dependencies"], *project["build-system"]["requires"], *extras]
    seen: set[str] = set()
    while to_see:
        wanted = Requirement(to_see.pop())
        name = pin_packages.normalized(wanted.name)
        if name.startswith(CUDA) or not (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            continue
        assert name in PINS, f"{name} is not pinned"
        if name not in seen:
            seen.add(name)
            to_see += metadata.requires(name) or ()
    assert len(seen) > 20


def test_every_dependency_accepts_the_version_in_the_list() -> None:
    project = tomllib.loads((pin_packages.ROOT / "pyproject.toml").read_text())
    for text in [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["metrics"]]:
        wanted = Requirement(text)
        assert PINS[pin_packages.normalized(wanted.name)] in wanted.specifier, text


def test_a_list_of_another_version_is_noticed() -> None:
    older = HASHED.replace("click==8", "click==7")
    assert pin_packages.differences(pin_packages.VERSIONS.read_text(), older) == [
        f"click: {PINS['click']} in constraints.txt, {PINS['click'].replace('8', '7', 1)} in requirements.txt"
    ]
    newer = pin_packages.VERSIONS.read_text().replace(f"torch=={PINS['torch']}", "torch==9.0")
    assert pin_packages.differences(newer, HASHED) == [
        f"torch: 9.0+cpu in constraints.txt, {PINS['torch']}+cpu in requirements.txt"
    ]


def test_hashes_of_torch_come_from_the_links_of_its_index() -> None:
    digests = {processor: hashlib.sha256(processor.encode()).hexdigest() for processor in ("x86_64", "aarch64")}
    page = "".join(
        f'<a href="/whl/cpu/torch-{version}%2Bcpu-{python}-{python}-{platform}.whl#sha256={digest}">torch</a><br/>'
        for version in ("2.12.0", "2.13.0")
        for python in ("cp311", "cp312")
        for platform, digest in [
            *((f"manylinux_2_28_{processor}", digest) for processor, digest in digests.items()),
            ("win_amd64", "0" * 64),
        ]
    )
    found = pin_packages.wheel_hashes(page, "2.13.0")
    assert found == {
        f"torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_{processor}.whl": digest for processor, digest in digests.items()
    }
    written = pin_packages.torch_section("2.13.0", found)
    assert pin_packages.kept_hashes(written + "xxhash==1.0 \\\n    --hash=sha256:00\n", "2.13.0") == found
    assert pin_packages.kept_hashes(written, "2.14.0") == {}


def test_a_processor_without_a_wheel_is_said() -> None:
    with pytest.raises(SystemExit, match=r"no hash of torch 2\.13\.0 for aarch64"):
        pin_packages.torch_section("2.13.0", {"torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": "0" * 64})


def test_pip_reads_the_list_and_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    name = f"xxhash-{PINS['xxhash']}.tar.gz"
    (tmp_path / name).write_bytes(b"not what was published")
    (only,) = re.findall(r"(?m)^xxhash==(?:.*\\\n)+.*\n?", HASHED)
    (tmp_path / "list.txt").write_text(only)
    pip = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "--dest", str(tmp_path / "out")]
    command = [*pip, "--no-index", "--find-links", str(tmp_path), "--require-hashes", "-r", str(tmp_path / "list.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_builds_are_asked_for_under_the_version_of_pypi() -> None:
    asked = audit_packages.known_to_pypi(HASHED)
    assert re.findall(r"(?m)^torch==.*", asked) == [f"torch=={PINS['torch']} \\"]
    assert pin_packages.versions(asked) == PINS


@pytest.mark.parametrize(
    ("packages", "status", "line"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, "1 packages: 0 known vulnerabilities, 0 not asked for"),
        ([{"name": "a", "version": "1", "vulns": [{"id": "X", "fix_versions": ["2"]}]}], 1, "a 1: X, repaired in 2"),
        ([{"name": "a", "version": "1", "vulns": [{"id": "X", "fix_versions": []}]}], 1, "a 1: X, no repair yet"),
        ([{"name": "a", "skip_reason": "no answer"}], 2, "a: not asked for: no answer"),
        ([], 2, "0 packages: 0 known vulnerabilities, 0 not asked for"),
    ],
)
def test_an_audit_without_an_answer_is_no_clean_one(packages: list[object], status: int, line: str) -> None:
    code, lines = audit_packages.report(json.dumps({"dependencies": packages}))
    assert code == status
    assert lines[0] == line
