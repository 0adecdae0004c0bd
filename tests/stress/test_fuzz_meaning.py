"""A fixed number of well-formed lies: to every algorithm, through journals, and to the handlers of a peer."""

from __future__ import annotations

import ast
import gc
import inspect
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.daemon import assembly
from peer.net.admission import CONTROL_VERBS
from tests.ops.answering import HONEST
from tests.stress import fuzz_meaning
from tests.stress.meaning.circumstances import ALGORITHMS, CIRCUMSTANCES, circumstances_of
from tests.stress.meaning.handlers import HONEST_NOTES, try_handlers
from tests.stress.meaning.report import Report, normalized
from tests.stress.meaning.trial import Effort, Trial

MEMORY = Effort(moments=4, batches=1, lies=15, keeps_state=False)
JOURNAL = Effort(moments=2, batches=1, lies=8, keeps_state=True)
SEED = 5


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
    gc.enable()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_peer_outlives_the_lies_of_a_neighbour(algorithm: str) -> None:
    report = Report()
    Trial(circumstances_of(algorithm, SEED), SEED, MEMORY, report).run()
    assert report.findings == {}, "\n".join(report.lines())
    assert report.num_cases >= MEMORY.lies


@pytest.mark.parametrize("name", ["sgp, a peer joins", "moniqua, repairs", "quant-sgp, late neighbours", "ad-psgd"])
def test_lies_leave_no_trace_on_disk(name: str) -> None:
    report = Report()
    (circumstances,) = [each for each in CIRCUMSTANCES if str(each) == name]
    Trial(circumstances, SEED, JOURNAL, report).run()
    assert not report.findings, "\n".join(report.lines())


def test_the_handlers_of_a_peer_outlive_lies() -> None:
    report = Report()
    try_handlers(SEED, 200, report)
    assert not report.findings, "\n".join(report.lines())
    assert len(report.checks) > 20


def test_lies_are_told_in_every_topic_and_every_answer() -> None:
    """Whoever adds a topic or a call adds what an honest peer says there."""
    tree = ast.parse(Path(inspect.getfile(assembly)).read_text(encoding="utf-8"))
    judges = [
        (key, node)
        for statement in ast.walk(tree)
        if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", "") == "judges"
        if isinstance(statement.value, ast.Dict)
        for key, node in zip(statement.value.keys, statement.value.values, strict=True)
        if key is not None
    ]
    later = [
        (target.slice, target)
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Assign)
        for each in statement.targets
        for target in (each.elts if isinstance(each, ast.Tuple) else [each])
        if isinstance(target, ast.Subscript) and getattr(target.value, "id", "") == "judges"
    ]
    topics = {eval(ast.unparse(key), vars(assembly)) for key, _ in [*judges, *later]}
    assert topics == HONEST_NOTES.keys()
    assert len(topics) >= 9
    assert HONEST.keys() == {*CONTROL_VERBS}


def test_a_seed_gives_the_same_report_each_time() -> None:
    reports = [Report(), Report()]
    for report in reports:
        Trial(circumstances_of("choco-sgd", 1), 1, MEMORY, report).run()
    assert reports[0].as_json() == reports[1].as_json()


def test_a_run_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_meaning, "MEMORY", MEMORY)
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    options = ["--algorithm", "local", "--level", "memory", "--json"]
    fuzz_meaning.main([*options, str(whole), "--seeds", "2"])
    fuzz_meaning.main([*options, str(parts), "--seeds", "1"])
    fuzz_meaning.main([*options, str(parts), "--seeds", "1", "--resume"])
    reports = [json.loads(file.read_text()) for file in (whole, parts)]
    for report in reports:
        del report["seconds"]
    assert reports[0] == reports[1]
    assert reports[0]["seeds"] == 2


def test_every_algorithm_has_its_circumstances() -> None:
    assert {each.algorithm for each in CIRCUMSTANCES} == set(ALGORITHMS)
    chosen = {str(circumstances_of(algorithm, seed)) for algorithm in ALGORITHMS for seed in range(60)}
    assert chosen == {*map(str, CIRCUMSTANCES)}


def test_refusals_by_the_same_check_are_counted_together() -> None:
    first = "told the weights 0.5 and -1e+300 in round 7, which nobody can have there"
    assert normalized(first) == normalized(
        "told the weights 2 and nan in round 4611686018427387904, which nobody can have there"
    )
    assert normalized("'peer-1' is in run 'a'") == normalized("'x' is in run ''")
    assert normalized("sent GOSSIP in phase 3") != normalized("sent REPAIR in phase 3")
