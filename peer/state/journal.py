"""The journal of a peer: all events since a checkpoint, in the order in which they were applied.

Replaying it from that checkpoint restores the peer, bit for bit: its records are the inputs of the participant (a round
begun, a frame received, a timer that made a difference, each with its time) and, to check the replay by, checksums of
the peer's own frames with a digest of the state from which they came. Where arithmetic is not repeatable it holds the
own frames themselves, to send them again. A run without rounds has records of one kind of its own: the calls on its
participant.

A plain file rather than SQLite: there is one writer, readers always take all of it in order, and a record has to be in
the hands of the kernel before a frame leaves. That is a `write` of the frame's own bytes here; a SQLite transaction in
WAL mode writes whole pages twice, takes locks, and cannot be cut into single operations by a test that stops the
process at each of them (`peer.state.disk`).

    file    := "SOTTOJNL" u16 version, u32 length, header: JSON, u64 checksum of all that
    record  := u32 length of body, u8 kind, body, u64 checksum

Numbers are little-endian. A checksum is XXH3-64 seeded with the one before it, so that a record is whole only where
everything in front of it is. A file ends at its last whole record; bytes after it were being written when the process
ended, or are damaged, and are cut off.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, get_args

import numpy.typing as npt
import xxhash

from peer.errors import StateError
from peer.foreign_values import parse_json
from peer.protocol import OLDEST
from peer.state.checkpoints import arrays_of, entries_of
from peer.state.disk import Buffer, Disk, Handle, Readable, blocks, cannot_be_written, replace, writing

VERSION = 6
"""Release 0.2.0 wrote it, too. Lower versions, of release 0.1 and before, lack some kinds of records."""

_MAGIC = b"SOTTOJNL"
_FILE = struct.Struct("<8sHI")
_HEAD = struct.Struct("<IB")
_SUM = struct.Struct("<Q")
_BEGUN = struct.Struct("<dQi")
_SENT = struct.Struct("<QQI")
_ENTRY = struct.Struct("<IQII")
_CHECKED = struct.Struct("<IQQ")
_CALLED = struct.Struct("<BdIQI")
_STEPPED = struct.Struct("<QI")


@dataclass(frozen=True)
class Received:
    """A frame of a neighbour was taken."""

    kind = 1
    now: float
    peer: int
    seq: int
    """0: outside the sequence."""
    frame: bytes


FULL_WIDTH = 1 << 30
"""In the place of a variant, of which there are fewer."""


@dataclass(frozen=True)
class Begun:
    """The local step of a round was done and its exchange began."""

    kind = 2
    now: float
    round: int
    variant: int | None = None
    """Variant of the compressor that a bandwidth budget chose; None without one. `FULL_WIDTH`: the peer wrote the
    round's frames without entropy coding, by its own choice."""
    left_out: tuple[int, ...] = ()
    """Receivers that could not be reached and got no weight, ascending."""


@dataclass(frozen=True)
class TimedOut:
    """The timer was due, and the round went on without late neighbours."""

    kind = 3
    now: float


@dataclass(frozen=True)
class Sent:
    """The own numbered frames that resulted from the record before, possibly none."""

    kind = 4
    round: int
    digest: int
    """Digest of the state right after (`DurablePeer`)."""
    frames: tuple[tuple[int, int, bytes], ...]
    """(receiver, number, frame). Equal frames are stored once."""


@dataclass(frozen=True)
class Checked:
    """Checksums of the own numbered frames that resulted from the record before, where a replay makes them again to the
    bit."""

    kind = 10
    round: int
    digest: int
    """Digest of the state right after (`DurablePeer`)."""
    frames: tuple[tuple[int, int, int], ...]
    """(receiver, number, XXH3-64 of the frame)."""

    @classmethod
    def of(cls, sent: Sent) -> Checked:
        """Return the record of frames that can be made again. A frame that several receivers share is read once."""
        distinct = {id(frame): frame for _, _, frame in sent.frames}
        sums = {key: xxhash.xxh3_64_intdigest(frame) for key, frame in distinct.items()}
        return cls(sent.round, sent.digest, tuple((to, seq, sums[id(frame)]) for to, seq, frame in sent.frames))


@dataclass(frozen=True)
class Receipt:
    """A neighbour has our frames up to a number for good."""

    kind = 5
    peer: int
    upto: int


