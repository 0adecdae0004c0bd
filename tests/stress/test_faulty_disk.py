"""The virtual disk keeps what POSIX promises, and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from peer.state.disk import replace
from tests.state.failing_disk import FailingDisk, ProcessEnds


def after_power_cuts(prepare: Callable[[FailingDisk], None], times: int = 200) -> list[dict[str, bytes]]:
    """Return what a disk holds after the same doings and each of many power cuts."""
    found = []
    for seed in range(times):
        disk = FailingDisk(Random(seed))
        prepare(disk)
        disk.lose_power()
        found.append({name: disk.read(name) for name in disk.names()})
    return found


def test_what_was_appended_is_there_for_the_next_process() -> None:
    disk = FailingDisk(Random(0))
    handle = disk.create("a")
    handle.append([b"one", b" two"])
    assert disk.read("a") == b"one two"
    disk.open("a").append([b"!"])
    assert (disk.size("a"), disk.names()) == (8, ["a"])


def test_a_power_cut_leaves_what_was_synced_and_anything_of_the_rest() -> None:
    def prepare(disk: FailingDisk) -> None:
        handle = disk.create("a")
        disk.sync_folder()
        handle.append([b"sure"])
        handle.sync()
        handle.append([b"perhaps"])

    contents = {files["a"] for files in after_power_cuts(prepare)}
    assert all(content.startswith(b"sure") for content in contents)
    assert {b"sure", b"sureperhaps", b"sureper", b"sure" + bytes(7)} <= contents


def test_a_file_whose_name_was_not_synced_may_be_gone() -> None:
    def prepare(disk: FailingDisk) -> None:
        handle = disk.create("a")
        handle.append([b"synced"])
        handle.sync()

    assert {tuple(files.items()) for files in after_power_cuts(prepare)} == {(), (("a", b"synced"),)}


@pytest.mark.parametrize("operation", range(1, 6))
def test_a_replaced_file_is_the_old_or_the_new_one(operation: int) -> None:
    def prepare(disk: FailingDisk) -> None:
        replace(disk, "a", [b"old"])
        disk.end_at = len(disk.operations) + operation - 1
        with pytest.raises(ProcessEnds):
            replace(disk, "a", [b"new"])

    contents = {files["a"] for files in after_power_cuts(prepare)}
    assert contents == ({b"old"} if operation < 4 else {b"old", b"new"})


def test_a_rename_without_a_sync_of_the_file_may_leave_anything() -> None:
    def prepare(disk: FailingDisk) -> None:
        replace(disk, "a", [b"old"])
        disk.create("b").append([b"new"])
        disk.rename("b", "a")
        disk.sync_folder()

    contents = {files["a"] for files in after_power_cuts(prepare)}
    assert b"old" not in contents
    assert {b"", b"new", b"n", bytes(3)} <= contents


def test_a_full_disk_takes_what_fits() -> None:
    disk = FailingDisk(Random(0))
    handle = disk.create("a")
    disk.fill(5)
    with pytest.raises(OSError, match="No space"):
        handle.append([b"1234567"])
    assert disk.read("a") == b"12345"
    assert disk.refused == 1


def test_a_process_dies_within_the_operation_that_was_chosen() -> None:
    contents = set()
    for seed in range(100):
        disk = FailingDisk(Random(seed))
        handle = disk.create("a")
        handle.append([b"12"])
        disk.end_at = len(disk.operations) + 1
        handle.append([b"34"])
        with pytest.raises(ProcessEnds):
            handle.append([b"56"])
        handle.append([b"."])  # The next process is not killed.
        contents.add(disk.read("a"))
    assert contents == {b"1234.", b"12345.", b"123456."}
