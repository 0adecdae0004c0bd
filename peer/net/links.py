"""The neighbours, and the connection in use to each.

At most one connection to a neighbour is in use, whichever end dialled it. This is where a new one takes over from an
older one, where links go up and down, and where the counters of all connections to a neighbour are added up.

Blame is also assigned here (`Links.blame`): an error raised while a neighbour's input is handled, here or in the
daemon, costs that neighbour its connection and never ends this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from peer.errors import (
    DivergenceError,
    HandshakeRefused,
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
    StateError,
)
from peer.foreign_text import quote
from peer.net.connection import Connection
from peer.net.counters import LinkCounters
from peer.net.handler import Handler
from peer.net.handshake import OpenedStream
from peer.net.hello import Terms
from peer.net.inbox import LinkLimits, new_pace
from peer.net.neighbor import Neighbor
from peer.net.offences import Offences, advice
from peer.net.tasks import Tasks
from peer.net.unreachable import OTHER_CA
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.rate_limits import Allowance, Complaints
from peer.wire.start_model import OTHER_BUFFERS

log = logging.getLogger(__name__)

_OTHER_MACHINE = "%s computes with something else than this peer (%s); only equal devices repeat a run to the bit"
_REMEMBERED_PROCESSES = 32
_ANY_CALLER = -1
"""Stands in place of a neighbour's number."""
_OWN_ERRORS = (StateError, DivergenceError)
"""Errors of this peer itself, whichever neighbour it was serving: its disk, or its own judgement of the run."""


@dataclass
class _Link:
    """A neighbour's record over all its connections, kept also while it is no neighbour."""

    connection: Connection | None = None
    went_down: asyncio.Event = field(default_factory=asyncio.Event)
    generation: int = 0
    """Counts attempts to put a connection into use: one that had to wait can see that it is no longer the newest."""
    replaced: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_PROCESSES))
    """Nonces of processes whose place a newer one took."""
    past: LinkCounters = field(default_factory=LinkCounters)
    """Totals of the connections before the last one."""
    last: LinkCounters = field(default_factory=LinkCounters)
    """Those of the last one, if it is no longer in use. What gRPC had in its hands still is counted in them."""
    is_parting: bool = False
    """Whether the last connection ended with a goodbye."""
    confirmed: tuple[int, int] = (0, 0)
    """Nonce of the last process and the last of our frames that it confirmed over connections out of use."""
    highest_sent: int = 0
    pace: Allowance | None = None
    """Allowance for the neighbour's traffic beside frames; None before its first connection."""
    told: set[str] = field(default_factory=set)
    """Refusals that the log names; each end words the same one its own way, in turns."""
    differences: tuple[str | None, ...] = (None, None)
    """Latest known differences of its buffers, and of its packages and processor, from ours."""


