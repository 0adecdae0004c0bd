"""Wiring of a peer's parts: the only module that knows both loops."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from peer import wire
from peer.config.options import SHARED_SECTIONS, Config
from peer.daemon.final_average import FinalAverage
from peer.daemon.incoming import Incoming
from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.change_requests import ChangeRequests, FixedMembers
from peer.daemon.members.equality import Equality
from peer.daemon.members.joining import Joining
from peer.daemon.members.loss_watch import LossWatch
from peer.daemon.members.member_links import MemberLinks
from peer.daemon.members.own_loss import OwnLoss
from peer.daemon.members.peer_list_reload import PeerList
from peer.daemon.members.signed_statements import SignedStatements
from peer.daemon.notes import notes
from peer.daemon.notes.data_check import DataCheck, data_digest
from peer.daemon.notes.replica_check import ModelCheck, ReplicaCheck
from peer.daemon.operator.audit_log import AuditLog, EventLog
from peer.daemon.operator.operator_api import OperatorApi
from peer.daemon.pair_exchanges import PairExchanges
from peer.daemon.pairs import PairLoop
from peer.daemon.parts import SOFTWARE, CommonParts, Greeting, Judge
from peer.daemon.progress import SignedProgress
from peer.daemon.recovery import recover_pairs, recover_rounds
from peer.daemon.round_frames import RoundFrames
from peer.daemon.rounds import RoundLoop
from peer.daemon.saving import PairSaver, RoundSaver
from peer.daemon.watcher import Watcher
from peer.errors import ConfigError
from peer.gossip.membership import Change
from peer.net.hello import HelloInfo
from peer.net.security.credentials import Credentials
from peer.net.services import OWN_SOCKET
from peer.net.transport import Transport
from peer.node import membership_codec
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.local_steps import RecordedSteps
from peer.node.loss_votes import LOST
from peer.node.progress import PROGRESS
from peer.node.told import TOLD
from peer.protocol import ADMITS, AVERAGE, EQUALITY, GROUNDED, OLDEST
from peer.run.plan import unreachable_pairs, why_no_average
from peer.terminal import STARTING_S, telling

log = logging.getLogger("sotto")


class Parts:
    """One peer, before it talks to anybody."""

    @telling(lambda: "reads checkpoint and journal", every_s=STARTING_S)
    def __init__(
        self,
        local: LocalPeer,
        config: Config,
        reread: Callable[[], Config] | None,
        watcher: Watcher,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read checkpoint and journal of one peer, where a training script is asked for its steps again. `wall_clock`
        returns the seconds since 1970. Raises SottoError."""
        self.common = common = CommonParts(local, watcher, wall_clock)
        self.loop = loop = _pair_loop(common) if local.setup.spec.asynchronous else _round_loop(common)
        self.peer_list = PeerList(local, config, reread, common.runtime, loop.requests)
        self.operator = OperatorApi(common, loop, self.peer_list)
        common.releases.follow(lambda: loop.members, lambda: loop.durable.disk_state.protocol)
        self.average = average = _average(common, loop)
        judges: dict[str, Judge] = {
            notes.EVALUATION: common.evaluations.heard,
            notes.DIVERGED: common.divergence.heard,
            notes.RELEASE: common.releases.heard,
            notes.SHARE: average.heard,
            notes.AVERAGE: average.heard_told,
        }
        greetings: dict[str, Greeting] = {
            notes.EVALUATION: lambda peer: common.evaluations.notes(),
            notes.RELEASE: common.releases.linked,
            notes.SHARE: average.linked,
            notes.AVERAGE: average.linked_told,
        }
        if (votes := common.class_votes) is not None:
            judges[notes.CLASSES], greetings[notes.CLASSES] = votes.heard, votes.linked
            judges[notes.CLASS_SHARES], greetings[notes.CLASS_SHARES] = votes.heard_report, votes.linked_reports
        if (data := _data_check(local)) is not None:
            judges[notes.DATA], greetings[notes.DATA] = data.heard, lambda peer: (data.note,)
        if loop.progress is not None:
            judges[PROGRESS] = loop.progress.heard
        if isinstance(loop, RoundLoop):
            judges[notes.REPLICA] = loop.replica_check.heard
            judges[notes.JOIN], judges[notes.REFUSAL] = loop.requests.asked_to_sponsor, loop.joining.declined
            if loop.loss_watch is not None:
                judges[LOST] = loop.loss_watch.heard
            if loop.equality is not None:
                judges[TOLD], greetings[TOLD] = loop.equality.heard, loop.equality.linked
        self.incoming = Incoming(
            common, loop, average=average, operator=self.operator, notes=judges, greetings=greetings
        )

    def make_transport(self) -> Transport:
        """Return the transport that calls these parts. Raises ConfigError."""
        local, releases = self.common.local, self.common.releases
        config = local.config
        if local.access is None:
            log.warning("security.mode is insecure: no encryption, no signatures, and anybody may claim to be any peer")
        elif not isinstance(local.access, Credentials):
            log.warning("security.mode is tls+token: nothing that peers say of each other is signed")
        if local.begins:
            for sentence in unreachable_pairs(config, local.setup.schedule, only=local.index):
                raise ConfigError(sentence, key="peers")
        return Transport(
            me=local.number,
            listen=config.peer.listen or None,
            neighbors=[local.roster.neighbor(peer) for peer in self.loop.linked()],
            hello=_hello(local),
            security=local.access,
            options=config.transport,
            handler=self.incoming,
            members=local.roster.names,
            own_relay=local.roster.relay_of(local.number),
            own_socket=local.base / config.state.directory / OWN_SOCKET,
            hear=self.incoming.hear,
            needed_protocol=lambda: releases.needed,
            device_of=local.roster.numbering.device,
            progress=self.loop.progress,
        )


