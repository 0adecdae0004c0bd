"""The end of a peer for which training makes no sense any more: it says so, and the others hear why.

Reports of others decide nothing, since they may not be true: a peer ends, and puts its state back, only for its own
findings. Reports appear in the log and in `sotto status` as their senders' word, signed where the run has certificates,
and the operator decides: end the run, go on without the peer, or put all peers back to the same round
(`peer.ops.rollback`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

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


@dataclass
class Divergence:
    """This peer's finding, and the reports of others about theirs."""

    hearsay: notes.Hearsay
    rounds: int
    """Rounds of the run."""
    _: KW_ONLY
    name: Callable[[int], str]
    advice: str
    """A sentence on what happens now, and on possible steps, about {name}."""
    broadcast: Callable[[str, bytes, int | None], None]
    """Tells the neighbours: (topic, note, the one that needs no telling)."""
    stop: Callable[[str], None]
    """Ends this peer for a reason."""
    finding: Diverged | None = field(default=None, init=False)
    """This peer's own finding; None while all is well."""
    _claims: dict[int, Claim] = field(default_factory=dict, init=False)
    _of_a_peer: Allowances = field(default_factory=lambda: Allowances(**_NEWS_OF_A_PEER), init=False)
    _from_a_neighbor: Allowances = field(default_factory=lambda: Allowances(**_NEWS_FROM_A_NEIGHBOR), init=False)

    def declare(self, finding: Diverged) -> None:
        """Tell everybody this peer's finding, and stop it."""
        if self.finding is None:
            self.finding = finding
            log.error("%s", finding.reason)
            note = notes.encode_divergence(self.hearsay.own, finding.round, finding.reason)
            self.broadcast(notes.DIVERGED, self.hearsay.statements.sign(notes.DIVERGED, note), None)
            self.stop(f"it diverged: {finding.reason}")

    def heard(self, source: int, note: bytes) -> None:
        """Show a neighbour's report, and pass it on if it is news. Raises RemoteProtocolError if it is malformed."""
        peer, round_, reason = notes.decode_divergence(note, self.rounds)
        known = self._claims.get(peer)
        is_news = known is None or known.round < round_ or (source == peer and known != Claim(round_, reason, peer))
        if not is_news:
            return  # Before the signature is looked at: every neighbour brings the same.
        teller = self.hearsay.teller(notes.DIVERGED, note, peer, source, self._of_a_peer)
        if teller is None or not self._from_a_neighbor.spend(source, self.hearsay.now()):
            return
        claim = self._claims[peer] = Claim(round_, reason, teller)
        log.warning("%s; %s", self._sentence(peer, claim), self.advice.format(name=self.name(peer)))
        self.broadcast(notes.DIVERGED, note, source)

    def claims(self) -> dict[int, Claim]:
        """Return the reports about peers that are not back, as far as this one can see."""
        return {peer: claim for peer, claim in sorted(self._claims.items()) if not self.hearsay.is_up(peer)}

    def _sentence(self, peer: int, claim: Claim) -> str:
        says = "says" if claim.told_by == peer else f"is said by {self.name(claim.told_by)}"
        diverged = "that it diverged" if claim.told_by == peer else "to have diverged"
        return f'{self.name(peer)} {says} {diverged} after {claim.round} rounds: "{claim.reason}"'


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
