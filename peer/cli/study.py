"""Bandwidth studies: the same configuration on named links, algorithm by algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from peer.cli.app import SottoCommand, SottoGroup, print_json, tell
from peer.cli.options import RUNS, json_option, out_option, shard_option
from peer.errors import LinkError, SottoError

if TYPE_CHECKING:
    from peer.lab.study.folder import StudyFolder
    from peer.lab.study.study import Study

sizes_option = click.option(
    "--peers",
    "sizes",
    type=click.IntRange(min=2),
    multiple=True,
    metavar="N",
    help="Also predict for this many peers; may be repeated. By default, the numbers given in the study.",
)


@click.group(cls=SottoGroup)
def study() -> None:
    """Compare algorithms on shaped links, with real peers.

    A TOML file describes a study: a configuration, contenders (algorithms with their compressors, or other systems) and
    link profiles (`sotto lab shape list`). Some studies are included; docs/links.md explains the keys.

    \b
    Examples:
      sotto lab study list
      sudo sotto lab study run moniqua --only moniqua-1mbit-1ms
      sotto lab study report moniqua
    """


@study.command(name="list", cls=SottoCommand)
@json_option
def list_studies(as_json: bool) -> None:
    """List the included studies.

    \b
    Examples:
      sotto lab study list
      sotto lab study list --json
    """
    from peer.lab.study.study import FILES, read_plan

    studies = {file.stem: read_plan(file) for file in sorted(FILES.glob("*.toml"), key=lambda file: file.stem)}
    lines = (f"{name:<12}{each.title}" for name, each in studies.items())
    tell(as_json, [{"name": name, "title": each.title} for name, each in studies.items()], lines)


@study.command(cls=SottoCommand)
@click.argument("name", metavar="STUDY")
def show(name: str) -> None:
    """Print the file of a study, as a starting point for your own.

    \b
    Examples:
      sotto lab study show moniqua > mine.toml
    """
    from peer.lab.study.study import find_study

    click.echo(find_study(name).read_text(encoding="utf-8"), nl=False)


@study.command(cls=SottoCommand)
@click.argument("name", metavar="STUDY")
@out_option
@click.option("--only", multiple=True, metavar="NAME", help="Measure only this contender or profile; may be repeated.")
@click.option(
    "--packages",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Folder of Python packages for other systems (pip install --target).",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True),
    metavar="DIR",
    help="Folder of the data set that a race trains on, if it is not part of the package.",
)
@click.option(
    "--curves", "only_curves", is_flag=True, help="Train the curves of a race and run no cell; needs no root."
)
@click.option("--cells", "only_cells", is_flag=True, help="Run cells and train no curve.")
@shard_option
@sizes_option
@json_option
def run(
    name: str,
    folder: Path | None,
    only: tuple[str, ...],
    packages: Path | None,
    data: Path | None,
    only_curves: bool,
    only_cells: bool,
    shard: str,
    sizes: tuple[int, ...],
    as_json: bool,
) -> None:
    """Run the missing cells of a study, then write its report.

    STUDY is the name of an included study or the path of a file. A cell is a run of real peers in network namespaces,
    with one contender on one link profile. Cells that exist are not run again, so an interrupted command can be started
    again. To measure a cell again, delete its file in DIR/cells. Needs Linux and root (see `sotto lab shape`). The exit
    code is 1 if a cell failed.

    A study that contains a race also trains every contender on real data, other systems with their own code, and
    reports the seconds and bytes in which the worst peer reaches an accuracy. Curves are kept in DIR/curves.

    With --shard, several machines run parts of one study, which `sotto lab study merge` joins. One machine runs one
    cell or curve after the other: cells are timed, and a curve uses all processors.

    \b
    Examples:
      sudo sotto lab study run moniqua
      sudo sotto lab study run moniqua --only moniqua-1mbit-1ms --only moniqua-8
      sudo sotto lab study run mine.toml --out runs/mine --peers 64
      sotto lab study run race-proxy --curves --data cifar-10-batches-bin
      sudo sotto lab study run mine.toml --shard 0/4 --out part-0
    """
    from peer.links import network
    from peer.ops.executors import Shard

    (plan, folder), part = _read(name, folder), Shard.parse(shard)
    found = _open(plan, folder, packages, data)
    if not only_curves and (reason := network.missing()) is not None:
        raise LinkError(f"{reason}; nothing was run")

    def say(line: str) -> None:
        click.echo(line, err=True)

    failed = 0 if plan.race is None or only_cells else found.race.run(only, say, part)
    failed += 0 if only_curves else found.run(only, say, part)
    _write_report(found, sizes, as_json)
    if failed:
        raise SottoError(f"{failed} of them failed; run the same command again to repeat them")


@study.command(cls=SottoCommand)
@click.argument("name", metavar="STUDY")
@out_option
@sizes_option
@json_option
def report(name: str, folder: Path | None, sizes: tuple[int, ...], as_json: bool) -> None:
    """Write the report of a study from its existing cells.

    DIR then contains results.json, results.csv and report.html, a single file with tables and curves.

    \b
    Examples:
      sotto lab study report moniqua
      sotto lab study report mine.toml --out runs/mine --peers 64 --peers 1024
    """
    plan, folder = _read(name, folder)
    if not (folder / "cells").is_dir() and not (folder / "curves").is_dir():
        raise SottoError(f"{folder} contains no cells of a study; `sotto lab study run {name}` measures them")
    _write_report(_open(plan, folder), sizes, as_json)


@study.command(cls=SottoCommand)
@click.argument("name", metavar="STUDY")
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@out_option
@sizes_option
@json_option
def merge(name: str, folders: tuple[Path, ...], folder: Path | None, sizes: tuple[int, ...], as_json: bool) -> None:
    """Put the cells and curves of several folders into one, then write its report.

    The folders come from `sotto lab study run --shard` on machines that should be alike, since cells are timed. Folders
    with different measurements of the same cell are refused.

    \b
    Examples:
      sotto lab study merge mine.toml part-0 part-1
    """
    found = _open(*_read(name, folder))
    found.merge(folders)
    _write_report(found, sizes, as_json)


def _read(name: str, folder: Path | None) -> tuple[Study, Path]:
    """Return the study of that name, and the folder of its results."""
    from peer.lab.study.study import find_study, read_plan

    plan = read_plan(find_study(name))
    return plan, folder or RUNS / plan.name


def _open(plan: Study, folder: Path, packages: Path | None = None, data: Path | None = None) -> StudyFolder:
    # After the plan: this loads torch, which a file that cannot be read does not need.
    from peer.lab.study.folder import StudyFolder

    return StudyFolder(plan, folder, packages, data)


def _write_report(found: StudyFolder, sizes: tuple[int, ...], as_json: bool) -> None:
    from peer.lab.study import race_tables, tables

    page, rows, finishes = found.report(sizes or found.study.predicted_peers)
    race = found.study.race
    if as_json:
        results = {"report": str(page), "cells": [row.as_json() for row in rows]}
        print_json(results if race is None else results | {"race": [each.as_json() for each in finishes]})
        return
    click.echo(tables.as_text(found.study, rows))
    if race is not None:
        click.echo(race_tables.as_text(race, finishes, found.race.trained()))
    click.echo(f"report: {page}")
