"""What a run keeps on this device, beside its state, from before its first round on.

- Rates: where the configuration leaves `algorithm.averaging_rate` or `algorithm.theta_value` unset, a default takes its
  place, which a later release may change. A journal leads to the same model only with the values of its rounds, and
  neighbours that mix at different rates lose weight. The rounding of 8-bit training and the order of classes likewise.
- The precision, where `training.precision` is "fastest": it is measured once.
- The secret of private local steps, in the state folder and nowhere else, and the settings that the budget was computed
  with. It is on disk before the first step, so that a round that a crash interrupts is repeated to the same bits. ε is
  counted from the run's first round on with one noise and one sampling rate, so neither may change while the run lasts,
  nor may privacy be turned on or off. A device that has lost its state folder draws another secret.
- The form of the peer's model, and what of it never changes, for `sotto export`.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from peer.compress.base import Compressor
from peer.config.options import Config
from peer.config.precision_choice import FASTEST, PrecisionChoice
from peer.errors import ConfigError, StateError
from peer.run.plan import algorithm_spec, averaging_rate, first_theta
from peer.run.privacy_budget import Budget
from peer.run.setup import PeerTrainer
from peer.state.disk import Disk, replace, writing
from peer.state.kept_file import CHOSEN_PRECISION, FROZEN_FILE, MODEL_FORM, KeptFile
from peer.state.recovery import WAYS_ON, begin_anew, begun_round
from peer.train.model_file import file_parts
from peer.train.private_step import SECRET_BYTES, SECRET_FILE

log = logging.getLogger("sotto")


class KeptRates(NamedTuple):
    """The first values of a run."""

    averaging_rate: float
    """η."""
    first_theta: float
    """θ of modulo codes in the first round."""
    float32_weight_gradients: bool
    """Whether 8-bit training does without the rounding of weight gradients to bfloat16 that release 0.2 had on
    processors with AVX2 alone."""
    normal_class_order: bool = True
    """Whether class folders are numbered by their names in Unicode's normal form C, rather than as release 0.2 did."""


def _rates_of_json(tree: Mapping[str, Any]) -> KeptRates:
    found = KeptRates(
        tree["averaging_rate"], tree["first_theta"], *(tree.get(name, False) for name in KeptRates._fields[2:])
    )
    is_rate = isinstance(found.averaging_rate, float) and 0 < found.averaging_rate <= 1
    is_theta = isinstance(found.first_theta, float) and found.first_theta > 0
    if not (is_rate and is_theta and {*map(type, found[2:])} == {bool}):
        raise ValueError("no rates that a run can begin with")
    return found


RATES = KeptFile[KeptRates](
    "rates.json",
    KeptRates._asdict,
    _rates_of_json,
    "restore it from a copy, or delete it and set algorithm.averaging_rate, and with a modulo code"
    " algorithm.theta_value, to what the run began with",
)


def settle_rates(config: Config, compressor: Compressor, disk: Disk) -> KeptRates:
    """Return the rates of the run that a state folder belongs to, and keep them there. The configuration overrules
    them. Raises StateError."""
    kept, options = RATES.read(disk), config.algorithm
    rate, theta = averaging_rate(config, compressor), first_theta(config)
    if kept is not None:
        rate = kept.averaging_rate if options.averaging_rate is None else rate
        theta = kept.first_theta if options.theta_value is None else theta
        newer = kept[2:]
    else:
        has_begun = begun_round(disk) is not None
        is_open = options.averaging_rate is None or (options.theta_value is None and algorithm_spec(config).modulo)
        if has_begun and is_open:
            raise StateError(f"{RATES.name} is missing in a run that has begun; {RATES.if_damaged}")
        # Runs that release 0.2 began are repeated with its rounding, and their classes keep their numbers.
        newer = (not has_begun, not has_begun)
    settled = KeptRates(rate, theta, *newer)
    if settled != kept:
        RATES.keep(disk, settled)
    return settled


