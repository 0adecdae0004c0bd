"""The admission log: changes of members with their proofs, revocations, refusals, and control calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from peer.daemon.members.roster import Roster
from peer.daemon.neighbors import Neighbors
from peer.foreign_text import printable
from peer.gossip.membership import Change, ChangeKind
from peer.net.security.revocation_list import RevocationList
from peer.state.admission_log import AdmissionLog

_LOOK_EVERY_S = 2.0
_UNLOGGED = ("status", "metrics")
"""Calls that change nothing."""
_MOST_REFUSALS = 1000
"""Most refusals that one process writes: a refused peer can come again and again."""
_WORDS = {ChangeKind.JOIN: "join", ChangeKind.LEAVE: "leave", ChangeKind.LOST: "lost"}


class Admissions:
    """Writes down who comes, goes and gives orders."""

    def __init__(self, log: AdmissionLog, roster: Roster, neighbors: Neighbors, revoked: RevocationList | None) -> None:
        self.log = log
        self._roster, self._neighbors, self._revoked = roster, neighbors, revoked
        keys = ("what", "peer", "told_by", "from_round")
        self._said: set[tuple[object, ...]] = {tuple(map(each.get, keys)) for each in log.known}
        self._list_number = 0 if revoked is None else revoked.number
        self._refused: dict[int, tuple[int, str | None]] = {}
        self._num_refusals = 0

    def changed(self, changes: Iterable[Change]) -> None:
        """Write down the changes of members that are new."""
        for change in changes:
            what, teller = _WORDS[change.kind], self._roster.name(change.issuer)
            key = what, change.subject, teller, change.effective
            if key in self._said:
                continue
            self._said.add(key)
            self.log.add(
                what,
                name=self._roster.name(change.subject),
                peer=change.subject,
                told_by=teller,
                from_round=change.effective,
                **({"votes": len(change.votes)} if change.votes else {}),
                **({"by": "operator"} if change.ordered else {}),
                **({"frame": change.told.hex()} if change.told else {}),
            )

    def called(self, verb: str, caller: str, arguments: Mapping[str, Any], outcome: str) -> None:
        """Write down a control call that may have changed something."""
        if verb not in _UNLOGGED:
            shown = {key: printable(str(value))[:200] for key, value in arguments.items() if key in ("name",)}
            self.log.add("control", call=verb, caller=printable(caller), **shown, outcome=printable(outcome)[:200])

    async def watch(self) -> None:
        """Write down revocations and refusals, as they come."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_EVERY_S)

    def look(self) -> None:
        """Write down revocations and refusals that are new."""
        if self._revoked is not None and self._revoked.number > self._list_number:
            self._list_number = self._revoked.number
            self.log.add("revoked", list=self._list_number, certificates=len(self._revoked.entries))
        transport = self._neighbors.transport
        for peer in sorted(transport.neighbors | transport.refusals.keys()):
            now = transport.offences.count(peer), transport.refusals.get(peer)
            if now == self._refused.get(peer, (0, None)) or self._num_refusals >= _MOST_REFUSALS:
                continue
            self._refused[peer], self._num_refusals = now, self._num_refusals + 1
            why = now[1] or transport.offences.last(peer)
            if why is not None:
                self.log.add("refused", name=self._roster.name(peer), offences=now[0], why=printable(why)[:300])
