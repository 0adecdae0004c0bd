"""`sotto lab sweep`: simulated runs over a grid of settings, on as many processors and machines as there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from peer.cli.app import SottoCommand, SottoGroup, StopOnSignal, print_json
from peer.cli.options import RUNS, computing_options, json_option, out_option, shard_option
from peer.errors import INTERRUPTED, SottoError, StateError

if TYPE_CHECKING:
    from peer.lab.sweep.folder import SweepFolder
    from peer.ops.executors import Kind


@click.group(cls=SottoGroup)
def sweep() -> None:
    """Simulate a grid of settings on several processors or machines.

    A TOML file describes a sweep: options that all runs share, contenders, axes with their values, and seeds. Each
    combination is a cell. docs/links.md explains the keys.

    \b
    Examples:
      sotto lab sweep run grid.toml --workers 4
      sotto lab sweep run grid.toml --shard 0/8 --out part-0
      sotto lab sweep merge grid.toml part-*
    """


@sweep.command(cls=SottoCommand)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@out_option
@shard_option
@computing_options
@json_option
def run(
    file: Path, folder: Path | None, shard: str, workers: int, executor: Kind, address: str | None, as_json: bool
) -> int:
    """Compute the missing cells of a sweep, then write results.json and results.csv.

    Cells that exist are not computed again, so the same command resumes an interrupted sweep. The first Ctrl-C lets
    cells that have begun end. Results do not depend on where cells are computed. The exit code is 1 if a cell failed.

    \b
    Examples:
      sotto lab sweep run grid.toml --workers 4
      sotto lab sweep run grid.toml --shard 0/8 --out part-0
      sotto lab sweep run grid.toml --executor dask --address tcp://10.0.0.1:8786
      sotto lab sweep run grid.toml --executor ray --workers 4
    """
    from peer.ops.executors import Shard, open_executor

    found, part = _open(file, folder), Shard.parse(shard)
    with StopOnSignal() as stop, open_executor(executor, workers=workers, address=address) as computing:
        failed = found.run(computing, part, say=lambda line: click.echo(line, err=True), is_over=stop.event.is_set)
    _report(found, as_json)
    if stop.event.is_set():
        return INTERRUPTED
    if failed:
        raise SottoError(f"{failed} cells failed; run the same command again to repeat them")
    return 0


@sweep.command(cls=SottoCommand)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("folders", metavar="DIR...", nargs=-1, type=click.Path(path_type=Path))
@out_option
@json_option
def merge(file: Path, folders: tuple[Path, ...], folder: Path | None, as_json: bool) -> None:
    """Put the cells of several folders into one, then write results.json and results.csv.

    Without a folder, only the files with the results are written. Folders with different results of the same cell are
    refused.

    \b
    Examples:
      sotto lab sweep merge grid.toml part-0 part-1
      sotto lab sweep merge grid.toml --json
    """
    found = _open(file, folder)
    found.merge(folders)
    _report(found, as_json)


def _open(file: Path, folder: Path | None) -> SweepFolder:
    from peer.lab.description import read_description
    from peer.lab.sweep.sweep import Sweep

    plan = read_description(Sweep, file)
    # It loads torch, which a file that cannot be read does not need.
    from peer.lab.sweep.folder import SweepFolder

    return SweepFolder(plan, folder or RUNS / plan.name)


def _report(found: SweepFolder, as_json: bool) -> None:
    from peer.lab.sweep.folder import as_text

    rows, missing = found.report(), len(found.grid.missing())
    if as_json:
        from dataclasses import asdict

        print_json({"folder": str(found.folder), "missing": missing, "cells": [asdict(row) for row in rows]})
        return
    if not rows:
        raise StateError(f"{found.folder} contains no cells of this sweep yet")
    click.echo(as_text(found.sweep, rows))
    note = f"; {missing} cells are missing" if missing else ""
    click.echo(f"results: {found.folder / 'results.csv'}{note}")
