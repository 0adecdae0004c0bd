"""Commands that look at several runs: compare them, and hand their metrics to other programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli.app import SottoCommand, print_json
from peer.cli.options import json_option
from peer.errors import StateError

if TYPE_CHECKING:
    from peer.report.comparison import Contender

directories_argument = click.argument(
    "directories", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)


@click.command(cls=SottoCommand)
@directories_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Also write the comparison as an HTML page."
)
@json_option
def compare(directories: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Compare runs: their results, their curves, and what differs in their configurations.

    Curves lie over each other by round, by second and by byte. Runs that differ in their seed alone become one line
    with their mean and range. A run is a folder of `sotto up` or `sotto simulate`, or a cluster folder that
    `sotto report` has collected.

    \b
    Examples:
      sotto lab compare runs/digits runs/digits-2
      sotto lab compare runs/scsp-* runs/moniqua-* -o comparison.html
      sotto lab compare runs/slow runs/fast --json
    """
    from peer.report.comparison import contenders
    from peer.report.run_data import load_run

    found = contenders([load_run(directory) for directory in directories])
    if output is not None:
        from peer.files import write_whole
        from peer.report.compare_page import compare_page

        try:
            write_whole(output, compare_page(found))
        except OSError as error:
            raise StateError(f"{output}: cannot be written: {error.strerror}") from None
    if as_json:
        print_json(_as_json(found, output))
        return
    from rich.console import Console

    from peer.report.compare_table import compare_table

    Console().print(compare_table(found))
    if output is not None:
        click.echo(f"wrote {output}")


def _as_json(found: list[Contender], output: Path | None) -> dict[str, Any]:
    from peer.report.comparison import differences, target

    reached = target(found)
    names = [each.name for each in found]
    return {
        "contenders": [
            {
                "name": each.name,
                "runs": [str(run.directory) for run in each.runs],
                "summaries": [None if run.summary is None else run.summary.document() for run in each.runs],
            }
            for each in found
        ],
        "target": None if reached is None else asdict(reached),
        "differences": {key: dict(zip(names, values, strict=True)) for key, values in differences(found)},
        "page": None if output is None else str(output),
    }


@click.command(cls=SottoCommand)
@directories_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="File to write: NAME.csv, or NAME.parquet (needs the extra parquet).",
)
@click.option(
    "-t",
    "--table",
    type=click.Choice(["rounds", "evaluations", "links", "consensus"]),
    default="rounds",
    show_default=True,
    help="Which figures: of each round of each peer, of evaluations, of links, or of all models together.",
)
@json_option
def metrics(directories: tuple[Path, ...], output: Path, table: str, as_json: bool) -> None:
    """Write the metrics of runs to one CSV or Parquet file.

    Each row has the name of its run and peer in front. Bytes are in bytes, times in seconds, accuracies from 0 to 1.

    \b
    Examples:
      sotto lab metrics runs/digits -o rounds.csv
      sotto lab metrics runs/* --table evaluations -o evaluations.parquet
    """
    from peer.report.metrics_file import write_metrics
    from peer.report.run_data import load_run

    rows = write_metrics([load_run(directory) for directory in directories], table, output)
    if as_json:
        print_json({"file": str(output), "table": table, "rows": rows})
    else:
        click.echo(f"wrote {output}: {rows:,} rows")
