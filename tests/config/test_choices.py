"""What a new job begins with: the table, the files that come of it, and the pages that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import CHOICES, DEFAULTS, Config, choices, load
from peer.config.writer import render
from peer.foreign_values import parse_toml
from peer.run import plan as run_plan
from tests.cli.runner import sotto

ROOT = Path(__file__).parents[2]
TABLE = parse_toml(CHOICES.read_text("utf-8"))

LOW_RANK = """\
[graph]
# A graph (`sotto lab list graphs`), or a list of graphs that take turns.
# Reason: low-rank adds up what all devices send.
kind = "complete"

[algorithm]
# An algorithm (`sotto lab list algorithms`).
# Reason: all devices hold one model, as with all-reduce, for a hundredth of its bytes.
name = "low-rank"
# low-rank: number of vectors of each factor of a matrix.
# Reason: a lower rank costs accuracy where labels differ.
rank = 16
# low-rank: bits per number of the factors.
# Reason: two more than are enough with an exponent for each vector.
factor_bits = 6
# low-rank: what has to fit into `factor_bits`.
# Reason: small numbers take few bytes.
factor_exponents = "layer"

[compressor]
# A compressor (`sotto lab list compressors`).
# Reason: low-rank sends factors, which have bits of their own.
kind = "none"
"""
SCRIPT = """\
[graph]
# A graph (`sotto lab list graphs`), or a list of graphs that take turns.
# Reason: what one device learns reaches all in few rounds.
kind = "exponential"

[algorithm]
# An algorithm (`sotto lab list algorithms`).
# Reason: it works on any graph and for any model.
name = "quant-sgp"

[compressor]
# top_k, random_k: fraction of each layer that is sent.
# Reason: scripts exchange rarely, so each round has to say much.
fraction = 0.2
"""
CAREFUL = SCRIPT.replace(
    "scripts exchange rarely, so each round has to say much", "less costs accuracy in runs of few rounds"
)
DRIFT = """\
[graph]
# A graph (`sotto lab list graphs`), or a list of graphs that take turns.
# Reason: one message a round is enough for this task.
kind = "directed-ring"

[algorithm]
# An algorithm (`sotto lab list algorithms`).
# Reason: the most accurate with few bytes.
name = "quant-sgp"
# quant-sgp: β, how fast each peer learns how its own gradients differ from the mean of all peers', and takes the
# difference out of them; on skewed data peers then stay closer together.
# Reason: devices with different data stay closer together, at no byte.
drift_correction = "auto"

