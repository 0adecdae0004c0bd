"""Models out of checkpoints: de-biased, averaged, and only where they belong together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file

from peer.config.options import Config, PeerAddress, load
from peer.daemon.device.kept import keep_model_form
from peer.errors import ConfigError, StateError
from peer.gossip.incarnations import Numbering
from peer.gossip.membership import Change, ChangeKind, Membership, Newcomer
from peer.ops.cluster_files import place_peers, write_cluster
from peer.ops.export import Beside, export_model
from peer.ops.model_card import CardFacts, model_card
from peer.run.setup import RunSetup
from peer.simulate import run as simulator
from peer.state.checkpoints import Checkpoint, StateFolder, StoredArrays
from peer.state.disk import Disk
from peer.state.kept_file import SCRIPT_SAYS, ScriptSays
from peer.train import model_file
from peer.train.model_file import save_model
from peer.train.models.distilbert import DistilBertSize, distilbert
from peer.train.models.gpt import gpt
from tests.cli.runner import sotto

JOB = Config(peers=tuple(PeerAddress(name=f"peer-{index}") for index in range(2)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of two peers without checkpoints."""
    write_cluster(tmp_path / "run" / "peers", JOB, place_peers(2, [], 7700))
    return tmp_path / "run"


def save(run: Path, peer: int, done: int, x: npt.NDArray[np.float32], u: float, changes: Sequence[Change] = ()) -> None:
    """Leave a checkpoint of a peer as its daemon does, which knows of these changes of the members."""
    file = run / "peers" / f"peer-{peer}" / "peer.toml"
    setup = RunSetup.open(load(file, environment={}), file.parent)
    trainer = setup.trainer(peer)
    participant = setup.participant(peer, trainer, trainer.layout, trainer.initial_vector())
    state, arrays = participant.to_checkpoint()
    arrays |= {"algorithm/x": x, "algorithm/u": np.array([u])}
    if changes:
        state["members"] = Membership((0, 1, 2), changes).state()
    folder = StateFolder(file.parent / "state")
    folder.checkpoints.save(Checkpoint(done, state, arrays))
    folder.close()


def size() -> int:
    return RunSetup.open(JOB, Path()).trainer(0).layout.size


def flat(path: Path) -> npt.NDArray[np.float32]:
    tensors = load_file(path)
    names = ("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias")
    assert set(tensors) == set(names)
    return np.concatenate([tensors[name].reshape(-1) for name in names])


def test_the_model_of_a_peer_is_x_over_u(run: Path, tmp_path: Path) -> None:
    x = np.arange(size(), dtype=np.float32)
    save(run, 1, 40, x, 0.5)
    for source, wanted in ((run, 1), (run / "peers" / "peer-1", None), (run / "peers" / "peer-1" / "state", None)):
        output = tmp_path / f"{source.name}.safetensors"
        if source == run:
            save(run, 0, 40, x, 1.0)
        exported = export_model(source, output, peer_index=wanted)
        assert (exported.round, exported.peers) == (40, (1,))
        np.testing.assert_array_equal(flat(output), 2 * x)


def test_the_average_is_the_mass_over_the_weight(run: Path, tmp_path: Path) -> None:
    x = np.ones(size(), dtype=np.float32)
    save(run, 0, 30, x, 0.5)
    save(run, 1, 30, 3 * x, 1.5)
    exported = export_model(run, tmp_path / "m.safetensors")
    assert (exported.round, exported.peers) == (30, (0, 1))
    np.testing.assert_array_equal(flat(tmp_path / "m.safetensors"), 2 * x)


def test_only_checkpoints_of_one_round_are_averaged(run: Path, tmp_path: Path) -> None:
    x = np.ones(size(), dtype=np.float32)
    save(run, 0, 10, x, 1.0)
    save(run, 0, 20, 5 * x, 1.0)
    save(run, 1, 10, 3 * x, 1.0)
    assert export_model(run, tmp_path / "m.safetensors").round == 10
    np.testing.assert_array_equal(flat(tmp_path / "m.safetensors"), 2 * x)


