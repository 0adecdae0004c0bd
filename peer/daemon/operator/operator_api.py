"""An operator's requests to a running peer (`sotto status`, `stop`, `reload`, `leave`, `remove`, `report`).

The transport has checked the caller's certificate. Values are those of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from peer import __version__
from peer.daemon.members.peer_list_reload import PeerList
from peer.daemon.pairs import PairLoop
from peer.daemon.parts import CommonParts
from peer.daemon.rounds import RoundLoop
from peer.errors import SottoError
from peer.gossip.membership import ChangeKind
from peer.net.offences import NOTABLE, advice
from peer.net.security.certificates import utc_now
from peer.net.security.credentials import Credentials
from peer.records import ACCURACY
from peer.state.metrics import PAGED, EvaluationRecord, LinkRecord


class OperatorApi:
    """Answers an operator. Every method raises SottoError, with a sentence, where it cannot do as asked."""

    def __init__(self, common: CommonParts, loop: RoundLoop | PairLoop, peer_list: PeerList) -> None:
        self.state = "running"
        """This peer's activity, in a word, until it stops; then its outcome."""
        self._common, self._local, self._neighbors = common, common.local, common.neighbors
        self._loop, self._members, self._peer_list = loop, loop.requests, peer_list

    async def control(self, verb: str, arguments: Mapping[str, object], caller: str = "") -> dict[str, object]:
        """Carry out `verb` for a caller of that name, and return the answer."""
        try:
            answer = await self._answer(verb, arguments)
        except SottoError as error:
            self._common.admissions.called(verb, caller, arguments, f"refused: {error}")
            raise
        self._common.admissions.called(verb, caller, arguments, "done")
        return answer

    async def _answer(self, verb: str, arguments: Mapping[str, object]) -> dict[str, object]:
        match verb:
            case "status":
                proofs = self.proofs(arguments.get("name")) if arguments.get("proofs") else {}
                return {**self.status(), **proofs}
            case "stop":
                return self._stop()
            case "snapshot":
                await self._loop.saver.take_snapshot()
                return {"round": self._loop.round}
            case "reload":
                return await self._peer_list.reload()
            case "leave":
                return await self._members.announce(ChangeKind.LEAVE, self._local.number)
            case "remove":
                return await self._remove(str(arguments.get("name")), arguments.get("order"))
            case "metrics":
                return self._metrics_page(arguments.get("table"), arguments.get("after", -1))
        valid = "status, stop, snapshot, reload, leave, remove, metrics"
        raise SottoError(f"there is no control call {verb!r}; valid: {valid}")

    def status(self) -> dict[str, object]:
        """Return round, loss, accuracies, links and traffic."""
        links = self._neighbors.totals()
        sockets = [link.socket_bytes for link in links.values()]
        own, worst = self._common.evaluations.own(), self._common.evaluations.worst()
        roster = self._local.roster
        return {
            "name": self._local.name,
            **({"incarnation": self._local.incarnation} if self._local.incarnation else {}),
            "run": self._local.config.run.name,
            "version": __version__,
            "releases": self._versions(),
            "protocol": {"needed": self._common.releases.needed, "usable": self._common.releases.usable},
            "state": "stopping" if self._common.runtime.stops else self.state,
            "round": self._loop.round,
            "rounds": self._local.config.run.rounds,
            "loss": self._common.metrics.last_loss,
            "accuracy": None if own is None else self._accuracy(own),
            "metrics": {} if own is None else dict(own.metrics),
            "criterion": self._common.evaluations.told[0].name,
            "criteria": {each.name: each.better for each in self._common.evaluations.told},
            "worst": None if worst is None else self._claimed(worst),
            "diverged": self._diverged(),
            "privacy": self._privacy(),
            "precision": None if self._local.chosen is None else self._local.chosen.document(),
            "neighbors": len(links),
            "neighbors_up": sum(link.up for link in links.values()),
            "payload_bytes": self._neighbors.traffic.payload_bytes,
            "frame_bytes": sum(link.frame_bytes for link in links.values()),
            "protobuf_bytes": sum(link.protobuf_bytes for link in links.values()),
            "socket_bytes": None if None in sockets else sum(size or 0 for size in sockets),
            "links": {roster.name(peer): self._link_status(peer, link) for peer, link in links.items()},
            "offenders": self._offenders(links),
            "newcomers": self._newcomers(),
            "peers": self._others(),
            "relayed": {f"{one} > {two}": size for (one, two), size in self._neighbors.transport.relay.carried.items()},
            "certificate": self._certificate(),
            "admissions": {"count": self._common.admissions.log.count, "chain": self._common.admissions.log.chain},
            "seconds": self._common.runtime.now(),
            "set_back": None if self._loop.progress is None else self._loop.progress.sentence,
            **self._loop.figures(),
            **({} if self._common.limits is None else {"limits": self._common.limits.figures()}),
        }

    def proofs(self, name: object) -> dict[str, object]:
        """Return the evidence for a peer that asks, by `name`, about its own fate, and the numbers of the others."""
        roster = self._local.roster
        losses = dict(sorted(self._members.losses().items()))
        own = {str(number): proof.hex() for number, proof in losses.items() if name == roster.name(number)}
        numbers = {roster.name(number): number for number in self._loop.members}
        number = roster.index_of(str(name))
        is_linked = number in self._neighbors.all and self._neighbors.is_up(number)
        return {"losses": own, "numbers": numbers, "linked": is_linked}

    def _privacy(self) -> dict[str, object] | None:
        """Return the ε that private local steps have spent at most; None where they are not private."""
        budget = self._local.budget
        if budget is None:
            return None
        # The round that is under way counts: its message may have left.
        spent = budget.spent(min(self._loop.round + 1, budget.rounds))
        return {
            "epsilon": spent,
            "delta": budget.delta,
            "limit": self._local.config.privacy.epsilon,
            "noise_multiplier": budget.noise_multiplier,
        }

    def _link_status(self, peer: int, link: LinkRecord) -> dict[str, object]:
        """Return the link to one neighbour for `sotto status --json`; bytes are those sent over it."""
        counts = {name: value for name, value in asdict(link).items() if name not in ("peer", "neighbor")}
        return {
            "up": link.up,
            "problem": self._neighbors.problem(peer),
            "sends": peer in self._neighbors.senders,
            "receives": peer in self._neighbors.receivers,
            **self._neighbors.traffic.described(peer),
            **counts,
            "relayed_bytes": self._neighbors.transport.relayed(peer),
            **self._loop.link_figures(peer),
        }

    def _offenders(self, links: Mapping[int, LinkRecord]) -> list[dict[str, object]]:
        """Return the neighbours that an operator should look at, with advice."""
        return [
            {"name": name, "offences": link.offences, "last": link.last_offence, "advice": advice(name)}
            for name, link in zip(map(self._local.roster.name, links), links.values(), strict=True)
            if link.offences >= NOTABLE
        ]

    def _accuracy(self, record: EvaluationRecord) -> float | None:
        """Return the accuracy of an evaluation; None where the task has metrics in its place."""
        return record.figure(ACCURACY) if ACCURACY in self._common.evaluations.criteria else None

    def _claimed(self, record: EvaluationRecord) -> dict[str, object]:
        """Return an evaluation and its teller: null for one measured here, or known before a restart."""
        name, told_by = self._local.roster.name, self._common.evaluations.told_by(record)
        teller = None if told_by is None else name(told_by)
        return {
            "peer": name(record.peer),
            "accuracy": self._accuracy(record),
            "metrics": dict(record.metrics),
            "told_by": teller,
        }

    def _diverged(self) -> list[dict[str, object]]:
        """Return the reports of peers that ended because they diverged."""
        name = self._local.roster.name
        return [
            {"name": name(peer), "round": claim.round, "reason": claim.reason, "told_by": name(claim.told_by)}
            for peer, claim in self._common.divergence.claims().items()
        ]

    def _versions(self) -> dict[str, str | None]:
        """Return the release of each member, as far as it is known."""
        return {
            self._local.roster.name(peer): None if software is None else software.removeprefix("sottovoce ")
            for peer, software in self._common.releases.software().items()
        }

    def _newcomers(self) -> list[dict[str, object]]:
        """Return the peers that this one knows beyond everybody's list, with the proof for an operator that they
        exist."""
        roster = self._local.roster
        return [
            {
                "index": roster.numbering.device(peer),
                "name": entry.name,
                "advertise": entry.advertise,
                "relay": entry.relay,
                "certificate": roster.certificate(peer).hex(),
            }
            for peer, entry in roster.newcomers.items()
        ]

    def _certificate(self) -> dict[str, object] | None:
        """Return until when the certificates are valid; None in a run without."""
        access = self._local.access
        if not isinstance(access, Credentials):
            return None
        until = min(access.identity.not_after, access.authority_until)
        return {
            "serial": f"{access.identity.serial:x}",
            "not_after": access.identity.not_after.isoformat(),
            "ca_not_after": access.authority_until.isoformat(),
            "days_left": (until - utc_now()).days,
        }

    def _others(self) -> dict[str, dict[str, object]]:
        """Return the state of every other peer, as far as known: its standing in the run, and whether it is
        finished."""
        roster, finished = self._local.roster, self._common.evaluations.finished()
        others: dict[str, dict[str, object]] = {}
        for peer in roster.others:
            state = self._members.standing(peer)
            if state == "member" and peer in finished:
                state = "finished"
            others[roster.name(peer)] = {"state": state, "problem": self._neighbors.problem(peer)}
            if incarnation := roster.numbering.incarnation(peer):
                others[roster.name(peer)]["incarnation"] = incarnation
        return others

    def _stop(self) -> dict[str, object]:
        self._common.runtime.request_stop("stopped by the operator")
        answer = {"stopping": True, "round": self._loop.round}
        return {**answer, "newcomers": self._newcomers(), "peers": self._others()}

    def _metrics_page(self, table: object, after: object) -> dict[str, object]:
        """Return rows of the metrics, of rounds above `after`."""
        if table not in PAGED or not isinstance(after, int):
            raise SottoError(f"metrics takes a table ({', '.join(PAGED)}) and the round after which to begin")
        if table == "links":
            self._common.metrics.put_links()
        else:
            self._common.metrics.flush()
        columns, rows, last = self._local.metrics.page(str(table), after=after)
        return {"columns": columns, "rows": rows, "last": last}

    async def _remove(self, name: str, order: object) -> dict[str, object]:
        """Announce that a peer is lost. `order`: the operator's signed order, in hexadecimal digits."""
        lost = self._local.roster.index_of(name)
        if lost is None:
            raise SottoError(f"there is no peer {name[:80]!r} in this run")
        if lost == self._local.number:
            raise SottoError(f"{name} is running and can leave by itself: sotto admin leave")
        try:
            ordered = bytes.fromhex(order) if isinstance(order, str) else b""
        except ValueError:
            raise SottoError("remove takes an order in hexadecimal digits") from None
        return await self._members.announce(ChangeKind.LOST, lost, ordered=ordered)
