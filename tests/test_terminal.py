"""Lines of work that takes long."""

from __future__ import annotations

import queue

from peer import terminal


def test_long_work_is_told_again_and_again_until_it_is_over() -> None:
    said: queue.Queue[str] = queue.Queue()
    done = 0
    with terminal.telling(lambda: f"reads file {done}" if done else None, said.put, every_s=0.001):
        done = 1
        first = said.get(timeout=60)
        done = 2
        while not (later := said.get(timeout=60)).startswith("reads file 2"):
            assert later.startswith("reads file 1")
    assert first.startswith("reads file 1, ")
    assert first.endswith(" so far")


def test_a_function_can_be_told_of_each_time_that_it_is_called() -> None:
    said: queue.Queue[str] = queue.Queue()

    @terminal.telling(lambda: "averages", said.put, every_s=0.001)
    def average() -> str:
        return said.get(timeout=60)

    for _ in range(2):
        assert average().startswith("averages, ")


def test_a_duration_has_the_unit_that_suits_it() -> None:
    assert [terminal.duration(each) for each in (0.035, 0.9997, 8.3, 9.97, 42.4, 59.7, 252.0, 11100.0, None)] == [
        "35 ms", "1.0 s", "8.3 s", "10 s", "42 s", "1 min 00 s", "4 min 12 s", "3 h 05 min", "–",
    ]  # fmt: skip
