"""The files that a running peer reads again on request: its certificate, and the list of peers, which gains and loses
entries."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from peer.config.options import Config
from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.change_requests import Members
from peer.daemon.members.first_peer_list import keep, refuse_other_changes
from peer.daemon.runtime import Runtime
from peer.errors import ConfigError, SottoError
from peer.net.security.credentials import Credentials

log = logging.getLogger("sotto")


@dataclass
class PeerList:
    """The list of peers in this peer's file."""

    local: LocalPeer
    file: Config
    """The configuration as it was read, in its own numbering."""
    reread: Callable[[], Config] | None
    """Reads it again; None for a peer that was not started from a file."""
    runtime: Runtime
    members: Members
    _is_kept: bool = field(default=False, init=False)

    async def keep(self) -> None:
        """Keep the list that the run began with beside the state, if none is kept there yet. Raises StateError."""
        if not self._is_kept:
            self._is_kept = True
            await self.runtime.work(keep, self.local.folder.disk, self.local.config.peers)

    async def reload_when_asked(self) -> None:
        """Read the file again after each SIGHUP."""
        while True:
            await self.runtime.reload_asked.wait()
            self.runtime.reload_asked.clear()
            try:
                await self.reload()
            except SottoError as error:
                log.error("the changed file is refused, and nothing changes here: %s", error)

    async def reload(self) -> dict[str, object]:
        """Take over the present list of peers; return the result as JSON values. Raises ConfigError for anything else
        that changed in the file."""
        if self.reread is None:
            raise SottoError("this peer was not started from a file")
        new = self.reread()
        refuse_other_changes(self.file, new)
        before, now = ({peer.name for peer in each.peers} for each in (self.file, new))
        added = [peer for peer in new.peers if peer.name not in before]
        taken_out = [peer.name for peer in self.file.peers if peer.name not in now]
        if (added or taken_out) and self.local.setup.why_no_changes is not None:
            raise ConfigError(self.local.setup.why_no_changes, key="peers")
        await self.keep()
        self.file = new
        renewed = self.local.renew_certificate()
        for entry in added:
            self.local.roster.expect(entry)
        answer = {"added": [entry.name for entry in added], **await self.members.follow_list(taken_out)}
        if renewed:
            assert isinstance(self.local.access, Credentials)
            answer["certificate_until"] = f"{self.local.access.identity.not_after:%Y-%m-%d}"
        log.info("the list of peers was read again: %s", json.dumps(answer))
        return answer
