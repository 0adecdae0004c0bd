"""Digests of messages that members send all others alike, which they sign and compare.

With all-reduce of any kind and `parameter-server`, each shared part has one owner, which tells it to all others. An
owner that tells two stories would drive their models apart unseen. Every peer therefore keeps a digest of each owner's
frames in each segment of ten rounds, and of its own, and signs them now and then. Digests are of frames as sent, so
that they do not depend on a processor's arithmetic.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from google.protobuf.message import DecodeError

from peer.errors import SecurityError
from peer.node.statements import Statements, unsealed
from peer.proto.sottovoce.v1 import note_pb2 as pb

TOLD = "told"
"""Topic of these notes and of their signatures."""
SEGMENT_ROUNDS = 10
KEPT_SEGMENTS = 32
"""Digests kept of each owner: twice those in a note, for notes of peers that are ahead or behind."""
MOST_SEGMENTS = 16
"""Most segments in one note."""
MAX_NOTE_BYTES = 8 * 1024
"""Most bytes of a note about more than one segment, without its proof."""
DIGEST_BYTES = 16
UNKNOWN = bytes(DIGEST_BYTES)
"""Stands for a digest that a peer does not know: it joined in that segment, or began to count in it."""
_LONG_FRAME = 1 << 20
_MOST_OWNERS = 1 << 16
_MOST_SEGMENT = 1 << 60
_LINK = struct.Struct("<QQ")


def digest(frame: bytes) -> bytes:
    """Return 16 bytes that stand for a frame. Nobody can make two frames of up to 1 MiB with the same ones. For longer
    ones that would take seven times as long (1.4 GB/s, an AMD EPYC) as XXH3, which finds every other difference."""
    if len(frame) <= _LONG_FRAME:
        return hashlib.sha256(frame).digest()[:DIGEST_BYTES]
    return xxhash.xxh3_128_digest(frame)


class ToldParts:
    """Digests of what each owner has told this peer, and this peer all others. A replay leads to the same digests.

    Digests of segments that are over may be read while another thread adds to them.
    """

    def __init__(self, rounds: int) -> None:
        """`rounds`: rounds of the run; the last segment may have fewer than the others."""
        self._rounds = rounds
        self._since = 0
        """The first round that was counted whole here."""
        self._closed = -1
        self._open: dict[tuple[int, int, int], bytes] = {}
        """(round, phase, owner) → digest of a frame."""
        self._chains: dict[int, bytes] = {}
        """Owner → chain over the rounds of the segment under way that are over."""
        self.segments: Mapping[int, Mapping[int, bytes]] = {}
        """Segment → owner → digest, of those that are over, ascending; owners that told nothing are left out."""

    def hear(self, owner: int, round_: int, phase: int, frame: bytes) -> None:
        """Count a frame that all are to get alike. Of those of one round and phase only the first counts."""
        if round_ > self._closed and (round_, phase, owner) not in self._open:
            self._open[round_, phase, owner] = digest(frame)

    def close(self, round_: int) -> None:
        """End a round, whose frames are complete."""
        if round_ != self._closed + 1:
            # This peer has just joined.
            self._since, self._chains = round_ + 1, {}
        self._closed = round_
        over = sorted(key for key in self._open if key[0] <= round_)
        for told in over:
            at, phase, owner = told
            link = self._chains.get(owner, b"") + _LINK.pack(at, phase) + self._open.pop(told)
            self._chains[owner] = hashlib.sha256(link).digest()[:DIGEST_BYTES]
        if (round_ + 1) % SEGMENT_ROUNDS == 0 or round_ + 1 == self._rounds:
            segment = round_ // SEGMENT_ROUNDS
            kept = {each: told for each, told in self.segments.items() if each > segment - KEPT_SEGMENTS}
            if segment * SEGMENT_ROUNDS >= self._since:
                kept[segment] = self._chains
            self.segments, self._chains = kept, {}

    def state(self) -> list[Any]:
        """Return everything as JSON values, between rounds."""
        segments = [[each, _listed(told)] for each, told in self.segments.items()]
        return [self._since, self._closed, _listed(self._chains), segments]

    def restore(self, state: Sequence[Any] | None, round_: int) -> None:
        """Restore a result of `state`, or begin counting at `round_` if it is None, as in a checkpoint that has none.
        Raises ValueError or TypeError if it cannot be that."""
        self._since, self._closed, chains, segments = state or (round_, round_ - 1, [], [])
        self._open, self._chains = {}, _read(chains)
        self.segments = {int(segment): _read(told) for segment, told in segments}


def _listed(told: Mapping[int, bytes]) -> list[list[object]]:
    return [[owner, told[owner].hex()] for owner in sorted(told)]


def _read(listed: Iterable[Sequence[Any]]) -> dict[int, bytes]:
    return {int(owner): bytes.fromhex(text) for owner, text in listed}


@dataclass(frozen=True)
class ToldNote:
    """A peer's note of the digests of frames that it sent and that it was sent."""

    peer: int
    digests: Mapping[int, Mapping[int, bytes]]
    """Segment → owner → digest, without unknown ones."""
    said: bytes = field(default=b"", compare=False, repr=False)
    """The note as sent to others, with the proof of the peer."""

    @property
    def newest(self) -> int:
        """The last segment in it."""
        return max(self.digests)

    def contradicts(self, other: ToldNote) -> bool:
        """Whether two notes of one peer differ about its own frames."""
        me = self.peer
        common = self.digests.keys() & other.digests.keys()
        pairs = ((self.digests[each].get(me), other.digests[each].get(me)) for each in common)
        return other.peer == me and any(None not in pair and pair[0] != pair[1] for pair in pairs)