def test_peers_without_a_common_round_are_not_mixed(run: Path, tmp_path: Path) -> None:
    x = np.ones(size(), dtype=np.float32)
    save(run, 0, 20, x, 1.0)
    save(run, 1, 10, x, 1.0)
    with pytest.raises(StateError, match=r"newest: 20, 10.*--peer"):
        export_model(run, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_a_model_of_a_run_that_goes_on_says_how_much_is_to_come(run: Path, tmp_path: Path) -> None:
    folder, out = run / "peers" / "peer-0", str(tmp_path / "m.safetensors")
    save(run, 0, 993, np.ones(size(), dtype=np.float32), 1.0)
    early = sotto("export", str(folder), "-o", out)
    assert early.stdout.startswith(f"wrote {out}: the model of peer 0 after 993 rounds")
    assert "rounds to come: 7; export again after the last" in early.stderr
    assert json.loads(sotto("export", str(folder), "-o", out, "--force", "--json").stdout)["rounds_to_come"] == 7
    # What a training script decided counts, not the file.
    for rounds, told in ((1003, 10), (993, 0)):
        SCRIPT_SAYS.keep(Disk(folder / "state"), ScriptSays(rounds))
        again = sotto("export", str(folder), "-o", out, "--force", "--json")
        assert json.loads(again.stdout)["rounds_to_come"] == told
        assert bool(again.stderr) is bool(told)


def test_who_left_has_no_rounds_to_come(three: Path, tmp_path: Path) -> None:
    save(three, 1, 20, np.ones(size(), dtype=np.float32), 1.0, [LEFT])
    assert export_model(three, tmp_path / "m.safetensors", peer_index=1).rounds_to_come == 0


LEFT = Change(ChangeKind.LEAVE, 1, 1, 20)
LOST = Change(ChangeKind.LOST, 2, 0, 30)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A run folder of three peers without checkpoints."""
    job = JOB.model_copy(update={"peers": tuple(PeerAddress(name=name) for name in ("ada", "ben", "cleo"))})
    write_cluster(tmp_path / "run" / "peers", job, place_peers(3, [], 7700))
    return tmp_path / "run"


def test_who_left_or_was_lost_has_no_part_in_the_average(three: Path, tmp_path: Path) -> None:
    x = np.ones(size(), dtype=np.float32)
    save(three, 1, 20, 100 * x, 1.0, [LEFT])
    save(three, 2, 20, 7 * x, 1.0, [LEFT])
    save(three, 0, 20, 3 * x, 2.0, [LEFT])
    save(three, 0, 40, 4 * x, 2.0, [LEFT, LOST])
    exported = export_model(three, tmp_path / "m.safetensors")
    assert (exported.round, exported.peers) == (40, (0,))
    assert exported.description == (
        "the model of peer 0 after 40 rounds, without ben, which had left, cleo, which was lost"
    )
    np.testing.assert_array_equal(flat(tmp_path / "m.safetensors"), 2 * x)
    # Who left still has what it took along.
    exported = export_model(three, tmp_path / "m.safetensors", peer_index=1, force=True)
    assert (exported.round, exported.peers) == (20, (1,))


def test_a_device_that_came_back_counts_under_its_index(three: Path, tmp_path: Path) -> None:
    """As a member it has another number, and its folder the same name."""
    again = Change(ChangeKind.JOIN, Numbering(3).number(2, 1), 0, 35)
    x = np.ones(size(), dtype=np.float32)
    for peer, factor in ((0, 3), (1, 5), (2, 7)):
        save(three, peer, 40, factor * x, 1.0, [LOST, again])
    exported = export_model(three, tmp_path / "m.safetensors")
    assert (exported.round, exported.peers) == (40, (0, 1, 2))
    assert exported.description == "the average of 3 peers after 40 rounds"
    np.testing.assert_array_equal(flat(tmp_path / "m.safetensors"), 5 * x)
    shutil.rmtree(three / "peers" / "peer-2")
    with pytest.raises(StateError, match="cleo has no folder here"):
        export_model(three, tmp_path / "m.safetensors", force=True)


def test_a_newcomer_in_nobodys_list_is_missed_by_its_name(three: Path, tmp_path: Path) -> None:
    joined = Change(ChangeKind.JOIN, 3, 0, 30, newcomer=Newcomer("dora", None, None, b""))
    for peer in range(3):
        save(three, peer, 40, np.ones(size(), dtype=np.float32), 1.0, [joined])
    with pytest.raises(StateError, match="dora has no folder here"):
        export_model(three, tmp_path / "m.safetensors")


def test_before_a_loss_its_peer_counts(three: Path, tmp_path: Path) -> None:
    x = np.ones(size(), dtype=np.float32)
    save(three, 1, 20, 100 * x, 1.0, [LEFT])
    save(three, 0, 25, 3 * x, 1.0, [LEFT, LOST])
    save(three, 2, 25, 5 * x, 1.0, [LEFT])
    exported = export_model(three, tmp_path / "m.safetensors")
    assert (exported.round, exported.peers) == (25, (0, 2))
    np.testing.assert_array_equal(flat(tmp_path / "m.safetensors"), 4 * x)


def test_a_peer_that_joins_later_is_missed_once_it_has_joined(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"peers": tuple(PeerAddress(name=name) for name in ("ada", "ben", "cleo"))})
    run = tmp_path / "run"
    write_cluster(run / "peers", job, place_peers(3, [], 7700), join_later=1)
    x = np.ones(size(), dtype=np.float32)
    for peer in (0, 1):
        save(run, peer, 20, x, 1.0)
    assert export_model(run, tmp_path / "m.safetensors").peers == (0, 1)
    joined = Change(ChangeKind.JOIN, 2, 0, 30)
    for peer in (0, 1):
        (run / "peers" / f"peer-{peer}" / "state" / "checkpoint-00000020.safetensors").unlink()
        save(run, peer, 40, x, 1.0, [joined])
    words = r"peer-2/state: contains no checkpoint yet, so cleo has not trained .* run --config .*peer-2/peer.toml"
    with pytest.raises(StateError, match=words):
        export_model(run, tmp_path / "m.safetensors", force=True)
    shutil.rmtree(run / "peers" / "peer-2")
    with pytest.raises(
        StateError, match="cleo has no folder here; copy it back, name the folders to average, or export one"
    ):
        export_model(run, tmp_path / "m.safetensors", force=True)


def test_a_model_of_another_shape_is_refused(run: Path, tmp_path: Path) -> None:
    save(run, 0, 10, np.ones(size(), dtype=np.float32), 1.0)
    file = run / "peers" / "peer-0" / "peer.toml"
    before, training, after = file.read_text().partition("[training]\n")
    assert training
    file.write_text(f"{before}{training}task_options = {{hidden = 3}}\n{after}")
    with pytest.raises(StateError, match="differs in shape"):
        export_model(run / "peers" / "peer-0", tmp_path / "m.safetensors")


def test_a_peer_that_does_not_exist_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--peer.*got 2.*0, 1"):
        export_model(run, tmp_path / "m.safetensors", peer_index=2)


def test_an_export_in_8_bits_tells_both_accuracies(run: Path, tmp_path: Path) -> None:
    setup = RunSetup.open(JOB, Path())
    x = setup.trainer(0).initial_vector()
    save(run, 0, 30, x, 1.0)
    save(run, 1, 30, x, 1.0)
    exported = export_model(run, tmp_path / "m.safetensors", int8=True)
    assert exported.description == "the average of 2 peers after 30 rounds, weights in 8 bits"
    assert set(exported.accuracy) == {"float32", "int8"}
    stored = load_file(tmp_path / "m.safetensors")
    assert stored["linear1.weight"].dtype == np.int8
    restored = stored["linear1.weight"].astype(np.float32) * stored["linear1.weight.scale"]
    assert np.abs(restored.reshape(-1) - x[: restored.size]).max() <= 0.51 * stored["linear1.weight.scale"][0]


def test_the_model_of_a_simulation_is_exported_in_8_bits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    config = load(overrides=["run.rounds=60", "data.skew=0", "algorithm.name=sgp"], environment={})
    simulated = simulator.run(config, tmp_path, num_peers=2, directory=folder, stacked=True, baseline=False)
    result = sotto("export", str(folder), "--int8", "-o", str(tmp_path / "m.safetensors"), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["accuracy"]["int8"] == pytest.approx(simulated.summary.averaged_accuracy, abs=0.02)
    assert answer["accuracy"]["float32"] == pytest.approx(simulated.summary.averaged_accuracy, abs=0.02)
    assert answer["bytes"] == (tmp_path / "m.safetensors").stat().st_size
    shown = sotto("export", str(folder), "--int8", "-o", str(tmp_path / "again.safetensors")).stdout
    assert "test accuracy: " in shown
    assert " % in 8 bits, " in shown


def test_a_folder_for_the_hub_says_what_it_is(run: Path, tmp_path: Path) -> None:
    save(run, 0, 40, np.ones(size(), dtype=np.float32), 1.0)
    done = sotto("export", str(run), "--peer", "0", "--format", "huggingface", "-o", str(tmp_path / "hub"))
    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in (tmp_path / "hub").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    fields = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert (fields["model_type"], fields["task"]) == ("sottovoce", "digits")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sottovoce\ntags:\n- sottovoce\n---\n\n# ")
    assert 'load_file("model.safetensors")' in card
    again = sotto("export", str(run), "--peer", "0", "--format", "huggingface", "-o", str(tmp_path / "hub"))
    assert again.exit_code == 2
    assert "already exists" in again.output
    eight = sotto("export", str(run), "--format", "huggingface", "--int8")
    assert eight.exit_code == 2
    assert "leave out --int8" in eight.output


def test_the_card_says_how_the_model_was_trained() -> None:
    settings = ["training.momentum=muon", "training.clip_norm=1", "training.local_steps=4"]
    outer = ["algorithm.name=low-rank", "algorithm.outer_rate=2", "algorithm.outer_momentum=0.5"]
    config = load(environment={}, overrides=[*outer, *settings], new_job=4)
    card = model_card(config, CardFacts(description="a model", round=None, num_peers=4), [Path("m.safetensors")])
    for row in (
        "messages | rank 16, 6 bits",
        "momentum | muon, β 0.9, β₂ 0.999, gradients clipped at 1",
        "local step | 8 samples; steps a round: 4",
    ):
        assert row in card, card
    assert "rounds of warm-up, outer rate 2, outer momentum 0.5" in card


def test_the_card_loads_the_model_by_its_task(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in (0, 1):
        save(run, peer, 40, np.arange(size(), dtype=np.float32), 0.5)
    export_model(run, tmp_path / "m.safetensors", beside=Beside(card=True))
    card = model_card(
        Config.model_validate(
            {"training": {"task": "ag-news", "task_options": {"weights": "/home/ann/w.safetensors"}}}
        ),
        CardFacts(description="a model", round=40, num_peers=2),
        [tmp_path / "m.safetensors"],
    )
    assert ("/home" in card, "{'weights': 'w.safetensors'}" in card) == (False, True)
    code = (tmp_path / "m.card.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert dict(names["model"].state_dict()).keys() == load_file("m.safetensors").keys()


def test_a_large_model_is_written_in_shards(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(size(), dtype=np.float32)
    for peer in (0, 1):
        save(run, peer, 40, x, 0.5)
    whole, output = tmp_path / "whole.safetensors", tmp_path / "m.safetensors"
    export_model(run, whole)
    tensors = load_file(whole)
    monkeypatch.setattr(model_file, "SHARD_BYTES", max(each.nbytes for each in tensors.values()) + 8)
    exported = export_model(run, output, beside=Beside(card=True))
    index, *shards = exported.files[:-1]
    assert index.name == "m.safetensors.index.json"
    assert [file.name for file in shards] == [f"m-0000{n + 1}-of-0000{len(shards)}.safetensors" for n in range(2)]
    assert not output.exists()
    places = json.loads(index.read_text())["weight_map"]
    assert {name: file.name for file in shards for name in load_file(file)} == places
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(load_file(tmp_path / places[name])[name], tensor)
    assert f"**load_file({json.dumps(shards[1].name)})," in (tmp_path / "m.card.md").read_text()
    # A library would read what is left of another model under this name.
    with pytest.raises(ConfigError, match="already exists"):
        export_model(run, output)
    monkeypatch.undo()
    assert export_model(run, output, force=True).files[0] == output
    assert not [*tmp_path.glob("m-*"), *tmp_path.glob("m.*.json")]
    monkeypatch.setattr(model_file, "SHARD_BYTES", 8)
    answer = json.loads(sotto("export", str(run), "-o", str(output), "--force", "--json").stdout)
    assert answer["file"] == str(index)
    assert answer["bytes"] == sum(file.stat().st_size for file in tmp_path.glob("m-*-of-00004.safetensors"))
    assert not output.exists()


def test_no_model_is_read_whole(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in (0, 1):
        save(run, peer, 40, np.arange(size(), dtype=np.float32), 0.5)
        keep_model_form(RunSetup.open(JOB, Path()).trainer(0), Disk(run / "peers" / f"peer-{peer}" / "state"))
    export_model(run, tmp_path / "whole.safetensors")
    sizes, read = [], StoredArrays.read

    def noted(arrays: StoredArrays, at: int, into: npt.NDArray[np.float32]) -> None:
        sizes.append(into.size)
        read(arrays, at, into)

    monkeypatch.setattr(StoredArrays, "read", noted)
    monkeypatch.setattr(model_file, "_BLOCK", 100)
    export_model(run, tmp_path / "blocks.safetensors")
    assert max(sizes) == 100
    assert (tmp_path / "blocks.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_transformers_loads_a_gpt_and_goes_on_with_a_text(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: the extra huggingface installs it")
    torch.manual_seed(0)
    own = gpt(128, 2, context=24)
    folder = tmp_path / "run"
    folder.mkdir()
    save_model(own, folder / "model.safetensors")
    (folder / "config.toml").write_text('[training]\ntask = "text"\n')
    done = sotto("export", str(folder), "--format", "huggingface", "-o", str(tmp_path / "hub"))
    assert done.exit_code == 0, done.output
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "library_name: transformers\npipeline_tag: text-generation\n" in card
    assert "AutoModelForCausalLM" in card
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    tokens = torch.randint(256, (3, 24))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, own(tokens), rtol=1e-5, atol=1e-5)
    begin = torch.tensor([list(b"The ")])
    assert loaded.generate(begin, max_length=20).shape[1] <= 20


@pytest.mark.parametrize("shard_bytes", [10_000, 10_000_000_000])
def test_transformers_loads_a_distilbert(tmp_path: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "SHARD_BYTES", shard_bytes)
    transformers = pytest.importorskip("transformers", reason="needs transformers: the extra huggingface installs it")
    torch.manual_seed(0)
    own = distilbert(3, DistilBertSize(vocabulary=40, positions=12, blocks=1, hidden=64))
    folder = tmp_path / "run"
    folder.mkdir()
    save_model(own, folder / "model.safetensors")
    (folder / "config.toml").write_text('[training]\ntask = "ag-news"\n')
    done = sotto("export", str(folder), "--format", "huggingface", "-o", str(tmp_path / "hub"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "hub" / "model.safetensors").exists() == (shard_bytes > 10_000)
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "library_name: transformers\npipeline_tag: text-classification\n" in card
    assert "AutoModelForSequenceClassification" in card
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hub").eval()
    pieces = torch.randint(1, 40, (5, 12))
    pieces[:3, 8:] = 0
    with torch.no_grad():
        logits = loaded(input_ids=pieces, attention_mask=(pieces != 0).long()).logits
        torch.testing.assert_close(own.eval()(pieces), logits, rtol=1e-4, atol=1e-5)
