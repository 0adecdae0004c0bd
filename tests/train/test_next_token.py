"""The task text: loss in nats a byte, by subfolder and over all, and steps that a restart does not change."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from peer.config.options import TrainingOptions, load
from peer.errors import ConfigError, DataError
from peer.ops.hub_folder import hub_files
from peer.records import Criterion
from peer.train.datasets.tokens import read_encoding
from peer.train.local_step import Trainer
from peer.train.metrics import metrics_of
from peer.train.model_file import save_model
from peer.train.models.gpt import gpt
from peer.train.next_token import NextToken
from peer.train.stacked import StackedTrainer
from peer.train.tasks import configured, resolve_task
from tests.cli.runner import sotto
from tests.train.test_stacked import all_gradients

SMALL = {"context": 16, "width": 16, "blocks": 1}
OPTIONS = TrainingOptions(batch_size=4, momentum="adamw", weight_decay=0.1, clip_norm=1.0, local_steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, word in (("code", "def f(x): return x\n"), ("news", "It rains in Rome. ")):
        (folder / name).mkdir()
        for number in range(40):
            (folder / name / f"{number}.txt").write_text(f"{number} {word * (3 + number % 5)}")
    return folder


def task(folder: Path, **options: int | str) -> NextToken:
    found = resolve_task("text", {**SMALL, **options}, directory=folder)
    assert isinstance(found, NextToken)
    return found


def write_tokenizer(folder: Path, *special: str) -> Path:
    """Write a byte-pair encoding of some texts as Hugging Face's tokenizers do."""
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = tokenizers.trainers.BpeTrainer(vocab_size=290, special_tokens=list(special), initial_alphabet=alphabet)
    own.train_from_iterator(["It rains in Rome. " * 9], how)
    own.enable_truncation(max_length=2)
    own.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def trainer(folder: Path, precision: str = "float32") -> Trainer:
    own = task(folder)
    options = OPTIONS.model_copy(update={"precision": precision})
    indices = np.flatnonzero(own.train_data().labels.numpy() == 1)
    return Trainer(own, options, rounds=30, seed=3, peer=1, train_indices=indices)


def steps(own: Trainer, z: np.ndarray, rounds: range) -> np.ndarray:
    for t in rounds:
        z = z - np.float32(3e-3) * own.gradient(z, t, 3e-3, 3e-3).gradient
    return z


