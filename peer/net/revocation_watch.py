"""Acting on revoked certificates: a newer list from anybody is kept, passed on, and carried out.

A list comes from the file beside the certificate, from a neighbour's note, or by the control call `revoke`. Links to
peers whose certificate it names end, and so does this peer if its own is among them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from peer.errors import RemoteProtocolError, SecurityError
from peer.net.links import Links
from peer.net.security.certificates import Identity
from peer.net.security.revocation_list import RevocationList
from peer.net.tasks import Tasks
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.rate_limits import Allowances

log = logging.getLogger(__name__)

_LOOK_AT_FILES_S = 2.0
_LISTS = {"rate": 0.2, "burst": 10.0}
"""Lists other than the known one that are read of one neighbour, a second and at once: each is a signature to check. An
honest one passes on only lists newer than all it had."""


@dataclass
class RevocationWatch:
    """Keeps up with the revocation list of a run."""

    revoked: RevocationList
    _: KW_ONLY
    own: Callable[[], Identity]
    """Returns this peer's certificate."""
    links: Links
    on_news: Callable[[], None]
    """Called when a newer list was carried out."""
    tasks: Tasks
    _lists: Allowances = field(default_factory=lambda: Allowances(**_LISTS), init=False)

    async def watch_file(self) -> None:
        """Look at the file from time to time: `sotto admin revoke`, or a person, may have put a newer list there."""
        complained = ""
        while True:
            try:
                # Only the file is read in another thread. Its contents are adopted here, so that no list which a
                # neighbour brings at the same time can be replaced by an older one.
                data = await asyncio.get_running_loop().run_in_executor(None, self.revoked.read_if_changed)
                if data is not None and self.revoked.adopt(data, str(self.revoked.path)):
                    self._carry_out(source=None)
                complained = ""
            except SecurityError as error:
                if str(error) != complained:
                    complained = str(error)
                    log.error("%s", error)
            await asyncio.sleep(_LOOK_AT_FILES_S)

    def take_note(self, peer: int, pem: bytes) -> None:
        """Take a list that a neighbour passed on; one of too many goes unread. Raises RemoteProtocolError if it is not
        genuine."""
        if pem == self.revoked.pem or not self._lists.spend(peer, asyncio.get_running_loop().time()):
            return
        try:
            self.take(pem, source=peer)
        except SecurityError as error:
            raise RemoteProtocolError(f"it passed on an invalid revocation list: {error}") from None

    def take(self, pem: bytes, source: int | None = None) -> dict[str, Any]:
        """Take a list; return the result as JSON values. Raises SecurityError if it is not genuine.

        It is passed on to all neighbours but `source`, which has it.
        """
        before = self.revoked.number
        try:
            self.revoked.take(pem)
        except SecurityError as error:
            if self.revoked.number == before:
                raise
            log.error("%s; the list holds until this peer is started again", error)
        if self.revoked.number > before:
            self._carry_out(source)
        return {
            "number": self.revoked.number,
            "revoked": len(self.revoked.entries),
            "news": self.revoked.number > before,
        }

    def _carry_out(self, source: int | None) -> None:
        log.info("%d certificates are revoked by list %d", len(self.revoked.entries), self.revoked.number)
        for connection in self.links.connections():
            if connection.identity is not None and (reason := self._why_revoked(connection.identity)) is not None:
                connection.drop(pb.Close.REFUSED, reason)
                self.links.note_refusal(connection.neighbor, reason)
            elif connection.neighbor.index != source:
                connection.send_revocations(self.revoked.pem)
        self.on_news()
        if (reason := self._why_revoked(self.own())) is not None:
            self.tasks.fail(SecurityError(f"{reason}: this peer may no longer take part"))

    def _why_revoked(self, identity: Identity) -> str | None:
        try:
            self.revoked.check(identity.serial, identity.name)
        except SecurityError as error:
            return str(error)
        return None
