"""Writes configuration files: one commented peer.toml, and the resolved file of a run.

The comments come from the schema in `options.py`, so that no copy of them can grow stale. Nothing is overwritten unless
the caller says so.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomlkit

from peer.config import schema
from peer.config.options import DEFAULTS, SECTIONS, Config, PeerAddress, Section, choices
from peer.errors import ConfigError
from peer.files import write_whole

_WIDTH = 116

_HEADER = """\
Sottovoce: the configuration of one peer.

  sotto lab validate --config FILE    check it, and the graph and algorithm it describes
  sotto run --config FILE         start the peer

{keys}
The sections run, graph, algorithm, compressor, training, data, rounds and evaluation must be the same on every
device of a run. The other sections may differ from device to device.
"""

_ALL_KEYS = "Every key is listed with what it does, the values it accepts and its default."
_SOME_KEYS = (
    "It names what differs from the defaults; `sotto init --all-keys -o FILE` writes a file that explains every key."
)

_ENVIRONMENT = """\
Environment variables override keys (SOTTO_TRAINING__LEARNING_RATE=0.05). The value "none" leaves a key unset.
"""

_ALWAYS_NAMED = {"run": ("name", "rounds"), "peer": ("index", "listen"), "training": ("task",)}
"""Keys that a short file names even at their defaults: they say whose file it is, and what is edited first. The name
of a run would follow from another task."""

_RESOLVED_HEADER = """\
Sottovoce: the configuration of this run, resolved from file, environment and command line.
"""

_PEERS_EXAMPLE = """\
All peers of the run, in the same order on every device.
name: name of the peer; its certificate is issued to this name.
advertise: address and port at which other peers reach it. Without one, it dials all its neighbours itself.
relay: for a peer without an address, the peer that relays between it and others without an address.
joins_later: the run begins without this peer; it becomes a member when it is started. Such peers come last.
admitted: written by `sotto admin sign` for a device that is added later. Other devices need not list it.

[[peers]]
name = "kitchen"
advertise = "192.168.1.10:7700"

[[peers]]
name = "garage"
relay = "kitchen"

[[peers]]
name = "attic"
advertise = "192.168.1.12:7700"
joins_later = true

[[peers]]
name = "shed"
advertise = "192.168.1.13:7700"
admitted = true
"""


def write_peer_file(path: Path, config: Config | None = None, *, force: bool = False, all_keys: bool = False) -> None:
    """Write a peer.toml with what differs from the defaults or, with `all_keys`, with every key and what it accepts.
    Raises ConfigError if the file exists, unless `force`, or cannot be written."""
    header = _HEADER.format(keys=_ALL_KEYS) + _ENVIRONMENT if all_keys else _HEADER.format(keys=_SOME_KEYS)
    write_bytes(path, render(config or Config(), header=header, all_keys=all_keys).encode(), force=force)


def write_resolved(config: Config, path: Path, base: Path) -> None:
    """Write the configuration so that `config.load` returns an equal one; an existing file is replaced. Relative paths
    start at `base`, and in the file lead to the same places."""
    write_bytes(path, render(moved(config, base, path.parent), header=_RESOLVED_HEADER).encode())


SHARED_PATHS = (("graph", "file"), ("training", "warm_start"), ("data", "directory"))
"""Keys of shared sections whose value is a path relative to the file."""


def moved(config: Config, old_base: Path, new_base: Path) -> Config:
    """Return the configuration with relative paths that lead from `new_base` to where they led from `old_base`."""
    for section, key in SHARED_PATHS:
        value = getattr(getattr(config, section), key)
        if value is not None and not Path(value).is_absolute():
            config = with_path(config, section, key, os.path.relpath(old_base / value, new_base))
    return config


def with_path(config: Config, section: str, key: str, value: str) -> Config:
    """Return the configuration with another value of a path."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})


