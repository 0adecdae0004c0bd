"""Commands that talk to running peers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from peer.cli import options
from peer.cli.app import SottoCommand, print_json, tell
from peer.cli.options import DEFAULT_FILE, Command, config_option, json_option, load_peer, newest_run, only_running
from peer.errors import ConfigError, RemoteProtocolError, SecurityError, SottoError, StateError

if TYPE_CHECKING:
    from peer.config.options import Config, PeerAddress
    from peer.ops.control import Asked

_SILENT = "unreachable"


def run_option(command: Command) -> Command:
    """Add a folder as an argument, and as --run: `directory`."""

    @functools.wraps(command)
    def with_folder(place: Path | None, directory: Path | None, **others: Any) -> Any:
        if place is not None and directory is not None:
            raise click.UsageError("name the folder once, with --run or without")
        folder = place or directory
        if folder is not None and others.get("config_file") is None and (folder / DEFAULT_FILE).exists():
            # The folder of one device.
            others["config_file"], folder = folder / DEFAULT_FILE, None
        return command(directory=folder, **others)

    option = click.option(
        "-r",
        "--run",
        "directory",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Address all peers of a run folder (`sotto up`) or cluster folder (`sotto init cluster`), as DIR does.",
    )
    argument = click.argument("place", required=False, metavar="[DIR]", type=click.Path(path_type=Path))
    return cast(Command, argument(option(with_folder)))


all_option = click.option(
    "-a", "--all", "everybody", is_flag=True, help="Address all peers listed in the configuration."
)


@click.command(cls=SottoCommand)
@config_option
@run_option
@all_option
@json_option
def status(config_file: Path | None, directory: Path | None, everybody: bool, as_json: bool) -> int:
    """Show the round, loss, accuracy, traffic and neighbours of one peer or of all peers.

    DIR is a run folder, a cluster folder, or the folder of one device. Without one, it asks the peer configured in
    ./peer.toml or, where there is none, the peers of the newest run in ./runs. A peer that does not answer is listed as
    finished, left, lost or not joined if a state folder, or a peer that answers, says so, as stopped if its run of
    `sotto up` has ended, and as connected if it has a link to a peer that answers: one without an address can be asked
    on its device alone. Otherwise it is unreachable, and the exit code is 6. So it is for a peer that answers what no
    peer can; the others are shown all the same.

    \b
    Examples:
      sotto status --config peer.toml
      sotto status runs/digits
      sotto status --all --json
    """
    if is_nothing_named(config_file, directory, everybody) and (
        options.RUNS.exists() or not options.own_file().exists()
    ):
        directory = newest_run("*/peers")
    answers = call(config_file, directory, everybody, "status")
    if as_json:
        print_json(answers if directory is not None or everybody else answers[0])
    else:
        from rich.console import Console

        from peer.report.status_table import status_table

        Console().print(status_table(answers))
    return exit_code(answers)


@click.command(cls=SottoCommand)
@config_option
@run_option
@all_option
@json_option
def stop(config_file: Path | None, directory: Path | None, everybody: bool, as_json: bool) -> int:
    """Ask one peer or all peers to finish the current round, save their state and stop.

    DIR is a run folder, a cluster folder, or the folder of one device. Without one, it asks the peer configured in
    ./peer.toml or, where there is none, the peers of the only run in ./runs that is under way. Peers that have finished
    or left, or have not joined, are named as such.

    \b
    Examples:
      sotto stop --config peer.toml
      sotto stop runs/digits
    """
    if is_nothing_named(config_file, directory, everybody):
        directory = only_running()
    answers = call(config_file, directory, everybody, "stop")
    return _tell(answers, as_json, lambda answer: ["stops after this round"], many=directory is not None or everybody)


@click.command(cls=SottoCommand)
@config_option
@json_option
def reload(config_file: Path | None, as_json: bool) -> int:
    """Make a running peer read [[peers]] in its file, its certificate and its key again.

    A peer added to the list can join once it is started. Whoever was taken out stays a member until `sotto remove`;
    only in a run without certificates is it excluded at once. If anything else changed, the reload is refused. A new
    certificate, with its key, is used for new connections; open ones stay. SIGHUP does the same and writes the answer
    to the log.

    \b
    Examples:
      sotto admin reload --config peer.toml
      sotto admin reload --json
    """
    answers = call(config_file, None, False, "reload")
    return _tell(answers, as_json, _changes)


@click.command(cls=SottoCommand)
@config_option
@json_option
def leave(config_file: Path | None, as_json: bool) -> int:
    """Ask a peer to leave the run for good, while the others continue.

    The change takes effect a few rounds later, once every member knows of it. The peer then hands over its share of the
    model, saves its own and ends. To stop a peer temporarily, use `sotto stop`: the others then wait for it.

    \b
    Examples:
      sotto admin leave --config peer.toml
      sotto admin leave --json
    """
    answers = call(config_file, None, False, "leave")
    return _tell(answers, as_json, lambda a: [f"leaves before round {a['from']}; it is now in round {a['round']}"])


@click.command(cls=SottoCommand)
@click.argument("name")
@config_option
@json_option
def remove(name: str, config_file: Path | None, as_json: bool) -> int:
    """Exclude a peer that is lost for good, because its device broke or its state is gone.

    A member announces the loss with the operator's signature, and all members check it and continue without that peer.
    So the command needs the operator's certificate, beside ca.pem or above the peer's folder. This cannot be undone:
    the state of that peer no longer belongs to the run. A device that is started again takes part as a newcomer.

    \b
    Examples:
      sotto remove peer-3 --config peer.toml
      sotto remove garage --json
    """
    config, base = load_peer(config_file or options.operated_file())
    import asyncio

    from peer.ops import control

    answer = {"name": name, **asyncio.run(control.remove(config, base, name))}
    line = f"{name}: excluded from round {answer['from']} on; its neighbours no longer wait for it"
    tell(as_json, answer, [line])
    return 0


@click.command(cls=SottoCommand)
@click.option(
    "--round",
    "round_",
    type=click.IntRange(min=0),
    required=True,
    help="Go back to the checkpoint of this round; 0 is the start.",
)
@config_option
@run_option
@json_option
def rollback(round_: int, config_file: Path | None, directory: Path | None, as_json: bool) -> int:
    """Put one stopped peer, or all peers of a folder, back to an earlier checkpoint.

    After a divergence, put every peer back to the same round, lower training.learning_rate, and start all of them
    again. Nothing is deleted: newer checkpoints and journals are renamed to set-aside-N-… in the state folder.

    \b
    Examples:
      sotto admin rollback --round 40 --config peer.toml
      sotto admin rollback --round 40 runs/digits
    """
    if directory is not None and config_file is not None:
        raise ConfigError("already addresses all peers; omit --config", key="--run")
    from peer.ops.cluster_files import peer_files
    from peer.ops.rollback import put_back

    peers = [load_peer(file) for file in peer_files(directory)] if directory else [load_peer(config_file)]

    folders = [base / config.state.directory for config, base in peers]
    put_back(folders, round_)
    answers = [{"state": str(folder), "round": round_} for folder in folders]
    lines = [f"{folder}: put back to round {round_}" for folder in folders]
    tell(as_json, answers if directory else answers[0], lines)
    return 0


@click.command(cls=SottoCommand)
@config_option
@json_option
def rejoin(config_file: Path | None, as_json: bool) -> int:
    """Give up the state of a stopped peer, and let it take part again as a newcomer.

    A device whose state folder is an old copy, or was lost, waits: others have used and forgotten what it would send
    again. With certificates it proves that to them by itself. Where nothing is signed (security.mode "insecure" or
    "tls+token"), nobody else can decide it: run this on the device, start it, and run `sotto remove` on another one.
    Nothing is deleted: checkpoints and journals are renamed to set-aside-N-… in the state folder.

    \b
    Examples:
      sotto admin rejoin --config peer.toml
    """
    config, base = load_peer(config_file)
    from peer.daemon.members.rejoining import give_up

    incarnation = give_up(config, base)
    folder = str(base / config.state.directory)
    line = f"{folder}: set aside; start the peer, and it asks to take part again"
    tell(as_json, {"state": folder, "incarnation": incarnation}, [line])
    return 0


def _tell(
    answers: list[dict[str, Any]], as_json: bool, lines: Callable[[dict[str, Any]], list[str]], *, many: bool = False
) -> int:
    """Print the peers' answers; return the exit code. `many`: JSON is a list though there may be one answer."""
    if as_json:
        print_json(answers if many else answers[0])
    else:
        for answer in answers:
            instead = answer.get("error") or answer.get("note")
            for line in [instead] if instead else lines(answer):
                click.echo(f"{answer['name']}{'' if 'note' in answer else ':'} {line}")
    return exit_code(answers)