def _average(common: CommonParts, loop: RoundLoop | PairLoop) -> FinalAverage:
    local, config = common.local, common.local.config
    return FinalAverage(
        common.hearsay,
        rounds=config.run.rounds,
        layout=local.trainer.layout,
        directory=local.folder.directory,
        is_last_round_done=loop.round >= config.run.rounds,
        why_not=why_no_average(config),
        most_weight=len(local.setup.first_members) + 0.5 if local.setup.spec.push_sum else None,
        name=local.roster.name,
        is_older=lambda peer: common.releases.is_older(peer, AVERAGE),
        neighbors=common.neighbors,
        runtime=common.runtime,
        options=config.transport,
    )


def _data_check(local: LocalPeer) -> DataCheck | None:
    """Return the comparison of devices' data; None where each has its own, or reads it in a training script."""
    if local.steps_are_recorded or local.config.data.partition == "own":
        return None
    task = local.setup.task
    return DataCheck(data_digest(task.train_data()), data_digest(task.test_data()), local.roster.name)


def _round_loop(common: CommonParts) -> RoundLoop:
    local, runtime, neighbors = common.local, common.runtime, common.neighbors
    audit_log = AuditLog(local.folder.directory / "ledger") if local.config.state.ledger else None
    participant = local.setup.participant(
        local.number,
        local.trainer,
        local.trainer.layout,
        local.trainer.initial_vector(),
        check_newcomer=local.roster.check,
        statements=local.statements,
        name_of=local.roster.name,
        word_suffices=lambda: not common.releases.have_spoken(GROUNDED),
        observe=None if audit_log is None else audit_log.observe,
    )

    def protocol_of(change: Change) -> int:
        return max(EQUALITY, ADMITS) if change.equivocation or change.admitted else OLDEST

    durable = DurablePeer(
        participant,
        local.disk_state(),
        neighbors=local.others,
        repeatable=local.trainer.repeatable,
        protocol_of=protocol_of,
    )
    if isinstance(local.trainer, RecordedSteps):
        state, have_spoken = durable.disk_state, common.releases.have_spoken
        # While the journal is replayed there is nobody to be asked.
        local.trainer.all_speak = lambda protocol: state.protocol >= protocol or have_spoken(protocol)
        local.trainer.is_saved_after = lambda done: (
            common.cadence.is_foreseen(done)
            # It may be this peer that leaves, and then saves its last state.
            or any(each.effective == done for each in participant.membership.coming_changes)
        )
    recovered = recover_rounds(common, durable, audit_log)
    member_links = MemberLinks(local, neighbors, durable, common.watcher, common.admissions)
    member_links.know_partners()

    def admitted(peer: int, said: bytes) -> None:
        common.releases.speaks(peer, ADMITS)
        if common.releases.all_speak(ADMITS):
            requests.declare_lost(peer, admitted=said)

    # First, since it is told before a neighbour forgets anything.
    progress = _progress(common, durable, admitted)
    frames = RoundFrames(
        runtime,
        neighbors,
        durable,
        recovered,
        member_links,
        on_late=lambda round_, peers: common.watcher.late(round_, [local.roster.name(peer) for peer in peers]),
        on_durable=(lambda: None) if progress is None else progress.tell,
    )
    requests = ChangeRequests(local, runtime, neighbors, member_links, durable, frames)
    requests.remove_members(local.taken_out)
    lost_after_s = local.config.rounds.lost_after_s
    loss_watch = None
    if lost_after_s is not None and local.setup.why_no_changes is None:
        loss_watch = LossWatch(local, runtime, neighbors, participant, requests, member_links, lost_after_s)
    own_loss = None
    if local.setup.why_no_changes is None:
        is_set_back = (lambda: False) if progress is None else lambda: progress.is_set_back
        own_loss = OwnLoss(local, runtime, neighbors, participant, member_links, is_set_back)
    patience_s = local.config.transport.give_up_after_s if local.incarnation else None
    joining = Joining(runtime, neighbors, member_links, local.roster, patience_s)
    check: ReplicaCheck | ModelCheck = ReplicaCheck(runtime, neighbors, participant, frames)
    if isinstance(local.trainer, RecordedSteps) and local.trainer.rule_of_mean is not None:
        check = ModelCheck(runtime, neighbors, participant, local.roster.name)
    equality = None
    if participant.algorithm.spec.tells_all is not None:
        equality = Equality(local, runtime, neighbors, durable, requests, common.releases, common.hearsay)
    return RoundLoop(
        common,
        durable=durable,
        frames=frames,
        member_links=member_links,
        requests=requests,
        joining=joining,
        replica_check=check,
        equality=equality,
        saver=RoundSaver(common, durable, frames),
        audit_log=audit_log,
        loss_watch=loss_watch,
        own_loss=own_loss,
        progress=progress,
    )


