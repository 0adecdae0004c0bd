"""`sotto up`: the processes of a whole run on this machine, started, watched and ended together.

Each peer is `sotto run` on a configuration of its own, as it would be on a device of its own; nothing here takes part
in training. The live view reads the metrics that the peers write anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from peer.config.options import Config, load
from peer.config.precision_choice import FASTEST, PrecisionChoice
from peer.config.writer import write_resolved
from peer.errors import (
    INTERRUPTED,
    DataError,
    DivergenceError,
    PeerUnreachable,
    RemoteError,
    SecurityError,
    SottoError,
    StateError,
)
from peer.ops import control
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.export import export_model
from peer.ops.peer_processes import ForkServer, PeerProcess, start_process
from peer.ops.resize import Lineup, add_peers
from peer.ops.rollback import newest_common_round, put_back
from peer.ops.standing import has_left, script_criteria, with_length
from peer.records import ONE_PROCESS, PeerProgress, Progress
from peer.run.plan import refuse_errors, refuse_own_data, validate_config
from peer.run.setup import RunSetup
from peer.run.summary import (
    Average,
    PeerState,
    compare_with_single_process,
    consensus,
    describe_run,
    evaluation_record,
    finish_summary,
    note_precisions,
)
from peer.state.checkpoints import StoredArrays, checkpoint_round, find_checkpoints, load_checkpoint
from peer.state.disk import Disk, private_files, writing
from peer.state.kept_file import CHOSEN_PRECISION
from peer.state.metrics import MetricsStore, Summary
from peer.train.local_step import Trainer
from peer.train.threads import use_one_thread

log = logging.getLogger("sotto")

KEEP_MODELS_BYTES_MAX = 256 << 20
"""The models of evaluations are kept, to measure the consensus distance, while all of them together are below this."""

_STOP_S = 12.0
"""Time that a peer may take after SIGTERM to finish its round before it is killed."""

_POLL_S = 0.25

_LAST_LINES = 20
"""Most lines of a script's log that are shown where it failed."""

_KINDS: Mapping[int, type[SottoError]] = {
    kind.exit_code: kind for kind in (DataError, SecurityError, StateError, RemoteError)
}


_ERROR = r"(?:\d{4}-\S+ \S+ )?sotto: error: "
"""Prefix of an error, with or without its time."""