def _changes(answer: dict[str, Any]) -> list[str]:
    lines = [f"knows {name}, which joins when it is started" for name in answer["added"]]
    lines += [f"continues without {name} from round {from_} on" for name, from_ in answer.get("removed", {}).items()]
    lines += [
        f"cannot announce the loss of {name} itself: {why}" for name, why in answer.get("left_to_others", {}).items()
    ]
    if (until := answer.get("certificate_until")) is not None:
        lines.append(f"uses its new certificate, valid until {until}, for new connections")
    return lines or ["its list of peers and its certificate are unchanged"]


def is_nothing_named(config_file: Path | None, directory: Path | None, everybody: bool) -> bool:
    """Return whether a command line names neither a peer nor a folder, and there is no ./peer.toml."""
    return config_file is None and directory is None and not everybody and not DEFAULT_FILE.exists()


def call(config_file: Path | None, directory: Path | None, everybody: bool, verb: str) -> list[dict[str, Any]]:
    """Return each peer's answer. One that gave none has `error` and `exit_code` instead; of one that was asked for its
    status or to stop, and is known to have ended or not to have joined, a `note` says so. Raises SecurityError where
    that is why nobody answered."""
    if directory is not None and (config_file is not None or everybody):
        raise ConfigError("already addresses all peers; omit --config and --all", key="--run")
    from peer.ops.cluster_files import peer_files
    from peer.ops.control import Asked, call_all, newcomers

    if directory is not None:
        # By their advertised addresses, with their own certificates: the folder may be a copy on another machine.
        peers = [load_peer(file) for file in peer_files(directory)]
        asked = [Asked(config, base, config.peer.index) for config, base in peers]
    else:
        config, base = load_peer(config_file)
        asked = [Asked(config, base, index) for index in (range(config.num_peers) if everybody else (None,))]
    found = call_all(asked, verb)
    if everybody:
        # Those that the configuration does not list: running peers know them.
        known = [newcomers(config, base, answer) for answer in found if isinstance(answer, dict)]
        others = [
            Asked(config, base, entry) for entry in {index: e for each in known for index, e in each.items()}.values()
        ]
        asked, found = [*asked, *others], [*found, *call_all(others, verb)]
    errors = [answer for answer in found if isinstance(answer, SecurityError)]
    if errors and len(errors) == len(found):
        raise errors[0]
    answers = [_described(each.config, each.peer) | _said(answer) for each, answer in zip(asked, found, strict=True)]
    if verb in ("status", "stop"):
        over = _end_of(directory) if all(answer.get("state") == _SILENT for answer in answers) else None
        for each, answer in zip(asked, answers, strict=True):
            if answer.get("state") == _SILENT:
                _settle(answer, each, answers, asked)
            if answer.get("state") == _SILENT and over:
                del answer["error"], answer["exit_code"]
                answer |= {"state": "stopped", "note": f"is stopped: the run {over}"}
    return answers


