"""Options that several commands share, and how they become a configuration."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from peer.errors import ConfigError
from peer.terminal import command

if TYPE_CHECKING:
    from peer.config.options import Config
    from peer.library.script import Script

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_FILE = Path("peer.toml")
DEFAULT_PEERS = 8
DAYS = click.IntRange(1, 36500)
RUNS = Path("runs")
KITS = Path("kits")
"""Folder of a cluster that nobody named."""
PASSPHRASE = "SOTTO_CA_PASSPHRASE"
"""Environment variable with the passphrase of ca.key, for scripts."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document to stdout, for scripts.")

out_option = click.option(
    "-o",
    "--out",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for the results; by default runs/NAME.",
)


def output_option(text: str, *, metavar: str = "FILE", required: bool = False) -> Callable[[Command], Command]:
    """Return the option that names what a command writes, with its help."""
    return click.option(
        "-o", "--output", type=click.Path(path_type=Path), metavar=metavar, required=required, help=text
    )


config_option = click.option(
    "-c", "--config", "config_file", metavar="FILE", type=click.Path(path_type=Path), help="Configuration file (TOML)."
)

set_option = click.option(
    "-s",
    "--set",
    "settings",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    help="Override one key of the configuration; may be repeated. VALUE uses TOML syntax; quotes are optional.",
)

peers_option = click.option(
    "-n",
    "--peers",
    "num_peers",
    metavar="N",
    type=click.IntRange(min=1),
    help=f"Number of peers; by default the number in the configuration, or {DEFAULT_PEERS}.",
)


def own_file(beside: str = "peer.key", folder: Path = Path()) -> Path:
    """Return the peer.toml of a folder, by default of the working directory; without it that of the only device below
    whose folder has a key, or what else is to lie `beside` its file."""
    from peer.config.options import configurations_below

    found = [each for each in configurations_below(folder) if each.with_name(beside).exists()]
    return folder / DEFAULT_FILE if (folder / DEFAULT_FILE).exists() or len(found) != 1 else found[0]


def operated_file() -> Path:
    """Return `own_file`; without it that of some device of the only run here that an operator's key belongs to."""
    from peer.config.options import configurations_below

    if (own := own_file()).exists():
        return own
    files = [*configurations_below(Path()), *(run / "peers/peer-0/peer.toml" for run in _running())]
    found = {each.parents[1]: each for each in reversed(files) if (each.parents[1] / "operator.key").exists()}
    return next(iter(found.values())) if len(found) == 1 else own


def newest_run(pattern: str = "*/config.toml", *, or_device: bool = False) -> Path:
    """Return the folder below ./runs that was written to last, of those that hold a run and match; `or_device`:
    rather the folder of `own_file`, where that has trained. Says on stderr which it is. Raises ConfigError if there is
    none."""
    if or_device and (own := own_file("state")).exists():
        click.echo(f"{own}, the device here", err=True)
        return own.parent
    runs = {RUNS / file.relative_to(RUNS).parts[0] for file in RUNS.glob(pattern)}
    if not runs:
        from peer.config.options import configurations_below

        files = configurations_below(Path())
        which = f", such as {files[0].parts[0]}" if files else ""
        start = command(*(("run", "SCRIPT") if own_file().exists() else ("up", "SCRIPT", "--peers", 3)))
        raise ConfigError(f"nothing was started here: no peer.toml, no ./runs; start: {start}, or name a folder{which}")
    newest = max(sorted(runs), key=_last_written)
    click.echo(f"{newest}, the newest run here", err=True)
    return newest


def _last_written(run: Path) -> float:
    times = []
    for file in run.iterdir():
        # Files that are being written have another name until they are whole.
        with contextlib.suppress(FileNotFoundError):
            times.append(file.stat().st_mtime)
    return max(times, default=0.0)


def _running() -> list[Path]:
    """Return the folders below ./runs whose peers run now."""
    from peer.state.checkpoints import is_in_use

    locks = [lock for lock in RUNS.glob("*/peers/peer-*/state/lock") if is_in_use(lock.parent)]
    return sorted({RUNS / lock.relative_to(RUNS).parts[0] for lock in locks})


def only_running() -> Path | None:
    """Return the folder below ./runs whose peers run now, and say on stderr which it is; None where that is the one of
    `own_file`. Raises ConfigError unless it is exactly one."""
    runs = _running()
    if not runs and own_file().exists():
        return None
    if not runs:
        raise ConfigError("there is neither peer.toml nor a run under way in ./runs; name a folder")
    if len(runs) > 1:
        raise ConfigError(f"several runs are under way; name one of {', '.join(map(str, runs))}")
    (run,) = runs
    click.echo(f"{run}, the only run under way here", err=True)
    return run


def script_options(command: Command) -> Command:
    """Add the script that a command runs, with its own arguments, and -m: `words` and `module`."""
    command = click.option(
        "-m",
        "module",
        metavar="MODULE",
        help='Run a module as the script, as "python -m" does. Its own arguments follow --.',
    )(command)
    return click.argument("words", nargs=-1, metavar="[SCRIPT [-- ARGUMENTS]]", type=click.UNPROCESSED)(command)


