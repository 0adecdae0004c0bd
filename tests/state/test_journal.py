"""The journal file: what was appended comes back, whatever its end looks like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.errors import StateError
from peer.state.disk import Disk
from peer.state.journal import (
    Begun,
    Call,
    Called,
    Checked,
    Journal,
    Receipt,
    Received,
    Record,
    Sent,
    Signed,
    Stepped,
    TimedOut,
    read_journal,
)
from tests.state.failing_disk import FailingDisk, ProcessEnds

FRAME = b"one frame for two"
RECORDS: list[Record] = [
    Received(0.5, 3, 17, b"frame"),
    Receipt(2, 9),
    Begun(1.25, 4),
    Sent(4, (1 << 64) - 1, ((0, 5, FRAME), (2, 7, FRAME), (5, 1, b"another"))),
    Begun(1.5, 5, 3),
    Begun(1.75, 6, None, (0, 4)),
    Called(Call.RECEIVE, 2.0, 3, (1 << 64) - 1, (1, 3), b"a request"),
    Called(Call.STEP, 2.25, 0, 7, ()),
    Sent(5, 0, ()),
    Checked(5, 3, ((0, 5, 1), (2, 7, (1 << 64) - 1))),
    Checked(6, 4, ()),
    Signed(b"what was said"),
    TimedOut(2.5),
    Received(3.0, 1, 0, b""),
]


def write(disk: FailingDisk | Disk) -> Journal:
    journal = Journal.create(disk, "j", {"run": "a", "round": 4})
    journal.append(*RECORDS[:3])
    for record in RECORDS[3:]:
        journal.append(record)
    return journal


def test_records_come_back_in_order_and_can_be_added_to(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    journal = write(disk)
    assert journal.size == (tmp_path / "j").stat().st_size
    journal.close()
    content = read_journal(disk, "j")
    assert content.header == {"run": "a", "round": 4}
    assert list(content.records) == RECORDS
    assert content.problem is None
    again = Journal.go_on(disk, "j", content)
    again.append(TimedOut(9.0))
    again.sync()
    again.close()
    again.sync()  # Of a closed one nothing is left to do.
    assert list(read_journal(disk, "j").records) == [*RECORDS, TimedOut(9.0)]


def test_a_frame_for_several_neighbours_is_stored_once() -> None:
    disk = FailingDisk()
    write(disk)
    assert disk.read("j").count(FRAME) == 1


def test_equal_frames_have_equal_checksums_and_others_do_not() -> None:
    sent = Sent(4, 9, ((0, 5, FRAME), (2, 7, FRAME), (5, 1, b"another")))
    checked = Checked.of(sent)
    first, second, third = checked.frames
    assert (checked.round, checked.digest) == (4, 9)
    assert (first[:2], second[:2], third[:2]) == ((0, 5), (2, 7), (5, 1))
    assert first[2] == second[2] != third[2]
    assert Checked.of(Sent(4, 9, ((0, 5, bytes(FRAME)),))).frames == (first,)


def test_a_file_cut_off_anywhere_is_read_up_to_its_last_whole_record() -> None:
    disk = FailingDisk()
    write(disk)
    data, seen = disk.read("j"), set()
    empty = len(header())
    for length in range(empty, len(data) + 1):
        cut = FailingDisk()
        cut.create("j").append([data[:length]])
        content = read_journal(cut, "j")
        assert list(content.records) == RECORDS[: len(content.records)]
        assert (content.problem is None) == (content.whole_bytes == length)
        seen.add(len(content.records))
        Journal.go_on(cut, "j", content).append(TimedOut(7.0))
        assert list(read_journal(cut, "j").records) == [*content.records, TimedOut(7.0)]
    assert seen == set(range(len(RECORDS) + 1))


def header() -> bytes:
    disk = FailingDisk()
    Journal.create(disk, "j", {"run": "a", "round": 4})
    return disk.read("j")


def test_a_changed_byte_ends_the_journal_before_it() -> None:
    disk = FailingDisk()
    write(disk)
    size = disk.size("j")
    for at in range(len(header()), size):
        disk.change("j", at, 0x20)
        content = read_journal(disk, "j")
        assert content.problem is not None
        assert content.whole_bytes <= at
        disk.change("j", at, 0x20)
    assert read_journal(disk, "j").problem is None


@pytest.mark.parametrize("at", [0, 9, 20, 40])
def test_a_journal_without_its_beginning_is_refused(at: int) -> None:
    disk = FailingDisk()
    write(disk)
    disk.change("j", at, 0x01)
    with pytest.raises(StateError, match="j: is not a journal, or is damaged at its beginning"):
        read_journal(disk, "j")


def test_records_of_two_files_do_not_mix() -> None:
    """A checksum continues the one before it: the tail of another journal is no tail of this one."""
    one, other = FailingDisk(), FailingDisk()
    Journal.create(one, "j", {"round": 1})
    write(other)
    one.open("j").append([other.read("j")[len(header()) :]])
    assert read_journal(one, "j").records == ()


def test_what_is_added_stays_though_whoever_began_the_journal_ended_at_once() -> None:
    disk = FailingDisk()
    first = FailingDisk()
    write(first).close()
    # The file has its name, and the folder is not synced.
    disk.end_at = first.operations.index("sync folder")
    with pytest.raises(ProcessEnds):
        write(disk)
    disk.restart()
    journal = Journal.go_on(disk, "j", read_journal(disk, "j"))
    journal.append(*RECORDS)
    journal.sync()
    disk.lose_power()
    assert list(read_journal(disk, "j").records) == RECORDS


def test_nothing_is_added_after_a_failed_write() -> None:
    disk = FailingDisk()
    journal = write(disk)
    disk.fill(10)
    with pytest.raises(StateError, match="j: cannot be written: No space left on device"):
        journal.append(TimedOut(1.0))
    disk.capacity_bytes = None
    with pytest.raises(StateError, match="No space left"):
        journal.append(TimedOut(2.0))
    assert list(read_journal(disk, "j").records) == RECORDS


def test_a_header_is_changed_at_once_or_not_at_all() -> None:
    whole = FailingDisk()
    write(whole)
    begun = len(whole.operations)
    for at in range(begun, begun + 20):
        disk = FailingDisk()
        journal = write(disk)
        disk.end_at = at
        try:
            journal.change_header(disk, {"run": "b", "new": 1})
            journal.append(TimedOut(9.0))
        except ProcessEnds:
            disk.restart()
            content = read_journal(disk, "j")
            assert content.header in ({"run": "a", "round": 4}, {"run": "b", "round": 4, "new": 1})
            assert list(content.records) == RECORDS
        else:
            break
    else:
        pytest.fail("the process ends at every operation")
    assert at > begun + 2
    content = read_journal(disk, "j")
    assert content.header == {"run": "b", "round": 4, "new": 1}
    assert (list(content.records), content.problem) == ([*RECORDS, TimedOut(9.0)], None)
    assert journal.size == disk.size("j")


def test_a_changed_header_survives_a_power_cut() -> None:
    disk = FailingDisk()
    write(disk).change_header(disk, {"run": "b"})
    disk.lose_power()
    assert read_journal(disk, "j").header == {"run": "b", "round": 4}
    assert list(read_journal(disk, "j").records) == RECORDS


def test_a_recorded_step_comes_back_with_its_arrays() -> None:
    disk = FailingDisk()
    arrays = {"displacement": np.arange(5, dtype=np.float32), "empty": np.empty((0, 2), np.uint8), "n": np.array([7])}
    journal = Journal.create(disk, "j", {})
    journal.append(Stepped(3, arrays), Begun(1.0, 3))
    content = read_journal(disk, "j")
    assert content.problem is None
    stepped, begun = content.records
    assert begun == Begun(1.0, 3)
    assert isinstance(stepped, Stepped)
    assert (stepped.round, stepped.arrays.keys()) == (3, arrays.keys())
    for name, array in arrays.items():
        assert stepped.arrays[name].dtype == array.dtype
        assert np.array_equal(stepped.arrays[name], array)