def render(config: Config, *, header: str, all_keys: bool = True) -> str:
    """Return the configuration as TOML in which a comment above each key says what it does; with `all_keys` also those
    at their defaults, with what they accept."""
    document = tomlkit.document()
    _comment(document, header)
    if not all_keys:
        document.add(tomlkit.nl())
        _comment(document, "What this file leaves out is as in this release, also under a later one.")
        document.add("defaults", DEFAULTS)
    measured, reasons = _reasons(config)
    if reasons:
        document.add(tomlkit.nl())
        _comment(document, f"Keys with a reason are how such a job begins: {measured}.")
    for name in SECTIONS:
        table = tomlkit.table() if name == "peers" else _table(name, getattr(config, name), reasons, all_keys)
        if name != "peers" and not table:
            continue
        document.add(tomlkit.nl())
        if name != "peers":
            document.add(name, table)
        elif config.peers:
            document.add(name, _peers(config.peers))
        else:
            _comment(document, _PEERS_EXAMPLE)
            document.add(tomlkit.nl())
    return tomlkit.dumps(document)


def write_bytes(path: Path, data: bytes, *, force: bool = True) -> None:
    """Write a file and the folders above it. Raises ConfigError if it exists, unless `force`, or cannot be written."""
    if not force and path.exists():
        raise ConfigError("already exists; name another place, or overwrite it with --force", file=str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError("cannot be written: one of its parent folders is a file", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=str(path)) from None


def _reasons(config: Config) -> tuple[str, dict[str, str]]:
    """Return what was measured of a job that is as `choices` has it, and the reason of each chosen key."""
    training = config.training
    for row in choices(training.task, len(config.peers) or 8, training.local_steps):
        if all(getattr(getattr(config, section), name) == value for section, name, value, _ in row["settings"]):
            return row["measured"], {f"{section}.{name}": why for section, name, _, why in row["settings"]}
    return "", {}


def _table(name: str, section: Section, reasons: Mapping[str, str], all_keys: bool) -> tomlkit.items.Table:
    table = tomlkit.table()
    kind = type(section)
    if all_keys:
        _comment(table, (kind.__doc__ or "").strip())
        table.add(tomlkit.nl())
    for key in kind.model_fields:
        value, default = getattr(section, key), kind.model_fields[key].get_default(call_default_factory=True)
        if all_keys:
            _comment(table, schema.sentence(kind, key))
            accepted = schema.accepts(kind, key)
            _comment(table, f"{accepted[0].upper()}{accepted[1:]}. Default: {spell(default)}.")
        elif value == default and key not in _ALWAYS_NAMED.get(name, ()) and f"{name}.{key}" not in reasons:
            continue
        else:
            _comment(table, re.split(r"(?<=\.) ", schema.sentence(kind, key))[0])
        if why := reasons.get(f"{name}.{key}"):
            _comment(table, f"Reason: {why}.")
        if value is None and default is None:
            table.add(tomlkit.comment(f"{key} ="))
        else:
            table.add(key, "none" if value is None else _plain(value))
        if all_keys:
            table.add(tomlkit.nl())
    return table


def _peers(peers: Sequence[PeerAddress]) -> tomlkit.items.AoT:
    tables = tomlkit.aot()
    for peer in peers:
        table = tomlkit.table()
        table.update(peer.model_dump(exclude_defaults=True))
        tables.append(table)
    return tables


def spell(value: object) -> str:
    """Return a value as TOML spells it, or "not set"."""
    return "not set" if value is None else tomlkit.item(_plain(value)).as_string()


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        inline = tomlkit.inline_table()
        inline.update(value)
        return inline
    return value


def _comment(container: tomlkit.TOMLDocument | tomlkit.items.Table, text: str) -> None:
    for line in text.splitlines():
        for piece in textwrap.wrap(line, _WIDTH) or [""]:
            container.add(tomlkit.comment(piece) if piece else tomlkit.items.Comment(tomlkit.items.Trivia(comment="#")))
