"""`sotto lab plan`: what it prints, the configuration that it writes, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.cli.plan import parse_link
from peer.config import options as configuration
from peer.errors import ConfigError
from tests.cli.runner import sotto

SMALL = ("--parameters", "20000", "--peers", "8", "--link", "1mbit", "--step-seconds", "0.1")


def test_the_document_says_what_to_take_and_what_it_rests_on() -> None:
    result = sotto("lab", "plan", *SMALL, "--skew", "0.8", "--steps", "1000", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    best = document["options"][0]
    assert document["recommended"] == best["name"]
    assert document["sentence"].startswith("take ")
    assert best["total_s"] == pytest.approx(1000 * best["rounds_factor"] * best["round_s"])
    assert best["up_bytes_per_day"] > 0
    assert document["latency_ms"] == 20
    assert document["evidence"]["source"]
    assert any(note.startswith("not known") for note in document["notes"])
    assert [each["rate_kbit"] for each in document["by_rate"]][:2] == [100, 1000]
    # The models of seven others, 4 bytes a parameter.
    assert (document["average_bytes"], document["average_s"]) == (560_000, pytest.approx(4.48))


def test_the_table_and_the_file_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "planned.toml"
    result = sotto("lab", "plan", *SMALL, "--write", str(path))
    assert result.exit_code == 0, result.output
    assert "the choice at other rates" in result.stdout
    assert "(run.average), unless they are equal: 560 kB to each device, at least 4.5 s" in result.stdout
    assert "not rated:" in result.stdout
    assert "no --skew: planned for 0.8" in result.stdout
    assert f"wrote {path}: " in result.stdout
    config = configuration.load(path, environment={})
    assert config.training.class_balance == 0.5
    assert sotto("lab", "validate", "--config", str(path), "--peers", "8").exit_code == 0
    assert "--force" in sotto("lab", "plan", *SMALL, "--write", str(path)).stderr


def test_a_configuration_keeps_what_a_plan_does_not_decide(tmp_path: Path) -> None:
    path, output = tmp_path / "run.toml", tmp_path / "planned.toml"
    path.write_text(
        "[run]\nrounds = 123\n[training]\nlearning_rate = 0.07\n[data]\nskew = 0.0\n"
        "[algorithm]\nname = 'd-psgd'\n[graph]\nkind = 'ring'\n"
    )
    arguments = (
        "--config",
        str(path),
        "--peers",
        "4",
        "--link",
        "lte",
        "--step-seconds",
        "0.05",
        "--write",
        str(output),
    )
    result = sotto("lab", "plan", *arguments, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["up_kbit"], document["down_kbit"], document["latency_ms"]) == (5000, 12000, 35)
    assert document["skew"] == 0
    assert document["evidence"]["name"] == "digits"
    assert document["layers"].startswith("task digits: 19,210 parameters in 4 layers")
    config = configuration.load(output, environment={})
    assert (config.run.rounds, config.training.learning_rate) == (123, 0.07)
    # Nothing to balance without skew.
    assert config.training.class_balance == 0.0
    assert config.algorithm.name in document["recommended_own"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--parameters", "1000", "--link", "1mbit"), "--step-seconds"),
        (("--link", "1mbit", "--step-seconds", "1"), "how large is the model? (--model resnet20, "),
        (("--parameters", "9", "--model", "resnet20", "--link", "1mbit"), "give one of them"),
        (("--model", "nothing", "--link", "1mbit", "--step-seconds", "1"), "resnet20"),
        (("--parameters", "1000", "--link", "fast", "--step-seconds", "1"), '"1mbit"'),
        (("--parameters", "1000", "--link", "1mbit", "--step-seconds", "soon"), '"measure"'),
        (("--parameters", "1000", "--link", "1mbit", "--step-seconds", "1", "--evidence", "x"), "images"),
        (("--parameters", "1000", "--link", "1mbit", "--step-seconds", "1", "--peers", "1"), "2 or more"),
    ],
)
def test_errors_say_what_to_give(arguments: tuple[str, ...], sentence: str) -> None:
    result = sotto("lab", "plan", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_all_options_that_are_missing_are_named_at_once() -> None:
    said = sotto("lab", "plan").stderr
    options = ("--link", "--model", "--parameters", "--task", "--config", "--step-seconds")
    assert all(option in said for option in options)


def test_the_tables_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = sotto("lab", "plan", *SMALL, "--steps", "20000").stdout.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(" option"))
    last = next(index for index, line in enumerate(lines) if line.startswith("rounds:"))
    assert {"s/step", "memory", "s×rounds"} <= set(lines[first].split())
    assert any("total up" in line for line in lines[first:last])
    assert not any("…" in line or len(line) > 80 for line in lines[first:last])


def test_links() -> None:
    assert parse_link("1mbit", None).latency_ms == 20
    both = parse_link("768kbit/2mbit", 75)
    assert (both.up_kbit, both.down_kbit, both.latency_ms) == (768, 2000, 75)
    assert parse_link("1.5gbit/s", 0).up_kbit == 1_500_000
    assert parse_link("dsl", None).latency_ms == 15
    for wrong in ("0mbit", "1mbit/2mbit/3mbit", "10", "mbit"):
        with pytest.raises(ConfigError):
            parse_link(wrong, None)