[compressor]
# top_k, random_k: fraction of each layer that is sent.
# Reason: with 2 % the worst ends a point lower.
fraction = 0.1
"""


def new(*overrides: str, peers: int = 8) -> Config:
    return load(environment={}, overrides=overrides, new_job=peers)


def chosen_in(text: str) -> str:
    """Return the sections of a short file that the table chooses."""
    return text[text.index("[graph]") : text.index("\n[training]")]


@pytest.mark.parametrize(
    ("task", "peers", "expected"),
    [
        ("digits", 3, DRIFT),
        ("digits", 100, DRIFT),
        ("image-folder", 2, LOW_RANK),
        ("cifar10", 16, LOW_RANK),
        ("image-folder", 17, CAREFUL),
        ("loop", 3, SCRIPT),
        ("loop", 16, SCRIPT),
        ("loop", 17, CAREFUL),
        ("sst2", 8, CAREFUL),
        ("my:task", 8, CAREFUL),
    ],
)
def test_a_file_names_what_the_table_chooses_with_its_reasons(
    task: str, peers: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("--peers", str(peers), "--task", task)
    assert sotto("init", "cluster", "kits", *arguments).exit_code == 0
    text = Path("kits/peer-0/peer.toml").read_text()
    assert chosen_in(text) == expected
    assert choices(task, peers)[0]["measured"] in text.replace("\n# ", " ")
    # The first `sotto up` has no file, and begins with the same.
    shared, written = new(f"training.task={task}", peers=peers), load(Path("kits/peer-0/peer.toml"), environment={})
    assert {**shared.shared_settings(), "peers": ""} == {**written.shared_settings(), "peers": ""}


def test_every_row_is_valid_and_says_what_was_measured() -> None:
    assert TABLE["version"] == DEFAULTS
    for row in TABLE["rows"]:
        few, many = row["peers"]
        task = row["tasks"][0] if row["tasks"] else "mnist"
        assert row["measured"]
        for peers in {max(few, 2), min(many, 17)}:
            if choices(task, peers)[0] != row:
                continue  # Another row of the same task comes first for so few peers.
            own = {key: value for name, key, value, _ in row["settings"] if name == "training"}
            steps = own.get("local_steps", min(row["most_local_steps"], 16))
            config = new(f"training.task={task}", f"training.local_steps={steps}", peers=peers)
            found = {(name, key): getattr(getattr(config, name), key) for name, key, _, _ in row["settings"]}
            assert found == {(name, key): value for name, key, value, _ in row["settings"]}
            findings = run_plan.validate_config(config, Path(), peers)
            assert [each for each in findings if each.level == "error"] == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), ("low-rank", "complete", "none")),
        (("algorithm.rank=4",), ("low-rank", "complete", "none")),
        (("algorithm.name=low-rank",), ("low-rank", "complete", "none")),
        # What would lose its meaning beside low-rank, or with which low-rank cannot be.
        (("compressor.fraction=0.05",), ("quant-sgp", "exponential", "top_k")),
        (("compressor.budget_kbytes_per_s=50",), ("quant-sgp", "exponential", "top_k")),
        (("rounds.late=skip",), ("quant-sgp", "exponential", "top_k")),
        (("rounds.lost_after_s=900",), ("low-rank", "complete", "none")),
        (("graph.kind=ring",), ("quant-sgp", "ring", "top_k")),
        (("algorithm.name=sgp", "compressor.kind=none"), ("sgp", "exponential", "none")),
        (("training.local_steps=4",), ("quant-sgp", "exponential", "top_k")),
    ],
)
def test_the_keys_of_the_user_win(settings: tuple[str, ...], expected: tuple[str, ...]) -> None:
    config = new("training.task=image-folder", *settings)
    assert (config.algorithm.name, config.graph.kind, config.compressor.kind) == expected
    for key, value in (each.split("=") for each in settings):
        section, name = key.split(".")
        assert str(getattr(getattr(config, section), name)) in (value, f"{value}.0")


def test_texts_keep_one_model_where_all_can_wait_for_each_other() -> None:
    def sent(*settings: str, peers: int = 4) -> tuple[object, ...]:
        job = new("training.task=text", *settings, peers=peers)
        return job.algorithm.name, job.graph.kind, job.compressor.fraction, job.algorithm.outer_momentum

    dense = ("compressed-allreduce", "complete", 1.0, 0.8)
    assert sent() == sent("algorithm.name=compressed-allreduce") == sent("training.local_steps=4") == dense
    assert sent("compressor.fraction=0.1") == (*dense[:2], 0.1, 0.8)
    for other in ({"peers": 17}, {"peers": 1}):
        assert sent(**other) == ("quant-sgp", "exponential", 0.1, 0.0)
    for setting in ("rounds.late=skip", "algorithm.name=quant-sgp", "training.local_steps=1", "training.momentum=adam"):
        assert sent(setting) == ("quant-sgp", "exponential", 0.1, 0.0)
    # In other jobs, those that name it begin with few numbers.
    scripts = new("training.task=loop", "algorithm.name=compressed-allreduce")
    assert (scripts.compressor.fraction, scripts.algorithm.outer_momentum) == (0.1, 0.0)


def test_a_job_that_differs_from_its_row_claims_no_measurement() -> None:
    assert "Reason" in render(new("training.task=loop"), header="", all_keys=False)
    other = render(new("training.task=loop", "compressor.fraction=0.05"), header="", all_keys=False)
    assert "Reason" not in other
    assert "measured" not in other


def test_the_planner_shows_the_same_choice() -> None:
    call = ("lab", "plan", "--peers", "8", "--link", "1mbit", "--step-seconds", "0.1")
    shown: dict[str, Any] = json.loads(sotto(*call, "--task", "digits", "--json").stdout)["new_job"]
    row = choices("digits", 8)[0]
    assert shown["settings"] == [f"{name}.{key}={value}" for name, key, value, _ in row["settings"]]
    assert shown["measured"] == row["measured"]


def test_the_planner_takes_no_unnamed_model_for_one_of_images() -> None:
    call = ("lab", "plan", "--peers", "8", "--link", "1mbit", "--step-seconds", "0.1", "--parameters", "20000")
    shown = json.loads(sotto(*call, "--json").stdout)
    assert shown["new_job"]["measured"] == choices("loop", 8)[0]["measured"]
    assert any(note.startswith("not known: how many rounds such a job needs") for note in shown["notes"])


def test_the_pages_name_the_same_choice() -> None:
    def settings(task: str) -> dict[str, Any]:
        return {f"{name}.{key}": value for name, key, value, _ in choices(task, 3)[0]["settings"]}

    script, images = settings("loop"), settings("image-folder")
    percent = f"{100 * script['compressor.fraction']:g} %"
    own_loop = " ".join((ROOT / "docs/own-loop.md").read_text("utf-8").split())
    assert f"has an {script['graph.kind']} graph and sends {percent} of the changes" in own_loop
    shown = f"{script['algorithm.name']}, top_k {percent} 4 bits, {script['graph.kind']}"
    assert shown in (ROOT / "docs/running.md").read_text("utf-8")
    algorithms = " ".join((ROOT / "docs/algorithms.md").read_text("utf-8").split())
    rank = f"rank {images['algorithm.rank']} in {images['algorithm.factor_bits']} bits"
    assert f"`{images['algorithm.name']}` of {rank} for images" in algorithms