def _end_of(directory: Path | None) -> str | None:
    """Return how the run of `sotto up` in a folder ended, in a word; None if it is none, or does not say so."""
    from peer.state.metrics import Summary

    if directory is None or not (directory / "peers").is_dir():
        return None
    try:
        return Summary.load(directory / "summary.json").ended.partition(":")[0]
    except (OSError, StateError):
        return None


def _said(answer: dict[str, Any] | SottoError) -> dict[str, Any]:
    """Return an answer, or why there is none."""
    if not isinstance(answer, SottoError):
        return answer
    problem = getattr(answer, "problem", None) or str(answer)
    state = "answers nonsense" if isinstance(answer, RemoteProtocolError) else _SILENT
    return {"state": state, "error": problem, "exit_code": answer.exit_code}


def _settle(answer: dict[str, Any], asked: Asked, others: list[dict[str, Any]], all_asked: Sequence[Asked]) -> None:
    """Put the known standing of a silent peer in the place of the error."""
    from peer.ops import standing

    config, base, peer = asked.config, asked.base, asked.peer
    has_folder = peer in (None, config.peer.index)
    found = standing.from_answers(answer["name"], others)
    if found is None and has_folder:
        found = standing.from_folder(config, base)
    if found is None and isinstance(peer, int):
        # An invited device keeps its state; what it told the others is with theirs.
        for each in all_asked:
            if (found := standing.from_average(each.config, each.base, peer)) is not None:
                config, base, has_folder = each.config, each.base, True
                break
    if found is not None:
        del answer["exit_code"]
        why = f" ({answer.pop('error')})"
        note = found.sentence + (why if found.state == "connected" else "")
        figures = (
            standing.last_figures(config, base, answer.get("index"))
            if has_folder and found.state in standing.FINAL
            else {}
        )
        answer |= {**figures, "state": found.state, "told_by": found.told_by, "note": note}
        answer |= {} if found.round is None else {"round": found.round}


def _described(config: Config, peer: int | PeerAddress | None) -> dict[str, Any]:
    if peer is not None and not isinstance(peer, int):
        return {"name": peer.name}
    index = config.peer.index if peer is None else peer
    return {"index": index, "name": config.peers[index].name if index < len(config.peers) else f"peer {index}"}


def exit_code(answers: list[dict[str, Any]]) -> int:
    return max(int(answer.get("exit_code", 0)) for answer in answers)
