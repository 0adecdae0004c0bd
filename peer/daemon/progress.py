"""Signed progress of this peer and its neighbours, and the conduct of this peer once it finds that it was set back.

`node.progress` holds the statements and what they prove; here are the hellos, the notes, the disk and the wait. A peer
that was set back keeps all its links down, trains nothing and votes on nobody. Once it is sure that no other process
takes part with a copy of its state, it signs that it was set back: with that in its hellos, the others declare it lost,
and it takes part again as a newcomer (`own_loss`, `rejoining`). Where that is not possible it waits, and says which
command helps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence

from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.own_loss import ask_members
from peer.daemon.neighbors import Neighbors
from peer.daemon.runtime import Runtime
from peer.errors import RemoteProtocolError, SecurityError, StateBehind
from peer.net.hello import ToldProgress
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.progress import (
    ADMISSION,
    PROGRESS,
    KnownProgress,
    Progress,
    check_admission,
    encode_admission,
)
from peer.node.statements import Statements
from peer.run.plan import why_no_rejoin
from peer.state.kept_progress import KEPT_PROGRESS, KeptProgress

log = logging.getLogger("sotto")

_LOOK_EVERY_S = 1.0
_KEEP_EVERY_S = 60.0
"""Interval at which news of neighbours that stay is written. A neighbour that goes may come back set back."""
_ASK_EVERY_S = 2.0
_REPEAT_AFTER_S = 600.0
"""Interval at which the log repeats that a person has to do something."""


class SignedProgress:
    """Implements `net.hello.Progress` for a run with certificates."""

    def __init__(
        self,
        local: LocalPeer,
        statements: Statements,
        runtime: Runtime,
        neighbors: Neighbors,
        durable: DurablePeer | DurablePair,
        admitted: Callable[[int, bytes], None],
    ) -> None:
        """`durable`: the state of this peer, as it was when this process began. `admitted(peer, said)` is told of the
        admission of a neighbour."""
        kept = KEPT_PROGRESS.read(local.folder.disk) or KeptProgress()
        self._local, self._runtime, self._neighbors = local, runtime, neighbors
        self._statements, self._durable, self._admitted = statements, durable, admitted
        self._start, self._era = Progress(era=kept.era, round=durable.round), kept.era
        self._known = KnownProgress(local.number, statements, self._start, kept.signed)
        self._written, self._writing = dict(kept.signed), threading.Lock()
        self._write_at = 0.0
        self._lost: Progress | None = None
        """Progress that this peer had signed and has lost."""
        self._admission = b""
        self._waits_for: str | None = None
        self._said_at = float("-inf")

    def helpers(self) -> Sequence[Coroutine[None, None, None]]:
        """Return the coroutines to run beside the training."""
        return self._tell_now_and_then(), self._watch()

    @property
    def is_set_back(self) -> bool:
        """Whether the state of this peer is older than its signed progress."""
        return self._lost is not None

    @property
    def sentence(self) -> str | None:
        """Return the fate of this peer and the event that it waits for; None for one that was not set back."""
        if self._lost is None:
            return None
        return (
            f"its state is that of round {self._start.round}, but it has signed before that it had completed round"
            f" {self._lost.round}: {self._waits_for or 'it asks the members what they know of it'}"
        )

    # -- hellos --------------------------------------------------------------------------------------------------------

    def told_to(self, peer: int) -> ToldProgress:
        """Return the statements for the hello to a neighbour."""
        return ToldProgress(own=self._known.own(self._done), shown=self._known.of(peer), admission=self._admission)

    def judge(self, peer: int, told: ToldProgress) -> None:
        """Take the statements of a neighbour's hello. Raises StateBehind and RemoteProtocolError."""
        if told.shown and (signed := self._known.shown(told.shown)) is not None:
            self._set_back(signed)
        if told.own:
            progress = self._known.hear(peer, told.own)
            if told.admission:
                self._take_admission(peer, told.admission)
            if self._known.is_behind(peer, progress):
                raise StateBehind(
                    f"its state is that of round {progress.round}, and it has signed a later one before: a copy of its"
                    " state folder was put back, or its disk was wiped"
                )
        if self._lost is not None:
            raise StateBehind(f"our state is that of round {self._start.round}, and we have signed a later one before")

    def _take_admission(self, peer: int, said: bytes) -> None:
        try:
            check_admission(self._statements, peer, said)
        except SecurityError as error:
            raise RemoteProtocolError(f"admits that it was set back: {error}") from None
        self._admitted(peer, said)
        raise StateBehind("it was set back and has lost what it had: it is about to be declared lost")

    # -- notes, and the disk -------------------------------------------------------------------------------------------

    def heard(self, peer: int, note: bytes) -> None:
        """Take a neighbour's signed statement. Raises RemoteProtocolError for one that it did not sign."""
        self._known.hear(peer, note)

    def link_down(self) -> None:
        """Have the knowledge of neighbours written soon: one of them is gone, and may come back set back."""
        self._write_at = 0.0

    async def _tell_now_and_then(self) -> None:
        """Tell the neighbours this peer's progress, and keep theirs, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.tell()
            if self._known.kept != self._written and self._runtime.now() >= self._write_at:
                await self._runtime.sync(self.keep)
                self._write_at = self._runtime.now() + _KEEP_EVERY_S

    def tell(self, *, is_last: bool = False) -> None:
        """Tell the neighbours how far this peer is, if it is time to, or `is_last`: before it ends."""
        if self._lost is None and (note := self._known.note(self._done, is_last=is_last)) is not None:
            self._neighbors.broadcast(PROGRESS, note)

    def keep(self) -> None:
        """Write the known progress of neighbours. Raises StateError."""
        # At the end of the process a write of the helper may still be under way in another thread.
        with self._writing:
            signed = dict(self._known.kept)
            if signed != self._written:
                KEPT_PROGRESS.keep(self._local.folder.disk, KeptProgress(era=self._era, signed=signed))
                self._written = signed

    @property
    def _done(self) -> Progress:
        return Progress(era=self._era, round=self._durable.disk_state.durable_round)

    # -- set back ------------------------------------------------------------------------------------------------------

    def _set_back(self, signed: Progress) -> None:
        is_new, self._lost = self._lost is None, max(signed, self._lost or signed)
        if not is_new:
            return
        log.warning("%s: %s", self._local.name, self.sentence)
        for peer in self._neighbors.reachable():
            self._neighbors.transport.blame(peer, StateBehind("our own state is older than what we have signed before"))
        self._runtime.wake()

    async def _watch(self) -> None:
        """Once this peer was set back, sign that as soon as it may, until it is cancelled."""
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            if self._lost is None:
                continue
            waits_for = self._what_only_a_person_can_do() or await self._what_members_say()
            now = self._runtime.now()
            if waits_for != self._waits_for or now > self._said_at + _REPEAT_AFTER_S:
                self._waits_for, self._said_at = waits_for, now
                log.warning("%s: %s", self._local.name, self.sentence)

    def _what_only_a_person_can_do(self) -> str | None:
        """Return the step for its operator where it cannot take part again, whatever the members say; None
        otherwise."""
        name, config = self._local.name, self._local.config
        if self._local.setup.why_no_changes is not None:
            return (
                "put the newest copy of its state folder back, or put all peers back to one round (stop them, then"
                f" `sotto admin rollback --round N` on each), since {self._local.setup.why_no_changes}"
            )
        if (why := why_no_rejoin(config)) is not None:
            return (
                f"put the newest copy of its state folder back; or run `sotto remove {name}` on another device, and add"
                f" this one under another name, since {why}"
            )
        return None

    async def _what_members_say(self) -> str:
        """Return the event that it waits for, judged by the members' answers; sign that it was set back once nothing
        forbids it."""
        roster, name = self._local.roster, self._local.name
        try:
            answers = await ask_members(roster, self._local.access)
        except SecurityError as error:
            return str(error)
        can_be_asked = sum(roster[peer].advertise is not None for peer in roster.others)
        if self._admission:
            return (
                "it has signed that, and takes part again as a newcomer once the others have declared it lost; if they"
                f" do not, run `sotto remove {name}` on one of them"
            )
        if any(answer.linked for answer in answers):
            return (
                "it still takes part from another process, whose state is newer: two devices have copies of one state"
                " folder; stop this one (Ctrl-C, `sotto stop` in its folder), or the other one if it is to be replaced"
            )
        few = sum(len(answer.numbers) <= 2 for answer in answers)
        if 2 * few > len(answers) or len(roster.others) < 2:
            return (
                "put the newest copy of its state folder back, or run"
                f" `sotto remove {name}` on the other device, which then goes on alone"
            )
        if 2 * len(answers) < can_be_asked:
            return f"most members have to answer first, and {len(answers)} of {can_be_asked} do"
        assert self._lost is not None
        admission = encode_admission(self._local.number, state=self._start, signed=self._lost)
        self._admission = self._statements.sign(ADMISSION, admission)
        return "it has signed that, and takes part again as a newcomer once the others have declared it lost"
