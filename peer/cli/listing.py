"""`sotto lab list`: the models, tasks, algorithms, compressors and graphs there are."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import click

from peer.cli.app import SottoCommand, print_json
from peer.cli.options import json_option


@click.command(name="list", cls=SottoCommand)
@click.argument("what", type=click.Choice(["models", "tasks", "algorithms", "compressors", "graphs"]))
@json_option
def list_kinds(what: str, as_json: bool) -> None:
    """List the available models, tasks, algorithms, compressors or graphs.

    \b
    Examples:
      sotto lab list algorithms
      sotto lab list tasks --json
    """
    rows = _listed(what)
    if as_json:
        print_json(rows)
        return
    columns, width = min(shutil.get_terminal_size().columns, 100), max(len(row["name"]) for row in rows) + 2
    for row in rows:
        text = " ".join(filter(None, (row["summary"], row.get("note"))))
        click.echo(click.wrap_text(text, columns, row["name"].ljust(width), " " * width))


def _listed(what: str) -> list[dict[str, Any]]:
    if what == "tasks":
        from peer.train.listed import TASKS

        return [
            {
                "name": name,
                "summary": info.summary,
                "options": list(info.options),
                "note": f"training.task_options: {', '.join(info.options)}" if info.options else "",
            }
            for name, info in TASKS.items()
        ]
    if what == "algorithms":
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
    known: Mapping[str, Any]
    if what == "models":
        from peer.train.listed import MODELS

        return [{"name": name, "summary": summary} for name, summary in MODELS.items()]
    if what == "compressors":
        from peer.compress import COMPRESSORS as known
    else:
        from peer.gossip.graphs import FAMILIES as known
    return [{"name": name, "summary": each.summary} for name, each in known.items()]