_TRACEBACK = re.compile(
    rf"^Traceback \(most recent call last\):\n(?:(?!\d{{4}}-).*\n)*(?={_ERROR}.*\s*\Z)", re.MULTILINE
)
"""A traceback at the end of a log, which --debug prints before the sentence. Lines of log records begin with the
date."""


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    """The peer processes of one run."""

    def __init__(
        self,
        config: Config,
        base: Path,
        *,
        num_peers: int,
        directory: Path,
        hosts: Sequence[Host] | None = None,
        launcher: Callable[[int], Sequence[str]] | None = None,
        fork_server: ForkServer | None = None,
        lineup: Lineup | None = None,
        debug: bool = False,
        script: Sequence[str] = (),
    ) -> None:
        """Check the configuration and write everything the peers need below `directory`. Raises SottoError.

        `hosts` says where the peers listen, by default on free ports of the loopback interface. Peers are forked from
        `fork_server`, by default one of the cluster's own; with `launcher`, each is started anew instead, with
        `launcher(index)` before its command, for a network of its own. With a `lineup` the folder holds a run that was
        stopped or broke off, which those peers go on with, and only what joining ones need is written; `config` is that
        of one of its peers, `num_peers` how many the run began with. With `debug` the peers log the traceback of an
        error that ends them. `script`: words that name a training script and its arguments, which the peers run;
        without one they train the task.
        """
        self.begun_at = time.monotonic()
        use_one_thread()
        self.directory, self.goes_on = directory, lineup is not None
        refuse_own_data(config)
        refuse_errors(validate_config(config, base, num_peers))
        self.trainer: Trainer | None = None
        """Judges and writes models; None where only the scripts can."""
        if script:
            self.setup, keep = RunSetup.of_loop(config, base, num_peers), False
        else:
            self.setup = RunSetup.open(config, base, num_peers)
            if (problem := self.setup.short_shard(range(num_peers))) is not None:
                log.warning("%s", problem)
            self.trainer = self.setup.trainer(0)
            self.trainer.try_own_task()
            every = config.evaluation.every_rounds
            evaluations = config.run.rounds // every + 1 if every else 1
            keep = evaluations * num_peers * self.trainer.layout.size * 8 <= KEEP_MODELS_BYTES_MAX
        self.numbers = range(num_peers) if lineup is None else lineup.started
        """Numbers of the peers that run here; everything else here goes by their position among these."""
        self._leaving = set() if lineup is None else {*lineup.leaving}
        self._leaves_at: dict[int, int] = {}
        """Peer number → first round without it."""
        self.config = config.model_copy(
            update={"evaluation": config.evaluation.model_copy(update={"keep_models": keep})}
        )
        self.rounds = 0 if script else config.run.rounds
        """Rounds of the run; 0 while only a script knows."""
        self.criteria, self.criterion = self.setup.criteria, self.setup.criterion
        """The figures of an evaluation, and the one that models are compared by."""
        self._base, self._launcher, self._fork_server = base, launcher, fork_server
        self._words = [*(["--debug"] if debug else []), *(["--deal"] if script else []), *script]
        if lineup is not None:
            ports = free_ports(len(lineup.joining))
            with private_files():
                add_peers(directory / "peers", lineup.joining, ports, signed=config.security.mode == "mtls")
            self.peer_files = [directory / "peers" / f"peer-{number}" / "peer.toml" for number in self.numbers]
        else:
            hosts = hosts or [Host("127.0.0.1", port) for port in free_ports(num_peers)]
            with private_files():
                self.peer_files = write_cluster(directory / "peers", self.config, hosts, base=base)
            write_resolved(self.config, directory / "config.toml", base)
        self.num_peers = len(self.numbers)
        self.state_folders = [file.parent / config.state.directory for file in self.peer_files]
        self.names = [file.parent.name for file in self.peer_files]
        self.processes: list[PeerProcess] = []
        self._stores: list[MetricsStore | None] = [None] * len(self.numbers)
        self._first_round: list[int | None] = [None] * len(self.numbers)
        self._seen = [PeerProgress(name=name) for name in self.names]
        self.central = MetricsStore(directory / "metrics.sqlite")
        """Figures over all peers: the averaged model's accuracy, the consensus distance."""
        self._evaluated: set[int] = set()
        self.averaged_figure: float | None = None
        self.consensus_distance: float | None = None

    def start(self) -> None:
        """Start every peer in a process of its own."""
        for index in range(len(self.numbers)):
            self.start_peer(index)

    def start_peer(self, index: int) -> PeerProcess:
        """Start one peer, or start it again after it ended."""
        file = self.peer_files[index]
        log = file.parent / "log.txt"
        arguments = ["run", "--config", str(file), *self._words]
        if self._launcher is not None:
            process = start_process([*self._launcher(index), sys.executable, "-m", "peer", *arguments], log)
        else:
            if self._fork_server is None:
                self._fork_server = ForkServer()
            process = self._fork_server.start(arguments, log)
        if index < len(self.processes):
            self.processes[index] = process
        else:
            self.processes.append(process)
        return process

    def stop(self) -> None:
        """Ask every peer that still runs to finish its round and save; kill those that do not in time. Closes the fork
        server."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._close_fork_server()

    def poll(self) -> list[PeerProgress]:
        """Read the peers' new rows since the last call; return the progress of each."""
        for index in range(len(self.numbers)):
            self._poll_peer(index)
        self._evaluate_new_models()
        return list(self._seen)

    @property
    def num_ready(self) -> int:
        """Number of peers that have read their data and can begin."""
        return sum(store is not None for store in self._stores)

    @property
    def staying(self) -> list[int]:
        """Positions of the peers that stay to the end."""
        return [index for index, number in enumerate(self.numbers) if number not in self._leaving]

    def let_go(self) -> None:
        """Ask those who are to leave for it, as soon as they can be asked. Raises RemoteError if one must not leave."""
        for number in sorted(self._leaving - self._leaves_at.keys()):
            file = self.peer_files[self.numbers.index(number)]
            config = load(file, environment={})
            with contextlib.suppress(PeerUnreachable):
                status = control.call(config, file.parent, None, "status")
                coming = [each for each in status["coming_changes"] if each["name"] == status["name"]]
                joins = any(each["kind"] == "JOIN" for each in coming)
                if status["name"] not in status["members"] or joins:
                    continue  # It has to join before it can leave.
                if not coming:
                    coming = [control.call(config, file.parent, None, "leave")]
                self._leaves_at[number] = coming[0]["from"]

    def failed(self, *, stops: bool = False) -> tuple[int, int] | None:
        """Return (peer, exit code) of the first process that ended with an error; where the run `stops`, a signal is
        none."""
        for index, process in enumerate(self.processes):
            code = process.poll()
            if code and not (stops and code == INTERRUPTED):
                return index, code
        return None

    def finished(self) -> bool:
        """Whether all processes have ended."""
        return all(process.poll() is not None for process in self.processes)

    def last_words(self, index: int) -> str:
        """Return the last line that a peer logged, without `sotto`'s prefix of errors."""
        lines = self._log(index).strip().splitlines()
        return re.sub(f"^{_ERROR}", "", lines[-1]) if lines else "it logged nothing"

    def last_traceback(self, index: int) -> str | None:
        """Return the traceback with which a peer ended, if it ran under --debug."""
        found = _TRACEBACK.search(self._log(index))
        return None if found is None else found[0].rstrip()

    def _log(self, index: int) -> str:
        # The process of a peer makes it, and may be yet to begin.
        with contextlib.suppress(FileNotFoundError):
            return (self.peer_files[index].parent / "log.txt").read_text(encoding="utf-8", errors="replace")
        return ""

    def failure(self, *, stops: bool = False) -> SottoError | None:
        """Return the error of the first process that ended with one, of the kind that its exit code names; `stops` is
        as for `failed`."""
        failed = self.failed(stops=stops)
        if self._fork_server is not None and (lost := self._fork_server.failure()) is not None:
            return lost
        if failed is None:
            return None
        index, code = failed
        words = self.last_words(index)
        if code == DivergenceError.exit_code:
            return DivergenceError(words)
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}; its last log line was"
        else:
            how = f"ended with code {code}"
        text = f"{self.names[index]} {how}: {words} (see {self.peer_files[index].parent / 'log.txt'})"
        error = _KINDS.get(code, SottoError)(text)
        if self.trainer is None:
            error.exit_code = max(code, 1)
            # What ended it is for its author to see, and may be anywhere in what the script printed.
            lines = self._log(index).rstrip().splitlines()[-_LAST_LINES - 1 : -1]
            if lines:
                error.add_note("\n".join([f"the last lines of {self.names[index]}:", *(f"  {line}" for line in lines)]))
        elif (trace := self.last_traceback(index)) is not None:
            error.add_note(f"{self.names[index]} logged:\n{trace}")
        return error

    def put_back(self) -> int:
        """Put every peer back to the last checkpoint that all have in common and that those which diverged went back
        to; return its round. To be called when all have ended. Raises StateError."""
        diverged = [
            folder
            for folder, process in zip(self.state_folders, self.processes, strict=True)
            if process.poll() == DivergenceError.exit_code
        ]
        at_most = min(checkpoint_round(files[-1]) if (files := find_checkpoints(f)) else 0 for f in diverged)
        round_ = newest_common_round(self.state_folders, at_most)
        put_back(self.state_folders, round_)
        return round_

    def close(self) -> None:
        """Close the metrics files and the fork server, when the peers have ended."""
        self._close_fork_server()
        self.central.close()
        for store, folder in zip(self._stores, self.state_folders, strict=True):
            if store is not None:
                store.close()
                # The peers could not tidy up behind themselves while this process was reading.
                MetricsStore(folder / "metrics.sqlite").close()

    def _close_fork_server(self) -> None:
        """Release its memory when no peer is left. A later start gets another server."""
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def final_states(self) -> list[PeerState]:
        """Return the states in the newest checkpoint of every peer that stays to the end."""
        states: list[PeerState] = []
        for index in self.staying:
            checkpoint = load_checkpoint(find_checkpoints(self.state_folders[index])[-1])
            # A peer that was told to leave while the run went on has handed over its share.
            if not has_left(checkpoint.state, self.config, self.numbers[index], checkpoint.round):
                assert isinstance(checkpoint.arrays, StoredArrays)
                x, u = checkpoint.arrays.vector("algorithm/x"), checkpoint.arrays["algorithm/u"]
                states.append((x, float(u[0])))
        return states

    def chosen_precisions(self) -> dict[str, PrecisionChoice]:
        """Return the precisions that the peers chose, by name, where each chooses."""
        found = {}
        for name, folder in zip(self.names, self.state_folders, strict=True):
            if (choice := CHOSEN_PRECISION.read(Disk(folder))) is not None:
                found[name] = choice
        return found

    def stores(self) -> list[MetricsStore]:
        """Return all metrics files that exist."""
        return [self.central] + [store for store in self._stores if store is not None]

    def _poll_peer(self, index: int) -> None:
        store = self._stores[index]
        if store is None:
            path = self.state_folders[index] / "metrics.sqlite"
            if not path.exists():
                return
            store = self._stores[index] = MetricsStore(path, read_only=True)
        seen = self._seen[index]
        for record in store.rounds(after=seen.round - 1):
            if self._first_round[index] is None:
                self._first_round[index] = record.round
            seen = seen.after(record)
        if not self.rounds:
            self._learn_length(index)
        number, schedule = self.numbers[index], self.setup.schedule
        own = [r for r in store.evaluations() if r.peer == number and r.split == "test"]
        if own:
            self.criterion = own[-1].compared_by(self.criteria)
        links = store.links()
        neighbors = {link.neighbor for link in links}
        if tuple(self.numbers) == self.setup.first_members and not self._leaving:
            # Members never change.
            neighbors = {*schedule.all_receivers(number), *schedule.all_senders(number)}
        running = index < len(self.processes) and self.processes[index].poll() is None
        sockets = [link.socket_bytes for link in links]
        self._seen[index] = dataclasses.replace(
            seen,
            figure=own[-1].figure(self.criterion) if own else seen.figure,
            socket_bytes=sum(size or 0 for size in sockets) if sockets and None not in sockets else None,
            neighbors=len(neighbors),
            neighbors_up=sum(link.up for link in links),
            state=("finished" if seen.round >= self.config.run.rounds else "training" if running else "stopped"),
        )

    def _learn_length(self, index: int) -> None:
        """Learn from a peer how many rounds and which figures there are, if its script has said so."""
        config = with_length(self.config, self.peer_files[index].parent)
        if config is not self.config:
            self.learn_criteria()
            self.config, self.rounds = config, config.run.rounds
            write_resolved(self.config, self.directory / "config.toml", self._base)

    def learn_criteria(self) -> None:
        """Learn which figures scripts tell. Where they are started again, that is known once they have joined."""
        said = [script_criteria(self.config, file.parent) for file in self.peer_files]
        self.criteria = next(filter(None, said), self.criteria)

    def _evaluate_new_models(self) -> None:
        """Measure consensus distance and averaged model wherever all peers have left theirs."""
        folders = [folder / "models" for folder in self.state_folders]
        if not folders[0].is_dir():
            return
        rounds = {int(path.stem) for path in folders[0].glob("[0-9]*.npy")} - self._evaluated
        for done in sorted(rounds):
            members = self._members_after(done)
            if members is None:
                return
            paths = [folders[index] / f"{done}.npy" for index in members]
            if not all(path.exists() for path in paths):
                return
            stacked = [np.load(path, allow_pickle=False) for path in paths]
            self._evaluated.add(done)
            self.evaluate(done, [(vector[:-1].astype(np.float32), float(vector[-1])) for vector in stacked])
            for path in paths:
                path.unlink()

    def _members_after(self, done: int) -> list[int] | None:
        """Return the positions of those who are members after `done` rounds; None while that is not known."""
        members = []
        for index, number in enumerate(self.numbers):
            leaves_at = self._leaves_at.get(number)
            if number in self._leaving and leaves_at is None:
                return None
            first = 0 if number in self.setup.first_members else self._first_round[index]
            if first is None:
                if self.processes[index].poll() is None:
                    return None
                continue  # It ended before it had joined.
            # The round in which a peer joins is that before its first as a member.
            joined = done >= first + (number not in self.setup.first_members)
            if joined and (leaves_at is None or done < leaves_at):
                members.append(index)
        return members

    def evaluate(self, done: int, states: Sequence[PeerState]) -> Average | None:
        """Record the consensus distance after `done` rounds and, with a task, the figures of the averaged model, which
        is returned."""
        record, z = consensus(done, states), None
        self.consensus_distance = record.consensus_distance
        self.central.put(record)
        if self.trainer is not None:
            z = Average(states)
            averaged = evaluation_record(-1, done, "test", self.trainer.evaluate(z, averaged=True))
            self.central.put(averaged)
            self.averaged_figure = averaged.figure(self.setup.criterion)
        self.central.flush()
        return z


