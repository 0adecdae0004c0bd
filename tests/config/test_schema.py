"""What options accept, in words."""

from __future__ import annotations

import pytest

from peer.config import schema
from peer.config.options import SECTIONS


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("run.rounds", "a whole number of at least 1 (rounds)"),
        ("compressor.bits", "a whole number from 1 to 16 (bits)"),
        ("compressor.fraction", "a number above 0 and at most 1"),
        ("compressor.value_bits", 'a whole number from 1 to 16, or "none" (bits)'),
        ("compressor.rounding", '"nearest", "stochastic", "dither" or "none"'),
        ("compressor.unbiased", 'true, false or "none"'),
        ("algorithm.final_rounds", 'a whole number of at least 0, or "auto" (rounds)'),
        ("security.mode", '"mtls", "tls+token" or "insecure"'),
        ("training.beta", "a number of at least 0 and below 1"),
        ("training.step_milestones", "a list in which each item is a number from 0 to 1"),
        ("transport.heartbeat_s", "a number above 0 (seconds)"),
        ("transport.chunk_kbytes", "a whole number from 1 to 4096 (KiB)"),
        ("run.name", "a short name of letters, digits, dots, dashes, underscores"),
        ("graph.kind", "text or a list in which each item is text"),
    ],
)
def test_types_and_limits_are_put_in_words(key: str, words: str) -> None:
    section, name = key.split(".")
    assert schema.accepts(SECTIONS[section], name) == words


def test_only_optional_keys_may_be_unset() -> None:
    assert schema.may_be_unset(SECTIONS["compressor"], "value_bits")
    assert not schema.may_be_unset(SECTIONS["compressor"], "kind")
    assert not schema.may_be_unset(SECTIONS["training"], "momentum")
