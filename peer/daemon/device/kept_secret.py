"""The secret of private local steps, in the state folder and nowhere else, and the settings that the budget was
computed with.

It is on disk before the first step, so that a round that a crash interrupts is repeated to the same bits. ε is counted
from the run's first round on with one noise and one sampling rate, so neither may change while the run lasts, nor may
privacy be turned on or off. A device that has lost its state folder draws another secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from peer.errors import ConfigError
from peer.run.privacy_budget import Budget
from peer.state.disk import Disk
from peer.state.kept_file import KeptFile
from peer.state.recovery import begin_anew, begun_round
from peer.train.private_step import SECRET_BYTES, SECRET_FILE


def _of_json(tree: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
    secret, budget = bytes.fromhex(tree["secret"]), tree["budget"]
    if len(secret) != SECRET_BYTES or not isinstance(budget, dict):
        raise ValueError("no secret with its budget")
    return secret, budget


_SECRET = KeptFile[tuple[bytes, dict[str, Any]]](
    SECRET_FILE,
    lambda kept: {"secret": kept[0].hex(), "budget": kept[1]},
    _of_json,
    "without it no round can be repeated; restore it, or begin a new run",
)


def settle_privacy(budget: Budget | None, disk: Disk) -> bytes | None:
    """Return the secret of the run that a state folder belongs to, which only its owner can read; None where local
    steps are not private. Raises ConfigError where the configuration asks for another budget than the run began with,
    and StateError for a file that is damaged or cannot be written."""
    kept = _SECRET.read(disk)
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
        _SECRET.keep(disk, (secret, asdict(budget)))
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
