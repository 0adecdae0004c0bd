"""Commands before a run: write a configuration, check it, look at the graph, list what there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli.app import SottoCommand, SottoGroup, print_json
from peer.cli.options import job_options, json_option, load_config, load_job, peers_option, set_option
from peer.errors import ConfigError

if TYPE_CHECKING:
    from peer.gossip.topology import Schedule

force_option = click.option("--force", is_flag=True, help="Overwrite existing files.")


@click.group(cls=SottoGroup, invoke_without_command=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("peer.toml"),
    show_default=True,
    metavar="FILE",
    help="File to write.",
)
@set_option
@click.option(
    "--join",
    "join",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="On a new device: write its private key and a certificate request into DIR.",
)
@click.option("--name", metavar="NAME", help="With --join: name of the new peer.")
@click.option(
    "--host",
    metavar="HOST[:PORT]",
    help='With --join: address at which others reach the new peer; omit it (or give "-") if it can only dial out.',
)
@force_option
@click.pass_context
def init(
    context: click.Context,
    output: Path,
    settings: tuple[str, ...],
    join: Path | None,
    name: str | None,
    host: str | None,
    force: bool,
) -> None:
    """Write a configuration file with a comment above every key.

    With --join: prepare a new device for an existing cluster. Its private key stays on the device. Take DIR/request.pem
    to the machine that holds the cluster folder, and sign it there with `sotto sign`.

    \b
    Examples:
      sotto init                                write ./peer.toml with default values
      sotto init -o run.toml -s graph.kind=torus
      sotto init cluster kits --peers 8         write certificates and one folder for each peer
      sotto init --join garage --name garage --host 10.0.0.9
    """
    if context.invoked_subcommand is not None:
        return
    if join is not None:
        from peer.ops import enrollment

        if not name:
            raise ConfigError("is missing", key="--name", valid="the name of the new peer")
        thumbprint = enrollment.request(join, name, host, 7700)
        click.echo(f"wrote {join / 'peer.key'} and {join / enrollment.REQUEST_FILE}; key {thumbprint}")
        click.echo(f"next, where the cluster was created: sotto sign KITS {enrollment.REQUEST_FILE}")
        return
    if name or host:
        raise ConfigError("can only be used with --join", key="--name" if name else "--host")
    from peer.config_writer import write_peer_file

    config, _ = load_config(None, settings)
    write_peer_file(output, config, force=force)
    click.echo(f"wrote {output}")


@init.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("-n", "--peers", "num_peers", type=click.IntRange(min=1), metavar="N", help="Number of peers.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Address at which peer 0, 1, 2, … is reached. Give it once for each peer, or once for all on one machine "
    '(ports then count up). "-" is a peer that others cannot reach: it dials out. Default: all on this machine.',
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    default=7700,
    show_default=True,
    help="Port, or the first of several.",
)
@click.option(
    "--relay",
    type=click.IntRange(min=0),
    metavar="K",
    help='Peer K relays between peers given as "-"; without a relay, two of them cannot be neighbours.',
)
@click.option(
    "--join-later",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Begin the run without the last N peers; each becomes a member when it is started.",
)
@job_options
@force_option
def cluster(
    directory: Path,
    num_peers: int | None,
    hosts: tuple[str, ...],
    port: int,
    relay: int | None,
    join_later: int,
    config_file: Path | None,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Write everything that the devices of a run need into DIRECTORY.

    DIRECTORY then holds a certificate authority (ca.pem, ca.key), an operator certificate for `sotto status` and
    `sotto stop`, and for each peer a folder peer-K with peer.toml, peer.pem, peer.key and a copy of ca.pem. Copy one of
    these folders to each device. Keep ca.key private: whoever has it can issue certificates.

    \b
    Examples:
      sotto init cluster kits --peers 8
      sotto init cluster kits --host 10.0.0.1 --host 10.0.0.2 --host -
      sotto init cluster kits --host 10.0.0.1 --host - --host - --relay 0
      sotto init cluster kits --peers 4 --config run.toml --set run.rounds=5000
      sotto init cluster kits --peers 6 --join-later 2
    """
    from peer.ops.cluster_files import place_peers, write_cluster

    config, base = load_config(config_file, settings)
    places = place_peers(num_peers, hosts, port)
    files = write_cluster(directory, config, places, base=base, force=force, relay=relay, join_later=join_later)
    click.echo(f"wrote {directory}: {len(files)} peers")
    click.echo(f"start each with: sotto run --config {files[0]}")


@click.command(cls=SottoCommand)
@peers_option
@job_options
@json_option
def validate(config_file: Path | None, settings: tuple[str, ...], num_peers: int | None, as_json: bool) -> int:
    """Check a configuration, its graph and its algorithm before anything runs.

    Reports errors for configurations that cannot run or converge, and warnings for those that may not converge or cost
    more than expected. The exit code is 2 if there is an error. Without --config it checks ./peer.toml; with --peers
    and no --config, the default configuration.

    \b
    Examples:
      sotto validate --config peer.toml
      sotto validate --peers 8 --algorithm d-psgd --graph directed-ring
    """
    from peer import run_plan

    config, base, count = load_job(config_file, settings, num_peers)
    findings = run_plan.validate_config(config, base, count)
    failed = any(finding.level == "error" for finding in findings)
    if as_json:
        print_json({"valid": not failed, "num_peers": count, "findings": [asdict(finding) for finding in findings]})
        return ConfigError.exit_code if failed else 0
    for finding in findings:
        key = f"{finding.key}: " if finding.key else ""
        click.secho(f"{finding.level}: ", bold=True, fg=_COLORS.get(finding.level), nl=False)
        click.echo(f"{key}{finding.sentence}")
    if not failed:
        click.echo(f"valid: {config.algorithm.name} for {count} peers, {config.run.rounds} rounds")
    return ConfigError.exit_code if failed else 0