@dataclass(frozen=True)
class Announced:
    """This peer announced a change of the members, at the wish of its operator or of a peer that joins."""

    kind = 6
    now: float
    frame: bytes
    """The announcement as sent to the neighbours (`notice`)."""


@dataclass(frozen=True)
class Signed:
    """A signed statement of this peer about a member, caused by the record before. A replay repeats it, since the
    certificate may be another one by then."""

    kind = 11
    frame: bytes
    """The statement as sent to the neighbours."""


@dataclass(frozen=True)
class Lost:
    """A peer that is lost is not waited for any more."""

    kind = 7
    now: float
    peer: int
    upto: int
    """It had our frames up to this number for good."""


class Call(enum.IntEnum):
    """Method called on a participant without rounds (`PairParticipant`)."""

    READ = 1
    STEP = 2
    RECEIVE = 3
    TIMER = 4
    DISCONNECTED = 5
    ABANDON = 6
    SKIP = 7
    """Exchange numbers were left out after a restart."""


@dataclass(frozen=True)
class Called:
    """A call on the participant of a run without rounds."""

    kind = 8
    call: Call
    now: float
    peer: int
    """The neighbour in question; 0 if there is none."""
    digest: int
    """Digest of the model right after it (`DurablePair`)."""
    reachable: tuple[int, ...]
    """The neighbours that could be asked for an exchange then, ascending."""
    frame: bytes = b""
    """The frame received."""


@dataclass(frozen=True)
class Stepped:
    """A local step was done whose code is the user's."""

    kind = 9
    round: int
    arrays: Mapping[str, npt.NDArray[Any]]
    """Result of the step (`node.local_steps.RecordedSteps`)."""
    needs: int = field(default=OLDEST, compare=False)
    """The version of the protocol whose releases can read it; not in the journal itself."""

    @property
    def is_repeated(self) -> bool:
        """Whether the user's code repeats the step: only a digest of its result is here."""
        return self.arrays.keys() == {"digest"}


Record: TypeAlias = (
    Received | Begun | TimedOut | Sent | Checked | Receipt | Announced | Signed | Lost | Called | Stepped
)
_RECORDS: Mapping[int, type[Record]] = {record.kind: record for record in get_args(Record)}

_PLAIN: Mapping[type[Record], struct.Struct] = {
    Received: struct.Struct("<dIQ"),
    TimedOut: struct.Struct("<d"),
    Receipt: struct.Struct("<IQ"),
    Announced: struct.Struct("<d"),
    Signed: struct.Struct("<"),
    Lost: struct.Struct("<dIQ"),
}
"""Records whose body is their numbers in this layout, and then their frame, if they have one."""


@dataclass(frozen=True)
class JournalContent:
    """Content of a journal file."""

    header: Mapping[str, Any]
    records: tuple[Record, ...]
    whole_bytes: int
    """End of the last whole record."""
    checksum: int
    """Checksum of that record, which the next one continues."""
    problem: str | None
    """The fault of the bytes after that; None if there are none."""


