"""The training scripts of all peers in one process, on the virtual clock.

Each script has a thread of its own, and exactly one of all threads runs at any time: a script until it waits for its
peer, the simulator until it needs the steps of a script. Each script has random numbers of its own, as in a process of
its own: the global generators are put where they belong whenever another thread takes its turn. The models are
therefore those of separate processes, bit for bit.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar, Unpack

import torch

from peer.config.options import Config, PeerAddress, load
from peer.config.writer import write_resolved
from peer.errors import ConfigError, TaskError, UsageError
from peer.files import open_own
from peer.library.background import Messenger
from peer.library.here import SIMULATED
from peer.library.loop_steps import LoopSteps
from peer.library.meeting import End, Finish, Meeting, Request
from peer.library.place import Host, Place
from peer.library.random_state import RandomNumbers, draw_alike
from peer.library.script import Program, Script
from peer.node.local_steps import StepAbandoned
from peer.node.pair_participant import PairParticipant
from peer.node.participant import Participant
from peer.records import Progress, RoundRecord
from peer.run.plan import algorithm_spec, final_rounds, refuse_errors, validate_config
from peer.run.setup import RunSetup
from peer.run.summary import describe_run
from peer.simulate.network import LinkModel
from peer.simulate.pairs import AsynchronousSimulator
from peer.simulate.rounds import Simulator
from peer.simulate.run import run_to_the_end
from peer.state.metrics import EvaluationRecord, MetricsStore, Summary
from peer.train.own_task import UserCode
from peer.train.threads import use_one_thread
from peer.wire.start_model import OTHER_BUFFERS

log = logging.getLogger("sotto")

Result = TypeVar("Result")
_Simulator: TypeAlias = Simulator | AsynchronousSimulator


class _Watching(TypedDict, total=False):
    """Options of a simulator's run."""

    stop: threading.Event | None
    on_progress: Callable[[Progress], None] | None


@dataclass(frozen=True, kw_only=True)
class Simulation(Generic[Result]):
    """The result of `simulate`."""

    results: tuple[Result, ...]
    """The script's return value for each peer."""
    consensus_distance: float
    """Mean distance of the peers' models from their average, after the last round."""
    sent_bytes: int
    """Size of all messages."""
    virtual_s: float
    """Duration of the run, in seconds on the virtual clock."""


def simulate(
    script: Callable[[Place], Result],
    config: str | os.PathLike[str],
    *,
    peers: int | None = None,
    rate_kbit_s: float | None = None,
    latency_s: float = 0.0,
    step_s: float = 0.0,
    slow: Mapping[int, float] | None = None,
) -> Simulation[Result]:
    """Run the scripts of all peers in this process, and return the result.

    - `script(place)` is the script of one device: it builds model and loader, and calls `join(model, place, …)` once.
    - `config`: path of a configuration with `training.task = "loop"`. `peers`: how many there are, by default those
      that it lists.
    - `rate_kbit_s`, `latency_s`: bandwidth and delay of each link, on the virtual clock. `step_s`: virtual seconds of
      the local steps of a round; `slow`: peer → how many times slower it is.

    Raises any error of a script.
    """
    path = Path(config).resolve()
    read = _with_peers(load(Path(config)), peers)
    for finding in refuse_errors(validate_config(read, path.parent)):
        log.warning("%s: %s", finding.key, finding.sentence)
    scripts = [_Script(script, read, path, index) for index in range(len(read.peers))]
    links = LinkModel(rate_kbit_s=rate_kbit_s, latency_s=latency_s)
    with _begun(scripts):
        simulator = _simulator(scripts, path.parent, links, step_s=step_s, slow=slow)
        _run(scripts, simulator)
    # The last round is always evaluated.
    assert simulator.last_consensus is not None
    return Simulation(
        results=tuple(each.result() for each in scripts),
        consensus_distance=simulator.last_consensus,
        sent_bytes=sum(each.sent_bytes for each in scripts),
        virtual_s=simulator.now,
    )


