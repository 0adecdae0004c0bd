"""What a training script logs: progress as `sotto run` does, unless the script decides."""

from __future__ import annotations

import logging

import pytest

from peer.library import background


@pytest.mark.parametrize(
    ("level", "has_own", "expected"),
    [
        (logging.NOTSET, False, ["round 3 of 9", "in trouble [2J"]),
        (logging.WARNING, False, ["in trouble [2J"]),
        (logging.NOTSET, True, []),
    ],
)
def test_a_script_tells_its_progress_once_unless_it_is_to_be_quiet(
    level: int, has_own: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = logging.Logger("sotto", level)
    if has_own:
        own.addHandler(logging.NullHandler())
    monkeypatch.setattr(background, "daemon_log", own)
    for _ in range(2):
        background.speak()
    own.info("round 3 of 9")
    own.warning("in trouble\x1b[2J")
    assert [line.split(maxsplit=2)[2] for line in capsys.readouterr().err.splitlines()] == expected