def test_the_loss_is_in_nats_a_byte_by_folder_and_over_all(folder: Path) -> None:
    own = task(folder)
    one = Trainer(own, OPTIONS, rounds=1, seed=0, peer=0, train_indices=np.arange(9))
    z = one.initial_vector()
    found = one.evaluate(z)
    assert [each.name for each in one.criteria] == ["test loss", "perplexity", "code", "news"]
    assert one.criteria[0] == Criterion("test loss", "lower")
    windows, folders = own.test_data().batch(torch.arange(len(own.test_data())))
    with torch.no_grad():
        logs = one.model(windows)[:, :-1].log_softmax(-1)
    losses = -logs.gather(2, windows[:, 1:, None]).squeeze(2)
    assert found.metrics["test loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    for number, name in enumerate(("code", "news")):
        assert found.metrics[name] == pytest.approx(float(losses[folders == number].mean()), rel=1e-5)
    assert found.total.tolist() == [len(windows)]
    assert found.metrics["test loss"] == pytest.approx(math.log(256), abs=0.1), "of 256 bytes, none is known yet"


def test_a_device_with_texts_of_its_own_has_one_folder(folder: Path) -> None:
    settings = [f"training.task_options.{name}={value}" for name, value in SMALL.items()]
    job = ("training.task=text", f"data.directory={folder}", *settings)
    split = configured(load(environment={}, overrides=job), folder)
    own = configured(load(environment={}, overrides=(*job, "data.partition=own")), folder)
    assert own.train_data().labels.unique().tolist() == [0]
    assert [each.name for each in metrics_of(own)] == ["test loss", "perplexity"]
    assert len(split.train_data().labels.unique()) == 2


def test_folders_without_room_or_with_an_odd_name_are_judged_together_only(tmp_path: Path) -> None:
    named = [f"folder-{number:02}" for number in range(14)]
    for number, name in enumerate(["", "a\nb", "perplexity", *named]):
        (tmp_path / name).mkdir(exist_ok=True)
        for part in range(2):
            (tmp_path / name / f"{part}.txt").write_text(f"{number} {part} and some words more")
    many = task(tmp_path)
    assert [each.name for each in many.metrics] == ["test loss", "perplexity", ".", *named[:13]]
    assert len(many.train_data().labels.unique()) == 17
    means = many.measure(many.make_model(), many.test_data().batch(torch.arange(17)))
    figures = many.figures({name: float(each.mean()) for name, each in means.items()})
    assert figures["folder-12"] == pytest.approx(means["/folder-12"].mean().item())
    assert figures["."] == pytest.approx(means["/"].mean().item())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_steps_that_go_on_in_the_middle_of_a_text_have_the_same_bits(folder: Path, precision: str) -> None:
    one, other = trainer(folder, precision), trainer(folder, precision)
    start = one.initial_vector()
    middle = steps(one, start, range(7))
    other.restore({name: np.array(value) for name, value in one.state().items()})
    assert steps(other, middle, range(7, 14)).tobytes() == steps(one, middle, range(7, 14)).tobytes()
    assert one.start_model().digest == other.start_model().digest


def test_it_learns_the_texts_of_its_folder(folder: Path) -> None:
    one = trainer(folder)
    z = steps(one, one.initial_vector(), range(30))
    found = one.evaluate(z).metrics
    assert found["news"] < 4.0
    assert found["news"] < found["code"], "its samples are those of one folder"


def test_no_byte_sees_another_document_where_these_are_masked(folder: Path) -> None:
    model, plain = (task(folder, mask_documents=masks).make_model() for masks in (True, False))
    plain.load_state_dict(model.state_dict())
    window = torch.tensor([[*b"one", 0, *b"two", 0, *b"three"]])
    changed = window.clone()
    changed[0, 4] = ord("T")
    with torch.no_grad():
        one, other, alone, seen = model(window), model(changed), plain(window[:, :4]), plain(changed)
        assert torch.equal(one[:, :4], other[:, :4])
        assert torch.equal(one[:, 8:], other[:, 8:])
        assert all(not torch.equal(one[:, place], other[:, place]) for place in (4, 5, 6, 7))
        torch.testing.assert_close(one[:, :4], alone)
        assert not torch.equal(plain(window)[:, 8:], seen[:, 8:])


@pytest.mark.parametrize("masks", [False, True])
def test_many_peers_at_once_take_the_same_steps(folder: Path, masks: bool) -> None:
    own = task(folder, mask_documents=masks)
    shards = [np.arange(8), np.arange(20, 30)]
    together = StackedTrainer(own, OPTIONS, rounds=5, seed=3, shards=shards)
    z = np.tile(together.initial_vector(), (2, 1))
    found = all_gradients(together, z, 1, 1e-3).gradients
    for peer, shard in enumerate(shards):
        alone = Trainer(own, OPTIONS, rounds=5, seed=3, peer=peer, train_indices=shard)
        expected = alone.gradient(z[peer], 1, 1e-3, 1e-3).gradient
        # Adam divides by the size of gradients, of which the smallest are rounding alone.
        assert np.quantile(np.abs(found[peer] - expected), 0.95) < 1e-2
    assert together.evaluate_one(0, z[0]).metrics["test loss"] == pytest.approx(math.log(256), abs=0.1)


def test_a_tokenizer_makes_fewer_tokens_and_the_loss_stays_one_of_bytes(folder: Path) -> None:
    write_tokenizer(folder, "<pad>", "<|endoftext|>")
    own, plain = task(folder, tokenizer="tokenizer.json", mask_documents=True), task(folder)
    model = own.make_model()
    size = model.transformer.wte.weight.shape[0]
    assert 256 < size <= 290
    for data, of_bytes in ((own.train_data(), plain.train_data()), (own.test_data(), plain.test_data())):
        assert int((data.tokens == 1).sum()) == int((of_bytes.tokens == 0).sum()), "one end for each document"
        assert data.tokens_per_byte[-1] == len(data.tokens) / len(of_bytes.tokens)
        assert data.tokens_per_byte[1] < data.tokens_per_byte[-1] < data.tokens_per_byte[0] <= 1, "of news it was made"
        assert "tokens" in data.found[0]
    assert plain.test_data().tokens_per_byte == (1, 1, 1)
    held_out = own.test_data()
    found, ratios = own.measure(model, held_out.batch(torch.arange(len(held_out)))), held_out.tokens_per_byte
    means = {name: each.detach().mean().item() for name, each in found.items()}
    assert own.figures(means)["test loss"] == pytest.approx(math.log(size) * ratios[-1], rel=0.02)
    assert means["/news"] == pytest.approx(math.log(size) * ratios[1], rel=0.02)
    alone = trainer(folder).task
    assert not alone.meaning
    assert own.with_one_folder().meaning == own.meaning
    assert len(own.meaning["tokens"]) == size + 1


def test_transformers_loads_the_tokenizer_of_a_gpt(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: the extra huggingface installs it")
    path = write_tokenizer(tmp_path, "<|endoftext|>")
    folder = tmp_path / "run"
    folder.mkdir()
    save_model(gpt(64, 1, vocabulary=290, context=24), folder / "model.safetensors")
    job = '[training]\ntask = "text"\ntask_options = {tokenizer = "tokenizer.json"}\n[data]\ndirectory = ".."\n'
    (folder / "config.toml").write_text(job)
    done = sotto("export", str(folder), "--format", "huggingface", "-o", str(tmp_path / "hub"))
    assert done.exit_code == 0, done.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    encoding = read_encoding(path)
    fields = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert tokenizer.eos_token_id == encoding.end == fields["eos_token_id"]
    text = "It rains in Rome, ä."
    assert encoding.encode([text.encode()]).tolist() == [*tokenizer(text).input_ids, encoding.end]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    before = path.read_bytes()
    again = sotto("export", str(folder), "--format", "huggingface", "-o", str(tmp_path))
    assert "tokenizer.json: already exists" in again.output
    assert not (tmp_path / "model.safetensors").exists()
    assert path.read_bytes() == before == (tmp_path / "hub" / "tokenizer.json").read_bytes()
    path.unlink()
    refused = sotto("export", str(folder), "--format", "huggingface", "-o", str(tmp_path / "again"))
    assert "tokenizer.json cannot be read" in refused.output
    assert not (tmp_path / "again").exists()


def test_numbers_without_a_token_move_no_name(tmp_path: Path) -> None:
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 5, "?": 7}, "unk_token": "?"}}
    (tmp_path / "words.json").write_text(json.dumps({**words, "added_tokens": []}))
    job = ("training.task=text", "training.task_options.tokenizer=words.json", f"data.directory={tmp_path}")
    shapes = {"transformer.wte.weight": [8, 16], "transformer.wpe.weight": [4, 16]}
    files = hub_files(load(environment={}, overrides=job), tmp_path, shapes)
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "</s>"
    assert json.loads(files["config.json"])["eos_token_id"] == 5


