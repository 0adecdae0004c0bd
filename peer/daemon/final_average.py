"""The average of all models after the last round, Σ x / Σ u: the same file on every member, to the bit.

Each member of the last round tells its share: its weight u and digests of its x, in chunks. These notes spread from
neighbour to neighbour. Every member then asks its neighbours for the chunks that it lacks, and passes on those that it
has, so that any connected graph will do, and whoever comes back goes on where it was. A chunk with the digest of one of
its own it has: where all hold one model, no numbers travel. A chunk counts only if it has the digest that its owner
told: a neighbour that passes on anything else is to blame. A member that has all shares, and found them plausible, says
so with a digest of the notes. The file follows from these alone, and nobody writes it before all have said the same: no
member can lead two others to different files, and one that lies in its share moves the average by what plausibility
lets by.

Nobody sums for others. That would save bytes, most of them in a star, and nobody could check a sum.

Shares are kept beside the state until all members have the file, so that a kill at any instant costs no more than the
chunks under way. If a member is missing, no other average is formed: it is named once nothing has come for
`transport.give_up_after_s`, and the next start goes on. The notes are kept for good.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Container, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from peer.compress.layout import Layout
from peer.config.options import TransportOptions
from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.daemon.notes.evaluations import Models
from peer.daemon.runtime import Runtime
from peer.errors import PeerUnreachable, RemoteProtocolError, StateError
from peer.node.statements import is_later
from peer.proto.sottovoce.v1 import note_pb2 as pb
from peer.rate_limits import Allowances
from peer.records import ModelForm
from peer.state.disk import Disk, writing
from peer.state.kept_file import AVERAGE_FILE, AVERAGE_SHARES, MODEL_FORM, OWN_FILE, KeptShares
from peer.state.shares import ShareFile, digest, places, write_average
from peer.train.model_file import open_tensors, write_tensors

log = logging.getLogger("sotto")

SHARES_NAME = "average.part"
MODEL_NAME = "model.safetensors"

_OPEN = 2
"""Requests to one neighbour without an answer."""
_MOST_WAITING = 2 * _OPEN
"""Frames for a neighbour that may wait before its requests do."""
_AGAIN_S = 10.0
"""Interval at which a waiting peer repeats the notes, since one may be lost."""
_PATIENCE_S = 60.0
"""A chunk that a neighbour has not answered for so long is asked of another one, too."""
_PAUSES_S = (0.05, 1.0)
"""Shortest and longest pause before a neighbour that lacked a chunk is asked for one of that share again."""
_LIED_PAUSE_S = 30.0
_PIECES_PER_S = 250.0
"""What is asked of one neighbour, in chunks of its stream: they are among the small messages that it may send at a
limited rate (`net.inbox`)."""
_LEAST_PIECES = 2.5
"""What a request costs at least, since it is such a message itself."""
_REPEATED = 64
"""Notes that are repeated at a time: only so many may wait for a neighbour."""
_NEWS = {"rate": 0.1, "burst": 10.0}
"""Notes of one peer that are looked at and passed on, by second."""
_MOST_CHANGES = 16
"""Notes of one member on what it has that count as progress. An honest one tells two, and again after a restart."""
_LIGHT = 0.25
"""A share of less weight is judged as if it had this one: it moves the average little, however far its z is away."""

_Key = tuple[int, int]
"""(owner, index) of a chunk."""


@dataclass
class FinalAverage:
    """What one peer does for the average, and has of it."""

    hearsay: notes.Hearsay
    _: KW_ONLY
    rounds: int
    layout: Layout
    directory: Path
    """The state folder."""
    is_last_round_done: InitVar[bool]
    """Whether it was when this process began; files about an average from before are deleted where it was not."""
    why_not: str | None
    """Why this run forms none."""
    most_weight: float | None
    """The largest push-sum weight; None for algorithms without."""
    name: Callable[[int], str]
    is_older: Callable[[int], bool]
    """Returns whether a member is known to run a release that cannot take part."""
    neighbors: Neighbors
    runtime: Runtime
    options: TransportOptions

    def __post_init__(self, is_last_round_done: bool) -> None:
        """Raise StateError if those files cannot be deleted."""
        self._me, self._disk = self.hearsay.own, Disk(self.directory)
        self._share_news, self._told_news = Allowances(**_NEWS), Allowances(**_NEWS)
        self._pace = Allowances(rate=_PIECES_PER_S, burst=_PIECES_PER_S)
        self._piece_bytes = min(1024 * self.options.chunk_kbytes, 256 * self.options.window_kbytes)
        """Least size of a chunk of a neighbour's stream, where it has much to send."""
        self._file = ShareFile(self.directory / SHARES_NAME, self.layout.size, ())
        self._members: tuple[int, ...] = ()
        """Members of the last round, ascending; empty until it is over here."""
        self._shares: dict[int, pb.ShareNote] = {}
        self._notes: dict[int, bytes] = {}
        """Peer → the note with its share."""
        self._told: dict[int, tuple[pb.AverageNote, bytes]] = {}
        self._changes: dict[int, int] = {}
        """Member → its notes on what it has, so far."""
        self._missing: dict[int, set[int]] = {}
        """Owner → chunks of its share that are not on disk, for owners whose share is known."""
        self._squares: dict[int, float] = {}
        """Owner → sum of the squares of its numbers that are on disk."""
        self._refused: dict[int, str] = {}
        """Owner → why its share does not count."""
        self._chunks: deque[tuple[int, int, bytes]] = deque()
        """(owner, index, chunk), to be written."""
        self._asked: dict[int, dict[_Key, float]] = {}
        """Neighbour → chunk that it was asked for → when."""
        self._asks: dict[int, deque[pb.ShareChunk]] = {}
        """Neighbour → its requests without an answer."""
        self._answers: dict[int, int] = {}
        """Neighbour → chunks that it was given."""
        self._pauses: dict[_Key, tuple[float, float]] = {}
        """(neighbour, owner) → (when it is asked again, the pause before that)."""
        self._progress_at = self._repeat_at = self._said_at = 0.0
        self._repeat_from = 0
        if not is_last_round_done:
            self._delete(AVERAGE_SHARES.name, SHARES_NAME, AVERAGE_FILE, OWN_FILE)

    # -- what others say -----------------------------------------------------------------------------------------------

    def linked(self, peer: int) -> Iterable[bytes]:
        """Take note of a connected neighbour: what was asked over an earlier connection is open no more. Return the
        shares that it should hear of."""
        self._asked.pop(peer, None)
        self._asks.pop(peer, None)
        return [self._notes[owner] for owner in sorted(self._notes) if owner != peer]

    def linked_told(self, peer: int) -> Iterable[bytes]:
        """Return the notes for a connected neighbour on who has what."""
        return [note for teller, (_, note) in sorted(self._told.items()) if teller != peer]

    def heard(self, source: int, note: bytes) -> None:
        """Judge a neighbour's note of a share. Raises RemoteProtocolError if it is malformed."""
        share = notes.decode_share(note, self.rounds, self._file.num_chunks, self.most_weight)
        known = self._shares.get(share.peer)
        if share == known or self.why_not is not None:
            return
        if known is not None:
            self._compare(source, share.peer, note)
        elif self.hearsay.teller(notes.SHARE, note, share.peer, source, self._share_news) is not None:
            self._shares[share.peer], self._notes[share.peer] = share, note
            self.neighbors.broadcast(notes.SHARE, note, source)
            self._goes_on()

    def heard_told(self, source: int, note: bytes) -> None:
        """Judge a neighbour's note on what a member has. Raises RemoteProtocolError if it is malformed."""
        told = notes.decode_averaged(note, self.rounds)
        if self.why_not is not None or (told.peer in self._told and not self._is_later(source, told, note)):
            return
        if self.hearsay.teller(notes.AVERAGE, note, told.peer, source, self._told_news) is not None:
            self._told[told.peer] = told, note
            self.neighbors.broadcast(notes.AVERAGE, note, source)
            # Whoever says something else again and again keeps nobody from giving up, or from being done.
            self._changes[told.peer] = self._changes.get(told.peer, 0) + 1
            if self._changes[told.peer] <= _MOST_CHANGES:
                self._goes_on()
            self.runtime.wake()

    def frame_received(self, peer: int, frame: bytes) -> None:
        """Take a neighbour's chunk, or its request for one. Raises RemoteProtocolError for what no honest peer
        sends."""
        chunk = notes.decode_chunk(frame)
        if self.why_not is not None:
            return
        self.runtime.wake()
        if chunk.asks:
            waiting = self._asks.setdefault(peer, deque())
            if len(waiting) >= _OPEN:
                raise RemoteProtocolError(f"asks for more than {_OPEN} chunks of shares at once")
            waiting.append(chunk)
            return
        key = chunk.owner, chunk.index
        if self._asked.get(peer, {}).pop(key, None) is None:
            raise RemoteProtocolError("sent a chunk of a share that it was not asked for")
        now = self.runtime.now()
        if not chunk.data:
            _, pause = self._pauses.get((peer, chunk.owner), (0.0, _PAUSES_S[0] / 2))
            pause = min(2 * pause, _PAUSES_S[1])
            self._pauses[peer, chunk.owner] = now + pause, pause
            return
        if digest(chunk.data) != self._shares[chunk.owner].digests[chunk.index]:
            self._pauses[peer, chunk.owner] = now + _LIED_PAUSE_S, _PAUSES_S[1]
            raise RemoteProtocolError(f"sent another chunk than {self.name(chunk.owner)} has told of its share")
        self._pauses.pop((peer, chunk.owner), None)
        self._chunks.append((chunk.owner, chunk.index, chunk.data))

    def _compare(self, source: int, owner: int, note: bytes) -> None:
        """Refuse a member that has signed another share than the one that counts here, and show that to the others."""
        if owner in self._refused or owner == self._me:
            return
        if self.hearsay.is_signed(notes.SHARE, owner, note, "another share"):
            self._refuse(owner, "has signed two different shares")
            self.neighbors.broadcast(notes.SHARE, note, source)

    def _is_later(self, source: int, told: pb.AverageNote, note: bytes) -> bool:
        known, known_note = self._told[told.peer]
        unsigned = source == told.peer or bool(told.file and not known.file)
        return told != known and is_later(note, known_note, unsigned=unsigned)

    def _goes_on(self) -> None:
        self._progress_at = self.runtime.now()
        self.runtime.wake()

    # -- the average ---------------------------------------------------------------------------------------------------

    async def form(
        self,
        members: Collection[int],
        model: Models,
        allowed: Callable[[int, float], float],
        meanwhile: Callable[[], Awaitable[None]],
    ) -> Path | None:
        """Form the average of the models of these members and return its file; None where there is to be none, or this
        peer is to stop. `model`: that of this peer after the last round. `allowed(peer, norm)`: how far the model of a
        peer may reach where the own one has this norm. `meanwhile()` does what else others wait for. Raises
        PeerUnreachable where a member is missing, and StateError."""
        path = self.directory / AVERAGE_FILE
        if self._me not in members:
            return None
        if self.why_not is not None:
            log.info("no average of the models is formed: %s", self.why_not)
            return None
        if await self._is_done(members):
            return path
        await self._begin(model)
        norm = await self.runtime.work(lambda: float(np.linalg.norm(model.z)))
        while not self.runtime.stops:
            older = [peer for peer in self._members if peer not in self._shares and self.is_older(peer)]
            if older:
                names = ", ".join(map(self.name, older))
                log.warning("no average of the models is formed: %s cannot take part before release 0.3", names)
                self._delete(AVERAGE_SHARES.name, SHARES_NAME)
                return None
            await self._write_chunks(lambda owner: allowed(owner, norm))
            await self._look()
            if self._has_file and not self._without_it():
                self._delete(SHARES_NAME)
                return path
            if self._has_waited_enough():
                # What they may still need is kept, for the next start.
                log.warning("%s; this peer is done", self._what_is_missing())
                return path
            await self._answer()
            until = self._ask(self.runtime.now())
            self._give_up_if_in_vain()
            await meanwhile()
            if not self._chunks:
                await self.runtime.wait(until)
        log.info("%s stops before all have the average of the models; the next start goes on", self.name(self._me))
        return None

    def close(self) -> None:
        """Close the file of shares, once no thread writes to it any more."""
        self._file.close()

    async def _is_done(self, members: Collection[int]) -> bool:
        """Take up what is kept; return whether an earlier process was done with it. Then whoever missed it is told
        again that this peer needs nothing more."""
        self._members = tuple(sorted(members))
        self._file = ShareFile(self.directory / SHARES_NAME, self.layout.size, self._members)
        kept = AVERAGE_SHARES.read(self._disk)
        if kept is None:
            return False
        if (kept.rounds, kept.members) != (self.rounds, self._members):
            raise AVERAGE_SHARES.damaged(self._disk)
        try:
            for peer, note in kept.notes.items():
                share = notes.decode_share(note, self.rounds, self._file.num_chunks, self.most_weight)
                self._shares[peer], self._notes[peer] = share, note
        except RemoteProtocolError:
            raise AVERAGE_SHARES.damaged(self._disk) from None
        is_done = not (self.directory / SHARES_NAME).exists() and self._shares.keys() >= {*self._members}
        if is_done:
            self._tell(self._digest(), await self.runtime.work(self._digest_of_file))
        return is_done

    def _digest_of_file(self) -> bytes:
        path = self.directory / AVERAGE_FILE
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise StateError(f"{path} cannot be read: {error.strerror}; copy it from another device") from None

    async def _begin(self, model: Models) -> None:
        """Tell the own share, which stays the same from then on: late messages may still change the model."""
        log.info("forms the average of the models of %d members", len(self._members))
        is_told = self._me in self._shares
        self._file.open()
        if not is_told:
            digests = await self.runtime.work(self._file.put_all, self._me, np.asarray(model.x, np.float32))
            share = pb.ShareNote(peer=self._me, round=self.rounds, weight=float(model.u), digests=digests)
            self._shares[self._me] = share
            self._notes[self._me] = self.hearsay.statements.sign(notes.SHARE, share.SerializeToString())
            self._keep()
        for note in self._notes.values():
            self.neighbors.broadcast(notes.SHARE, note)
        self._goes_on()
        self._repeat_at = self._progress_at + _AGAIN_S

    def _keep(self) -> None:
        known = {peer: note for peer, note in self._notes.items() if peer in self._members}
        AVERAGE_SHARES.keep(self._disk, KeptShares(self.rounds, self._members, known))

    async def _look(self) -> None:
        """Do what is next once all shares are there."""
        now = self.runtime.now()
        if now >= self._repeat_at:
            self._repeat_at = now + _AGAIN_S
            if not self._has_file and now - self._progress_at >= _AGAIN_S and self._said_at != self._progress_at:
                self._said_at = self._progress_at
                log.info("waits with the average: %s", self._what_is_missing())
            told = [(notes.SHARE, note) for note in self._notes.values()]
            told += [(notes.AVERAGE, note) for _, note in self._told.values()]
            for number in range(min(len(told), _REPEATED)):
                self.neighbors.broadcast(*told[(self._repeat_from + number) % len(told)])
            self._repeat_from = (self._repeat_from + _REPEATED) % len(told)
        if not self._is_complete:
            return
        own, shares = self._own, self._digest()
        if own is None:
            # The others rely on it that this peer never takes another one for these.
            self._keep()
            self._tell(shares, b"")
        elif not own.file and not self._unequal():
            weight = sum(self._shares[owner].weight for owner in self._members)
            self._tell(shares, await self.runtime.work(self._write, weight))

    @property
    def _own(self) -> pb.AverageNote | None:
        known = self._told.get(self._me)
        return None if known is None else known[0]

    @property
    def _is_complete(self) -> bool:
        """Whether all shares are on disk, and all count."""
        return not self._refused and all(self._missing.get(owner, {0}) == set() for owner in self._members)

    def _unequal(self) -> list[int]:
        """Return the members that have not said that they have the shares that this one has."""
        own = self._digest()
        return [peer for peer in self._members if peer not in self._told or self._told[peer][0].shares != own]

    def _without_it(self) -> list[int]:
        """Return the members that have not said that they have the file."""
        return [peer for peer in self._members if peer not in self._told or not self._told[peer][0].file]

    def _has_waited_enough(self) -> bool:
        """Whether the file is here, and those that did not say that they have it say nothing for long, or nobody is
        left to pass it on. They do have it, or are to be started again with this peer."""
        silent = self.runtime.now() - self._progress_at > self.options.linger_s
        left = [self.neighbors.left.get(peer) == "completed" for peer in self.neighbors.all]
        return self._has_file and (silent or (bool(left) and all(left)))

    @property
    def _has_file(self) -> bool:
        own = self._own
        return own is not None and bool(own.file)

    def _digest(self) -> bytes:
        """Return a digest of the shares of all, proofs aside."""
        return notes.digest_of(self._shares[owner].SerializeToString() for owner in self._members)

    def _tell(self, shares: bytes, file: bytes) -> None:
        told = pb.AverageNote(peer=self._me, round=self.rounds, shares=shares, file=file)
        note = self.hearsay.statements.sign(notes.AVERAGE, told.SerializeToString())
        self._told[self._me] = told, note
        self.neighbors.broadcast(notes.AVERAGE, note)
        self._goes_on()

    # -- chunks --------------------------------------------------------------------------------------------------------

    def _recall(self, owner: int) -> tuple[set[int], float]:
        """Return the chunks of a share that are not on disk, and the sum of squares of those that are. What equals this
        peer's own is copied first."""
        missing = self._file.missing(owner, self._shares[owner].digests)
        if owner == self._me and missing:
            raise StateError(
                f"{self._file.path} does not hold the model that this peer has told; restore it from a copy, or delete"
                f" it and {AVERAGE_SHARES.name} before the next start"
            )
        mine = self._shares[self._me].digests
        for index in [each for each in missing if self._shares[owner].digests[each] == mine[each]]:
            self._file.put(owner, index, self._file.get(self._me, index))
            missing.discard(index)
        there = set(range(self._file.num_chunks)) - missing
        return missing, sum(_squares(self._file.get(owner, index)) for index in there)

    async def _write_chunks(self, allowed: Callable[[int], float]) -> None:
        """Take up shares that are new, write the chunks that came, and refuse shares that move a model further than
        honest ones do."""
        for owner in self._members:
            if owner in self._shares and owner not in self._missing:
                self._missing[owner], self._squares[owner] = await self.runtime.work(self._recall, owner)
                self._goes_on()  # What is equal was copied, which takes its time.
        for _ in range(len(self._chunks)):
            owner, index, chunk = self._chunks[0]
            if index in self._missing[owner] and owner not in self._refused:
                self._squares[owner] += await self.runtime.work(self._put, owner, index, chunk)
                self._missing[owner].discard(index)
                self._goes_on()
            self._chunks.popleft()
        for owner in self._squares.keys() - self._refused.keys() - {self._me}:
            reach, most = self._squares[owner] ** 0.5 / max(self._shares[owner].weight, _LIGHT), allowed(owner)
            if not reach <= most:
                self._refuse(owner, f"has a share that reaches {reach:.3g}, where {most:.3g} is let by")

    def _put(self, owner: int, index: int, chunk: bytes) -> float:
        self._file.put(owner, index, chunk)
        return _squares(chunk)

    def _refuse(self, owner: int, why: str) -> None:
        self._refused[owner] = why
        log.error("%s %s: no average of the models is formed with it", self.name(owner), why)

    def _ask(self, now: float) -> float:
        """Ask neighbours for what is missing; return when to look again at the latest."""
        until = now + 1.0
        for peer in [each for each in self._asked if not self.neighbors.is_up(each)]:
            del self._asked[peer]
        for peer in sorted(self.neighbors.reachable() & {*self._members}):
            asked = self._asked.setdefault(peer, {})
            while len(asked) < _OPEN and peer in self._shares:
                key = self._next_chunk(peer, now)
                if key is None:
                    break
                pieces = max(_LEAST_PIECES, self._file.length(key[1]) / self._piece_bytes)
                if not self._pace.spend(peer, now, min(pieces, _PIECES_PER_S)):
                    until = min(until, now + 0.1)
                    break
                asked[key] = now
                self._send(peer, pb.ShareChunk(owner=key[0], index=key[1], asks=True))
        again = [at for at, _ in self._pauses.values() if at > now]
        return min([until, *again])

    def _next_chunk(self, peer: int, now: float) -> _Key | None:
        """Return what a neighbour is asked for next: a chunk of its own share, if one is missing."""
        under_way = {key for asked in self._asked.values() for key, at in asked.items() if now < at + _PATIENCE_S}
        under_way |= {(owner, index) for owner, index, _ in self._chunks} | self._asked[peer].keys()
        for owner in sorted(self._missing, key=lambda each: (each != peer, each < self._me, each)):
            if owner in self._refused or self._pauses.get((peer, owner), (0.0, 0.0))[0] > now:
                continue
            wanted = (index for index in sorted(self._missing[owner]) if (owner, index) not in under_way)
            if (index := next(wanted, None)) is not None:
                return owner, index
        return None

    async def _answer(self) -> None:
        """Give neighbours the chunks that they ask for, as far as their links carry them off."""
        for peer, asks in list(self._asks.items()):
            link = self.neighbors.transport.connection(peer)
            while asks and (link is None or link.waiting < _MOST_WAITING):
                ask, data = asks[0], b""
                missing = self._missing.get(ask.owner)
                if missing is not None and 0 <= ask.index < self._file.num_chunks and ask.index not in missing:
                    data = await self.runtime.work(self._file.get, ask.owner, ask.index)
                if self._asks.get(peer) is not asks:
                    break  # The connection over which it asked is gone.
                asks.popleft()
                self._send(peer, pb.ShareChunk(owner=ask.owner, index=ask.index, data=data))
                # Whoever asks for the same again and again keeps nobody from giving up.
                self._answers[peer] = self._answers.get(peer, 0) + bool(data)
                if data and self._answers[peer] <= 2 * len(self._members) * self._file.num_chunks:
                    self._progress_at = self.runtime.now()

    def _send(self, peer: int, chunk: pb.ShareChunk) -> None:
        self.neighbors.transport.send(peer, 0, notes.encode_chunk(chunk))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _write(self, weight: float) -> bytes:
        """Write the average, and what this device's model has beside it; return the digest of the former."""
        form = MODEL_FORM.read(self._disk)
        if form is None:
            trained = dict(zip(self.layout.names, self.layout.shapes, strict=True))
            form = ModelForm(trained=trained, private=(), entries={name: name for name in trained}, without=())
        if sum(map(math.prod, form.trained.values())) != self.layout.size:
            raise MODEL_FORM.damaged(self._disk)
        mixed = places(form)
        self._write_rest(mixed)
        return write_average(
            self.directory / AVERAGE_FILE,
            mixed,
            partial(self._file.mean, weight=weight),
            rounds=self.rounds,
            members=self._members,
        )

    def _write_rest(self, mixed: Container[str]) -> None:
        path = self.directory / OWN_FILE
        with open_tensors(self.directory / MODEL_NAME) as file:
            rest = {name: file.get_tensor(name) for name in [*file.keys()] if name not in mixed}
        self._delete(OWN_FILE)
        if rest:
            with writing(self._disk.where(OWN_FILE)):
                write_tensors(rest, path, metadata={"format": "pt", "rounds": str(self.rounds)})

    def _give_up_if_in_vain(self) -> None:
        if self.runtime.now() - self._progress_at > self.options.give_up_after_s:
            raise PeerUnreachable(
                f"{self._what_is_missing()}, and nothing has come for {self.options.give_up_after_s:.0f} s: no"
                " average of the models is formed, and each device keeps its own; the next start goes on"
            )

    def _what_is_missing(self) -> str:
        """Return whom this peer waits for, and what for."""
        away = [owner for owner in self._members if owner not in self._shares]
        if self._refused:
            owner, why = next(iter(self._refused.items()))
            return f"{self.name(owner)} {why}"
        if away:
            return f"{self._names(away)} told no model after the last round"
        lacking = [owner for owner in self._members if self._missing.get(owner)]
        if lacking:
            return f"nobody within reach has the whole model of {self._names(lacking)}"
        if unequal := self._unequal():
            return f"{self._names(unequal)} did not say that the same shares are there"
        return f"{self._names(self._without_it())} did not say that the average is there"

    def _names(self, peers: Collection[int]) -> str:
        return ", ".join(map(self.name, peers))

    def _delete(self, *names: str) -> None:
        for name in names:
            with writing(self._disk.where(name)):
                (self.directory / name).unlink(missing_ok=True)


def _squares(chunk: bytes) -> float:
    """Return the sum of squares of the numbers of a chunk; NaN or infinite where a number is."""
    values = np.frombuffer(chunk, "<f4").astype(np.float64)
    return float(values @ values)
