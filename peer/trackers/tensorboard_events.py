"""TensorBoard: event files, a folder for each peer, so that their curves lie over each other in one chart."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from peer.trackers.tracker import Run

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


def open_tracker(run: Run) -> TensorBoardTracker:
    """Begin anew: event files of an earlier call would show every curve twice."""
    shutil.rmtree(run.folder)
    run.folder.mkdir()
    return TensorBoardTracker(run.folder)


class TensorBoardTracker:
    """Event files of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, EventFileWriter] = {}

    def log(self, whose: str, done: int, at: float, figures: Mapping[str, float]) -> None:
        """Write one event with all figures."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer(whose).add_event(Event(wall_time=at, step=done, summary=Summary(value=values)))

    def flush(self) -> None:
        """Write buffered events."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, whose: str) -> EventFileWriter:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if whose not in self._writers:
            self._writers[whose] = EventFileWriter(str(self._folder / whose.replace("/", "_")))
        return self._writers[whose]