def simulate_programs(
    config: Config,
    base: Path,
    script: Script,
    *,
    num_peers: int,
    directory: Path,
    links: LinkModel,
    step_s: float,
    slow: Mapping[int, float],
    command: str,
    **options: Unpack[_Watching],
) -> Summary:
    """Simulate a script that is the main program of each peer, and leave metrics and summary in `directory`, which
    exists; what the scripts print, in its folder `logs`. `command`: the line that started it.

    Raises the errors of the configuration, and of a script.
    """
    started, config = time.monotonic(), _with_peers(config, num_peers)
    # As in processes of their own (`ops.peer_processes`).
    if "OMP_NUM_THREADS" not in os.environ:
        use_one_thread()
    sys.path.insert(0, str(script.folder))
    logs = directory / "logs"
    logs.mkdir()
    with ExitStack() as stack:
        metrics = MetricsStore(directory / "metrics.sqlite")
        stack.callback(metrics.close)
        scripts = []
        for index, each in enumerate(config.peers):
            file = open_own(logs / f"{each.name}.txt", os.O_WRONLY | os.O_CREAT)
            output = stack.enter_context(os.fdopen(file, "w", encoding="utf-8", buffering=1))
            program = script.program(each.name, output)
            scripts.append(_Script(partial(_as_program, program), config, base / script.name, index, program.is_main))
        stack.enter_context(_begun(scripts))
        simulator = _simulator(scripts, base, links, step_s=step_s, slow=slow, metrics=metrics)
        size = scripts[0].steps.layout.size
        summary = describe_run(scripts[0].config, simulator.setup, size, command=command)
        summary.simulated = True
        write_resolved(scripts[0].config, directory / "config.toml", base)
        run_to_the_end(
            simulator,
            summary,
            partial(_run, scripts, simulator, **options),
            directory=directory,
            metrics=metrics,
            started=started,
        )
    return summary


def _as_program(program: Program, place: Place) -> None:
    """Run a script, which finds its place by itself."""
    try:
        with UserCode("__main__", "script").runs():
            draw_alike(place.config.run.seed)
            program.run()
    except TaskError as error:
        if isinstance(error.__cause__, StepAbandoned):
            raise error.__cause__ from None
        raise


def _with_peers(config: Config, peers: int | None) -> Config:
    """Return the configuration with so many peers listed, all of whom begin."""
    if peers is not None and config.peers and peers != len(config.peers):
        raise ConfigError("is not the number of peers listed", key="peers", value=peers, valid=str(len(config.peers)))
    names = [peer.name for peer in config.peers] or [f"peer-{index}" for index in range(peers or 0)]
    if not names:
        raise ConfigError("no peers are listed", key="peers", valid="simulate(…, peers=N), or [[peers]] tables")
    return config.model_copy(update={"peers": tuple(PeerAddress(name=name) for name in names)})


@contextmanager
def _begun(scripts: Sequence[_Script[Any]]) -> Iterator[None]:
    """Within this context all scripts wait for their peers' first model. Raises what one of them raises."""
    try:
        for each in scripts:
            each.begin()
        yield
    finally:
        for each in scripts:
            each.close()


def _run(scripts: Sequence[_Script[Any]], simulator: _Simulator, **options: Unpack[_Watching]) -> bool:
    """Train, and let the scripts come to their end; return whether they did, and were not stopped. Raises what one of
    them raises."""
    try:
        if not simulator.run(**options):
            return False
        for each in scripts:
            each.finish(simulator.participants[each.index])
    except StepAbandoned:
        for each in scripts:
            each.raise_error()
        raise UsageError("a script left its with block before the last round") from None
    return True


def _simulator(
    scripts: Sequence[_Script[Any]],
    base: Path,
    links: LinkModel,
    *,
    step_s: float,
    slow: Mapping[int, float] | None,
    metrics: MetricsStore | None = None,
) -> _Simulator:
    """Return the run of scripts that have begun. Raises UsageError where they do not belong together."""
    config = scripts[0].config
    for each in scripts:
        if each.config.run_digest() != config.run_digest():
            raise UsageError(
                f"{each.name} joined with another every, steps, outer_momentum or outer_learning_rate than"
                f" {scripts[0].name}"
            )
        ours, theirs = scripts[0].steps.start_model(), each.steps.start_model()
        difference = ours.difference(theirs.digest, theirs.parameters.entries)
        if difference is not None:
            raise UsageError(
                f"{each.name} joined with another model than {scripts[0].name} ({difference}), and all peers begin with"
                f" the same values; {ours.remedy(difference)}"
            )
        own = {meaning.kind: meaning for meaning in scripts[0].steps.meanings}
        for told in each.steps.meanings:
            if (mine := own.get(told.kind)) is not None:
                names = {"here": scripts[0].name, "there": each.name}
                sentence = mine.difference(told.digest, told.entries, len(told.names), **names)
                if sentence is not None:
                    raise UsageError(sentence)
        apart = ours.buffers.differences(theirs.buffers.entries)
        if apart is not None:
            log.warning(OTHER_BUFFERS, each.name, apart)

    def after_round(participant: Participant | PairParticipant, record: RoundRecord) -> None:
        scripts[participant.peer].sent_bytes += record.frame_bytes
        scripts[participant.peer].messenger.round_done(record)

    def after_evaluation(record: EvaluationRecord) -> None:
        for each in scripts:
            each.messenger.evaluated(record, scripts[record.peer].name)

    kind = AsynchronousSimulator if algorithm_spec(config).asynchronous else Simulator
    return kind(
        config,
        base,
        num_peers=len(scripts),
        metrics=metrics,
        links=links,
        step_s=step_s,
        slow=slow,
        after_round=after_round,
        after_evaluation=after_evaluation,
        loops=[each.steps for each in scripts],
    )


