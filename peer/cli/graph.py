"""`sotto lab graph`: who sends to whom, and how fast the graph mixes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli.app import SottoCommand, print_json
from peer.cli.options import job_options, json_option, load_job, peers_option

if TYPE_CHECKING:
    from peer.gossip.topology import Schedule


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
    config_file: Path | None, settings: tuple[str, ...], num_peers: int | None, svg_file: Path | None, as_json: bool
) -> None:
    """Show which peer sends to which others and with what weights, and how fast the graph mixes.

    Without --config it reads ./peer.toml; with --peers and no --config, the default configuration.

    \b
    Examples:
      sotto lab graph --peers 8
      sotto lab graph --peers 16 --graph torus --svg torus.svg
      sotto lab graph --config peer.toml --json
    """
    from peer.config.writer import write_bytes
    from peer.report import graph_view
    from peer.run import plan as run_plan

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
        "diameter_is_exact": schedule.diameter_is_exact,
        "second_eigenvalue": schedule.second_eigenvalue,
        "spectral_gap": schedule.spectral_gap,
        "spectral_method": schedule.contraction.method.value,
        "spectral_residual": schedule.contraction.residual,
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
