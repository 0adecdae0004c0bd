"""The tutorial on a language model, followed to the letter but for sizes, and what its script refuses."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.docs.walk import ROOT, blocks, walk

transformers = pytest.importorskip("transformers", reason="needs transformers: the extra huggingface installs it")

PAGE = ROOT / "docs" / "tutorials" / "language-model.md"
OUT = "--out models/{peer}"
# The rate lets even these few steps unlearn the bytes that no text holds.
SMALL = f"{OUT} --steps 32 --rate 1e-2 --batch 4 --context 32 --width 16 --layers 1 --heads 2"


@pytest.mark.slow
@pytest.mark.timeout(900)  # Nine processes, on machines that may be busy.
@pytest.mark.usefixtures("warm_python")
def test_the_page_leads_from_texts_to_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    walk(PAGE, tmp_path, replace={OUT: SMALL, "--steps 400": "--steps 2"}, timeout_s=800)
    models = tmp_path / "models"
    own = [load_file(models / f"peer-{index}" / "model.safetensors") for index in range(4)]
    mean = {name: torch.stack([each[name].double() for each in own]).mean(0).float() for name in own[0]}

    average = transformers.GPT2LMHeadModel.from_pretrained(models / "average")
    expected = transformers.GPT2LMHeadModel(average.config).eval()
    expected.load_state_dict({**mean, "lm_head.weight": mean["transformer.wte.weight"]})
    windows = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, wanted = (model(windows).logits for model in (average, expected))
    assert (found - wanted).abs().max() <= 1e-5
    # Those of one institute are others.
    expected.load_state_dict({**own[0], "lm_head.weight": own[0]["transformer.wte.weight"]})
    with torch.no_grad():
        assert (found - expected(windows).logits).abs().max() > 1e-3
    # The last two steps of one institute alone began where all of them ended.
    went_on = load_file(models / "own" / "model.safetensors")
    torch.manual_seed(0)
    fresh = transformers.GPT2LMHeadModel(average.config).state_dict()
    assert 0 < _distance(went_on, mean) < _distance(went_on, fresh) / 10


def _distance(model: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two models, over the names of the first."""
    return float(torch.cat([(each - other[name]).flatten() for name, each in model.items()]).norm())


@pytest.fixture
def script(tmp_path: Path) -> Mapping[str, Any]:
    """The names that the script of the page defines."""
    (text,) = (block.text for block in blocks(PAGE) if block.file == "train.py")
    (tmp_path / "train.py").write_text(text)
    return runpy.run_path(str(tmp_path / "train.py"))


def write_texts(folder: Path, *texts: bytes) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text)
    return folder


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "texts holds 0 different .txt files: one is held out, so it takes two or more"),
        ([b"the same", b"the same"], "texts holds 1 different .txt files"),
        ([b"a text", b"caf\xe9"], r"1.txt is not UTF-8 \(byte 3\): convert it with iconv"),
        ([b"a text", b"a\0b"], "1.txt holds zero bytes, so it is no text"),
    ],
)
def test_the_script_names_a_folder_that_holds_no_texts(
    script: Mapping[str, Any], texts: list[bytes], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=said):
        script["documents"](write_texts(tmp_path / "texts", *texts))


def test_a_document_is_either_trained_on_or_held_out(script: Mapping[str, Any], tmp_path: Path) -> None:
    texts = [f"document {number} ä".encode() for number in range(30)]
    folder = write_texts(tmp_path / "texts", *texts, texts[0])
    parts = [bytes(part.tolist()).split(b"\0")[:-1] for part in script["documents"](folder)]
    assert [len(part) for part in parts] == [27, 3]
    assert sorted(parts[0] + parts[1]) == sorted(texts)
    (folder / "0.txt").rename(folder / "100.txt")
    assert [bytes(part.tolist()).split(b"\0")[:-1] for part in script["documents"](folder)] == parts


def run(script: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    script["main"]()


def test_the_script_refuses_less_than_a_context_and_another_tokenizer(
    script: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts", b"one line", b"and two")
    options = ["--texts", texts, "--out", tmp_path / "out"]
    with pytest.raises(SystemExit, match="bytes to train on: a context takes 128; add documents"):
        run(script, monkeypatch, *options, "--width", 8, "--heads", 2)
    size = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    tokens = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **tokens)).save_pretrained(tmp_path / "start")
    with pytest.raises(SystemExit, match="start has a tokenizer of 300 tokens: here they are 256 bytes"):
        run(script, monkeypatch, *options, "--start", tmp_path / "start")


def test_the_script_warns_where_few_bytes_are_read_often(
    script: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts", b"one line", b"and two")
    small = ["--context", 4, "--width", 8, "--heads", 2, "--layers", 1, "--steps", 16]
    run(script, monkeypatch, "--texts", texts, "--out", tmp_path / "out", *small)
    said = capsys.readouterr().out
    assert "held out" in said
    assert "may learn them by heart" in said
    assert (tmp_path / "out" / "config.json").exists()
