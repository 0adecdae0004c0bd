"""Messages between the first process of a simulation and its workers: calls on peers, and their outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from peer import errors
from peer.errors import SottoError
from peer.gossip.effects import Effects, OutgoingFrame
from peer.records import RoundRecord
from peer.simulate.virtual_run import Arrival, Event, Finished, StepDone, Timer
from peer.simulate.workers import Packed


def pack_calls(timed: Sequence[tuple[float, Event]]) -> Packed:
    """Return events with their times as a request."""
    calls: list[list[Any]] = []
    frames: list[bytes] = []
    for now, event in timed:
        if isinstance(event, Arrival):
            # Once for all receivers in a row.
            is_new = not frames or frames[-1] is not event.frame
            calls.append([now, "arrival", event.receiver, event.sender, is_new])
            if is_new:
                frames.append(event.frame)
        else:
            calls.append([now, "step" if isinstance(event, StepDone) else "timer", event.peer])
    return ["calls", calls], frames


def unpack_calls(calls: Sequence[Sequence[Any]], frames: Sequence[memoryview]) -> Iterator[tuple[float, Event]]:
    """Yield the arguments of `pack_calls`."""
    following, frame = iter(frames), b""
    for now, kind, peer, *more in calls:
        if kind == "arrival":
            sender, is_new = more
            if is_new:
                frame = bytes(next(following))
            yield now, Arrival(peer, sender, frame)
        else:
            yield now, StepDone(peer) if kind == "step" else Timer(peer)


def pack_outcomes(outcomes: Iterable[tuple[Effects, Finished | None]]) -> Packed:
    """Return outcomes as an answer: all, or those before the first call that raised an error of the package, and the
    error."""
    packed: list[Any] = []
    blobs: list[bytes | memoryview] = []
    try:
        for effects, finished in outcomes:
            frames, last = [], None
            for each in effects.frames:
                is_new = each.frame is not last
                frames.append([each.receiver, each.payload_bytes, is_new])
                if is_new:
                    last = each.frame
                    blobs.append(last)
            packed.append([frames, effects.wake_at, None if finished is None else _packed(finished, blobs)])
    except SottoError as error:
        packed.append([type(error).__name__, str(error)])
    return packed, blobs


def unpack_outcomes(
    outcomes: Sequence[Sequence[Any]], blobs: Sequence[memoryview]
) -> Iterator[tuple[Effects, Finished | None]]:
    """Yield the outcomes given to `pack_outcomes`; raise the error, if there was one, in its place."""
    following = iter(blobs)
    for outcome in outcomes:
        if len(outcome) == 2:
            raise _raised(*outcome)
        listed, wake_at, packed = outcome
        frames, frame = [], b""
        for receiver, payload_bytes, is_new in listed:
            if is_new:
                frame = bytes(next(following))
            frames.append(OutgoingFrame(receiver=receiver, frame=frame, payload_bytes=payload_bytes))
        finished = None
        if packed is not None:
            record, done, reason, u, dtype = packed
            state = None if u is None else (np.frombuffer(next(following), dtype), u)
            finished = Finished(record=RoundRecord(**record), done=done, reason=reason, state=state)
        yield Effects(frames=frames, wake_at=wake_at), finished


def _packed(finished: Finished, blobs: list[bytes | memoryview]) -> list[Any]:
    u, dtype = None, None
    if finished.state is not None:
        x, u = finished.state
        dtype = x.dtype.str
        blobs.append(x.data.cast("B"))
    return [asdict(finished.record), finished.done, finished.reason, u, dtype]


def _raised(name: str, text: str) -> SottoError:
    """Return an error of the package that a worker raised."""
    kind = getattr(errors, name, SottoError)
    error: SottoError = kind(text)
    return error