_COLORS = {"error": "red", "warning": "yellow"}


@click.command(cls=SottoCommand)
@peers_option
@job_options
@click.option(
    "--svg",
    "svg_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also draw the graph into an SVG file; `rsvg-convert` makes a PNG file of it.",
)
@json_option
def graph(
    config_file: Path | None,
    settings: tuple[str, ...],
    num_peers: int | None,
    svg_file: Path | None,
    as_json: bool,
) -> None:
    """Show which peer sends to which others and with what weights, and how fast the graph mixes.

    Without --config it reads ./peer.toml; with --peers and no --config, the default configuration.

    \b
    Examples:
      sotto graph --peers 8
      sotto graph --peers 16 --graph torus --svg torus.svg
      sotto graph --config peer.toml --json
    """
    from peer import run_plan
    from peer.config_writer import write_bytes
    from peer.report import graph_view

    config, base, count = load_job(config_file, settings, num_peers)
    schedule = run_plan.build_schedule(config, base, count)
    names = [peer.name for peer in config.peers]
    if svg_file is not None:
        write_bytes(svg_file, graph_view.svg(schedule, names=names or None).encode())
        click.echo(f"wrote {svg_file}", err=True)
    if as_json:
        print_json(graph_facts(schedule))
    else:
        click.echo(graph_view.text(schedule, names=names or None))


def graph_facts(schedule: Schedule) -> dict[str, Any]:
    """Return the figures and edges of a schedule as JSON values."""
    return {
        "num_peers": schedule.num_peers,
        "doubly_stochastic": schedule.is_doubly_stochastic,
        "symmetric": schedule.is_symmetric,
        "strongly_connected": schedule.is_strongly_connected,
        "time_varying": schedule.is_time_varying,
        "diameter": schedule.diameter,
        "second_eigenvalue": schedule.second_eigenvalue,
        "spectral_gap": schedule.spectral_gap,
        "period_rounds": schedule.period_rounds,
        "digest": schedule.digest,
        "graphs": [
            [
                {"sender": sender, "receiver": int(receiver), "weight": float(weight)}
                for sender in range(schedule.num_peers)
                for receiver, weight in zip(*matrix.column(sender), strict=True)
            ]
            for matrix in schedule.matrices
        ],
    }


@click.command(name="list", cls=SottoCommand)
@click.argument("what", type=click.Choice(["models", "tasks", "algorithms", "compressors", "graphs"]))
@json_option
def show(what: str, as_json: bool) -> None:
    """List the available models, tasks, algorithms, compressors or graphs.

    \b
    Examples:
      sotto list algorithms
      sotto list tasks --json
    """
    rows = _LISTS[what]()
    if as_json:
        print_json(rows)
        return
    width = max(len(row["name"]) for row in rows) + 2
    for row in rows:
        indent = " " * width
        note = f"\n{indent}{row['note']}" if row.get("note") else ""
        click.echo(f"{row['name']:<{width}}{row['summary']}{note}")


def _list_models() -> list[dict[str, Any]]:
    from peer.train.models import MODELS

    return [{"name": name, "summary": info.summary} for name, info in MODELS.items()]


def _list_tasks() -> list[dict[str, Any]]:
    from peer.train.tasks import TASKS

    return [
        {
            "name": name,
            "summary": info.summary,
            "options": list(info.options),
            "note": f"training.task_options: {', '.join(info.options)}" if info.options else "",
        }
        for name, info in TASKS.items()
    ]


def _list_algorithms() -> list[dict[str, Any]]:
    from peer.gossip import ALGORITHMS
    from peer.gossip.base import Memory

    return [
        {
            "name": name,
            "summary": kind.spec.summary,
            "source": kind.spec.source,
            "graph": kind.spec.graph.value,
            "push_sum": kind.spec.push_sum,
            "compresses": kind.spec.compresses,
            "tolerates_late": kind.spec.tolerates_late,
            "time_varying": kind.spec.time_varying,
            "asynchronous": kind.spec.asynchronous,
            "state": [] if kind.spec.memory is Memory.NONE else [kind.spec.memory.value],
            "note": f"Graph: {kind.spec.graph.value}. {kind.spec.source}",
        }
        for name, kind in ALGORITHMS.items()
    ]


def _list_compressors() -> list[dict[str, Any]]:
    from peer.compress import COMPRESSORS

    return [{"name": name, "summary": info.summary} for name, info in COMPRESSORS.items()]


def _list_graphs() -> list[dict[str, Any]]:
    from peer.gossip.graphs import FAMILIES

    return [{"name": name, "summary": family.summary} for name, family in FAMILIES.items()]


_LISTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "models": _list_models,
    "tasks": _list_tasks,
    "algorithms": _list_algorithms,
    "compressors": _list_compressors,
    "graphs": _list_graphs,
}
