"""The process of a peer, from its start through the first round to the last.

| part | module |
| --- | --- |
| limits of the device: data plan, hours, battery, temperature | `limits`, `limit_rules` |
| what this peer is: configuration, certificate, state folder, data | `local_peer` |
| clock, threads, signals, the request to stop | `runtime` |
| neighbours and what goes over their links | `neighbors`, `traffic` |
| training, in rounds or in pairs | `rounds`, `pairs` |
| its state on disk | `saving`, `checkpoint_cadence`, `recovery` |
| accuracies; the end of training that makes no sense | `evaluations`, `divergence`, `notes` |
| members that come and go | `member_links`, `change_requests`, `joining`, `peer_list` |
| members that were lost and come back | `own_loss`, `rejoining` |
| what others say | `incoming` |
| the average of all models after the last round | `final_average` |
| which releases the peers run | `releases` |
| how frequent the classes are in all data | `class_votes` |
| what an operator asks | `operator_api` |
| what log and service manager are told | `progress_log`, `service_manager` |

`assembly` puts them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from peer import __version__
from peer.config.options import Config
from peer.daemon.assembly import Parts
from peer.daemon.device.progress_log import ProgressLog
from peer.daemon.device.service_manager import notify
from peer.daemon.final_average import MODEL_NAME
from peer.daemon.local_peer import LocalPeer
from peer.daemon.members import rejoining
from peer.daemon.members.first_peer_list import settle
from peer.daemon.notes.divergence import Diverged
from peer.daemon.notes.evaluations import Models
from peer.daemon.operator.exporter import Exporter
from peer.daemon.runtime import has_parent, in_event_loop
from peer.daemon.saving import sync_now_and_then
from peer.daemon.watcher import Watcher
from peer.errors import INTERRUPTED, DataError, DivergenceError, SottoError, StateError, TaskError
from peer.net.address import split_address, why_not_bound
from peer.node.divergence_guard import reason_to_stop
from peer.node.local_steps import RecordedSteps
from peer.records import ACCURACY, RoundRecord
from peer.run.plan import refuse_errors, validate_config
from peer.state.disk import private_files, writing
from peer.state.kept_file import AVERAGE_FILE
from peer.terminal import command, duration
from peer.train.memory import give_back_freed
from peer.train.threads import use_one_thread

log = logging.getLogger("sotto")

_LOOK_AGAIN_S = 5.0


def run(config: Config, base: Path, reread: Callable[[], Config] | None = None) -> int:
    """Run one peer in the foreground until its last round, a stop or a signal; return the exit code. It is 0 except
    after a signal, so that a supervisor can tell a peer to be started again from one that is done.

    `base` is the folder that relative paths of the configuration start from; `reread` reads it again, for a peer that
    is told that its file has changed. Passing obstacles, such as an address or a disk that is not there yet after a
    boot, are waited out, unless another process waits for this one. Raises SottoError.
    """
    warn_of(config, base)
    patience = Patience(config, base)
    try:
        with private_files():
            while True:
                try:
                    # First: while one is waited for, the data is not read again and again.
                    require_addresses(config)
                    with contextlib.closing(open_peer(config, base, reread)) as daemon:
                        return in_event_loop(daemon.main())
                except rejoining.LOST as error:
                    if not in_event_loop(rejoining.prepare(error, config, base)):
                        return INTERRUPTED
                except SottoError as error:
                    patience.wait(error)
    except TaskError as error:
        if error.__cause__ is not None:
            # The sentence names one line; a person who mends the task may need those that led there.
            log.error("the task failed", exc_info=error.__cause__)
        raise


def warn_of(config: Config, base: Path) -> None:
    """Log what theory says against a configuration. Raises ConfigError for errors."""
    for finding in refuse_errors(validate_config(settle(config, base), base)):
        # Others that cannot reach each other refuse to start themselves, unless they are seats that are still free.
        if finding.key != "peers":
            log.warning("%s: %s", finding.key, finding.sentence)


class Patience:
    """Waits out passing obstacles, such as an address or a disk that is not there yet after a boot."""

    def __init__(self, config: Config, base: Path) -> None:
        self._config, self._base = config, base
        self._waits_for, self._since = "", 0.0

    def wait(self, error: SottoError) -> None:
        """Return when it is time to look again. Raises `error` where that would change nothing, or another process
        waits for this one."""
        if has_parent() or not (error.may_pass or _data_is_away(error, self._config, self._base)):
            raise error
        if str(error) == self._waits_for:
            log.info("that has not passed yet, %s so far", duration(time.monotonic() - self._since))
        else:
            self._waits_for, self._since = str(error), time.monotonic()
            log.warning("%s", error)
            log.warning("waits until that has passed, and looks again every %g s", _LOOK_AGAIN_S)
        notify(f"STATUS=waits: {error}\nEXTEND_TIMEOUT_USEC={int(10e6 * _LOOK_AGAIN_S)}")
        _pause(_LOOK_AGAIN_S)


def _pause(seconds: float) -> None:
    # Not `time.sleep`, which computes a deadline: under a clock that is faked, for a trial, the system refuses it.
    select.select((), (), (), seconds)


def require_addresses(config: Config) -> None:
    """Raise ConfigError where a peer cannot listen yet, because an interface or a host name is still to come."""
    for key in ("listen", "metrics_listen"):
        if listen := getattr(config.peer, key):
            host, port = split_address(listen, key=f"peer.{key}")
            why = why_not_bound(host, port, key=f"peer.{key}")
            if why is not None and why.passes:
                raise why.error(f"peer.{key}", listen)


def _data_is_away(error: SottoError, config: Config, base: Path) -> bool:
    """Whether the data is missing as a whole, as where its disk or share is not mounted yet."""
    if not isinstance(error, DataError) or config.data.directory is None:
        return False
    directory = base / config.data.directory
    try:
        return next(directory.iterdir(), None) is None
    except NotADirectoryError:
        return False
    except OSError:
        return True


def open_peer(
    config: Config,
    base: Path,
    reread: Callable[[], Config] | None = None,
    *,
    wall_clock: Callable[[], float] = time.time,
) -> Daemon:
    """Return the peer of a configuration, with data and checkpoint read. `wall_clock` returns the seconds since 1970.
    Raises SottoError."""
    # For every caller: a journal is replayed to the same bits only with as many threads.
    use_one_thread()
    local = LocalPeer(config, base)
    try:
        return Daemon(Parts(local, config, reread, Watcher(), wall_clock))
    except BaseException:
        # A caller that catches it may try again in this process.
        local.close()
        raise


class Daemon:
    """One peer, from the first round to the last."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.common = parts, parts.common
        self.local, self.runtime, self.neighbors = parts.common.local, parts.common.runtime, parts.common.neighbors
        self.loop, self.saver, self.operator = parts.loop, parts.loop.saver, parts.operator
        self._config = parts.common.local.config
        self._exporter: Exporter | None = None
        self._has_warned = False

    async def main(self, *, heeds_signals: bool = True) -> int:
        """Run to the end; return the exit code. `heeds_signals`: whether SIGTERM and its like are for this peer, as in
        a process of its own. Raises SottoError."""
        if heeds_signals:
            self.runtime.install_signals()
        transport = self.parts.make_transport()
        self.neighbors.connect(transport)
        self._open_exporter()
        await transport.start()
        give_back_freed()
        log.info(
            "%s listens on port %s, others dial %s, %d neighbours, round %d of %d",
            self.local.name,
            transport.port if self._config.peer.listen else "none (dials out)",
            self.local.roster[self.local.index].advertise or "nothing",
            len(self.neighbors.all),
            self.loop.round,
            self._config.run.rounds,
        )
        notify("READY=1")
        failure: str | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(helper)
                    for helper in (
                        self.runtime.watch_parent(),
                        self.parts.peer_list.reload_when_asked(),
                        sync_now_and_then(self.saver),
                        transport.wait_closed(),
                        ProgressLog(self.operator.status, self._is_member).watch(self.runtime.now),
                        self.common.admissions.watch(),
                        self.common.releases.tell_now_and_then(),
                        *(() if self.loop.progress is None else self.loop.progress.helpers()),
                        *self.loop.helpers(),
                    )
                ]
                await self._train()
                await self._finish()
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as group:
            # One error is enough to end with, and says more than a group of one.
            error = group.exceptions[0]
            # Text from own code may hold data, which stays on this device.
            what = "its task failed" if isinstance(error, TaskError) else str(error)
            failure = f"it ends with an error: {what}".removesuffix(": ")
            if type(error) is StateError:  # Of one of the files, which others need not know the place of.
                error.args = (f"{self.local.folder.directory}: {error}",)
            raise error from error.__cause__
        finally:
            notify(f"STOPPING=1\nSTATUS={self.operator.state}, round {self.loop.round} of {self._config.run.rounds}")
            if self._exporter is not None:
                await asyncio.to_thread(self._exporter.close)
            await transport.close(failure or self.runtime.stop_reason or self.operator.state)
            try:
                self.common.metrics.put_links()
            except StateError as error:
                # The last traffic counts matter less than the reason why this peer ends.
                log.error("%s", error)
        if self.common.divergence.finding is not None:
            raise DivergenceError(f"{self.local.name}: {self.common.divergence.finding.reason}")
        return INTERRUPTED if self.runtime.is_interrupted else 0

    def let_go_in_fork(self) -> None:
        """Give up, in a process forked from this one, the lock on the state folder and the port, which only one process
        may have. Workers of a loader outlive a script that is killed, and would keep both."""
        self.local.folder.close()
        self.neighbors.let_go_in_fork()

    def close(self) -> None:
        """Release threads and files."""
        # The threads first: nothing may write to a file being closed.
        self.runtime.close()
        if self.common.limits is not None:
            self.common.limits.close()
        self.saver.close()
        self.parts.average.close()
        self.common.admissions.log.close()
        self.local.close()

    # -- training ------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Train until the last round, a stop, or a divergence."""
        try:
            has_checkpoint = self.loop.durable.disk_state.checkpoint_bytes > 0
            if self.local.steps_are_recorded and not self.loop.round and not has_checkpoint:
                # The journal leads to the same model only from the one that the script began with.
                await self.saver.checkpoint()
            if self.common.class_votes is not None:
                await self.common.class_votes.settle(self.loop.linked)
            while (record := await self.loop.next_round()) is not None:
                await self._after_round(record)
            own = self.common.evaluations.own()
            if self._is_trained and (own is None or own.round < self._config.run.rounds):
                # This peer was killed between its last round and what it says of it, which the others wait for.
                await self._evaluate(self._config.run.rounds)
        except DivergenceError as error:
            suspicion = self.loop.participant.reaches.suspicion(self.loop.round, self.local.roster.name)
            self.common.divergence.declare(Diverged(self.loop.round, f"{error}{suspicion}"))

    def _is_member(self) -> bool:
        """Whether this peer takes part: not before it has joined, nor under a number that was declared lost."""
        return self.local.number in self.loop.members

    @property
    def _is_trained(self) -> bool:
        """Whether the last round is done, and all is well."""
        return self.common.divergence.finding is None and self.loop.round >= self._config.run.rounds

    async def _after_round(self, record: RoundRecord) -> None:
        # Only now: until a round was completed, a list that nobody agrees with can be mended in the file.
        await self.parts.peer_list.keep()
        self.common.metrics.put_round(record)
        self.common.watcher.round_done(record)
        if self._exporter is not None:
            self._exporter.observe(record)
        reaches = self.loop.participant.reaches
        if reaches.has_shortened and not self._has_warned:
            suspicion = reaches.suspicion(record.round, self.local.roster.name)
            log.warning("round %d: own changes are shortened, to stay plausible%s", record.round, suspicion)
            self._has_warned = True
        is_misled = reaches.is_misled(record.round)
        # A neighbour's answer may be changing the model of a run without rounds: good enough for a look at its size.
        model = self.loop.participant.model
        reason = await self.runtime.work(
            lambda: reason_to_stop(self._config.guard, record, model(), is_misled=is_misled)
        )
        if reason is not None:
            raise DivergenceError(reason)
        done = self.loop.round
        if self.common.evaluations.is_due(done):
            await self._evaluate(done)
        disk, trainer = self.loop.durable.disk_state, self.local.trainer
        repeats = isinstance(trainer, RecordedSteps) and not trainer.records_all
        if self.common.cadence.is_due(done, disk.journal_bytes, disk.checkpoint_bytes if repeats else None):
            await self.saver.checkpoint()
        self.common.metrics.put_links_if_due(self.runtime.now())

    async def _evaluate(self, done: int) -> None:
        """Measure the own model, record the result, and tell the others."""
        models = await self.loop.models()
        records = await self.runtime.work(self.common.own.measure, done, models)
        self.common.metrics.put_evaluations(records)
        self.common.evaluations.share(records)
        for record in records:
            self.common.watcher.evaluated(record, self.local.name)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Save, stay until the neighbours have all they need of this peer, and write the model."""
        if self.common.divergence.finding is not None:
            self._end_diverged(self.common.divergence.finding)
            return
        completed = self._is_trained or self.loop.has_left
        if self.common.class_votes is None or self.common.class_votes.is_settled:
            # Before, there is nothing to save, and the state of a trainer that does not adjust yet would be taken for
            # that of a run which never does.
            await self.loop.save_at_end()
        if self.loop.progress is not None:
            # A copy that is put back while this peer is stopped is then behind this statement.
            self.loop.progress.tell(is_last=True)
            self.loop.progress.keep()
        self.operator.state = "left" if self.loop.has_left else "completed" if completed else "stopped"
        self.common.metrics.flush()
        if not completed:
            done, all_ = self.loop.round, self._config.run.rounds
            # `sotto up`, which has started this process, says so itself.
            resumes = "" if has_parent() else "; the same command resumes it"
            log.info("%s: stopped after round %d of %d%s", self.local.name, done, all_, resumes)
            return
        await self.loop.linger()
        models = await self.loop.models()
        path = self.local.folder.directory / MODEL_NAME
        with writing(path.name):
            await self.runtime.work(self.local.trainer.save_model, models.z, path)
        self.common.metrics.put_evaluations(self.common.evaluations.newest.values())
        self.common.metrics.flush()
        average = await self._form_average(models)
        self._say_last_word(path if average is None else average)

    async def _form_average(self, models: Models) -> Path | None:
        """Return the file with the average of all models; None where there is none."""
        if self.loop.has_left:
            return None
        allowed, self.operator.state = self.loop.participant.reaches.allowed, "averaging"
        average = await self.parts.average.form(self.loop.members, models, allowed, self.loop.answer)
        self.operator.state = "completed"
        return average

    def _say_last_word(self, model: Path) -> None:
        """Log what came of the run here, and where it is."""
        own, criterion = self.common.evaluations.own(), self.common.evaluations.told[0]
        figure = None if own is None else own.figure(criterion)
        loss = self.common.metrics.last_loss
        is_accuracy = criterion == ACCURACY
        written = f", loss {loss:.3g}" if loss is not None else ""
        if figure is not None:
            written = f", accuracy {100 * figure:.1f} %" if is_accuracy else f", {criterion.name} {figure:.3g}"
        what, took = "left after" if self.loop.has_left else "finished", duration(self.runtime.now())
        name, done, next_ = self.local.name, self.loop.round, command("export", model.parent.parent)
        which = f"Model: {model}"
        if self.local.steps_are_recorded and model.name == AVERAGE_FILE and self.local.setup.spec.tells_all is None:
            which = f"The one model of all devices: {model}; that which the script holds is {name}'s own"
        log.info("%s %s %s rounds in %s%s. %s. Next: %s", name, what, f"{done:,}", took, written, which, next_)

    def _end_diverged(self, finding: Diverged) -> None:
        self.operator.state = f"diverged: {finding.reason}"
        self.common.metrics.flush()
        if self._config.guard.action == "rollback":
            disk = self.loop.durable.disk_state
            round_ = disk.go_back(self.common.cadence.last_common_round(finding.round))
            log.warning(
                "what this peer had after round %d is set aside in its state folder; before the run goes on, put the"
                " other peers back to that round too: sotto admin rollback --round %d",
                round_,
                round_,
            )
            self.common.divergence.finding = replace(
                finding, reason=f"{finding.reason}; its state is that of round {round_}"
            )

    def _open_exporter(self) -> None:
        """Serve metrics, if the configuration says so."""
        listen = self._config.peer.metrics_listen
        if listen:
            labels = {"algorithm": self._config.algorithm.name, "version": __version__}
            self._exporter = Exporter(listen, self.operator.status, labels)
            log.info("metrics at port %d", self._exporter.port)