class Journal:
    """A journal that is being written. `append` is for one thread; `sync` may be called from another."""

    def __init__(self, name: str, handle: Handle, last_sum: int) -> None:
        self.name = name
        self._handle, self._sum = handle, last_sum
        self._closing = threading.Lock()
        self._closed = False
        self._problem: str | None = None

    @classmethod
    def create(cls, disk: Disk, name: str, header: Mapping[str, Any]) -> Journal:
        """Begin a new journal, whole and synced from its first instant. Raises StateError."""
        parts, checksum = _start(header)
        with writing(name):
            replace(disk, name, parts)
            return cls(name, disk.open(name), checksum)

    @classmethod
    def go_on(cls, disk: Disk, name: str, content: JournalContent) -> Journal:
        """Go on writing a journal that was read; bytes after its last whole record are cut off."""
        with writing(name):
            # The process that created it may have ended before its name was there for good.
            disk.sync_folder()
            if disk.size(name) > content.whole_bytes:
                disk.truncate(name, content.whole_bytes)
            return cls(name, disk.open(name), content.checksum)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._handle.size

    def append(self, *records: Record) -> None:
        """Write records, one right after the other. Raises StateError if the disk refuses: nothing can be added after
        that, since half a record may be there."""
        if self._problem is not None:
            raise StateError(self._problem)
        parts: list[Buffer] = []
        for record in records:
            body = _encode(record)
            head = _HEAD.pack(sum(map(len, body)), record.kind)
            checksum = xxhash.xxh3_64(head, seed=self._sum)
            for part in body:
                checksum.update(part)
            self._sum = checksum.intdigest()
            parts += [head, *body, _SUM.pack(self._sum)]
        with self._failing_for_good():
            self._handle.append(parts)

    def change_header(self, disk: Disk, changes: Mapping[str, Any]) -> None:
        """Write the file anew with these values in its header, at once or not at all. Raises StateError."""
        with self._closing:
            checksum = 0

            def anew(file: io.BufferedReader[Readable]) -> Iterator[Buffer]:
                nonlocal checksum
                begin = file.read(_FILE.size)
                begin += file.read(_FILE.unpack(begin)[2] + _SUM.size)
                header, _, _ = _read_header(self.name, memoryview(begin))
                start, checksum = _start({**header, **changes})
                yield from start
                # Checksums are chained from the header on.
                while head := file.read(_HEAD.size):
                    chained = xxhash.xxh3_64(head, seed=checksum)
                    yield head
                    for block in blocks(file, _HEAD.unpack(head)[0]):
                        chained.update(block)
                        yield block
                    checksum = chained.intdigest()
                    file.read(_SUM.size)
                    yield _SUM.pack(checksum)

            with self._failing_for_good():
                with disk.reader(self.name) as raw, io.BufferedReader(raw) as file:
                    replace(disk, self.name, anew(file))
                handle = disk.open(self.name)
            with contextlib.suppress(OSError):
                self._handle.close()
            self._handle, self._sum = handle, checksum

    def sync(self) -> None:
        """Make all records appended survive a power cut; for a closed journal nothing is left to do. Raises
        StateError."""
        with self._closing:
            if self._closed:
                return
            # If it fails, the kernel may have dropped the pages; only a restart knows what is really there.
            with self._failing_for_good():
                self._handle.sync()

    @contextlib.contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Raise StateError if the disk refuses inside, and in every later `append`."""
        try:
            yield
        except OSError as error:
            failure = cannot_be_written(self.name, error)
            self._problem = str(failure)
            raise failure from None

    def close(self) -> None:
        """Close the file, after a `sync` that may be under way. Callers that need its content sync first."""
        with self._closing, contextlib.suppress(OSError):
            self._closed = True
            self._handle.close()


def read_journal(disk: Disk, name: str) -> JournalContent:
    """Return the content of a journal up to its last whole record.

    Raises StateError if not even its beginning can be read, or if a newer version wrote it.
    """
    try:
        data = memoryview(disk.read(name))
    except OSError as error:
        raise StateError(f"{name}: cannot be read: {error.strerror}") from None
    header, at, checksum = _read_header(name, data)
    records: list[Record] = []
    problem = None
    while at < len(data):
        try:
            record, end, checksum = _read_record(data, at, checksum)
        except ValueError as error:
            problem = f"{error} at byte {at} of {len(data)}"
            break
        records.append(record)
        at = end
    return JournalContent(header, tuple(records), at, checksum, problem)


def _start(header: Mapping[str, Any]) -> tuple[list[Buffer], int]:
    """Return the beginning of a file, and its checksum."""
    text = json.dumps(header).encode()
    start = _FILE.pack(_MAGIC, VERSION, len(text)) + text
    checksum = xxhash.xxh3_64_intdigest(start)
    return [start + _SUM.pack(checksum)], checksum


def _read_header(name: str, data: memoryview) -> tuple[Mapping[str, Any], int, int]:
    try:
        magic, version, length = _FILE.unpack_from(data)
        end = _FILE.size + length
        if magic != _MAGIC or _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
            raise ValueError
    except (struct.error, ValueError):
        raise StateError(f"{name}: is not a journal, or is damaged at its beginning") from None
    if version != VERSION:
        problem = "a later release wrote it" if version > VERSION else "release 0.2 reads it, and writes this version"
        raise StateError(f"{name}: has version {version}, but this release reads {VERSION}; {problem}")
    try:
        header = parse_json(bytes(data[_FILE.size : end]))
    except ValueError as error:
        raise StateError(f"{name}: is damaged at its beginning: {error}") from None
    return header, end + _SUM.size, _SUM.unpack_from(data, end)[0]


def _read_record(data: memoryview, at: int, checksum: int) -> tuple[Record, int, int]:
    """Return the record at a position, where it ends and its checksum. Raises ValueError if it is not whole."""
    start = at + _HEAD.size
    if start > len(data):
        raise ValueError("a record is cut off")
    length, kind = _HEAD.unpack_from(data, at)
    end = start + length
    if end + _SUM.size > len(data):
        raise ValueError("a record is cut off")
    found = xxhash.xxh3_64_intdigest(data[at:end], seed=checksum)
    if found != _SUM.unpack_from(data, end)[0]:
        raise ValueError("the checksum of a record does not match")
    try:
        return _decode(_RECORDS[kind], data[start:end]), end + _SUM.size, found
    except (struct.error, KeyError, TypeError, ValueError):
        raise ValueError("a record makes no sense") from None


def _encode(record: Record) -> Sequence[Buffer]:
    """Return the pieces of a record's body."""
    match record:
        case Begun(now, round_, variant, left_out):
            peers = struct.pack(f"<{len(left_out)}I", *left_out)
            return [_BEGUN.pack(now, round_, -1 if variant is None else variant) + peers]
        case Called(call, now, peer, digest, reachable, frame):
            peers = struct.pack(f"<{len(reachable)}I", *reachable)
            return [_CALLED.pack(call, now, peer, digest, len(reachable)) + peers, frame]
        case Stepped(round_, arrays):
            layout, parts = entries_of(arrays)
            text = json.dumps(layout).encode()
            return [_STEPPED.pack(round_, len(text)) + text, *parts]
        case Checked(round_, digest, checksums):
            return [_SENT.pack(round_, digest, len(checksums)), *(_CHECKED.pack(*each) for each in checksums)]
        case Sent(round_, digest, frames):
            places: dict[int, tuple[int, int]] = {}
            entries, blobs, end = [], [], 0
            for receiver, seq, frame in frames:
                place = places.get(id(frame))
                if place is None:
                    place = places[id(frame)] = (end, len(frame))
                    blobs.append(frame)
                    end += len(frame)
                entries.append(_ENTRY.pack(receiver, seq, *place))
            return [_SENT.pack(round_, digest, len(frames)), *entries, *blobs]
        case _:
            numbers = dict(vars(record))
            frame = numbers.pop("frame", b"")
            return [_PLAIN[type(record)].pack(*numbers.values()), frame]


