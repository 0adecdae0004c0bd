"""A neighbour decides how often its link comes and goes, and not how much is logged about it."""

from __future__ import annotations

import logging

import pytest

from peer.net.links import LinkLog


def test_each_neighbour_has_a_budget(caplog: pytest.LogCaptureFixture) -> None:
    link_log, logger = LinkLog(), logging.getLogger("sotto")
    with caplog.at_level(logging.INFO):
        for n in range(10_000):
            link_log.write(logger, logging.INFO, 1, "link to %s is down: %d", "ben", n)
        link_log.write(logger, logging.WARNING, 2, "link to %s is down: %s", "cleo", "it left")
    about_ben = [record.message for record in caplog.records if "ben" in record.message]
    assert 20 <= len(about_ben) < 30
    assert about_ben[0] == "link to ben is down: 0"
    assert caplog.records[-1].message == "link to cleo is down: it left"
    assert caplog.records[-1].levelno == logging.WARNING
