"""`sotto version`: what runs here."""

from __future__ import annotations

import click

from peer.cli.app import SottoCommand, tell, verbosity
from peer.cli.options import json_option


@click.command(cls=SottoCommand)
@json_option
def version(as_json: bool) -> None:
    """Print the version of sotto; with -v also what results and speed depend on.

    \b
    Examples:
      sotto version
      sotto version -v
      sotto version --json
    """
    from peer import __version__

    facts: dict[str, str] = {}
    if verbosity():
        from peer.run.machine import machine_facts

        facts = {key: value for key, value in machine_facts().items() if key != "sottovoce"}
    lines = [f"sotto {__version__}", *(f"{key}: {value}" for key, value in facts.items())]
    tell(as_json, {"version": __version__, **facts}, lines)
