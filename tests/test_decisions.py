"""The log of a budget's decisions: what is in it survives, what was cut off never was."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.decisions import DecisionLog
from peer.errors import StateError


def test_decisions_are_read_back_and_added_to(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.txt")
    assert log.read() == {}
    log.append(0, 0)
    log.append(4, 7)
    log.close()
    again = DecisionLog(tmp_path / "decisions.txt")
    assert again.read() == {0: 0, 4: 7}
    again.append(8, 3)
    assert again.read() == {0: 0, 4: 7, 8: 3}


def test_a_line_that_was_cut_off_was_never_decided(tmp_path: Path) -> None:
    path = tmp_path / "decisions.txt"
    path.write_bytes(b"0 0\n4 7\n8 1")  # It may have been going to say 12.
    log = DecisionLog(path)
    assert log.read() == {0: 0, 4: 7}
    log.append(8, 12)
    log.close()
    assert path.read_bytes() == b"0 0\n4 7\n8 12\n"


@pytest.mark.parametrize("content", [b"0 zero\n", b"4\n", b"\xff\xfe 1\n", b"1 2 3\n"])
def test_what_is_no_decision_stops_the_peer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "decisions.txt").write_bytes(content)
    with pytest.raises(StateError, match=r"decisions\.txt: is damaged"):
        DecisionLog(tmp_path / "decisions.txt").read()
