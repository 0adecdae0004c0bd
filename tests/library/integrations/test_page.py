"""The scripts of docs/own-loop.md for frameworks run as they stand there."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import sottovoce

from tests.docs.walk import patched
from tests.library.integrations.kits import PEERS, ROUNDS
from tests.library.scripts import write_kits

PAGE = Path(__file__).parents[3] / "docs" / "own-loop.md"
NEEDED = {
    "Hugging Face `Trainer`": "transformers",
    "PEFT: exchange adapters only": "peft",
    "Lightning": "lightning",
    "Accelerate": "accelerate",
    "Data that flwr-datasets splits": "flwr_datasets",
}
"""Title of a section with a script → the package that it needs."""


def scripts() -> dict[str, str]:
    """Return the scripts of the page by the titles of their sections."""
    found, last = {}, ""
    for section in re.split(r"^### ", PAGE.read_text().partition("\n## With a framework\n")[2], flags=re.MULTILINE)[1:]:
        code = re.findall(r"^```(python|diff)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        if code:
            # What changes a script is said of the one before it.
            ((kind, text),) = code
            found[section.partition("\n")[0]] = last = patched(last, text) if kind == "diff" else text
    return found


def test_every_script_is_run() -> None:
    assert scripts().keys() == NEEDED.keys()


@pytest.mark.parametrize("title", NEEDED)
def test_the_script_trains_with_others(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NEEDED[title], reason=f"needs {NEEDED[title]}, which .ci/run installs")
    monkeypatch.chdir(tmp_path)
    module: dict[str, Any] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(scripts()[title], str(PAGE), "exec"), module)
        settings = ("graph.kind=complete", "compressor.fraction=0.5")
        (file, *_) = write_kits(tmp_path / "kits", PEERS, f"run.rounds={ROUNDS}", *settings)
        simulated = sottovoce.simulate(module["train"], file)
    assert simulated.sent_bytes > 0
    assert simulated.consensus_distance < 1.0
