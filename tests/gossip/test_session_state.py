"""The state of a session in a checkpoint: what is written, and what is read of older ones."""

from __future__ import annotations

import json

import pytest

from peer.gossip.session_state import LateState, SessionState

STATE = SessionState(
    round=12,
    late=LateState(
        missed=frozenset({(11, 2), (10, 2)}),
        skips_in_a_row={2: 2},
        lateness={0: [0.0, 0.25], 2: [1.5]},
        began_at={10: 3.5},
    ),
    usual_weight=0.75,
    applied=((9, 2),),
    lost={4: 8},
)


def test_it_is_what_it_was_after_it_was_json() -> None:
    written = json.loads(json.dumps(STATE.to_json()))
    assert written == {
        "round": 12,
        "missed": [[10, 2], [11, 2]],
        "skips_in_a_row": {"2": 2},
        "usual_weight": 0.75,
        "applied": [[9, 2]],
        "deadlines": {"0": [0.0, 0.25], "2": [1.5]},
        "began_at": {"10": 3.5},
        "lost": [[4, 8]],
    }
    assert SessionState.from_json(written) == STATE


def test_the_first_releases_wrote_less() -> None:
    assert SessionState.from_json({"round": 3, "missed": [], "skips_in_a_row": {}}) == SessionState(round=3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("round", "12"),
        ("missed", {"11": 2}),
        ("missed", [[11]]),
        ("skips_in_a_row", [2]),
        ("usual_weight", "1"),
        ("deadlines", {"0": 1.5}),
        ("began_at", {"ten": 1.0}),
        ("lost", [["4", 8]]),
    ],
)
def test_what_is_no_state_is_refused(key: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        SessionState.from_json({**STATE.to_json(), key: value})


def test_a_state_without_its_round_is_refused() -> None:
    with pytest.raises(KeyError):
        SessionState.from_json({"missed": [], "skips_in_a_row": {}})