def encode_told(peer: int, segments: Mapping[int, Mapping[int, bytes]]) -> bytes | None:
    """Return a note of the newest consecutive segments; None if there is none."""
    if not segments:
        return None
    newest = first = max(segments)
    owners = sorted({owner for told in segments.values() for owner in told} | {peer})
    most = min(MOST_SEGMENTS, (MAX_NOTE_BYTES - 32 - 5 * len(owners)) // (len(owners) * DIGEST_BYTES + 4))
    while first - 1 in segments and newest - first + 1 < most:
        first -= 1
    rows = [b"".join(segments[each].get(owner, UNKNOWN) for owner in owners) for each in range(first, newest + 1)]
    note = pb.ToldNote(peer=peer, first_segment=first, owners=owners, digests=rows)
    return note.SerializeToString(deterministic=True)


def decode_told(said: bytes) -> ToldNote:
    """Return a decoded note, whose issuer is yet to be checked. Raises SecurityError for other bytes."""
    statement, _ = unsealed(said)
    try:
        message = pb.ToldNote.FromString(statement)
    except DecodeError:
        raise SecurityError(f"{len(said)} bytes are no ToldNote") from None
    owners, rows = list(message.owners), list(message.digests)
    size = len(owners) * DIGEST_BYTES
    if (
        not 0 < len(rows) <= MOST_SEGMENTS
        or not 0 < len(owners) <= _MOST_OWNERS
        or owners != sorted({*owners})
        or message.first_segment >= _MOST_SEGMENT
        or any(len(row) != size for row in rows)
    ):
        raise SecurityError(f"it has digests of {len(owners)} owners in {len(rows)} segments that make no sense")
    digests = {}
    for number, row in enumerate(rows, start=message.first_segment):
        of_all = (row[at : at + DIGEST_BYTES] for at in range(0, size, DIGEST_BYTES))
        digests[number] = {owner: each for owner, each in zip(owners, of_all, strict=True) if each != UNKNOWN}
    return ToldNote(message.peer, digests, said)


def check_equivocation(statements: Statements, subject: int, said: Sequence[bytes]) -> None:
    """Raise SecurityError unless two notes prove that a peer told different things to different members: both signed by
    it, about one segment, and not the same."""
    if len(said) != 2:
        raise SecurityError(f"{len(said)} notes prove no equivocation")
    one, other = map(decode_told, said)
    if one.peer != subject or not one.contradicts(other):
        raise SecurityError("the two notes do not contradict each other")
    for note in said:
        if not statements.check(TOLD, subject, note):
            raise SecurityError("what nobody has signed proves nothing")


class Comparison:
    """Compares the frames that this peer was sent with the notes of others, and finds owners that told two stories."""

    def __init__(self, peer: int, told: ToldParts, statements: Statements) -> None:
        self._peer, self._told, self._statements = peer, told, statements
        self._notes: dict[int, ToldNote] = {}
        """Member → its newest note."""
        self._agreed: dict[int, ToldNote] = {}
        """Member → the newest of its notes that agreed with its frames to this peer."""
        self.confirmed: dict[int, int] = {}
        """Member → last segment up to which its note agrees with the frames that this peer was sent."""
        self.differs: dict[int, int] = {}
        """Member → an owner about whose frames its note differs from this peer's. If that is itself, it has signed
        something else than it sent."""
        self._shown: set[bytes] = set()
        """Notes that others were shown, while anything differs."""
        self.proofs: dict[int, tuple[bytes, bytes]] = {}
        """Member → two of its notes that contradict each other."""

    def own_note(self, members: Collection[int]) -> bytes | None:
        """Return the signed note for the other members; None if there is nothing to say yet. It is about them alone:
        only some have heard a lost peer's last frames."""
        concerned = {*members, self._peer}
        segments = {
            segment: {owner: told[owner] for owner in told.keys() & concerned}
            for segment, told in self._told.segments.items()
        }
        statement = encode_told(self._peer, segments)
        return None if statement is None else self._statements.sign(TOLD, statement)

    def is_news(self, note: ToldNote) -> bool:
        """Return whether a note says something that was not known."""
        known = self._notes.get(note.peer)
        kept = (each.get(note.peer) for each in (self._notes, self._agreed))
        is_contradiction = note.peer not in self.proofs and any(each and each.contradicts(note) for each in kept)
        return note.peer != self._peer and (known is None or known.newest < note.newest or is_contradiction)

    def take(self, note: ToldNote) -> None:
        """Take a note that is news and whose issuer is proven, or believed where nothing is signed."""
        for kept in (self._notes.get(note.peer), self._agreed.get(note.peer)):
            if kept is not None and kept.contradicts(note) and note.peer not in self.proofs:
                with contextlib.suppress(SecurityError):
                    check_equivocation(self._statements, note.peer, (kept.said, note.said))
                    self.proofs[note.peer] = kept.said, note.said
        known = self._notes.get(note.peer)
        if known is None or known.newest < note.newest:
            self._notes[note.peer] = note

    def look(self, members: Collection[int]) -> list[bytes]:
        """Compare the notes of the other members with the frames counted here by now; return those that all should see,
        because their issuers told somebody something else. Former members are left out: only some may have heard their
        last frames."""
        segments, concerned = self._told.segments, {*members, self._peer}
        self.differs = {}
        for member in sorted(self._notes.keys() & {*members}):
            note = self._notes[member]
            common = sorted(note.digests.keys() & segments.keys())
            other = {
                owner
                for segment in common
                for owner in note.digests[segment].keys() & concerned
                if segments[segment].get(owner) != note.digests[segment][owner]
            }
            if other:
                # Itself before others: its own frames are its own word.
                self.differs[member] = member if member in other else min(other)
            else:
                self.confirmed[member] = max([self.confirmed.get(member, -1), *common])
                self._agreed[member] = note
        owners = set(self.differs.values())
        kept = (note for notes in (self._agreed, self._notes) for note in notes.values() if note.peer in owners)
        news = {note.said: None for note in kept if note.said not in self._shown}
        self._shown = {*news, *self._shown} if owners else set()
        return [*news]