def _save_average(directory: Path) -> None:
    """Write the average of the models that scripts ended with; where there is none, say why."""
    try:
        export_model(directory, directory / "model.safetensors")
    except SottoError as error:
        log.warning("no averaged model was written: %s", error)


def up(
    cluster: Cluster,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    baseline: bool = True,
    command: str = "",
) -> Summary:
    """Run all peers of a run on this machine to the end; return its figures. `command` is the line that started it.

    Everything lands in the cluster's folder, which was empty before, unless there is a lineup: configuration, peers
    with their states and logs, metrics, the averaged model, the summary. When `stop` is set the peers finish their
    round, save and end. Raises SottoError if a peer fails; no process outlives this call.
    """
    stop = stop or threading.Event()
    config, directory = cluster.config, cluster.directory

    def show(phase: str, peers: list[PeerProgress]) -> None:
        if on_progress is not None:
            on_progress(
                Progress(
                    phase=phase,
                    ready=None if (ready := cluster.num_ready) == cluster.num_peers else ready,
                    rounds=cluster.rounds,
                    elapsed_s=time.monotonic() - cluster.begun_at,
                    peers=tuple(peers),
                    criterion=cluster.criterion,
                    averaged_figure=cluster.averaged_figure,
                    consensus_distance=cluster.consensus_distance,
                )
            )

    size = 0 if cluster.trainer is None else cluster.trainer.layout.size
    summary = describe_run(cluster.config, cluster.setup, size, command=command)
    summary.peer_names = [f"peer-{number}" for number in range(cluster.numbers[-1] + 1)]
    if cluster.goes_on:
        summary.continue_from(directory / "summary.json")
        summary.members = [cluster.numbers[index] for index in cluster.staying]
        summary.num_peers = len(summary.members)
        # What the file says of the end holds no longer.
        summary.ended = ""
        summary.save(directory / "summary.json")
    ended: str = "completed"
    failure: SottoError | None = None
    try:
        # A newcomer's is 0 until it joins, with rounds that it has not trained.
        begin = [peer.round for peer in cluster.poll()]
        cluster.start()
        while not cluster.finished():
            if stop.is_set():
                ended = "stopped"
                break
            failure = cluster.failure()
            if failure is not None:
                break
            try:
                cluster.let_go()
            except RemoteError as error:
                failure = error
                break
            peers = cluster.poll()
            resumes = cluster.goes_on and [peer.round for peer in peers] == begin
            show("starting peers" if resumes or cluster.num_ready < cluster.num_peers else "training", peers)
            # Not `stop.wait`: a signal handler that sets `stop` while this thread is inside would wait for ever.
            time.sleep(_POLL_S)
        # A signal may reach the peers before this process, as where a service manager sends it to all.
        failure = failure or cluster.failure(stops=stop.is_set())
        if failure is not None:
            ended = f"{'diverged' if isinstance(failure, DivergenceError) else 'failed'}: {failure}"
    finally:
        cluster.stop()
    if isinstance(failure, DivergenceError) and config.guard.action == "rollback":
        failure = DivergenceError(f"{failure}; all peers are put back to round {cluster.put_back()}")
        ended = f"diverged: {failure}"
    try:
        cluster.learn_criteria()
        show("collecting results", peers := cluster.poll())
        config = cluster.config
        summary.rounds = config.run.rounds
        summary.criteria = {criterion.name: criterion.better for criterion in cluster.criteria}
        if ended == "completed" and all(peer.round < config.run.rounds for peer in peers):
            ended = "stopped"  # By `sotto stop`, with which peers end well too.
        if ended == "completed":
            states = cluster.final_states()
            z = cluster.evaluate(config.run.rounds, states)
            summary.parameters = states[0][0].size
            if cluster.trainer is None or z is None:
                _save_average(directory)
            else:
                with writing("model.safetensors"):
                    cluster.trainer.save_model(z, directory / "model.safetensors", averaged=True)
        summary.ended, summary.seconds = ended, time.monotonic() - cluster.begun_at
        if config.training.precision == FASTEST:
            note_precisions(summary, cluster.chosen_precisions())
        finish_summary(summary, cluster.stores(), cluster.setup)
        summary.save(directory / "summary.json")
        if ended == "completed" and baseline and cluster.trainer is not None:
            tell = partial(show, ONE_PROCESS, cluster.poll())
            compare_with_single_process(summary, cluster.setup, directory, tell, stop)
    except StateError:
        # Where a peer met the full disk first, it has said so.
        if failure is None:
            raise
    finally:
        cluster.close()
    if failure is not None:
        raise failure
    return summary
