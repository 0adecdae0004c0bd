from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.net.chunks import CHUNK_COST, Assembler, Cutter

WINDOW = 4096


@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=12),
    chunk_bytes=st.integers(1, 3000),
    first=st.integers(0, 2**40),
)
def test_frames_of_any_size_pass_a_small_window_unchanged(sizes: list[int], chunk_bytes: int, first: int) -> None:
    cutter = Cutter(chunk_bytes=chunk_bytes, credit_bytes=WINDOW)
    assembler = Assembler(window_bytes=WINDOW, chunk_bytes=chunk_bytes, max_frame_bytes=9000, last_seq=first)
    sent = [(first + 1 + i, bytes([i]) * size) for i, size in enumerate(sizes)]
    for seq, frame in sent:
        cutter.push(seq, frame)
    received = []
    while len(cutter):
        assert cutter.ready, "credit ran out for ever"
        pieces, frames, frame_bytes = cutter.cut()
        complete = assembler.take(pieces)
        assert (frames, frame_bytes) == (len(complete), sum(len(frame) for _, frame in complete))
        received += complete
        if assembler.owes:
            cutter.credit_bytes += assembler.grant()
    assert received == sent


def test_a_sender_without_credit_has_nothing_ready() -> None:
    cutter = Cutter(chunk_bytes=1000, credit_bytes=1000 + CHUNK_COST)
    cutter.push(1, bytes(1000))
    cutter.push(2, bytes(500))
    assert cutter.ready
    cutter.cut()
    assert cutter.credit_bytes == 0
    assert not cutter.ready
    cutter.credit_bytes += 500 + CHUNK_COST
    assert cutter.ready


def test_small_frames_share_an_envelope() -> None:
    cutter = Cutter(chunk_bytes=1000, credit_bytes=1 << 20)
    for seq in range(1, 6):
        cutter.push(seq, bytes(250))
    pieces, frames, frame_bytes = cutter.cut()
    assert ([piece.sequence for piece in pieces], frames, frame_bytes) == ([1, 2, 3, 4], 4, 1000)


def test_a_whole_frame_needs_neither_offset_nor_size() -> None:
    cutter = Cutter(chunk_bytes=1000, credit_bytes=1 << 20)
    cutter.push(1, bytes(1000))
    (piece,) = cutter.cut()[0]
    assert (piece.offset, piece.frame_bytes) == (0, 0)


def test_credit_comes_back_in_quarters_of_the_window() -> None:
    assembler = Assembler(window_bytes=WINDOW, chunk_bytes=WINDOW, max_frame_bytes=WINDOW, last_seq=0)
    cutter = Cutter(chunk_bytes=WINDOW, credit_bytes=WINDOW)
    cutter.push(1, bytes(WINDOW // 4 - CHUNK_COST - 1))
    assembler.take(cutter.cut()[0])
    assert not assembler.owes
    cutter.push(2, b"x")
    assembler.take(cutter.cut()[0])
    assert assembler.owes
    assert assembler.grant() == WINDOW - cutter.credit_bytes
    assert not assembler.owes