def settle_chosen(measure: Callable[[], PrecisionChoice], disk: Disk) -> PrecisionChoice:
    """Return the precision of the run that a state folder belongs to. Before the first round, `measure` decides, and it
    is on disk before anything is computed in it. Raises ConfigError for a run that began with another setting, and
    StateError."""
    choice = CHOSEN_PRECISION.read(disk)
    if choice is None:
        if (begun := begun_round(disk)) is not None:
            raise ConfigError(
                f"cannot be set in a run that began without it, or that lost {CHOSEN_PRECISION.name}: its rounds cannot"
                f" be repeated in another precision; set the precision that it began with, or {begin_anew(begun)}",
                key="training.precision",
                value=FASTEST,
            )
        choice = measure()
        CHOSEN_PRECISION.keep(disk, choice)
    log.info("trains in %s", choice.sentence)
    return choice


def _secret_of_json(tree: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
    secret, budget = bytes.fromhex(tree["secret"]), tree["budget"]
    if len(secret) != SECRET_BYTES or not isinstance(budget, dict):
        raise ValueError("no secret with its budget")
    return secret, budget


SECRET = KeptFile[tuple[bytes, dict[str, Any]]](
    SECRET_FILE,
    lambda kept: {"secret": kept[0].hex(), "budget": kept[1]},
    _secret_of_json,
    "without it no round can be repeated; restore it, or begin a new run",
)


def settle_privacy(budget: Budget | None, disk: Disk) -> bytes | None:
    """Return the secret of the run that a state folder belongs to, which only its owner can read; None where local
    steps are not private. Raises ConfigError where the configuration asks for another budget than the run began with,
    and StateError for a file that is damaged or cannot be written."""
    kept = SECRET.read(disk)
    if kept is None:
        if budget is None:
            return None
        if (begun := begun_round(disk)) is not None:
            raise ConfigError(
                "cannot be turned on in a run that began without it, and neither can a run go on that lost"
                f" {SECRET_FILE}: its earlier rounds are not accounted for; {begin_anew(begun)}",
                key="privacy",
            )
        secret = secrets.token_bytes(SECRET_BYTES)
        SECRET.keep(disk, (secret, asdict(budget)))
        return secret
    secret, begun_with = kept
    if budget is None:
        raise ConfigError("cannot be turned off in a run that began with it; begin a new run", key="privacy")
    now = asdict(budget)
    if begun_with != now:
        changed = ", ".join(
            f"{key} {begun_with.get(key)} to {now[key]}" for key in now if begun_with.get(key) != now[key]
        )
        raise ConfigError(
            f"the run began with another budget, and what is spent cannot be counted with two ({changed}); undo the"
            " change, or begin a new run",
            key="privacy",
        )
    return secret


def keep_model_form(trainer: PeerTrainer, disk: Disk) -> None:
    """Keep the form of the model that a run trains, and its frozen parameters as they were when it began. Raises
    StateError, also where it has trained another model."""
    parts = trainer.model_parts()
    if parts is None:
        return
    # Before that, the code may have been that of another model, which the neighbours refused.
    if begun_round(disk) is not None and (kept := MODEL_FORM.read(disk)) is not None:
        there, here = kept.trained, parts[0].trained
        name = next((name for name in {**there, **here} if there.get(name) != here.get(name)), None)
        if name is not None:
            sizes = [sum(map(math.prod, each.values())) for each in (there, here)]
            shapes = ["×".join(map(str, each.get(name, ()))) or "missing" for each in (there, here)]
            now = f"this one {sizes[1]:,} (there {shapes[1]})"
            what = f"it has {sizes[0]:,} parameters ({name}: {shapes[0]}), and {now}"
            raise StateError(f"{disk.where('')}: the state belongs to another model: {what}; {WAYS_ON}")
        return
    form, frozen = parts
    if frozen:
        with writing(disk.where(FROZEN_FILE)):
            replace(disk, FROZEN_FILE, file_parts(frozen, {"format": "pt"}))
    MODEL_FORM.keep(disk, form)
