"""`sotto version`: what runs here."""

from __future__ import annotations

import click

from peer.cli.app import SottoCommand, print_json, verbosity
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
    if as_json:
        print_json({"version": __version__, **facts})
        return
    click.echo(f"sotto {__version__}")
    for key, value in facts.items():
        click.echo(f"{key}: {value}")
