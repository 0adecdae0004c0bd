"""The tools that measure: settings are valid, and the figures are those of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer import gossip
from peer.config.options import load
from peer.lab.description import read_description
from peer.lab.sweep.sweep import Sweep, cells
from peer.run import plan as run_plan
from tools import scale

STUDIES = {file.stem: file for file in (Path(scale.__file__).parent / "studies").glob("*.toml")}


def test_the_study_of_mnist_has_every_algorithm() -> None:
    planned = cells(read_description(Sweep, STUDIES["mnist"]))
    assert {load(environment={}, overrides=each.overrides).algorithm.name for each in planned} == {*gossip.ALGORITHMS}


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_no_setting_is_one_that_the_validator_refuses(name: str) -> None:
    sweep = read_description(Sweep, STUDIES[name])
    for planned in cells(sweep):
        findings = run_plan.validate_config(load(environment={}, overrides=planned.overrides), Path(), sweep.peers)
        assert not [finding.sentence for finding in findings if finding.level == "error"], planned.describe()


@pytest.mark.parametrize("stacked", [False, True])
def test_the_figures_of_scale_are_of_the_run(stacked: bool) -> None:
    found = scale.measure(4, 4, stacked, ["training.task_options={hidden = 8}"], profile=False)
    assert (found.peers, found.rounds, found.stacked) == (4, 4, stacked)
    assert found.parameters == 20 * 8 + 8 + 8 * 10 + 10
    assert found.peer_rounds_per_s > 0
    assert found.peak_bytes_per_peer >= found.memory_bytes_per_peer