shard_option = click.option(
    "--shard",
    metavar="I/N",
    default="0/1",
    show_default=False,
    help="Only every N-th cell, beginning with number I, from 0 to N - 1.",
)


def computing_options(command: Command) -> Command:
    """Add the options that say where many simulations are computed (`peer.ops.executors`)."""
    command = click.option(
        "--address",
        metavar="ADDRESS",
        help="Address of the cluster; by default one of --workers processes is started on this machine.",
    )(command)
    command = click.option(
        "--executor",
        type=click.Choice(["local", "dask", "ray"]),
        default="local",
        help="What computes: processes, or a cluster of Dask or Ray.",
    )(command)
    return click.option(
        "--workers", type=click.IntRange(min=1), default=1, metavar="N", help="Compute in N processes of this machine."
    )(command)


_SHORTHANDS: Mapping[str, tuple[str, type, str, str]] = {
    "skew": (
        "data.skew",
        float,
        "FRACTION",
        "Fraction of the data that is sorted by label before it is split: 0 is none, 1 is all.",
    ),
    "rounds": ("run.rounds", int, "N", "Number of gossip rounds."),
    "seed": ("run.seed", int, "N", "Seed of all random numbers in the run."),
    "algorithm": ("algorithm.name", str, "NAME", "Algorithm, see `sotto lab list algorithms`."),
    "compressor": ("compressor.kind", str, "NAME", "Compressor, see `sotto lab list compressors`."),
    "graph": ("graph.kind", str, "NAME", "Graph, see `sotto lab list graphs`."),
    "task": (
        "training.task",
        str,
        "NAME",
        'Task, see `sotto lab list tasks`, or your own as "package.module:make_task".',
    ),
}
"""Option → key it sets, type, how help calls its value, what it does."""


def job_options(command: Command) -> Command:
    """Return the command with --config, --set and one short option for each key that is set most often.

    The command gets `config_file` and `settings`.
    """
    return config_option(set_option(shorthand_options(command)))


def shorthand_options(command: Command) -> Command:
    """Return the command with the short options, which `load_config` counts in."""
    for name, (key, kind, metavar, text) in reversed(list(_SHORTHANDS.items())):
        command = click.option(
            f"--{name}",
            type=kind,
            metavar=metavar,
            expose_value=False,
            callback=_keep_shorthand,
            help=f"{text} [{key}]",
        )(command)
    return command


def _keep_shorthand(context: click.Context, option: click.Parameter, value: object) -> None:
    if value is not None:
        key = _SHORTHANDS[str(option.name)][0]
        context.meta.setdefault("peer.shorthands", []).append(f"{key}={value}")


def load_config(
    config_file: Path | None, settings: tuple[str, ...], script: Script | None = None, num_peers: int | None = None
) -> tuple[Config, Path]:
    """Return the configuration and the folder that its relative paths start from.

    Without a file a new job of `num_peers` is the base (`config.choices`). Short options count after the file and
    before --set. A run of a `script` is named after that, unless it has a name.
    """
    from peer.config import options as config

    shorthands = click.get_current_context().meta.get("peer.shorthands", [])
    base, count = config_file.parent if config_file is not None else Path(), num_peers or DEFAULT_PEERS
    if script is None:
        return config.load(config_file, overrides=(*shorthands, *settings), new_job=count), base
    script.refuse_missing()
    loop = f"training.task={config.OWN_LOOP}"
    read = config.load(config_file, overrides=(*shorthands, *settings, loop), new_job=count)
    name = config.run_name_of(script.run_name)
    if name and read.run.name == config.run_name_of(config.OWN_LOOP):
        read = read.model_copy(update={"run": read.run.model_copy(update={"name": name})})
    return read, base


def load_peer(file: Path | None, settings: Sequence[str] = (), script: Script | None = None) -> tuple[Config, Path]:
    """Return the configuration of one peer, which runs a `script` if one is named, and its folder; without a file it is
    that of `own_file`."""
    from peer.config.options import load_device

    file, named = file or own_file(), None if script is None else shlex.join(script.program_words)
    return load_device(file, overrides=settings, script=named), file.parent


def load_job(config_file: Path | None, settings: tuple[str, ...], num_peers: int | None) -> tuple[Config, Path, int]:
    """Return configuration, folder and number of peers for commands that look at the whole run.

    Without a file: ./peer.toml if there is one, unless a number of peers asks for a job that is not its own.
    """
    if config_file is None and num_peers is None and DEFAULT_FILE.exists():
        config_file = DEFAULT_FILE
    config, base = load_config(config_file, settings, num_peers=num_peers)
    return config, base, count_peers(config, num_peers)


def count_peers(config: Config, num_peers: int | None) -> int:
    """Return --peers, or the number in the configuration, or the default. Raises ConfigError if the two differ."""
    if num_peers is not None and config.peers and num_peers != len(config.peers):
        raise ConfigError(
            "does not match the number of [[peers]] in the configuration",
            key="--peers",
            value=num_peers,
            valid=str(len(config.peers)),
        )
    return num_peers or len(config.peers) or DEFAULT_PEERS
