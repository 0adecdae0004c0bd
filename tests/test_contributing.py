"""CONTRIBUTING.md says in which files something is added. Each list is tried: a small example is added to a copy of the
tree, in these files and in no others, and the gates that would miss a file are run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LISTS = "tests/test_docs.py::test_the_features_list_every_algorithm_and_compressor"
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


@dataclass(frozen=True)
class Addition:
    """An example of what somebody adds."""

    heading: str
    """That of its list."""
    new: Mapping[str, str]
    """File → its text."""
    edits: Mapping[str, tuple[tuple[str, str], ...]]
    """File → (a line or a part of one that is there once, what takes its place)."""
    command: tuple[str, ...]
    """`sotto` with these arguments shows that it works."""
    shows: str
    """A part of what that prints."""
    tests: tuple[str, ...] = field(default=())
    """Tests that hold lists of all things of this kind."""

    @property
    def files(self) -> list[str]:
        return sorted([*self.new, *self.edits])


COMPRESSOR = Addition(
    "A compressor with a setting",
    {
        "peer/compress/threshold.py": '''"""Values above a share of the largest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from peer.compress.base import Draws, ErrorBound
from peer.compress.magnitude import max_magnitude
from peer.compress.payload import Dense, FloatArray, Sparse, ValueType


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Sends the values of at least `threshold` times the layer's largest magnitude. Biased."""

    kind: ClassVar[str] = "threshold"
    summary: ClassVar[str] = "values of at least a share of the layer's largest magnitude; biased"
    unbiased: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    threshold: float

    def compress(self, v: FloatArray, layer: int, draws: Draws) -> Sparse:
        kept = np.flatnonzero(np.abs(v) >= self.threshold * max_magnitude(v))
        return Sparse(v.size, kept.astype(np.int64), Dense(v[kept].copy(), ValueType.FLOAT32))

    def bits_per_value(self, size: int) -> float:
        return 32.0

    def error_bound(self, size: int) -> ErrorBound:
        """The largest value is always sent, and is at least 1 / size of the square."""
        return ErrorBound(contraction=1.0 / size)
