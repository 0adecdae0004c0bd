"""One lie, told to three honest peers, and what became of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sqlite3
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from peer.config.options import load
from peer.errors import SecurityError, SottoError
from peer.ops import control
from peer.ops.local_cluster import free_ports
from peer.ops.peer_processes import ForkServer, PeerProcess, start_process
from tests.stress.attack.meaning.insider import HONEST, ME
from tests.stress.attack.meaning.lies import Lie
from tests.stress.soak import resident_mbytes

Settings: TypeAlias = tuple[str, ...]

ROUNDS = 40
VICTIM = 0
"""Who is killed after the lie, and started again."""
COMMON = (
    "graph.kind=complete", f"run.rounds={ROUNDS}", "peer.min_step_s=0.1", "evaluation.every_rounds=10",
    "training.task_options={hidden=8}", "state.checkpoint_every_rounds=5",
)  # fmt: skip
_AFTER_S = 1.0
"""So long after the lie the peers are asked for their status."""
_STUCK_S = 20.0
"""A run of which no round ends for so long is stuck."""
_ALONE_S = 10.0
_MORE_MB = 32.0
_TUNNELS_OF_PAIR = 2
_MORE_LOG_BYTES = 16_384
"""A restart of a neighbour and a handful of refusals take 3 kB."""
_LIMIT_S = 150.0
_ASK_TIMES = 4


@dataclass(kw_only=True)
class Outcome:
    """What became of three honest peers."""

    lie: str
    what: str
    died: dict[str, str] = field(default_factory=dict)
    """Honest peer → the last line of its log, of those that ended before the last round."""
    said: list[str] = field(default_factory=list)
    """What honest peers logged of the attacker, in the first three forms."""
    offences: int = 0
    """The most that an honest peer counts of the attacker in its status; an older release counts none."""
    told: list[str] = field(default_factory=list)
    """With which words links to the attacker ended."""
    answers_status: bool = True
    restarted: str = ""
    """"clean", or how the peer that was killed ended when it was started again."""
    finished: bool = False
    """Whether all honest peers came to the last round."""
    same_models: bool = False
    """Whether their models are, to the bit, those of a run in which nobody lies."""
    believed: bool = False
    """Whether an honest peer's metrics hold an accuracy that nobody can have."""
    in_state: bool = False
    """Whether bytes of the lie were in a state folder, in the seconds after it."""
    checkpoints: tuple[int, int] = (0, 0)
    """Checkpoints of the honest peers before the lie and 2 s after it, all together."""
    memory_mb: tuple[float, float] = (0.0, 0.0)
    """The most of any honest peer, before and after."""
    log_bytes: int = 0
    """What the honest peer that logged most wrote in the 5 s after the lie."""
    round_ms: tuple[float, float] = (0.0, 0.0)
    """Median duration of a round over the honest peers, before and after the lie."""
    slowest_ms: float = 0.0
    lie_bytes: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    """What the lie itself counted."""
    trouble: str = ""
    """Why the attacker did not come to its lie, if it did not."""

    @property
    def is_flat(self) -> bool:
        """Whether neither memory, nor log, nor relayed connections grew more than a run without lies lets them."""
        tunnels = int(self.figures.get("tunnels", 0))
        return (
            self.memory_mb[1] < self.memory_mb[0] + _MORE_MB and self.log_bytes < _MORE_LOG_BYTES
            and tunnels <= _TUNNELS_OF_PAIR
        )  # fmt: skip

    @property
    def held(self) -> bool:
        """Whether the lie came to nothing."""
        return (
            self.is_flat and not self.died and self.answers_status and self.restarted == "clean" and self.finished
            and self.same_models and not self.in_state and not self.believed
            and self.checkpoints[1] >= self.checkpoints[0]
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What the processes of a trial are started with."""

    release: Path
    """The installation of the honest peers."""
    honest: ForkServer
    """Of that installation."""
    attacker: Sequence[str]
    """The command of the attacker, to which its arguments are added."""


class Trial:
    """Three honest peers of an installation and one attacker, in a folder."""

    def __init__(self, folder: Path, sides: Sides, lie: Lie | None, settings: Settings) -> None:
        """`lie` None: nobody lies. `settings` are those of the run."""
        self.folder, self.lie = folder, lie
        self._sides = sides
        self._processes: dict[int, PeerProcess] = {}
        self._began = self._progress_at = 0.0
        self._done = 0
        """Rounds of all honest peers together."""
        self._lied = False
        self._restarted_at: float | None = None
        self._log_before: list[int] = []
        kits = ["init", "cluster", str(folder)]
        for port in free_ports(len((*HONEST, ME))):
            kits += ["--host", f"127.0.0.1:{port}"]
        for setting in (*COMMON, *settings):
            kits += ["--set", setting]
        log = folder.with_name(f"{folder.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        if sides.honest.start(kits, log).wait(60.0):
            raise SystemExit(f"no folders for a run: {log.read_text()}")
        self.files = [folder / f"peer-{peer}" / "peer.toml" for peer in (*HONEST, ME)]

    def run(self) -> Outcome:
        """Run to the end and return what became of it."""
        lie = self.lie
        outcome = Outcome(lie=lie.name if lie else "nothing", what=lie.what if lie else "nobody lies")
        try:
            for peer in HONEST:
                self._start(peer)
            self._start_attacker()
            self._watch(outcome)
        finally:
            for process in self._processes.values():
                _kill(process)
        outcome.finished = all(self._rounds(peer) == ROUNDS for peer in HONEST)
        return outcome

    def models(self) -> list[str]:
        """Return a digest of each honest peer's model after the last round."""
        found = []
        for peer in HONEST:
            with contextlib.suppress(OSError, struct.error):
                model = (self._state(peer) / "model.safetensors").read_bytes()
                # The header lists what does not concern the numbers, in any order.
                (header,) = struct.unpack_from("<Q", model)
                found.append(hashlib.sha256(model[8 + header :]).hexdigest())
        return found

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start(self, peer: int) -> None:
        file = self.files[peer]
        self._processes[peer] = self._sides.honest.start(["run", "--config", str(file)], file.with_name("log.txt"))

    def _start_attacker(self) -> None:
        arguments = [self.lie.name if self.lie else "", str(self.folder), str(self._sides.release)]
        log = self.files[ME].with_name("log.txt")
        self._processes[ME] = start_process([*self._sides.attacker, *arguments], log)

    def _watch(self, outcome: Outcome) -> None:
        """Follow the run to its end, or until nothing more can come of it."""
        self._began = self._progress_at = time.monotonic()
        struck = None
        if self.lie is not None:
            while (struck := self._strike()) is None:
                if not self._goes_on(outcome):
                    outcome.trouble = "the attacker never came to its lie"
                    return
            self._see_what_comes(outcome, struck)
        while any(self._processes[peer].poll() is None for peer in HONEST) and self._goes_on(outcome):
            if self._restarted_at is not None and not outcome.log_bytes and time.monotonic() > self._restarted_at + 2.0:
                outcome.log_bytes = max(self._log_size(peer) - self._log_before[peer] for peer in HONEST)
        if struck is not None:
            self._conclude(outcome, self._strike() or struck)

    def _see_what_comes(self, outcome: Outcome, struck: dict[str, Any]) -> None:
        """Look at what the lie does at once and on disk, ask for the status, and start one peer again."""
        self._lied = True
        self._log_before = [self._log_size(peer) for peer in HONEST]
        before = self._checkpoints()
        asked: list[threading.Thread] = []
        while (over := time.monotonic() - float(struck["time"])) < _AFTER_S + 2.0 or any(
            thread.is_alive() for thread in asked
        ):
            self._goes_on(outcome)
            outcome.in_state = outcome.in_state or self._in_state(self._strike())
            if over > _AFTER_S and not asked:
                asked = [threading.Thread(target=self._ask, args=(peer, outcome)) for peer in HONEST]
                for thread in asked:
                    thread.start()
        outcome.checkpoints = (before, self._checkpoints())
        _kill(self._processes[VICTIM])
        self._start(VICTIM)
        self._restarted_at = self._progress_at = time.monotonic()

    def _goes_on(self, outcome: Outcome) -> bool:
        """Wait a moment and look around; return whether anything more can come of this run."""
        time.sleep(0.1)
        self._measure_memory(outcome, self._lied)
        self._look_for_dead(outcome)
        now, done = time.monotonic(), sum(map(self._rounds, HONEST))
        if done != self._done:
            self._done, self._progress_at = done, now
        is_over = self._restarted_at is not None and now > self._restarted_at + _ALONE_S
        if is_over and any(name != f"peer-{VICTIM}" for name in outcome.died):
            # Those that ended do not come back; the one that was started again has had time to end, too.
            return False
        is_stuck = self._done > 0 and now > self._progress_at + _STUCK_S
        return not is_stuck and now < self._began + _LIMIT_S

    def _conclude(self, outcome: Outcome, struck: dict[str, Any]) -> None:
        code = self._processes[VICTIM].poll()
        outcome.restarted = (
            "clean" if code == 0 and self._rounds(VICTIM) == ROUNDS
            else "runs on, alone" if code is None
            else f"ends with {code}: {self._last_line(VICTIM)}"
        )  # fmt: skip
        outcome.told = list(dict.fromkeys(struck["told"]))[:3]
        outcome.lie_bytes = struck["bytes"]
        keys = ("time", "round", "bytes", "said", "told")
        outcome.figures |= {key: value for key, value in struck.items() if key not in keys}
        outcome.said = self._said()
        outcome.believed = any(map(self._believes, HONEST))
        before, after = self._durations_ms(int(struck["round"]))
        outcome.round_ms = statistics.median(before or [0.0]), statistics.median(after or [0.0])
        outcome.slowest_ms = max(after, default=0.0)

    def _look_for_dead(self, outcome: Outcome) -> None:
        for peer in HONEST:
            code = self._processes[peer].poll()
            if code is None or (self._restarted_at is not None and peer == VICTIM):
                continue
            if self._rounds(peer) < ROUNDS or code != 0:
                outcome.died.setdefault(f"peer-{peer}", f"exit {code}: {self._last_line(peer)}")

    # -- what is looked at ---------------------------------------------------------------------------------------------

    def _strike(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.folder / "strike.json").read_text())
            return found
        return None

    def _ask(self, peer: int, outcome: Outcome) -> None:
        """Ask a peer for its status, as `sotto status` does. In a thread: another one looks how processes ended."""
        if self._processes[peer].returncode is not None:
            outcome.answers_status = False
            return
        config = load(self.files[peer], environment={})
        for attempt in range(_ASK_TIMES):
            try:
                status = control.call(config, self.files[peer].parent, None, "status")
                counted = status["links"].get(f"peer-{ME}", {}).get("offences", 0)
                outcome.offences = max(outcome.offences, counted)
                break
            except SecurityError:
                break  # It answered; an older release proves nothing with its answer.
            except SottoError as error:
                # The machine may be busy.
                if attempt == _ASK_TIMES - 1 or self._processes[peer].returncode is not None:
                    outcome.answers_status = False
                    outcome.figures[f"status of peer-{peer}"] = str(error)[:200]
                    return
        time.sleep(0.5)
        if self._processes[peer].returncode is not None:
            outcome.answers_status = False

    def _state(self, peer: int) -> Path:
        return self.files[peer].with_name("state")

    def _checkpoints(self) -> int:
        return sum(len(list(self._state(peer).glob("checkpoint-*"))) for peer in HONEST)

    def _in_state(self, struck: dict[str, Any] | None) -> bool:
        said = [bytes.fromhex(each) for each in (struck or {}).get("said", ())]
        for path in (path for peer in HONEST for path in self._state(peer).rglob("*") if path.is_file()):
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                if any(len(each) > 8 and each in content for each in said):
                    return True
        return False

    def _believes(self, peer: int) -> bool:
        """Return whether a peer holds an evaluation of a round beyond the run, or with more right than there are."""
        rows = self._query(peer, "select round, correct, total from evaluations")
        return any(
            int(round_) > ROUNDS or sum(json.loads(correct)) > sum(json.loads(total)) for round_, correct, total in rows
        )

    def _measure_memory(self, outcome: Outcome, struck: bool) -> None:
        for peer in HONEST:
            with contextlib.suppress(OSError):
                used = resident_mbytes(self._processes[peer].pid)
                before, after = outcome.memory_mb
                outcome.memory_mb = (before, max(after, used)) if struck else (max(before, used), after)

    def _log(self, peer: int) -> str:
        return self.files[peer].with_name("log.txt").read_text(errors="replace")

    def _log_size(self, peer: int) -> int:
        return self.files[peer].with_name("log.txt").stat().st_size

    def _last_line(self, peer: int) -> str:
        lines = [line for line in self._log(peer).splitlines() if line.strip()]
        return (lines[-1] if lines else "it logged nothing")[:300]

    def _said(self) -> list[str]:
        """Return what honest peers logged of the attacker as a fault of its."""
        found: dict[str, str] = {}
        for peer in HONEST:
            for line in self._log(peer).splitlines():
                words = line.split(": ", 1)[-1]
                level = line.split()[2:3]
                if level in (["ERROR"], ["WARNING"]) and (f"peer-{ME}" in words or f"peer {ME}" in words):
                    found.setdefault(words[:40], f"peer-{peer}: {words[:220]}")
        return list(found.values())[:3]

    def _rounds(self, peer: int) -> int:
        rows = self._query(peer, "select max(round) from rounds")
        return 0 if not rows or rows[0][0] is None else int(rows[0][0]) + 1

    def _durations_ms(self, struck: int) -> tuple[list[float], list[float]]:
        """Return the durations of rounds before and after the lie; the one that saw the restart is the longest."""
        before: list[float] = []
        after: list[float] = []
        for peer in HONEST:
            rows = self._query(peer, "select round, time_s from rounds order by round")
            for (_, began), (round_, ended) in itertools.pairwise(rows):
                if round_ >= 2:
                    (before if round_ < struck else after).append(1000 * (ended - began))
        return before, after

    def _query(self, peer: int, text: str) -> list[tuple[Any, ...]]:
        path = self._state(peer) / "metrics.sqlite"
        if not path.exists():
            return []
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0.2)) as store,
        ):
            return store.execute(text).fetchall()
        return []


def _kill(process: PeerProcess) -> None:
    process.kill()
    process.wait(10.0)
