"""Runs `sotto` inside the test process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from peer.cli import cli


def sotto(*arguments: str, typed: str = "", **environment: str) -> Result:
    """Return what a command line printed and its exit code; `typed` is its standard input."""
    return CliRunner(env=environment).invoke(cli, list(arguments), prog_name="sotto", input=typed)
