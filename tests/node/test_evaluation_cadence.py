"""After which rounds a model is evaluated and shared."""

from __future__ import annotations

from peer.config.options import EvaluationOptions
from peer.node.evaluation_cadence import is_evaluated, is_shared


def test_every_so_many_rounds_and_at_the_end() -> None:
    options = EvaluationOptions(every_rounds=4, share_every=2)
    assert [done for done in range(1, 15) if is_evaluated(options, done, 14)] == [4, 8, 12, 14]
    assert [done for done in range(1, 15) if is_shared(options, done, 14)] == [8, 14]


def test_only_at_the_end_where_no_cadence_is_set() -> None:
    options = EvaluationOptions(every_rounds=0)
    assert [done for done in range(1, 8) if is_evaluated(options, done, 7)] == [7]
    assert [done for done in range(1, 8) if is_shared(options, done, 7)] == [7]