def _pair_loop(common: CommonParts) -> PairLoop:
    local, runtime, neighbors = common.local, common.runtime, common.neighbors
    audit_log = EventLog(local.folder.directory / "ledger") if local.config.state.ledger else None
    participant = local.setup.pair_participant(
        local.index, local.trainer, local.trainer.layout, local.trainer.initial_vector()
    )
    durable = DurablePair(participant, local.disk_state(), repeatable=local.trainer.repeatable)
    recovered = recover_pairs(common, durable, audit_log)
    abandon_after_s = local.config.rounds.abandon_after_s
    exchanges = PairExchanges(runtime, neighbors, local.roster, durable, recovered, abandon_after_s)
    return PairLoop(
        common,
        durable=durable,
        frames=exchanges,
        requests=FixedMembers(local.setup.why_no_changes or "the members of this run cannot change"),
        saver=PairSaver(common, durable, exchanges, audit_log),
        audit_log=audit_log,
        progress=_progress(common, durable, lambda peer, said: None),
    )


def _progress(
    common: CommonParts, durable: DurablePeer | DurablePair, admitted: Callable[[int, bytes], None]
) -> SignedProgress | None:
    """Return the signer of this peer's progress; None where nothing is signed."""
    statements = common.local.statements
    if not isinstance(statements, SignedStatements):
        return None
    return SignedProgress(common.local, statements, common.runtime, common.neighbors, durable, admitted)


def _hello(local: LocalPeer) -> HelloInfo:
    """Return this peer's description of itself and of the run for its hellos."""
    config = local.config
    return HelloInfo(
        run=config.run.name,
        algorithm=config.algorithm.name,
        run_digest=config.run_digest(),
        shared_sections=SHARED_SECTIONS,
        settings=config.shared_settings(),
        machine={name: local.machine[name] for name in ("torch", "numpy", "kernels")},
        start=local.trainer.start_model(),
        meanings=local.trainer.meanings,
        graph_digest=local.setup.schedule.digest,
        num_peers=local.setup.num_peers,
        name=local.name,
        software=SOFTWARE,
        max_frame_bytes=max(
            wire.max_frame_bytes(local.trainer.layout), membership_codec.max_bytes(local.setup.num_peers)
        ),
    )
