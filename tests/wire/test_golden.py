"""Frames that were written once decode for ever, and to the same message."""

from __future__ import annotations

import pytest

from peer.wire import decode, encode
from tests.wire import reference
from tests.wire.comparing import assert_same
from tests.wire.golden import FOLDER, cases, layout_of
from tools.frame_report import describe

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_golden_frames_decode_to_their_message(name: str, implementation: str) -> None:
    message, previous = CASES[name]
    frame = (FOLDER / f"{name}.bin").read_bytes()
    assert_same(decode(frame, layout_of(name), previous=previous), message)


@pytest.mark.parametrize("name", CASES)
def test_a_reader_written_from_the_description_agrees(name: str) -> None:
    message, previous = CASES[name]
    assert_same(reference.decode((FOLDER / f"{name}.bin").read_bytes(), layout_of(name), previous), message)


def test_no_golden_frame_lacks_its_message() -> None:
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(CASES)


def test_golden_frames_hold_every_codec_and_every_code_of_indices() -> None:
    seen: set[str] = set()
    for name, (_, previous) in CASES.items():
        report = describe((FOLDER / f"{name}.bin").read_bytes(), layout_of(name), previous=previous)
        seen |= {codec.partition("-")[0] for layer in report.layers for codec in layer.codecs}
    assert seen == {"packed", "entropy", "zstd", "pooled", "rice", "all"}


@pytest.mark.parametrize("name", CASES)
def test_the_writer_has_not_grown_longer(name: str) -> None:
    message, previous = CASES[name]
    written = encode(message, layout_of(name), previous=previous)
    assert len(written) <= (FOLDER / f"{name}.bin").stat().st_size