class _Script(Host, Generic[Result]):
    """The script of one peer, in a thread of its own."""

    steps: LoopSteps
    config: Config
    sent_bytes = 0

    def __init__(
        self,
        script: Callable[[Place], Result],
        config: Config,
        path: Path,
        index: int,
        is_main: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`is_main`: makes a context in which the script is the main program of the process."""
        self.index, self.name = index, config.peers[index].name
        own = config.model_copy(update={"peer": config.peer.model_copy(update={"index": index})})
        self._place = Place(
            index, len(config.peers), self.name, f"the simulation of {path}", own, lambda derive: self, deals=True
        )
        self._base, self._has_joined = path.parent, False
        self._thread = threading.Thread(
            target=self._run, args=(partial(script, self._place),), name=self.name, daemon=True
        )
        self._meeting = _Turns(self._thread, is_main)
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._threads = torch.get_num_threads()
        self.messenger = Messenger(self._meeting)

    # Called by the simulation.

    def begin(self) -> None:
        """Let the script come to its `with` block. Raises what it raises."""
        with self._meeting.turn():
            self._thread.start()
            self._meeting.wait_for_script()
        self.raise_error()
        if not self._has_joined:
            raise UsageError(f"the script of {self.name} ended without joining the run")

    def finish(self, participant: Participant | PairParticipant) -> None:
        """Hand over the last model, and let the script come to its end. Raises what it raises."""
        self._meeting.ask(Finish(participant.model(), None))
        with self._meeting.turn():
            self._meeting.end(End())
            self._thread.join()
        self.raise_error()

    def result(self) -> Result:
        """Return the script's return value."""
        return self._result[0]

    def close(self) -> None:
        """End the script where it has not come to its end."""
        if self._thread.ident is None:
            return
        with self._meeting.turn():
            self._meeting.end(End(StepAbandoned()))
            self._thread.join()

    def raise_error(self) -> None:
        """Raise the script's own error."""
        if self._error is not None and not isinstance(self._error, StepAbandoned):
            raise self._error

    def _run(self, script: Callable[[], Result]) -> None:
        SIMULATED.set(self._place)
        # Threads begin with a number of their own.
        torch.set_num_threads(self._threads)
        try:
            self._result.append(script())
        except BaseException as error:  # The simulation raises it in its own thread.
            self._error = error
        finally:
            self._meeting.script_is_over()

    # Called by the script.

    def meet(self) -> Meeting:
        if self._has_joined:
            raise UsageError("a simulated script joins once; call simulate again for another run")
        return self._meeting

    def open(self, steps: LoopSteps, config: Config) -> int:
        self.steps, self.config, self._has_joined = steps, config, True
        return config.run.rounds - final_rounds(config, RunSetup.of_loop(config, self._base).schedule) - 1

    def start(self) -> None:
        """Do nothing: the simulation goes on when all scripts have come here."""

    def stop(self, reason: str) -> None:
        self._meeting.abandon()


class _Turns(Meeting):
    """A meeting at which the generators of random numbers change hands with the turn, and what else a script has for
    itself as the main program of a process."""

    def __init__(self, owner: threading.Thread, is_main: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(owner, takes_turns=True)
        self._is_main = is_main
        self._random = RandomNumbers()
        self._script_random = self._random.state()

    def ask(self, request: Request) -> Any:
        with self.turn():
            return super().ask(request)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """It is the script's turn inside."""
        with self._random.kept():
            self._random.set(self._script_random)
            try:
                with self._is_main():
                    yield
            finally:
                self._script_random = self._random.state()
