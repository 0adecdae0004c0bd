"""The daemon of a peer in a thread of its own, beside the training script of the same process.

It takes no signals, sets no number of threads and changes no generator of random numbers: all of these are the
script's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from peer.config.options import Config
from peer.daemon.assembly import Parts
from peer.daemon.local_peer import LocalPeer
from peer.daemon.members import rejoining
from peer.daemon.process import Daemon, Patience, require_addresses, warn_of
from peer.daemon.process import log as daemon_log
from peer.daemon.runtime import Runtime
from peer.daemon.watcher import Watcher
from peer.errors import SottoError, UsageError
from peer.gossip.membership import Change, ChangeKind
from peer.library.events import Evaluated, MemberChange, PeersLate, RoundDone
from peer.library.loop_steps import LoopSteps
from peer.library.meeting import End, Meeting, Restored
from peer.library.place import Host, Place, read_config
from peer.records import RoundRecord
from peer.run.plan import final_rounds
from peer.state.kept_file import SCRIPT_SAYS, ScriptSays
from peer.state.metrics import EvaluationRecord
from peer.terminal import LineFormatter

_KINDS: dict[ChangeKind, Literal["join", "leave", "loss"]] = {
    ChangeKind.JOIN: "join",
    ChangeKind.LEAVE: "leave",
    ChangeKind.LOST: "loss",
}

_open: dict[Path, Background] = {}
"""The peers of this process, by the file of their configuration."""

_THREADS_OF_GRPC = ("grpc", "event_engine")
"""Prefixes of the names of threads that gRPC has while it is in use, by this peer or by another library."""

_grpc_runs = False
"""Whether gRPC was in use at the last fork."""

_grpc_ran_at_fork = False
"""Whether it was when this process, or one that it comes from, was forked: it is broken here."""


def _look_for_grpc() -> None:
    global _grpc_runs
    _grpc_runs = False
    for file in Path("/proc/self/task").glob("*/comm"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            _grpc_runs |= file.read_text().startswith(_THREADS_OF_GRPC)


def _let_go_in_fork() -> None:
    global _grpc_ran_at_fork
    _grpc_ran_at_fork |= _grpc_runs
    for background in _open.values():
        background.let_go_in_fork()


os.register_at_fork(before=_look_for_grpc, after_in_child=_let_go_in_fork)


def place_of(config: str | os.PathLike[str], *, deals: bool = False) -> Place:
    """Return the place of a configuration file in its run. `deals` is as in `Place`. Raises UsageError or
    ConfigError."""
    read, path = read_config(config)
    index, name = read.peer.index, read.own.name
    return Place(index, len(read.peers), name, str(path), read, lambda derive: Background(path, derive), deals=deals)


def speak() -> None:
    """Log to stderr what a peer without a script logs there, unless the script has set up logging by itself. It is
    quiet with `logging.getLogger("sotto").setLevel(logging.WARNING)`."""
    if not daemon_log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(LineFormatter("%(asctime)s %(message)s"))
        daemon_log.addHandler(handler)
        daemon_log.setLevel(daemon_log.level or logging.INFO)


class Background(Host):
    """The daemon of one script."""

    def __init__(self, path: Path, derive: Callable[[Config], Config]) -> None:
        """`derive` makes the configuration of the run from that of the file at `path`, which begins at the root."""
        self._path, self._derive = path, derive
        self._thread: threading.Thread | None = None
        self._begins = threading.Lock()
        """Held while it is decided whether the thread does anything, or was told to stop before."""
        self._has_begun, self._is_over = False, False
        self._loop: asyncio.AbstractEventLoop
        self._local: LocalPeer | None = None
        """None while there is nothing to close."""
        self._daemon: Daemon | None = None
        """None until the journal was replayed."""
        self._config: Config
        self._runtime: Runtime
        """The runtime to be told to stop."""

    def meet(self) -> Meeting:
        if _grpc_ran_at_fork:
            raise UsageError(
                "this process was forked from one that uses gRPC, in a peer of its own or in another library, and gRPC"
                ' does not work in it; start it by the method "spawn" or "forkserver" of multiprocessing, or before'
                " the other process uses gRPC"
            )
        other = _open.get(self._path)
        if other is not None:
            if not other._is_over:
                raise UsageError(f"this process has joined with {self._path} already; leave that with block first")
            # The script left it without waiting for its end.
            other._join()
        if self._thread is not None:
            # A peer that was lost has ended, but for the last line of its thread.
            self._thread.join()
            self._thread = None
        self._meeting = Meeting(threading.current_thread())
        return self._meeting

    def open(self, steps: LoopSteps, config: Config) -> int:
        speak()
        base = self._path.parent
        warn_of(config, base)
        self._config, self._local = config, self._opened(steps, config)
        steps.disk = self._local.folder.disk
        said = ScriptSays(config.run.rounds, steps.criteria)
        SCRIPT_SAYS.keep(self._local.folder.disk, said)
        _open[self._path] = self
        return config.run.rounds - final_rounds(config, self._local.setup.schedule) - 1

    def _opened(self, steps: LoopSteps, config: Config) -> LocalPeer:
        """Return the peer's opened files; passing obstacles, as after a boot, are waited out. Raises SottoError."""
        base, patience = self._path.parent, Patience(config, self._path.parent)
        while True:
            try:
                # The daemon listens in its own thread, when nothing of it can be made anew.
                require_addresses(config)
                return LocalPeer(config, base, steps)
            except SottoError as error:
                patience.wait(error)

    def start(self) -> None:
        self._has_begun, self._loop = False, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sotto")
        self._thread.start()

    def stop(self, reason: str) -> None:
        with self._begins:
            self._is_over = True
        if not self._has_begun:
            # An interrupt may have come before the thread was started, or before it did anything.
            self._close()
            return

        def stop() -> None:
            self._runtime.request_stop(reason, at_once=True)
            self._meeting.abandon()

        if self._daemon is None:
            # It may be asking for steps again, and look at nothing else.
            self._meeting.abandon()
        # It may have ended by itself, and its loop with it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(stop)
        self._join()

    def _join(self) -> None:
        if self._thread is not None and self._has_begun:
            self._thread.join()

    def let_go_in_fork(self) -> None:
        """See `Daemon.let_go_in_fork`."""
        if self._daemon is not None:
            self._daemon.let_go_in_fork()
        elif self._local is not None:
            self._local.folder.close()

    def _run(self) -> None:
        with self._begins:
            if self._is_over:
                return
            self._has_begun = True
        end = End()
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                try:
                    runner.run(self._main())
                    end = End(reason=self._runtime.stop_reason)
                except rejoining.LOST as error:
                    if self._runtime.stops:
                        raise
                    # Nobody needs the steps that it has asked for, and its state folder is needed.
                    self._meeting.abandon()
                    self._close()
                    end = runner.run(self._come_back(error))
        except BaseException as error:  # The script is to see every error.
            end = End(error)
        finally:
            try:
                self._close()
            finally:
                self._meeting.end(end)

    async def _main(self) -> None:
        assert self._local is not None
        self._runtime = Runtime()  # Until the peer's own is there: steps that are repeated may be abandoned.

        def reread() -> Config:
            return self._derive(read_config(self._path)[0])

        # The script is asked for steps that it is to repeat, so that this is not done in its own thread.
        parts = Parts(self._local, self._config, reread, Messenger(self._meeting))
        self._daemon, self._runtime = Daemon(parts), parts.common.runtime
        self._meeting.tell(Restored())
        await self._daemon.main(heeds_signals=False)

    async def _come_back(self, error: rejoining.Lost) -> End:
        """Return how a peer ends that was declared lost, or is going to be. Raises `error` where that is for good."""
        config, base = self._config, self._path.parent
        before, self._runtime = self._runtime, Runtime()
        if before.stop_reason is not None:
            self._runtime.request_stop(before.stop_reason, at_once=True)
        incarnation = await rejoining.following(error, config, base, self._runtime)
        if incarnation is None:
            return End(reason=self._runtime.stop_reason)
        return End(begin_again=partial(rejoining.begin, incarnation, config, base))

    def _close(self) -> None:
        daemon, local, self._daemon, self._local = self._daemon, self._local, None, None
        if local is None:
            return
        try:
            (daemon or local).close()
        finally:
            _open.pop(self._path, None)


class Messenger(Watcher):
    """Tells a script about events."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def round_done(self, record: RoundRecord) -> None:
        self._meeting.tell(
            RoundDone(
                round=record.round + 1,
                loss=record.loss,
                neighbor_distance=record.neighbor_distance,
                push_weight=record.push_weight,
                sent_bytes=record.frame_bytes,
                wait_s=record.wait_s,
            )
        )

    def late(self, round_: int, names: Sequence[str]) -> None:
        self._meeting.tell(PeersLate(round=round_, names=tuple(names)))

    def members_change(self, change: Change, name: str) -> None:
        self._meeting.tell(MemberChange(name=name, kind=_KINDS[change.kind], round=change.effective))

    def evaluated(self, record: EvaluationRecord, name: str) -> None:
        if record.accuracy is not None or record.metrics:
            metrics = dict(record.metrics)
            self._meeting.tell(Evaluated(name=name, round=record.round, accuracy=record.accuracy, metrics=metrics))