'''
    },
    {
        "peer/compress/__init__.py": (
            (
                "from peer.compress.top_k import",
                "from peer.compress.threshold import Threshold\nfrom peer.compress.top_k import",
            ),
            ("| Sign | Ternary |", "| Sign | Ternary | Threshold |"),
            ("Sign, Ternary,", "Sign, Ternary, Threshold,"),
        ),
        "peer/config/options.py": (
            (
                '    rounding: Literal["nearest", "stochastic", "dither"] | None = None\n',
                "    threshold: Annotated[float, Field(gt=0, le=1)] = 0.1\n"
                '    """threshold: share of a layer\'s largest magnitude from which on a value is sent."""\n'
                '    rounding: Literal["nearest", "stochastic", "dither"] | None = None\n',
            ),
        ),
        "tests/compress/test_build.py": (
            ('    "ternary": {},\n', '    "ternary": {},\n    "threshold": {"threshold": 0.5},\n'),
        ),
        "docs/features.md": (("`ternary`,", "`ternary`, `threshold`,"),),
    },
    (
        *("simulate", "--peers", "3", "--no-save", "--no-live", "--no-baseline", "--set", "run.rounds=2"),
        *("--set", "compressor.kind=threshold", "--set", "compressor.threshold=0.2"),
    ),
    "quant-sgp, threshold",
    ("tests/compress/test_build.py", "tests/config/test_options.py", LISTS),
)

ALGORITHM = Addition(
    "An algorithm",
    {
        "peer/gossip/eager.py": '''"""D-PSGD under another name."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from peer.gossip.base import AlgorithmSpec
from peer.gossip.exact import DPsgd


class Eager(DPsgd):
    """x ← x + η Σ_j (W_ij − I_ij) x_j − γ g(x)."""

    spec: ClassVar[AlgorithmSpec] = replace(
        DPsgd.spec, name="eager", summary="As d-psgd.", source="an example", robust_mixing=False
    )
'''
    },
    {
        "peer/gossip/__init__.py": (
            (
                "from peer.gossip.error_feedback import",
                "from peer.gossip.eager import Eager\nfrom peer.gossip.error_feedback import",
            ),
            ("    NaiveQuantized,\n    Sgp,", "    NaiveQuantized,\n    Eager,\n    Sgp,"),
        ),
        "peer/gossip/validate.py": (('    "d-psgd": "sgp",\n', '    "d-psgd": "sgp",\n    "eager": "sgp",\n'),),
        "tests/gossip/reference.py": (('name == "d-psgd":', 'name in ("d-psgd", "eager"):'),),
        "tests/gossip/test_against_reference.py": (
            (
                '    yield "d-psgd", {"averaging_rate": 0.7}\n',
                '    yield "d-psgd", {"averaging_rate": 0.7}\n    yield "eager", {}\n',
            ),
        ),
        "tests/gossip/test_state.py": (('    "sgp": {},\n', '    "sgp": {},\n    "eager": {},\n'),),
        "tests/gossip/test_validate.py": (
            (
                '    "d-psgd": ("ring", NONE, {}),\n',
                '    "d-psgd": ("ring", NONE, {}),\n    "eager": ("ring", NONE, {}),\n',
            ),
            (
                '"d-psgd", "deep-squeeze", "choco-sgd", "local"}',
                '"d-psgd", "eager", "deep-squeeze", "choco-sgd", "local"}',
            ),
        ),
        "tests/stress/plausible.py": (('    "d-psgd": (RING,),\n', '    "d-psgd": (RING,),\n    "eager": (RING,),\n'),),
        "docs/features.md": (("`naive-quantized`, `deep", "`naive-quantized`, `eager`, `deep"),),
    },
    (
        *("simulate", "--peers", "3", "--no-save", "--no-live", "--no-baseline", "--set", "run.rounds=2"),
        *("--set", "algorithm.name=eager", "--set", "graph.kind=ring"),
    ),
    "eager, none",
    (
        *("tests/gossip/test_state.py", "tests/gossip/test_validate.py", LISTS),
        "tests/gossip/test_against_reference.py::test_every_algorithm_has_a_case",
    ),
)

OPTION = Addition(
    "An option of one device",
    {},
    {
        "peer/config/options.py": (
            (
                "    slow_down: NonNegative = 0.0\n",
                '    pause_s: NonNegative = 0.0\n    """Pause after each round."""\n    slow_down: NonNegative = 0.0\n',
            ),
        ),
        "peer/daemon/process.py": (
            (
                "                await self._after_round(record)\n",
                "                await self._after_round(record)\n"
                "                await asyncio.sleep(self._config.peer.pause_s)\n",
            ),
        ),
    },
    ("validate", "--peers", "3", "--set", "peer.pause_s=-1"),
    "peer.pause_s",
    ("tests/config/test_options.py",),
)

COMMAND = Addition(
    "A command",
    {
        "peer/cli/digest.py": '''"""`sotto digest`: what devices compare of their configurations."""

from __future__ import annotations

from pathlib import Path

import click

from peer.cli.app import SottoCommand, print_json
from peer.cli.options import json_option


@click.command(cls=SottoCommand)
@click.argument("config", type=click.Path(path_type=Path))
@json_option
def digest(config: Path, as_json: bool) -> None:
    """Print the digest of what all devices share of a configuration.

    \\b
    Examples:
      sotto digest peer.toml
      sotto digest peer.toml --json
    """
    from peer.config.options import load

    found = load(config).run_digest()
    if as_json:
        print_json({"digest": found})
    else:
        click.echo(found)
''',
    },
    {
        "peer/cli/__init__.py": (
            (
                '{"validate": "validate"}',
                '{"validate": "validate", "digest": "digest"}',
            ),
        )
    },
    ("lab", "digest", "--help"),
    "Print the digest of what all devices share",
    ("tests/cli/test_documentation.py",),
)

ADDITIONS = (COMPRESSOR, ALGORITHM, OPTION, COMMAND)


class Copy:
    """A copy of the tree, in which commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        kernels = (str(each.relative_to(ROOT)) for each in (ROOT / "peer" / "native").glob("_kernels*.so"))
        for name in {*filter(None, listed.stdout.decode().split("\0")), *kernels}:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def apply(self, addition: Addition) -> None:
        for name, text in addition.new.items():
            assert not (self.folder / name).exists(), name
            (self.folder / name).write_text(text, "utf-8")
        for name, edits in addition.edits.items():
            text = (self.folder / name).read_text("utf-8")
            for before, after in edits:
                assert text.count(before) == 1, (name, before)
                text = text.replace(before, after)
            (self.folder / name).write_text(text, "utf-8")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        paths = (self.folder, self.folder / "peer" / "library" / "api")
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
        )


def sections() -> Iterator[tuple[str, list[str]]]:
    """Yield the headings of the page with the files that the items below each begin with."""
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        yield heading, re.findall(r"^- `([^`]+)`", text, flags=re.MULTILINE)


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda each: each.heading)
def test_the_page_lists_the_files_of_its_example(addition: Addition) -> None:
    assert sorted(dict(sections())[addition.heading]) == addition.files


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_what_is_added_needs_these_files_and_no_others(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    for addition in ADDITIONS:
        copy.apply(addition)
    changed = sorted({file for addition in ADDITIONS for file in addition.files if file.endswith(".py")})
    tests = sorted({test for addition in ADDITIONS for test in addition.tests})
    for command in (
        ("tools.render_docs",),
        ("ruff", "check", "--no-cache", *changed),
        ("ruff", "format", "--no-cache", "--check", *changed),
        ("vulture",),
        ("pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/test_layers.py", *tests),
    ):
        done = copy.run(*command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for addition in ADDITIONS:
        shown = copy.run("peer", *addition.command)
        assert addition.shows in shown.stdout + shown.stderr, addition.command
