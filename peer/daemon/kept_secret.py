"""The secret of private local steps, in the state folder and nowhere else, and what the budget was computed with.

It is on disk before the first step, so that a round that a crash interrupts is repeated to the same bits. ε is counted
from the run's first round on with one noise and one sampling rate, so neither may change while the run lasts, nor may
privacy be turned on or off. A device that has lost its state folder draws another secret.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict

from peer.errors import ConfigError, StateError
from peer.foreign_values import parse_json
from peer.privacy_budget import Budget
from peer.state.disk import Disk, cannot_be_written, replace
from peer.train.private_step import SECRET_BYTES, SECRET_FILE


def settle_privacy(budget: Budget | None, disk: Disk) -> bytes | None:
    """Return the secret of the run that a state folder belongs to, which only its owner can read; None where local
    steps are not private. Raises ConfigError where the configuration asks for another budget than the run began with,
    and StateError for a file that is damaged or cannot be written."""
    names = disk.names()
    if SECRET_FILE not in names:
        if budget is None:
            return None
        if any(name.startswith(("checkpoint-", "journal-")) for name in names):
            raise ConfigError(
                "cannot be turned on in a run that began without it, and neither can a run go on that lost"
                f" {SECRET_FILE}: its earlier rounds are not accounted for; begin a new run",
                key="privacy",
            )
        secret = secrets.token_bytes(SECRET_BYTES)
        content = {"secret": secret.hex(), "budget": asdict(budget)}
        try:
            replace(disk, SECRET_FILE, [json.dumps(content).encode()])
        except OSError as error:
            raise cannot_be_written(SECRET_FILE, error) from None
        return secret
    secret, begun = _read(disk)
    if budget is None:
        raise ConfigError("cannot be turned off in a run that began with it; begin a new run", key="privacy")
    now = asdict(budget)
    if begun != now:
        changed = ", ".join(f"{key} {begun.get(key)} to {now[key]}" for key in now if begun.get(key) != now[key])
        raise ConfigError(
            f"the run began with another budget, and what is spent cannot be counted with two ({changed}); undo the"
            " change, or begin a new run",
            key="privacy",
        )
    return secret


def _read(disk: Disk) -> tuple[bytes, dict[str, object]]:
    try:
        content = parse_json(disk.read(SECRET_FILE))
        secret, budget = bytes.fromhex(content["secret"]), content["budget"]
        if len(secret) == SECRET_BYTES and isinstance(budget, dict):
            return secret, budget
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise StateError(
        f"{SECRET_FILE} cannot be read or is damaged, and without it no round can be repeated; restore it, or begin a"
        " new run"
    )
