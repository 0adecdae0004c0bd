"""Bandwidth studies: the same configuration on named links, algorithm by algorithm."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from peer.cli.app import SottoCommand, SottoGroup, print_json
from peer.cli.options import json_option
from peer.errors import LinkError, SottoError

if TYPE_CHECKING:
    from peer.study.folder import StudyFolder

out_option = click.option(
    "-o",
    "--out",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for the results; by default runs/NAME.",
)

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
    link profiles (`sotto shape list`). Some studies are included; docs/links.md explains the keys.

    \b
    Examples:
      sotto study list
      sudo sotto study run moniqua --only moniqua-1mbit-1ms
      sotto study report moniqua
    """


@study.command(name="list", cls=SottoCommand)
@json_option
def list_studies(as_json: bool) -> None:
    """List the included studies.

    \b
    Examples:
      sotto study list
      sotto study list --json
    """
    from peer.study.plan import FILES, read_plan

    studies = {file.stem: read_plan(file) for file in sorted(FILES.glob("*.toml"))}
    if as_json:
        print_json([{"name": name, "title": each.title} for name, each in studies.items()])
        return
    for name, each in studies.items():
        click.echo(f"{name:<12}{each.title}")


@study.command(cls=SottoCommand)
@click.argument("name", metavar="STUDY")
def show(name: str) -> None:
    """Print the file of a study, as a starting point for your own.

    \b
    Examples:
      sotto study show moniqua > mine.toml
    """
    from peer.study.plan import find_study

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
@sizes_option
@json_option
def run(
    name: str, folder: Path | None, only: tuple[str, ...], packages: Path | None, sizes: tuple[int, ...], as_json: bool
) -> None:
    """Run the missing cells of a study, then write its report.

    STUDY is the name of an included study or the path of a file. A cell is a run of real peers in network namespaces,
    with one contender on one link profile. Cells that exist are not run again, so an interrupted command can be started
    again. To measure a cell again, delete its file in DIR/cells. Needs Linux and root (see `sotto shape`). The exit
    code is 1 if a cell failed.

    \b
    Examples:
      sudo sotto study run moniqua
      sudo sotto study run moniqua --only moniqua-1mbit-1ms --only moniqua-8
      sudo sotto study run mine.toml --out runs/mine --peers 64
    """
    from peer.links import network
    from peer.study.folder import StudyFolder
    from peer.study.plan import find_study, read_plan

    plan = read_plan(find_study(name))
    found = StudyFolder(plan, folder or Path("runs") / plan.name, packages)
    if (reason := network.missing()) is not None:
        raise LinkError(f"{reason}; nothing was run")
    # Peers and namespaces are removed on the way out, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = found.run(only, lambda line: click.echo(line, err=True))
    _write_report(found, sizes, as_json)
    if failed:
        raise SottoError(f"{failed} cells failed; run the same command again to repeat them")


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
      sotto study report moniqua
      sotto study report mine.toml --out runs/mine --peers 64 --peers 1024
    """
    from peer.study.folder import StudyFolder
    from peer.study.plan import find_study, read_plan

    plan = read_plan(find_study(name))
    folder = folder or Path("runs") / plan.name
    if not (folder / "cells").is_dir():
        raise SottoError(f"{folder} contains no cells of a study; `sotto study run {name}` measures them")
    _write_report(StudyFolder(plan, folder), sizes, as_json)


def _write_report(found: StudyFolder, sizes: tuple[int, ...], as_json: bool) -> None:
    from peer.study import tables

    page, rows = found.report(sizes or found.study.predicted_peers)
    if as_json:
        print_json({"report": str(page), "cells": [row.as_json() for row in rows]})
        return
    click.echo(tables.as_text(found.study, rows))
    click.echo(f"report: {page}")
