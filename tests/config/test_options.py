"""The configuration: defaults, precedence, what the hello compares, and the sentences for what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import Field

from peer.compress import COMPRESSORS, options_of
from peer.config import schema
from peer.config.options import SECTIONS, CompressorOptions, Config, PeerAddress, check, load, load_device
from peer.config.writer import write_resolved
from peer.errors import ConfigError
from peer.run.plan import validate_config

PEERS = (PeerAddress(name="kitchen", advertise="10.0.0.1:7700"), PeerAddress(name="garage"))


def loaded(*overrides: str, **environment: str) -> Config:
    return load(None, overrides=overrides, environment=environment)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "digits"),
        (["training.task=mnist"], "mnist"),
        (["training.task=home.sensors:make_task"], "sensors"),
        (["training.task=_größe:make_task"], "gr--e"),
        (["training.task=größe:make_task", "run.name=size"], "size"),
        (["training.task=ж:make_task"], "digits"),
    ],
)
def test_a_run_is_named_after_its_task(overrides: list[str], name: str) -> None:
    config = load(overrides=overrides, environment={})
    assert config.run.name == name


def test_the_defaults_are_valid() -> None:
    assert load(None, environment={}) == Config()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_says_what_it_does_and_what_it_accepts(section: str) -> None:
    model = SECTIONS[section]
    assert (model.__doc__ or "").strip().endswith(".")
    for key in model.model_fields:
        assert schema.sentence(model, key).endswith((".", ")")), key
        assert schema.accepts(model, key), key


def test_sections_are_those_of_the_whole_configuration() -> None:
    assert list(SECTIONS) == list(Config.model_fields)


def test_file_then_environment_then_command_line(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("[training]\nlearning_rate = 0.2\nbatch_size = 8\nbeta = 0.5\n")
    environment = {"SOTTO_TRAINING__LEARNING_RATE": "0.3", "SOTTO_TRAINING__BATCH_SIZE": "16", "HOME": "/"}
    config = load(file, overrides=["training.learning_rate=0.4"], environment=environment)
    assert config.training.learning_rate == 0.4
    assert config.training.batch_size == 16
    assert config.training.beta == 0.5
    assert config.training.mu is None


def test_a_mark_in_front_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("[training]\nbatch_size = 8\n", encoding="utf-8-sig")
    assert load(file, environment={}).training.batch_size == 8


def test_environment_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOTTO_RUN__ROUNDS", "17")
    assert load(None).run.rounds == 17


def test_values_are_toml_and_plain_words_need_no_quotes() -> None:
    config = loaded('graph.kind=["ring", "torus"]', "algorithm.name=sgp", "training.task_options={hidden = 7}")
    assert config.graph.kind == ("ring", "torus")
    assert config.algorithm.name == "sgp"
    assert config.training.task_options == {"hidden": 7}


def test_one_option_of_a_task_can_be_set_alone() -> None:
    assert loaded("training.task_options.hidden=7").training.task_options == {"hidden": 7}
    assert loaded(SOTTO_TRAINING__TASK_OPTIONS__HIDDEN="9").training.task_options == {"hidden": 9}


def test_none_unsets_a_key_and_stays_a_word_where_it_is_one() -> None:
    config = loaded("compressor.value_bits=none", "compressor.kind=none", "training.momentum=none")
    assert config.compressor.value_bits is None
    assert config.compressor.kind == "none"
    assert config.training.momentum == "none"


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError):
        Config().run.rounds = 5  # type: ignore[misc]


# -- what the hello compares ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "run.name=other",
        "run.seed=1",
        "run.rounds=2",
        "graph.kind=ring",
        "algorithm.averaging_rate=0.3",
        "compressor.fraction=0.5",
        "compressor.coding=packed",
        "training.learning_rate=0.7",
        "training.label_adjustment=false",
        "training.class_balance=0.5",
        "training.class_balance_follows_rate=true",
        "data.skew=0",
        "data.partition=own",
        "data.weight_by_samples=true",
        "data.total_samples=800",
        "data.class_shares=[1, 2]",
        "rounds.late=skip",
        "evaluation.every_rounds=1",
    ],
)
def test_a_different_job_has_a_different_digest(override: str) -> None:
    assert loaded(override).run_digest() != Config().run_digest()


@pytest.mark.parametrize(
    "override",
    [
        "peer.listen=127.0.0.1:9",
        "peer.slow_down=3",
        "compressor.coding=entropy",
        "security.mode=insecure",
        "state.directory=elsewhere",
        "data.directory=/data",
        "graph.file=graph.json",
        "transport.heartbeat_s=1",
        "guard.max_loss=5",
    ],
)
def test_a_device_may_differ_without_changing_the_job(override: str) -> None:
    assert loaded(override).run_digest() == Config().run_digest()


def test_options_that_came_later_leave_the_digest_of_older_configurations_as_it_was() -> None:
    """Recorded before the options came that `_ALWAYS_COUNTED` lacks."""
    assert Config().run_digest() == (
        "3f516b9ec55dc6a3.aeb4573a60957783.9bd75361edaa3a4c.8b5ac38f21a3b10b.87a1abf61eae3dfd.52f365b43159371e."
        "c8c313980759e62d.34c48fab4cb9f5b3.4f53cda18c2baa0c"
    )


def test_an_option_that_is_added_changes_only_the_digest_of_runs_that_set_it() -> None:
    class Later(CompressorOptions):
        later: float = 0.5
        table: dict[str, int] = Field(default_factory=dict)

    assert Config(compressor=Later()).run_digest() == Config().run_digest()
    assert Config(compressor=Later(later=0.6)).run_digest() != Config().run_digest()
    assert Config(compressor=Later(table={"a": 1})).run_digest() != Config().run_digest()


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_every_setting_of_a_compressor_is_a_key_whose_sentence_names_it(kind: str) -> None:
    for name in options_of(kind):
        assert re.search(rf"\b{kind}\b", schema.sentence(CompressorOptions, name)), name


def test_what_a_job_sets_is_told_and_nothing_that_is_a_device_s_own() -> None:
    own = ("state.directory=x", "security.key=y", "limits.day_mbytes=9", "data.directory=z", "graph.file=f")
    assert loaded("training.learning_rate=0.5", "graph.kind=ring", *own).shared_settings() == {
        "graph.kind": '"ring"',
        "training.learning_rate": "0.5",
    }
    assert Config().shared_settings() == {}


def test_the_list_of_peers_belongs_to_the_job_but_their_addresses_do_not() -> None:
    mine = Config(peers=PEERS)
    moved = Config(peers=(PeerAddress(name="kitchen", advertise="[::1]:1"), PeerAddress(name="garage")))
    swapped = Config(peers=tuple(reversed(PEERS)))
    assert mine.run_digest() == moved.run_digest()
    assert mine.run_digest() != swapped.run_digest()
    assert mine.run_digest() != Config().run_digest()


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["compressor.value_bits=none", "algorithm.averaging_rate=0.25", "algorithm.final_rounds=auto"],
        ['graph.kind=["ring", "torus"]', "training.step_milestones=[0.1, 0.9]", 'training.only=["head.*"]'],
        ['training.task_options={a = 1, b = "quoted \\" word", c = 0.5, d = true}', 'peer.listen=""'],
        ["run.seed=9223372036854775807", "guard.min_push_weight=1e-30", "guard.max_loss=1e30"],
    ],
)
def test_what_is_written_is_read_back_equal(overrides: list[str], tmp_path: Path) -> None:
    config = load(None, overrides=overrides, environment={}).model_copy(update={"peers": PEERS})
    write_resolved(config, tmp_path / "config.toml", tmp_path)
    assert load(tmp_path / "config.toml", environment={}) == config


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "fragments"),
    [
        ({"rnu": {}}, ["rnu", "unknown section", "run, peer"]),
        ({"run": {"round": 3}}, ["run.round", "unknown key", "rounds"]),
        ({"run": 3}, ["run", "not a table", "[run]"]),
        ({"run": {"rounds": 0}}, ["run.rounds", "got 0", "at least 1"]),
        ({"run": {"rounds": True}}, ["run.rounds", "got True", "whole number"]),
        ({"run": {"rounds": 1.5}}, ["run.rounds", "got 1.5", "whole number"]),
        ({"training": {"learning_rate": float("nan")}}, ["training.learning_rate", "nan", "above 0"]),
        ({"training": {"schedule": "linear"}}, ["training.schedule", "'linear'", '"cosine"']),
        ({"compressor": {"bits": 17}}, ["compressor.bits", "17", "from 1 to 16"]),
        ({"algorithm": {"final_rounds": "never"}}, ["algorithm.final_rounds", "'never'", '"auto"']),
        ({"graph": {"kind": ["ring", 5]}}, ["graph.kind", "5"]),
        ({"peers": {"name": "a"}}, ["peers", "[[peers]]"]),
        ({"peers": [{"advertise": "a:1"}]}, ["peers.0.name", "missing"]),
        ({"peers": [{"name": "a"}, {"name": "a"}]}, ["two peers have the same name"]),
        ({"peers": [{"name": "a"}], "peer": {"index": 1}}, ["peer.index is 1", "1 peers"]),
    ],
)
def test_an_error_names_file_key_value_and_what_is_valid(tree: dict[str, object], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tree, file="peer.toml")
    for fragment in ["peer.toml", *fragments]:
        assert fragment in str(caught.value)


def test_an_error_names_the_environment_variable_that_caused_it(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"environment variable SOTTO_RUN__ROUNDS: run\.rounds: .*'many'"):
        load(file, environment={"SOTTO_RUN__ROUNDS": "many"})


def test_an_error_blames_the_command_line_only_for_what_it_set(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("[run]\nrounds = 0\n")
    with pytest.raises(ConfigError, match=r"peer\.toml: run\.rounds"):
        load(file, overrides=["run.seed=3"], environment={})
    with pytest.raises(ConfigError, match=r"command line: run\.seed"):
        load(file, overrides=["run.seed=-3"], environment={})


def test_peers_may_have_different_budgets_but_all_or_none() -> None:
    one, other = (loaded(f"compressor.budget_kbytes_per_s={number}") for number in (10, 50))
    assert one.run_digest() == other.run_digest()
    assert one.run_digest() != Config().run_digest()


@pytest.mark.parametrize(("theta", "levels"), [("verified", ["error"]), ("constant", [])])
def test_verified_codes_are_not_put_back_by_the_guard(theta: str, levels: list[str]) -> None:
    overrides = ["algorithm.name=moniqua", "graph.kind=ring", "compressor.kind=modulo", "guard.action=rollback"]
    config = load(environment={}, overrides=[*overrides, f"algorithm.theta={theta}"])
    findings = validate_config(config, Path(), 4)
    assert [finding.level for finding in findings if finding.key == "guard.action"] == levels


@pytest.mark.parametrize(("give_up_after_s", "levels"), [(1801.0, []), (1800.0, ["error"])])
def test_a_peer_that_ends_before_it_may_vote_is_no_member_that_declares_losses(
    give_up_after_s: float, levels: list[str]
) -> None:
    overrides = ["rounds.lost_after_s=1800", f"transport.give_up_after_s={give_up_after_s}"]
    config = load(environment={}, overrides=overrides)
    findings = validate_config(config, Path(), 4)
    assert [finding.level for finding in findings if finding.key == "transport.give_up_after_s"] == levels


def test_a_file_that_is_not_here_names_those_below(tmp_path: Path) -> None:
    (tmp_path / "api_every.py").touch()
    with pytest.raises(ConfigError, match=r"no such file; `sotto init` writes one; \S* holds api_every.py$"):
        load(tmp_path / "peer.toml", environment={})
    with pytest.raises(ConfigError, match="no such file; `sotto up SCRIPT --peers 3` trains on this machine alone"):
        load_device(tmp_path / "peer.toml", environment={})
    for folder in ("kits/peer-0", "garage"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "peer.toml").touch()
    for read in (load, load_device):
        with pytest.raises(ConfigError, match=r": --config \S*/garage/peer.toml or \S*/kits/peer-0/peer.toml"):
            read(tmp_path / "peer.toml", environment={})
        with pytest.raises(ConfigError, match=r"did you mean \S*/garage/peer.toml\?"):
            read(tmp_path / "garages/peer.toml", environment={})
    (tmp_path / "garage/peer.key").touch()
    with pytest.raises(ConfigError, match=r": --config \S*/garage/peer.toml$"):
        load_device(tmp_path / "peer.toml", environment={})


def test_a_new_job_on_digits_corrects_drift_and_a_file_means_what_it_did(tmp_path: Path) -> None:
    new = load(environment={}, new_job=8)
    assert (new.algorithm.drift_correction, new.compressor.fraction) == ("auto", 0.1)
    changed = load(environment={"SOTTO_COMPRESSOR__FRACTION": "0.5"}, overrides=["compressor.bits=4"], new_job=8)
    assert (changed.compressor.fraction, changed.compressor.bits) == (0.5, 4)
    sums = load(environment={}, overrides=["algorithm.name=low-rank", "algorithm.rank=8"], new_job=8)
    assert (sums.graph.kind, sums.compressor.fraction) == ("complete", 0.1)
    assert (sums.algorithm.factor_exponents, sums.algorithm.rank, sums.algorithm.factor_bits) == ("vector", 8, 6)
    assert load(environment={}, overrides=["compressor.value_bits=2"], new_job=8).compressor.four_levels
    both = load(environment={}, overrides=["algorithm.name=compressed-allreduce", "compressor.value_bits=3"], new_job=8)
    assert (both.graph.kind, both.compressor.fraction, both.compressor.value_bits) == ("complete", 0.1, 3)
    chosen = load(environment={}, overrides=["algorithm.name=compressed-allreduce"], new_job=8).compressor
    assert (chosen.fraction, chosen.value_bits, chosen.four_levels) == (0.1, 2, True)
    assert not sums.compressor.four_levels
    (tmp_path / "peer.toml").write_text(
        "[run]\nrounds = 5\n[algorithm]\nname = 'low-rank'\n[compressor]\nvalue_bits = 2\n"
    )
    for old in (
        load(environment={}),
        load(tmp_path / "peer.toml", environment={}, new_job=8),
        load(environment={}, overrides=["training.task=loop"]),
    ):
        assert (old.algorithm.drift_correction, old.compressor.fraction) == (0.0, 0.02)
        assert (old.algorithm.factor_exponents, old.compressor.four_levels) == ("vector", False)