def _decode(kind: type[Record], body: memoryview) -> Record:
    """Return the record of a body. Raises struct.error, KeyError, TypeError or ValueError."""
    if (layout := _PLAIN.get(kind)) is not None:
        rest = body[layout.size :]
        frame = (bytes(rest),) if rest or fields(kind)[-1].name == "frame" else ()
        return kind(*layout.unpack_from(body), *frame)
    if kind is Begun:
        now, round_, variant = _BEGUN.unpack_from(body)
        peers = body[_BEGUN.size :]
        left_out = struct.unpack(f"<{len(peers) // 4}I", peers)
        return Begun(now, round_, None if variant < 0 else variant, left_out)
    if kind is Called:
        call, now, peer, digest, count = _CALLED.unpack_from(body)
        reachable = struct.unpack_from(f"<{count}I", body, _CALLED.size)
        return Called(Call(call), now, peer, digest, reachable, bytes(body[_CALLED.size + 4 * count :]))
    if kind is Stepped:
        round_, length = _STEPPED.unpack_from(body)
        end = _STEPPED.size + length
        return Stepped(round_, arrays_of(parse_json(bytes(body[_STEPPED.size : end])), body[end:]))
    round_, digest, count = _SENT.unpack_from(body)
    if kind is Checked:
        return Checked(round_, digest, tuple(_CHECKED.iter_unpack(body[_SENT.size :])))
    start = _SENT.size + count * _ENTRY.size
    if start > len(body):
        raise ValueError("too many entries")
    blobs: dict[tuple[int, int], bytes] = {}
    frames = []
    for number in range(count):
        receiver, seq, first, length = _ENTRY.unpack_from(body, _SENT.size + number * _ENTRY.size)
        if start + first + length > len(body):
            raise ValueError("a frame lies outside the record")
        # Receivers of the same bytes share them in memory too.
        blob = blobs.setdefault((first, length), bytes(body[start + first : start + first + length]))
        frames.append((receiver, seq, blob))
    return Sent(round_, digest, tuple(frames))
