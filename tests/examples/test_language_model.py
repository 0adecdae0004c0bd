"""The tutorial on a language model, followed to the letter but for sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import sottovoce
import torch
from safetensors.torch import load_file

from peer.train.models.gpt import gpt
from tests.docs.walk import ROOT, walk

transformers = pytest.importorskip("transformers", reason="needs transformers: the extra huggingface installs it")

PAGE = ROOT / "docs" / "tutorials" / "language-model.md"
SIZE = "{context=128, width=96, blocks=3}"
# The rate lets even these few steps unlearn the bytes that no text holds.
SMALL = "{context=32, width=16, blocks=1}"
TOGETHER = "--peers 4 --name institutes"
RATE = "--set training.learning_rate=1e-2 --set training.local_steps=4"


@pytest.mark.slow
@pytest.mark.timeout(900)  # Nine processes, on machines that may be busy.
@pytest.mark.usefixtures("warm_python")
def test_the_page_leads_from_texts_to_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    shorter = {SIZE: SMALL, TOGETHER: f"{TOGETHER} --rounds 10 {RATE}", "--rounds 25": "--rounds 1"}
    walk(PAGE, tmp_path, replace=shorter, timeout_s=800)
    mean = load_file(tmp_path / "average" / "model.safetensors")
    own = gpt(16, 1, context=32)
    own.load_state_dict(mean)
    average = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "average")
    windows = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (average(windows).logits - own(windows)).abs().max() <= 1e-5
    # The last steps of one institute alone began where all of them ended.
    went_on = load_file(tmp_path / "own" / "model.safetensors")
    fresh = gpt(16, 1, context=32).state_dict()
    assert 0 < _distance(went_on, mean) < _distance(went_on, fresh) / 2
    # It has learned something: no text holds most of the bytes.
    task = sottovoce.resolve_task("text", {"context": 32}, directory=tmp_path / "texts")
    batch = task.test_data().batch(torch.arange(len(task.test_data())))
    with torch.no_grad():
        assert task.loss(own, batch) < 4.5


def _distance(model: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two models, over the names of the first."""
    return float(torch.cat([(each - other[name]).flatten() for name, each in model.items()]).norm())