def test_a_text_that_spells_its_end_goes_on(folder: Path) -> None:
    write_tokenizer(folder, "<|endoftext|>")
    encoding = read_encoding(folder / "tokenizer.json")
    tokens = encoding.encode([b"Rome<|endoftext|>rains", "ä".encode()])
    assert (tokens == encoding.end).nonzero().flatten().tolist() == [len(tokens) - 4, len(tokens) - 1]


def test_peers_with_another_tokenizer_refuse_each_other(folder: Path, tmp_path: Path) -> None:
    one, other = (write_tokenizer(to, "<|endoftext|>") for to in (folder, tmp_path))
    names = read_encoding(one).names
    assert read_encoding(other).names == names
    other.write_text(other.read_text().replace('"truncation"', '"truncation" '))
    assert read_encoding(other).names[:-1] == names[:-1]
    assert read_encoding(other).names != names


def test_a_tokenizer_without_a_token_for_a_word_is_refused(folder: Path) -> None:
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "?"}, "added_tokens": []}
    (folder / "words.json").write_text(json.dumps(words))
    with pytest.raises(DataError, match=r"words\.json cannot encode a text: "):
        task(folder, tokenizer="words.json").train_data()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "cannot be read"), ("{}", "cannot be read"), ("\0", "cannot be read"), ("unending", "no token that ends")],
)
def test_a_file_that_is_no_tokenizer_is_refused(folder: Path, content: str | None, sentence: str) -> None:
    path = write_tokenizer(folder)
    if content is None:
        path.unlink()
    elif content != "unending":
        path.write_text(content)
    with pytest.raises(DataError, match=sentence):
        task(folder, tokenizer="tokenizer.json")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"model": "gpt-2m"}, "model"),
        ({"context": 1}, "context"),
        ({"width": -1}, "width"),
        ({"length": 3}, "length"),
        ({"tokenizer": 3}, "tokenizer"),
    ],
)
def test_options_that_are_none_are_named(folder: Path, options: dict[str, int | str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"training\.task_options\.{key}: "):
        resolve_task("text", options, directory=folder)


def test_eight_bits_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the model of task text consists of float32 layers"):
        trainer(folder, "int8")
