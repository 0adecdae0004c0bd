"""From a configuration to the objects of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from peer import gossip
from peer.compress.layout import Layout
from peer.config.options import load
from peer.config.precision_choice import Precision, PrecisionChoice
from peer.errors import ConfigError
from peer.gossip.drift import default_gain
from peer.gossip.membership import Change, ChangeKind
from peer.gossip.theta import theorem_2
from peer.gossip.views import ViewSchedule
from peer.run import setup as run_setup
from peer.run.plan import build_schedule, corrects_drift, validate_config
from peer.run.setup import RunSetup, settle_precision, simulated_secret
from peer.simulate.run import run
from peer.train.bfloat16 import computes_in_bfloat16
from peer.train.local_step import Trainer
from peer.train.momentum import Momentum


def test_theta_by_theorem_2_knows_how_far_the_learning_rate_fell() -> None:
    """γ falls to a tenth twice; C_α, 100 in the end, keeps θ where the first rounds need it."""
    chosen = {
        "algorithm.name": "moniqua",
        "algorithm.theta": "theorem",
        "compressor.kind": "modulo",
        "graph.kind": "ring",
    }
    falling = {"training.schedule": "step", "training.learning_rate": 0.5, "training.warmup_rounds": 0, "run.rounds": 8}
    config = load(environment={}, overrides=[f"{key}={value}" for key, value in {**chosen, **falling}.items()])
    setup = RunSetup.open(config, Path(), num_peers=5)
    layout = Layout.of_sizes([3])
    algorithm = gossip.build("moniqua", setup.node(0, layout), np.zeros(3, np.float32))
    rho = setup.schedule.second_eigenvalue
    for t, (rate, decay) in {0: (0.5, 1.0), 4: (0.05, 10.0), 7: (0.005, 100.0)}.items():
        algorithm.begin(t, np.full(3, -2.0, np.float32), rate)
        assert algorithm.metrics().theta == pytest.approx(theorem_2(rate, 2.0, 5, rho, decay=decay)), t


@pytest.mark.parametrize(("coding", "packed"), [("auto", False), ("entropy", False), ("packed", True)])
def test_all_peers_of_a_run_write_frames_alike(coding: str, packed: bool) -> None:
    config = load(environment={}, overrides=[f"compressor.coding={coding}"])
    setup = RunSetup.open(config, Path(), num_peers=3)
    assert [setup.node(peer, Layout.of_sizes([3])).packed for peer in range(3)] == [packed] * 3


@pytest.mark.parametrize(
    ("algorithm", "local_steps", "asked", "expected"),
    [
        ("allreduce", 1, "auto", False),
        ("parameter-server", 1, "auto", False),
        ("low-rank", 1, "auto", False),
        ("low-rank", 4, "auto", False),
        ("compressed-allreduce", 4, "auto", False),
        ("quant-sgp", 1, "auto", "auto"),
        ("quant-sgp", 4, "auto", "auto"),
        ("sgp", 1, "auto", False),
        ("sgp", 4, "auto", "auto"),
        ("sgp", 1, "true", True),
        ("d-psgd", 1, "auto", "auto"),
        ("allreduce", 1, "true", True),
    ],
)
def test_logits_are_not_adjusted_where_all_peers_hold_one_model(
    algorithm: str, local_steps: int, asked: str, expected: bool | str
) -> None:
    chosen = {
        "algorithm.name": algorithm,
        "training.label_adjustment": asked,
        "training.local_steps": local_steps,
        "graph.kind": "complete",
    }
    config = load(environment={}, overrides=[f"{key}={value}" for key, value in chosen.items()])
    assert RunSetup.open(config, Path(), num_peers=4).training.label_adjustment == expected


@pytest.mark.parametrize("algorithm", ["compressed-allreduce", "low-rank"])
@pytest.mark.parametrize(("momentum", "of_mean"), [("adamw", False), ("muon", False), ("adam", True)])
def test_several_steps_of_adamw_or_muon_are_averaged_and_the_model_moves_further(
    algorithm: str, momentum: str, of_mean: bool
) -> None:
    chosen = {
        "algorithm.name": algorithm,
        "algorithm.outer_rate": 2.0,
        "algorithm.outer_momentum": 0.5,
        "algorithm.rank": 64,  # At this, of 64 pixels, it is exact but for the rounding to factor_bits.
        "algorithm.factor_bits": 16,
        "graph.kind": "complete",
        "compressor.kind": "none",
        "training.momentum": momentum,
        "training.precision": "float32",
        "training.local_steps": 3,
        "training.learning_rate": 0.01,
        "training.warmup_rounds": 0,
        "training.weight_decay": 0.1,
    }
    config = load(environment={}, overrides=[f"{key}={value}" for key, value in chosen.items()])
    setup = RunSetup.open(config, Path(), num_peers=3)
    trainers = [setup.trainer(peer) for peer in range(3)]
    x0, layout = trainers[0].initial_vector(), trainers[0].layout
    peers = [gossip.build(algorithm, setup.node(peer, layout), x0.copy()) for peer in range(3)]
    steps = [each.gradient(x0, 0, 0.01, 0.01).gradient.copy() for each in trainers]
    outboxes = [peer.begin(0, step, 0.01).sends for peer, step in zip(peers, steps, strict=True)]
    while any(outboxes):
        inboxes = [{j: box[i] for j, box in enumerate(outboxes) if i in box} for i in range(3)]
        exchanges = [peer.advance(inbox) for peer, inbox in zip(peers, inboxes, strict=True)]
        outboxes = [{} if exchange is None else exchange.sends for exchange in exchanges]
    moved = x0 - peers[0].model()
    mean = np.mean(steps, axis=0)
    # Nesterov's momentum goes 1 + β as far at first. Where a momentum of the mean is the job's own, it counts.
    mean = setup.node(0, layout).momentum().direction(mean, x0) if of_mean else 1.5 * mean
    assert len(layout.hidden) == 1
    assert np.linalg.norm(moved - 0.02 * mean) < 1e-3 * np.linalg.norm(moved)


def test_logits_are_adjusted_where_only_some_rounds_end_with_the_mean() -> None:
    config = load(environment={}, overrides=["algorithm.name=sgp", 'graph.kind=["complete", "directed-ring"]'])
    assert RunSetup.open(config, Path(), num_peers=4).training.label_adjustment == "auto"


@pytest.mark.parametrize(
    ("settings", "gain"),
    [
        ((), None),
        (("algorithm.drift_correction=auto",), 0.00061),
        (("algorithm.drift_correction=auto", "compressor.fraction=0.1"), 0.003),
        # A graph that mixes fast is no reason to follow what compression has not sent yet.
        (("algorithm.drift_correction=auto", "compressor.fraction=0.1", "graph.kind=complete"), 0.0032),
        (("algorithm.drift_correction=0.004",), 0.004),
        (("algorithm.drift_correction=auto", "algorithm.name=sgp"), None),
        (("algorithm.drift_correction=auto", "training.task=loop"), None),
        (("algorithm.drift_correction=auto", "rounds.late=skip"), None),
        (("algorithm.drift_correction=0.004", "rounds.late=skip"), None),
        (("algorithm.drift_correction=0.004", "training.task=loop"), 0.004),
    ],
)
def test_drift_is_corrected_where_it_is_asked_for_and_can_be(settings: tuple[str, ...], gain: float | None) -> None:
    config = load(environment={}, overrides=[*settings])
    assert corrects_drift(config) == (gain is not None)
    if config.training.task != "loop":
        found = RunSetup.open(config, Path(), num_peers=8).node(3, Layout.of_sizes([3])).drift_gain
        assert (found and found()) == gain


@pytest.mark.parametrize(("asked", "expected"), [("auto", False), (True, True), (False, False)])
def test_labels_are_not_adjusted_for_where_drift_is_corrected(asked: str | bool, expected: bool) -> None:
    chosen = ["algorithm.drift_correction=auto", f"training.label_adjustment={str(asked).lower()}"]
    config = load(environment={}, overrides=chosen)
    assert RunSetup.open(config, Path(), num_peers=4).training.label_adjustment == expected


def test_the_correction_of_drift_suits_the_graph_of_the_members_that_there_are() -> None:
    config = load(environment={}, overrides=["algorithm.drift_correction=auto", "compressor.fraction=0.1"])
    setup = RunSetup.open(config, Path(), num_peers=8)
    node = setup.node(0, Layout.of_sizes([3]))
    algorithm = gossip.build("quant-sgp", node, np.zeros(3, np.float32))
    schedule = node.schedule
    assert isinstance(schedule, ViewSchedule)
    for leaver in (5, 6, 7):
        schedule.membership.add(Change(ChangeKind.LEAVE, leaver, leaver, 4))
    schedule.enter(4)
    algorithm.start_anew()
    five = build_schedule(config, Path(), 5).spectral_gap
    assert algorithm.state()["drift.gain_and_rate"][0] == default_gain(0.24, five) != default_gain(0.24, 0.076)


def own_setup(*overrides: str, num_peers: int = 4) -> RunSetup:
    """Return the setup of a peer whose own data is the digits, 1,437 samples."""
    config = load(environment={}, overrides=["data.partition=own", *overrides])
    return RunSetup.open(config, Path(), num_peers=num_peers)


def test_own_data_is_that_of_this_peer_alone() -> None:
    setup = own_setup("peer.index=2")
    assert setup.trainer(2).evaluate(setup.trainer(2).initial_vector(), "train").total.sum() == 1437
    with pytest.raises(ConfigError, match="only the device of peer 1 has its data"):
        setup.trainer(1)
    # One that was admitted has its own too.
    assert own_setup("peer.index=7").trainer(7).peer == 7


@pytest.mark.parametrize(
    ("settings", "expected"),
    [((), 1.0), (("data.total_samples=2874",), 1.0), (("data.weight_by_samples=true", "data.total_samples=2874"), 2.0)],
)
def test_steps_are_weighted_by_samples_where_asked_for(settings: tuple[str, ...], expected: float) -> None:
    assert own_setup(*settings).step_weight == expected
    assert RunSetup.open(load(environment={}, overrides=settings), Path(), num_peers=4).step_weight == 1.0


def test_class_shares_are_counted_declared_or_taken_to_be_equal() -> None:
    assert RunSetup.open(load(environment={}), Path(), num_peers=4).class_shares is None
    assert own_setup().class_shares == pytest.approx([0.1] * 10)
    shares = own_setup("data.class_shares=[5, 0, 1, 1, 1, 1, 0.5, 0.5, 0, 0]").class_shares
    assert shares == pytest.approx([0.5, 0, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0, 0])
    regression = ("training.task=synthetic", "training.task_options={parameters=40, layers=2, samples=64}")
    assert own_setup(*regression).class_shares is None
    with pytest.raises(ConfigError, match=r"data\.class_shares: task synthetic has no classes"):
        own_setup(*regression, "data.class_shares=[1]").trainer(0)
    with pytest.raises(ConfigError, match=r"data\.class_shares: task synthetic has no classes \(got 'vote'\)"):
        own_setup(*regression, "data.class_shares=vote").trainer(0)


OWN_TASK = ("data.partition=own", "training.task=own_task:make_task")


@pytest.mark.parametrize(
    ("settings", "level", "key", "sentence"),
    [
        ((*OWN_TASK, "data.weight_by_samples=true"), "error", "data.total_samples", "is missing, which"),
        ((*OWN_TASK, "data.total_samples=9"), "warning", "data.total_samples", "without data.weight_by_samples"),
        (("data.partition=own",), "warning", "data.partition", "task digits has the same samples on every device"),
        (
            ("data.weight_by_samples=true",),
            "warning",
            "data.weight_by_samples",
            'no effect without data.partition = "own',
        ),
        (("data.total_samples=9",), "warning", "data.total_samples", "no effect without"),
        (("data.class_shares=[1]",), "warning", "data.class_shares", "no effect without"),
        (("data.class_shares=vote",), "warning", "data.class_shares", "no effect without"),
        (
            (*OWN_TASK, "data.class_shares=vote", "training.label_adjustment=false"),
            "warning",
            "data.class_shares",
            "no effect with training.label_adjustment",
        ),
        (
            (*OWN_TASK, "data.class_shares=vote", "privacy.noise_multiplier=1"),
            "error",
            "data.class_shares",
            "without the noise",
        ),
    ],
)
def test_options_for_own_data_that_lack_something_or_do_nothing_are_named(
    settings: tuple[str, ...], level: str, key: str, sentence: str
) -> None:
    found = validate_config(load(environment={}, overrides=settings), Path(), 4)
    assert [(finding.level, finding.key) for finding in found] == [(level, key)]
    assert sentence in found[0].sentence


def test_own_data_in_order_needs_no_remark() -> None:
    settings = (*OWN_TASK, "data.weight_by_samples=true", "data.total_samples=9", "data.class_shares=[1, 2]")
    assert validate_config(load(environment={}, overrides=settings), Path(), 4) == []
    folder = ("data.partition=own", "training.task=image-folder")
    assert validate_config(load(environment={}, overrides=folder), Path(), 4) == []


def test_kernels_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.run.plan.kernels_missing", lambda: True)
    (found,) = validate_config(load(environment={}), Path(), 4)
    assert (found.level, found.key) == ("warning", "kernels")
    assert "install a wheel that has them, or a C compiler" in found.sentence


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("data.holdout_fraction=0.1", "data.holdout_fraction"),
        ("algorithm.name=ad-psgd", "algorithm.name"),
        ("guard.action=rollback", "guard.action"),
        ("training.class_balance=0.5", "training.class_balance"),
        ("training.label_adjustment=true", "training.label_adjustment"),
        ("training.precision=bfloat16", "training.precision"),
        ("training.precision=int8", "training.precision"),
        ("training.precision=auto", "training.precision"),
        ("training.task=loop", "training.task"),
    ],
)
def test_what_private_peers_would_tell_otherwise_is_refused_at_the_start_and_before(setting: str, key: str) -> None:
    config = load(environment={}, overrides=["privacy.noise_multiplier=1", "training.precision=float32", setting])
    begin = RunSetup.of_loop if key == "training.task" else RunSetup.open
    with pytest.raises(ConfigError) as error:
        begin(config, Path(), num_peers=4)
    assert error.value.key == key
    assert key in {each.key for each in validate_config(config, Path(), 4) if each.level == "error"}


def test_simulated_secrets_follow_the_seed_and_the_peer() -> None:
    pairs = [(0, 0), (0, 1), (1, 0)]
    assert len({simulated_secret(*pair) for pair in pairs}) == len(pairs)
    assert simulated_secret(1, 0) == simulated_secret(1, 0)


def test_a_precision_by_name_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_setup, "fastest", None)
    for precision in ("auto", "float32", "bfloat16", "int8"):
        config = load(environment={}, overrides=[f"training.precision={precision}"])
        assert settle_precision(config, tmp_path, 2) == (config, None)


def test_the_fastest_precision_takes_the_place_of_the_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times: dict[Precision, float] = {"float32": 0.002, "bfloat16": 0.001}

    def fastest(open_trainer: Callable[[Precision], Trainer]) -> PrecisionChoice:
        assert computes_in_bfloat16(open_trainer("bfloat16").model)
        return PrecisionChoice("bfloat16", times)

    monkeypatch.setattr(run_setup, "fastest", fastest)
    config = load(environment={}, overrides=["training.precision=fastest", "training.batch_size=4"])
    settled, choice = settle_precision(config, tmp_path, 2)
    assert choice == PrecisionChoice("bfloat16", times)
    assert (settled.training.precision, settled.training.batch_size) == ("bfloat16", 4)


def test_models_of_devices_that_choose_are_compared_in_float32(tmp_path: Path) -> None:
    setup = RunSetup.open(load(environment={}, overrides=["training.precision=fastest"]), tmp_path, 2)
    chosen = replace(setup, precision="int8")
    assert setup.training.precision == "float32"
    assert chosen.training.precision == "int8"
    assert setup.trainer(0).start_model() == chosen.trainer(0).start_model()
    assert {name for name, _ in chosen.trainer(0).model.named_buffers()} != set()


@pytest.mark.parametrize(
    ("algorithm", "warned"), [("sgp", True), ("allreduce", True), ("low-rank", False), ("compressed-allreduce", False)]
)
def test_an_outer_step_that_does_nothing_is_warned_about(algorithm: str, warned: bool, tmp_path: Path) -> None:
    outer = ("algorithm.outer_rate=2", "algorithm.outer_momentum=0.9")
    overrides = [f"algorithm.name={algorithm}", "graph.kind=complete", "training.local_steps=4", *outer]
    for momentum in ("adamw", "nesterov"):
        config = load(environment={}, overrides=[*overrides, f"training.momentum={momentum}"])
        keys = [each.key for each in validate_config(config, tmp_path, 3)]
        assert ("algorithm.outer_rate" in keys) == warned
        assert ("algorithm.outer_momentum" in keys) == (warned or momentum == "nesterov")


def test_private_steps_are_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_setup, "fastest", None)
    config = load(environment={}, overrides=["training.precision=fastest", "privacy.noise_multiplier=1.0"])
    settled, choice = settle_precision(config, tmp_path, 2)
    assert (settled.training.precision, choice) == ("float32", PrecisionChoice("float32"))


def test_adamw_and_clipping_act_on_the_mean_gradient_where_there_is_one(tmp_path: Path) -> None:
    settings = ("momentum=adamw", "clip_norm=0.2", "weight_decay=0.1", "learning_rate=0.01", "warmup_rounds=0")
    job = ("algorithm.name=allreduce", "compressor.kind=none", "graph.kind=complete", "run.rounds=5")
    overrides = (*job, "training.precision=float32", *(f"training.{each}" for each in settings))
    config = load(environment={}, overrides=overrides)
    setup = RunSetup.open(config, tmp_path, 3)
    trainers = [setup.trainer(peer) for peer in range(3)]
    own = Momentum("adamw", weight_decay=0.1, clip_norm=0.2)
    z, norms = trainers[0].initial_vector(), []
    for t in range(5):
        mean = np.mean([each.gradient(z, t, 0.0, 0.0).gradient for each in trainers], axis=0, dtype=np.float32)
        norms.append(float(np.linalg.norm(mean)))
        z = z - np.float32(trainers[0].rate(t)) * own.direction(mean, z)
    assert min(norms) > 0.2, "all means are shortened"
    for model in run(config, tmp_path, num_peers=3, baseline=False).models:
        np.testing.assert_allclose(model, z, atol=1e-5)
