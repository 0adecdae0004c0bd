"""Where a training script finds its place in a run by itself, and what it is without one.

In this order: the simulation that runs it, what `sotto` started it with, the file `peer.toml` in the folder that it was
started in. Otherwise it trains alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextvars import ContextVar
from pathlib import Path

import numpy as np

from peer.config.options import OWN_LOOP, Config
from peer.config.options import check as checked
from peer.errors import UsageError
from peer.library.background import place_of, speak
from peer.library.events import RoundDone
from peer.library.loop_steps import LoopSteps
from peer.library.meeting import End, Finish, Meeting
from peer.library.place import Host, Place
from peer.node.divergence_guard import require_finite_loss
from peer.node.local_steps import StepAbandoned
from peer.terminal import telling

log = logging.getLogger("sotto")

FILE = "SOTTO_PLACE"
"""Environment variable with the path of the configuration that `sotto` starts a script with."""
DEALS = "SOTTO_DEALS"
"""Environment variable that is set where all peers run on one machine, and read the same data."""

SIMULATED: ContextVar[Place | None] = ContextVar("simulated", default=None)
"""Place of the simulated script whose thread this is."""

_ALONE = "nowhere"
"""Source of a place without a run."""

try:
    _STARTED_IN = Path.cwd()
except FileNotFoundError:
    _STARTED_IN = Path("/nonexistent")
"""Working directory of the process at its start: scripts and frameworks change it."""


def place(config: str | os.PathLike[str] | None = None) -> Place:
    """Return the place of a configuration file in its run: which peer it is, of how many. Without a file it is that of
    this script, which is alone where neither `sotto` nor a `peer.toml` in its folder says otherwise.

    Raises UsageError or ConfigError.
    """
    if config is not None:
        return place_of(config)
    if (simulated := SIMULATED.get()) is not None:
        return simulated
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"torchrun or accelerate launch started {os.environ['WORLD_SIZE']} processes, which share one model and"
            " would all be the same peer; start one process for each peer instead: sotto up SCRIPT --peers"
            f" {os.environ['WORLD_SIZE']}"
        )
    if file := os.environ.get(FILE):
        return place_of(file, deals=DEALS in os.environ)
    if (_STARTED_IN / "peer.toml").is_file():
        return place_of(_STARTED_IN / "peer.toml")
    _refuse_beside_devices()
    # Of one peer all algorithms make the same, and with this one it may average gradients.
    mean = {"algorithm": {"name": "allreduce"}, "graph": {"kind": "complete"}}
    alone = checked({"training": {"task": OWN_LOOP}, "peers": [{"name": "peer-0"}], **mean})
    return Place(0, 1, "peer-0", _ALONE, alone, lambda derive: Alone())


def is_alone(where: Place) -> bool:
    """Return whether a script at this place trains alone."""
    return where.source == _ALONE


def _refuse_beside_devices() -> None:
    """Raise UsageError where a device's folder is near, which may be meant."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    beside = None if script is None else Path(script).absolute().parent / "peer.toml"
    if beside is not None and beside.is_file():
        raise UsageError(
            f"{beside} lies beside this script, which was started in {_STARTED_IN}; start it in {beside.parent}, or"
            f" with `sotto run {script} --config {beside}`"
        )
    devices = sorted(_STARTED_IN.glob("peer-*/peer.toml"))
    if devices:
        raise UsageError(
            f"{_STARTED_IN} holds the folders of {len(devices)} devices, and none says which is this one; start the"
            f" script in one of them, such as {devices[0].parent}, or with `sotto run {script} --config {devices[0]}`"
        )


class Alone(Host):
    """What a script that trains alone has in place of a peer: its own steps count, and nothing is sent or saved."""

    def meet(self) -> Meeting:
        """Return a new meeting, in the script's thread."""
        self._meeting = Meeting(threading.current_thread())
        return self._meeting

    def open(self, steps: LoopSteps, config: Config) -> int:
        """Begin with the script's model: nothing is kept. Return the last round."""
        self._steps, self._config, self._round = steps, config, 0
        return config.run.rounds - 1

    def start(self) -> None:
        """Say that nobody else trains, and let the rounds begin."""
        speak()
        log.warning(
            "this script trains alone: `sotto` did not start it, and there is no peer.toml in %s; nothing is exchanged,"
            " and nothing survives a crash. To train with others: sotto up SCRIPT --peers 3",
            _STARTED_IN,
        )
        tells = telling(lambda: f"trains alone, round {self._round} of {self._config.run.rounds}")
        threading.Thread(target=tells(self._train), name="sotto", daemon=True).start()

    def stop(self, reason: str) -> None:
        """Ask for no further steps."""
        self._meeting.abandon()

    def _train(self) -> None:
        end = End()
        try:
            z, rule = np.array(self._steps.initial_vector()), self._steps.rule_of_mean
            for t in range(self._config.run.rounds):
                rate = self._steps.rate(t)
                step = self._steps.gradient(z, t, rate, rate)
                if step.loss is not None:
                    require_finite_loss(t, step.loss)
                self._round = t + 1
                z = z - np.float32(rate) * (step.gradient if rule is None else rule.direction_(step.gradient, z))
                self._meeting.tell(
                    RoundDone(
                        round=t + 1, loss=step.loss, neighbor_distance=None, push_weight=1.0, sent_bytes=0, wait_s=0.0
                    )
                )
            self._meeting.ask(Finish(z, None))
            log.warning("this script has trained alone: no other device had a part in its model")
        except StepAbandoned:
            pass
        except BaseException as error:  # The script is to see every error.
            end = End(error)
        finally:
            self._meeting.end(end)