@dataclass(kw_only=True)
class Links:
    """The links of one peer, up or down."""

    me: int
    limits: LinkLimits
    heartbeat_s: float
    relayed: Callable[[int], tuple[int, int] | None]
    """Returns the bytes to and from a neighbour through a relay."""
    handler: Handler
    revocations: Callable[[], bytes]
    """Returns the revocation list that each new connection begins with; empty for none."""
    take_revocations: Callable[[int, bytes], None]
    """As for Connection."""
    tasks: Tasks
    refusals: dict[int, str] = field(default_factory=dict, init=False)
    """Neighbours whose hello does not match ours, with the sentence; until a link to them comes up."""
    problems: dict[int, str] = field(default_factory=dict, init=False)
    """Neighbours without a link, with the latest obstacle."""
    offences: Offences = field(default_factory=Offences, init=False)
    log: LinkLog = field(default_factory=lambda: LinkLog(), init=False)
    neighbors: dict[int, Neighbor] = field(default_factory=dict, init=False)
    """The neighbours of now."""
    _links: dict[int, _Link] = field(default_factory=dict, init=False)

    # -- neighbours --

    def add(self, neighbor: Neighbor) -> None:
        """Take up a neighbour, or see it in another way."""
        if neighbor.index == self.me:
            raise LocalProtocolError("a peer is not its own neighbour")
        self.neighbors[neighbor.index] = neighbor
        self._links.setdefault(neighbor.index, _Link()).highest_sent = 0

    def remove(self, index: int, reason: str) -> None:
        """Forget a neighbour and end the connection to it, for a reason that it is told."""
        if self.neighbors.pop(index, None) is None:
            return
        link = self._links[index]
        link.generation += 1
        link.went_down.set()
        if link.connection is not None:
            if reason:
                link.connection.drop(pb.Close.VIOLATION, reason)
            else:
                link.connection.drop(pb.Close.REFUSED, "there is nothing to say over this link any more")
        self.refusals.pop(index, None)
        self.problems.pop(index, None)

    def holds(self, neighbor: Neighbor) -> bool:
        """Return whether a neighbour still is one, and seen in the same way."""
        return self.neighbors.get(neighbor.index) is neighbor

    # -- connections --

    def connection(self, peer: int) -> Connection | None:
        """Return the connection to a neighbour that is in use; None while its link is down."""
        link = self._links.get(peer)
        return None if link is None else link.connection

    def connections(self) -> Iterator[Connection]:
        """Yield all connections in use; they may be dropped meanwhile."""
        for link in list(self._links.values()):
            if link.connection is not None:
                yield link.connection

    async def wait_down(self, peer: int) -> None:
        """Return when no connection to a neighbour is in use, or when it was removed."""
        link = self._links[peer]
        link.went_down.clear()
        if link.connection is not None:
            await link.went_down.wait()

    def new_generation(self, peer: int) -> int:
        """Return a number that stays the neighbour's `generation` until another stream of it comes this far."""
        self._links[peer].generation += 1
        return self._links[peer].generation

    def generation(self, peer: int) -> int:
        """Return the number of the newest attempt to connect with a neighbour."""
        return self._links[peer].generation

    def give_way(self, neighbor: Neighbor, terms: Terms, *, dialled: bool) -> bool:
        """Return whether a new stream takes over; then the older connection, if any, is out of use.

        The newest wins: the other end would not open another one if it believed in the older one. There is one
        exception. If both ends dial each other at the same time, each would drop the stream that the other chose, and
        so on for ever. If streams of the same two processes cross, the one dialled by the lower index therefore wins at
        both ends. Raises HandshakeRefused for a process whose place a newer one took: two processes that run as the
        same peer would replace each other for ever, too.
        """
        link = self._links[neighbor.index]
        if terms.nonce in link.replaced:
            raise HandshakeRefused(
                f"a newer process of {quote(neighbor.name)} took the place of this one; is it running twice?"
            )
        old = link.connection
        if old is None:
            return True
        if old.nonce != terms.nonce:
            link.replaced.append(old.nonce)
        elif old.dialled != dialled and old.dialled == (self.me < neighbor.index):
            return False
        old.end(pb.Close.SUPERSEDED, "a newer stream of the same pair took over")
        old.detach("a newer connection took over")
        return True

    def open(self, opened: OpenedStream) -> Connection:
        """Put a new connection into use. The caller runs it at once."""
        peer = opened.neighbor.index
        link = self._links[peer]
        link.pace = link.pace or new_pace(asyncio.get_running_loop().time())
        connection = Connection(
            opened,
            limits=self.limits,
            heartbeat_s=self.heartbeat_s,
            relayed=lambda: self.relayed(peer),
            handler=self.handler,
            take_revocations=self.take_revocations,
            blame=self.blame,
            on_detach=self._went_down,
            tasks=self.tasks,
            pace=link.pace,
        )
        nonce, confirmed = link.confirmed
        if nonce == connection.nonce:
            # Its hello may be older than a receipt that came over another connection: where both ends dial, they cross.
            connection.remote_has = max(connection.remote_has, confirmed)
        link.connection, link.is_parting = connection, False
        link.past, link.last = link.past.plus(link.last), LinkCounters()
        link.told.clear()
        self.refusals.pop(peer, None)
        self.problems.pop(peer, None)
        self.log.write(log, logging.INFO, peer, "link to %s is up", opened.neighbor.name)
        self._name_differences(link, opened)
        if pem := self.revocations():
            connection.send_revocations(pem)
        try:
            for seq, frame in self.handler.link_up(peer, connection.remote_has):
                self.send(peer, seq, frame)
        except Exception as error:  # Its word about our frames is its input.
            self.blame(peer, error)
        return connection

    def _name_differences(self, link: _Link, opened: OpenedStream) -> None:
        neighbor, found = opened.neighbor, (opened.terms.other_buffers, opened.terms.other_machine)
        for sentence, known, difference in zip((OTHER_BUFFERS, _OTHER_MACHINE), link.differences, found, strict=True):
            if difference is not None and difference != known:
                self.log.write(log, logging.WARNING, neighbor.index, sentence, neighbor.name, difference)
        link.differences = found

    def send(self, peer: int, seq: int, frame: bytes) -> None:
        """Queue a frame if the link is up."""
        link = self._links.get(peer)
        if link is None or link.connection is None:
            return
        link.connection.send(seq, frame, again=0 < seq <= link.highest_sent)
        link.highest_sent = max(link.highest_sent, seq)

    def counters(self, peer: int) -> LinkCounters:
        """Return the traffic of the link to a neighbour so far."""
        link = self._links.get(peer, _Link())
        return link.past.plus(link.last if link.connection is None else link.connection.counters())

    # -- who is to blame --

    def blame(self, peer: int, error: Exception) -> None:
        """Hold a neighbour responsible for an error raised while its input was handled: count and log it, and close the
        connection with that sentence. It is dialled anew, with back-off.

        Raises the error again if it is about our disk or the whole run, for which this process has to end.
        """
        if isinstance(error, _OWN_ERRORS):
            raise error
        name = self.neighbors[peer].name if peer in self.neighbors else f"peer {peer}"
        problem = error.problem if isinstance(error, RemoteError) else _cannot_be_handled(error)
        if isinstance(error, RemoteError) and not isinstance(error, RemoteProtocolError):
            self.log.write(log, logging.WARNING, peer, "the link to %s ends: %s", name, problem)
        else:
            self._count_offence(peer, name, problem, error)
        if peer in self.neighbors:
            self.problems[peer] = problem
        if (connection := self.connection(peer)) is not None:
            connection.drop(pb.Close.VIOLATION, problem)

    def blame_caller(self, address: str, error: Exception) -> None:
        """Log an error raised while input of a relay, or of a caller that is no known neighbour, was handled.

        Raises the error again if no caller is to blame for it.
        """
        if isinstance(error, _OWN_ERRORS):
            raise error
        problem = _cannot_be_handled(error)
        if self.offences.add(_ANY_CALLER, problem):
            log.warning("a peer at %s broke the protocol: %s", address, problem, exc_info=error)

    def _count_offence(self, peer: int, name: str, problem: str, error: Exception) -> None:
        if self.offences.add(peer, problem):
            bug = None if isinstance(error, RemoteError) else error
            log.warning("%s broke the protocol: %s", name, problem, exc_info=bug)
        if self.offences.is_due(peer):
            count, what_to_do = self.offences.count(peer), advice(name)
            log.error("%s has broken the protocol %d times, most recently: %s; %s", name, count, problem, what_to_do)

    # -- what stands in the way --

    def note_refusal(self, neighbor: Neighbor, reason: str) -> None:
        """Note that two peers do not match, which only a person can mend."""
        self.problems[neighbor.index] = reason
        if self.refusals.get(neighbor.index) != reason:
            self.refusals[neighbor.index] = reason
            if reason not in (told := self._links[neighbor.index].told):
                told.add(reason)
                line = "no link to %s is possible: %s"
                self.log.write(log, logging.ERROR, neighbor.index, line, neighbor.name, reason)
            self._tell_down(neighbor.index, reason)

    def note_problem(self, neighbor: Neighbor, reason: str) -> None:
        """Note why there is no link yet."""
        is_news, self.problems[neighbor.index] = self.problems.get(neighbor.index) != reason, reason
        if is_news and not self._links[neighbor.index].is_parting:
            level = logging.WARNING if OTHER_CA in reason else logging.INFO
            self.log.write(log, level, neighbor.index, "no link to %s yet: %s", neighbor.name, reason)

    def _went_down(self, connection: Connection, reason: str) -> None:
        peer = connection.neighbor.index
        link = self._links[peer]
        link.last = connection.counters()
        link.connection, link.confirmed = None, (connection.nonce, connection.remote_has)
        self.problems[peer] = reason
        link.went_down.set()
        link.is_parting = connection.is_parting
        if not link.is_parting:  # A goodbye is told as one.
            self.log.write(log, logging.INFO, peer, "link to %s is down: %s", connection.neighbor.name, reason)
        self._tell_down(peer, reason)

    def _tell_down(self, peer: int, reason: str) -> None:
        try:
            self.handler.link_down(peer, reason)
        except Exception as error:  # The end of a connection is the doing of its other end, too.
            self.blame(peer, error)


def _cannot_be_handled(error: Exception) -> str:
    """Return the other end's sentence about an unexpected error, whose own text may name files of ours."""
    return f"this peer cannot handle what it sent ({type(error).__name__})"


_LINES_PER_MINUTE = 20


class LinkLog:
    """Logs events on the links of one peer, at most 20 lines at once and per minute about each neighbour."""

    def __init__(self) -> None:
        self._budgets: dict[int, Complaints] = {}

    def write(self, logger: logging.Logger, level: int, peer: int, line: str, *values: object) -> None:
        """Log a line about a neighbour, unless there were too many about it; those left out are counted."""
        now = time.monotonic()
        budget = self._budgets.setdefault(peer, Complaints(per_minute=_LINES_PER_MINUTE, now=now))
        more = budget.worth_a_line(now)
        if more is not None:
            logger.log(level, line + "%s", *values, more)
