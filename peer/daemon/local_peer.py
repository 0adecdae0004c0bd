"""A peer before it talks to anybody: configuration, certificate, state folder, data and trainer.

The parts of the daemon read it and never change it. It knows no clock and no socket.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from peer import __version__
from peer.config.options import Config
from peer.config.precision_choice import FASTEST, PrecisionChoice
from peer.daemon.checkpoint_cadence import regular_interval
from peer.daemon.device.kept import keep_model_form, settle_chosen, settle_privacy, settle_rates
from peer.daemon.members import first_peer_list
from peer.daemon.members.roster import Roster
from peer.daemon.members.signed_statements import SignedStatements, statements_of
from peer.errors import ConfigError, StateError
from peer.net.security.certificates import utc_now
from peer.net.security.credentials import Credentials, load_credentials
from peer.node.disk_state import DiskState
from peer.node.local_steps import RecordedSteps
from peer.run.machine import machine_facts
from peer.run.plan import algorithm_spec, build_compressor, why_no_changes, why_no_rejoin
from peer.run.privacy_budget import Budget
from peer.run.setup import PeerTrainer, RunSetup
from peer.state import incarnation
from peer.state.checkpoints import StateFolder
from peer.state.metrics import MetricsStore
from peer.terminal import STARTING_S, telling
from peer.train import eight_bit

log = logging.getLogger("sotto")

_EXPIRES_SOON_DAYS = 30
_MOST_WEIGHT = 4.0
"""A step that is more times as long as the learning rate says is warned of."""


class LocalPeer:
    """The files of one peer, opened. Holds the lock on its state folder until `close`."""

    def __init__(self, config: Config, base: Path, loop: PeerTrainer | None = None) -> None:
        """`config` as its file has it; `base` is where its relative paths start; `loop`: the trainer, where that is no
        task. Raises SottoError."""
        listed = {peer.name for peer in config.peers}
        config = first_peer_list.settle(config, base)
        self.config, self.base = config, base
        self.taken_out = tuple(peer.name for peer in config.peers if peer.name not in listed)
        """Names in the list that the run began with which the file does not list any more."""
        self.index = config.peer.index
        self.name = config.own.name
        self.access = load_credentials(config.security, base, self.name)
        if isinstance(self.access, Credentials):
            self._warn_of_expiry(self.access)
        place = Path(config.state.directory)
        if place.is_absolute() and not place.parent.is_dir():
            # Made on another disk, it would begin the run anew: the neighbours would take its state for lost.
            away = StateError(f"state.directory: {place.parent} does not exist; mount its disk, or make that folder")
            away.may_pass = True
            raise away
        repeats = None
        if isinstance(loop, RecordedSteps) and algorithm_spec(config).asynchronous:
            loop.records_all = True
        elif isinstance(loop, RecordedSteps):
            # The same on a GPU, where nothing is repeated: members are put back together.
            repeats = loop.layout.size
        self.regular = regular_interval(config, repeats)
        """Rounds between regular checkpoints; 0: none."""
        # Before the data is read, which takes long, so that a second daemon on the same folder fails at once.
        self.folder = StateFolder(
            base / config.state.directory, keep=config.state.keep_checkpoints, regular=self.regular
        )
        if self.folder.why_not_private is not None:
            log.warning(
                "%s: other users of this machine may be able to read it: %s",
                self.folder.directory,
                self.folder.why_not_private,
            )
        try:
            self._read(config, base, loop)
        except BaseException:
            # A caller that catches it may try again in this process.
            self.folder.close()
            raise

    @telling(lambda: "reads its data", every_s=STARTING_S)
    def _read(self, config: Config, base: Path, loop: PeerTrainer | None) -> None:
        """Read the folder and the data."""
        self.incarnation = incarnation.finish(self.folder.disk).number
        self.roster = Roster(config, self.access, self.incarnation)
        if not config.peers[self.index].is_first and (why := why_no_changes(config)) is not None:
            raise ConfigError(f"{self.name} cannot join: {why}", key="peers")
        self.statements = statements_of(config, self.access, self.folder.disk)
        rates = settle_rates(config, build_compressor(config), self.folder.disk)
        self.trainer: PeerTrainer
        self.budget: Budget | None = None
        """Privacy budget of private steps."""
        self.chosen: PrecisionChoice | None = None
        """Precision that this device trains in, where each device chooses."""
        if loop is None:
            if not rates.float32_weight_gradients:
                # Imported when first used, and before its modules.
                eight_bit.linear_kernels.round_weight_gradients_as_before_()
            self.setup = RunSetup.open(config, base, rates=rates[:2], former_order=not rates.normal_class_order)
            self.budget = self.setup.budget_of_privacy(self.index)
            secret = settle_privacy(self.budget, self.folder.disk)
            if config.training.precision == FASTEST:
                self.chosen = settle_chosen(partial(self.setup.fastest_precision, self.index), self.folder.disk)
                self.setup = replace(self.setup, precision=self.chosen.precision)
            self.trainer = self.setup.trainer(self.index, secret=secret)
            if self.budget is not None and config.data.partition != "own":
                log.warning(
                    "every device of this run has the samples of all, so [privacy] hides them from nobody in it; set"
                    ' data.partition = "own" where each device has data of its own'
                )
            if (problem := self.setup.short_shard([self.index])) is not None:
                log.warning("%s", problem)
        else:
            settle_privacy(None, self.folder.disk)
            self.setup, self.trainer = RunSetup.of_loop(config, base, rates=rates[:2], criteria=loop.criteria), loop
        keep_model_form(self.trainer, self.folder.disk)
        if (weight := self.setup.step_weight) > _MOST_WEIGHT:
            log.warning(
                "this device has %d of %d samples, so its steps are %.1f times as long as training.learning_rate says;"
                " lower that on every device if the loss rises, or set data.weight_by_samples = false",
                self.setup.manifest.num_samples,
                config.data.total_samples,
                weight,
            )
        self.metrics = MetricsStore(self.folder.directory / "metrics.sqlite")
        self.machine = machine_facts()

    @property
    def number(self) -> int:
        """The number of this peer: its index in the list, unless it takes part again after it was lost
        (`gossip.incarnations`)."""
        return self.roster.me

    @property
    def begins(self) -> bool:
        """Whether the run begins with this peer; any other joins later."""
        return self.number in self.setup.first_members

    @property
    def rejoins(self) -> bool:
        """Whether this device takes part again, as a newcomer, after it was declared lost."""
        return why_no_rejoin(self.config) is None

    @property
    def others(self) -> list[int]:
        """The peers that everybody lists, without this one; with this device's numbers from before it was lost."""
        return [peer for peer in range(self.setup.num_peers) if peer != self.number]

    def disk_state(self) -> DiskState:
        """Return this peer's state on disk, to be opened."""
        return DiskState(
            self.folder.disk,
            self.identity,
            # A step that cannot be repeated must not be forgotten once neighbours have seen it, not by a power cut
            # either.
            durability="power" if self.steps_are_recorded else self.config.state.durability,
            keep_checkpoints=self.config.state.keep_checkpoints,
            regular=self.regular,
        )

    @property
    def steps_are_recorded(self) -> bool:
        """Whether local steps are a training script's, which alone can compute them again."""
        return isinstance(self.trainer, RecordedSteps)

    @property
    def identity(self) -> dict[str, str]:
        """Values that a state folder must share to belong to this peer. Rates are not among them: they may change while
        a run is stopped everywhere."""
        identity = {
            "run": self.config.run.name,
            "peer": self.name,
            "model": self.trainer.layout.digest,
            "graph": self.setup.schedule.digest,
            "algorithm": self.config.algorithm.name,
            "momentum": self.config.momentum_rule,
        }
        if self.incarnation:
            identity["incarnation"] = str(self.incarnation)
        manifest = self.setup.manifest
        if manifest.own_labels is not None and not self.steps_are_recorded:
            # A device may collect more, but a journal is replayed to the same bits only on the same samples.
            identity["data"] = f"{manifest.num_samples} samples, {manifest.own_labels[:16]}"
        return identity

    def describe(self, seconds: float) -> dict[str, object]:
        """Return the identification in every checkpoint. `seconds`: the time on the clock of the run."""
        return {
            **self.identity,
            "job": self.config.run_digest(),
            "version": __version__,
            "machine": self.machine,
            "seconds": seconds,
        }

    def _warn_of_expiry(self, credentials: Credentials) -> None:
        until = min(credentials.identity.not_after, credentials.authority_until)
        days = (until - utc_now()).days
        if days < _EXPIRES_SOON_DAYS:
            log.warning(
                "the certificate of %s, or of its authority, is valid until %s only; renew it with"
                " `sotto init --join renewed --name %s` and `sotto admin sign`, then `sotto admin reload`",
                self.name,
                f"{until:%Y-%m-%d}",
                self.name,
            )

    def renew_certificate(self) -> bool:
        """Read certificate and key again; return whether they are others, which new connections and statements use from
        here on. Raises SecurityError for files that are not this peer's, and nothing changes."""
        if not isinstance(self.access, Credentials) or not isinstance(self.statements, SignedStatements):
            return False
        newer = load_credentials(self.config.security, self.base, self.name)
        assert isinstance(newer, Credentials)
        if not self.access.renew(newer):
            return False
        self.statements.renewed(self.access)
        return True

    def close(self) -> None:
        """Close the metrics and release the lock."""
        try:
            self.metrics.close()
        finally:
            self.folder.close()
