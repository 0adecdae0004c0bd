"""The end of a peer for which training makes no sense any more: it says so, and the others hear why.

Reports of others decide nothing, since they may not be true: a peer ends, and puts its state back, only for its own
findings. Reports appear in the log and in `sotto status` as their senders' word, signed where the run has certificates,
and the operator decides: end the run, go on without the peer, or put all peers back to the same round
(`peer.ops.rollback`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from peer.config.options import Config
from peer.daemon.notes import notes
from peer.rate_limits import Allowances

log = logging.getLogger("sotto")

_NEWS_OF_A_PEER = {"rate": 1 / 60, "burst": 3.0}
"""Divergences of one peer that are looked at, shown and passed on, by second."""
_NEWS_FROM_A_NEIGHBOR = {"rate": 1 / 60, "burst": 50.0}
"""Divergences of others that one neighbour may tell of."""


@dataclass(frozen=True)
class Diverged:
    """A peer's finding about itself."""

    round: int
    """Rounds that it had completed."""
    reason: str
    """A sentence."""


@dataclass(frozen=True)
class Claim(Diverged):
    """A report about another peer."""

    told_by: int
    """The neighbour that said so: the peer itself, or one that passed it on."""


class Divergence:
    """This peer's finding, and the reports of others about theirs."""

    def __init__(
        self,
        hearsay: notes.Hearsay,
        rounds: int,
        *,
        name: Callable[[int], str],
        advice: str,
        broadcast: Callable[[str, bytes, int | None], None],
        stop: Callable[[str], None],
    ) -> None:
        """`rounds`: how many the run has. `advice`: a sentence on what happens now, and on possible steps, about
        {name}. `stop` ends this peer for a reason, `broadcast(topic, note, besides)` tells the neighbours."""
        self.finding: Diverged | None = None
        """This peer's own finding; None while all is well."""
        self._claims: dict[int, Claim] = {}
        self._hearsay, self._rounds, self._name, self._advice = hearsay, rounds, name, advice
        self._broadcast, self._stop = broadcast, stop
        self._of_a_peer, self._from_a_neighbor = Allowances(**_NEWS_OF_A_PEER), Allowances(**_NEWS_FROM_A_NEIGHBOR)

    def declare(self, finding: Diverged) -> None:
        """Tell everybody this peer's finding, and stop it."""
        if self.finding is None:
            self.finding = finding
            log.error("%s", finding.reason)
            note = notes.encode_divergence(self._hearsay.own, finding.round, finding.reason)
            self._broadcast(notes.DIVERGED, self._hearsay.statements.sign(notes.DIVERGED, note), None)
            self._stop(f"it diverged: {finding.reason}")

    def heard(self, source: int, note: bytes) -> None:
        """Show a neighbour's report, and pass it on if it is news. Raises RemoteProtocolError if it is malformed."""
        peer, round_, reason = notes.decode_divergence(note, self._rounds)
        known = self._claims.get(peer)
        is_news = known is None or known.round < round_ or (source == peer and known != Claim(round_, reason, peer))
        if not is_news:
            return  # Before the signature is looked at: every neighbour brings the same.
        teller = self._hearsay.teller(notes.DIVERGED, note, peer, source, self._of_a_peer)
        if teller is None or not self._from_a_neighbor.spend(source, self._hearsay.now()):
            return
        claim = self._claims[peer] = Claim(round_, reason, teller)
        log.warning("%s; %s", self._sentence(peer, claim), self._advice.format(name=self._name(peer)))
        self._broadcast(notes.DIVERGED, note, source)

    def claims(self) -> dict[int, Claim]:
        """Return the reports about peers that are not back, as far as this one can see."""
        return {peer: claim for peer, claim in sorted(self._claims.items()) if not self._hearsay.is_up(peer)}

    def _sentence(self, peer: int, claim: Claim) -> str:
        says = "says" if claim.told_by == peer else f"is said by {self._name(claim.told_by)}"
        diverged = "that it diverged" if claim.told_by == peer else "to have diverged"
        return f'{self._name(peer)} {says} {diverged} after {claim.round} rounds: "{claim.reason}"'


def advice(config: Config, *, asynchronous: bool, members_change: bool) -> str:
    """Return a sentence on a peer's conduct while {name} is away because it diverged, and on the operator's choices."""
    rounds, give_up = config.rounds, f"{config.transport.give_up_after_s:g} s at most"
    if asynchronous:
        does = "this peer goes on with its other neighbours"
    elif rounds.late == "skip":
        does = f"this peer goes on without it for {rounds.max_skipped_rounds} rounds, then it waits, {give_up}"
    else:
        does = f"this peer waits where a round needs it, {give_up}"
    instead = "; `sotto remove {name}` goes on without it" if members_change else ""
    return f"{does}{instead}; `sotto stop` ends this peer"
