"""The return of a device that was declared lost, or has lost its state: it joins as another peer.

Its training since the others went on without it is no part of the run; nor may it send anything under its old number.
Its old state is set aside, and it asks for a model like any newcomer, under its name and certificate and the number of
its next incarnation. A device that joined and got no model has to be declared lost before: until then the others count
on it. The same holds for one whose state is lost or too old, which waits for that while its peer runs (`progress`).
"""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

from peer.config.options import Config
from peer.daemon.members.first_peer_list import settle
from peer.daemon.members.own_loss import LOST_TOO_OFTEN, ask_members, next_incarnation
from peer.daemon.members.roster import Roster
from peer.daemon.members.signed_statements import statements_of
from peer.daemon.runtime import Runtime
from peer.errors import ConfigError, DeclaredLost, HandshakeRefused, SponsorLost
from peer.gossip.incarnations import MAX_INCARNATIONS
from peer.gossip.membership import Membership
from peer.net.security.credentials import load_credentials
from peer.node.loss_grounds import LossGrounds
from peer.run.plan import why_no_rejoin
from peer.state import incarnation as incarnations
from peer.state.checkpoints import StateFolder
from peer.terminal import telling

log = logging.getLogger("sotto")

_ASK_EVERY_S = 2.0


Lost: TypeAlias = DeclaredLost | SponsorLost
"""Ends of a peer that may take part again."""
LOST = (DeclaredLost, SponsorLost)


async def prepare(error: Lost, config: Config, base: Path, *, heeds_signals: bool = True) -> bool:
    """Make the state folder of a peer, which no process uses, that of its next incarnation. Returns False if it was
    stopped meanwhile. Raises `error` where it cannot take part again, or is not declared lost in time."""
    runtime = Runtime()
    if heeds_signals:
        runtime.install_signals()
    incarnation = await following(error, config, base, runtime)
    if incarnation is None:
        return False
    begin(incarnation, config, base)
    return True


async def following(error: Lost, config: Config, base: Path, runtime: Runtime) -> int | None:
    """Return the incarnation as which a peer that ended with `error` may take part again, once it is declared lost;
    None if `runtime` stops before. Raises `error` where it cannot, or is not declared lost in time."""
    if why_no_rejoin(config) is not None:
        raise error
    name = config.own.name
    if isinstance(error, DeclaredLost):
        incarnation: int | None = error.incarnation
    else:
        log.warning("%s", error)
        log.warning(
            "%s waits to be declared lost, and takes part again then: %s",
            name,
            "run `sotto remove` on another device"
            if config.rounds.lost_after_s is None
            else f"the others do that after {config.rounds.lost_after_s:g} s",
        )
        with telling(lambda: f"{name} waits to be declared lost"):
            incarnation = await _declared_lost(error, config, base, runtime)
    if incarnation is not None and incarnation >= MAX_INCARNATIONS:
        raise HandshakeRefused(LOST_TOO_OFTEN)
    return incarnation


def begin(incarnation: int, config: Config, base: Path) -> None:
    """Make the state folder of a peer, which no process uses, that of an incarnation. Raises StateError."""
    with closing(StateFolder(base / config.state.directory)) as folder:
        incarnations.begin(folder.disk, incarnation)
    name = config.own.name
    log.warning("%s: its state is set aside, and it takes part again as a newcomer", name)


def give_up(config: Config, base: Path) -> int:
    """Make the state folder of a stopped peer that of its next incarnation, as its operator wants; return which one
    that is. Raises ConfigError where it cannot take part again, and StateError."""
    why = why_no_rejoin(config)
    incarnation = incarnations.read_folder(base / config.state.directory) + 1
    if why is None and incarnation >= MAX_INCARNATIONS:
        why = LOST_TOO_OFTEN
    if why is not None:
        raise ConfigError(why)
    begin(incarnation, config, base)
    return incarnation


async def _declared_lost(error: SponsorLost, config: Config, base: Path, runtime: Runtime) -> int | None:
    """Return the next incarnation of a device of no use to the others once its loss is proven; None if it is to stop.
    It knows of no member but those that the run began with: votes count as far as they are theirs."""
    config = settle(config, base)
    access = load_credentials(config.security, base, config.own.name)
    current = incarnations.read_folder(base / config.state.directory)
    roster = Roster(config, access, current)
    with closing(StateFolder(base / config.state.directory)) as folder:
        statements = statements_of(config, access, folder.disk)
    grounds = LossGrounds(
        membership=Membership(tuple(range(config.num_members(config.num_listed)))),
        statements=statements,
        numbering=roster.numbering,
        name_of=roster.name,
        counts_votes=config.rounds.lost_after_s is not None,
    )
    began_at = runtime.now()
    while not runtime.stops:
        incarnation = next_incarnation(grounds, roster.me, await ask_members(roster, access))
        if incarnation > current:
            return incarnation
        if runtime.now() > began_at + config.transport.give_up_after_s:
            raise error
        await runtime.wait(runtime.now() + _ASK_EVERY_S)
    return None
