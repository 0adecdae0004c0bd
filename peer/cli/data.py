"""Data sets: what there is, and fetching one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from peer.cli.app import SottoCommand, SottoGroup, is_interactive, tell
from peer.cli.options import json_option, output_option


@click.group(cls=SottoGroup)
def data() -> None:
    """Download the data sets that the built-in tasks read.

    \b
    Examples:
      sotto data list
      sotto data fetch mnist
    """


@data.command(name="list", cls=SottoCommand)
@json_option
def list_data(as_json: bool) -> None:
    """List the data sets that can be downloaded.

    \b
    Examples:
      sotto data list
      sotto data list --json
    """
    from peer.train.datasets.catalogue import DATA_SETS

    rows = [{"name": name, "summary": item.summary, "task": item.task} for name, item in DATA_SETS.items()]
    width = max(map(len, DATA_SETS)) + 2
    tell(as_json, rows, (f"{name:<{width}}{item.summary}" for name, item in DATA_SETS.items()))


@data.command(cls=SottoCommand)
@click.argument("name", metavar="NAME")
@output_option("Folder for the files; by default data/NAME.", metavar="DIR")
@click.option("--mirror", metavar="URL", help="Fetch URL/FILENAME for each file instead of using the official address.")
@json_option
def fetch(name: str, output: Path | None, mirror: str | None, as_json: bool) -> None:
    """Download the files of a data set and verify their checksums.

    Files that already exist are verified and kept. To resume an interrupted download, run the same command again. Where
    no checksum is published, the first download records one in SHA256SUMS, and later downloads are checked against it.

    \b
    Examples:
      sotto data fetch mnist
      sotto data fetch cifar10 -o /srv/data/cifar10
      sotto data fetch imagenette --mirror http://10.0.0.1:8000/imagenette
    """
    from peer.train.datasets import catalogue

    directory = output or Path("data") / name
    with _bars() as show:
        found = catalogue.fetch(name, directory, mirror=mirror, on_progress=show)
    files, lines = [], []
    for file in found.files:
        files.append({"file": str(file.path), "bytes": file.size, "fetched_bytes": file.fetched, "sha256": file.sha256})
        how = "fetched" if file.fetched else "verified"
        lines.append(f"{how:<10} {file.path} ({file.size:,} bytes, SHA-256 {file.sha256[:16]}…)")
    if found.recorded:
        lines.append(f"recorded   checksums of {', '.join(found.recorded)} in {directory / catalogue.RECORD}")
    known = catalogue.DATA_SETS[name]
    if known.option:
        lines.append(f"use it with: --set training.task_options.{known.option}={found.files[0].path.absolute()}")
    else:
        lines.append(f"use it with: --task {known.task} --set data.directory={directory}")
    document = {"name": name, "directory": str(directory), "files": files, "recorded": list(found.recorded)}
    tell(as_json, document, lines)


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Within this context, calls of the returned function move one bar for each file, where a person is watching."""
    if not is_interactive():
        yield lambda name, done, total: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield show
