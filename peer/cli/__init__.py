"""The command `sotto`. Each file holds one command or one group of commands.

Modules here import click and nothing that is slow; what a command works with is imported inside it, so that
`sotto --help` answers at once and never loads torch.
"""

from __future__ import annotations

import logging

import click

from peer.cli.app import CONTEXT, EXIT_CODES, SottoGroup

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())


@click.group(cls=SottoGroup, context_settings=CONTEXT, epilog=_EPILOG)
def cli() -> None:
    """Train one deep-learning model across devices, with no server and no shared data.

    \b
    Try it on this machine:
      sotto up                 eight peers train handwritten digits, then a report
      sotto up --skew 1 --rounds 2000 --algorithm scsp
    \b
    Train on several devices:
      sotto init cluster kits --host 10.0.0.1 --host 10.0.0.2 --host 10.0.0.3
      (copy one folder kits/peer-K to each device)
      sotto run --config peer-0/peer.toml
    \b
    Your own script:
      sotto up train.py --peers 3

    Every command has its own --help. Every command also accepts -v (log to stderr; -vv logs more) and --debug (show
    the traceback of an error).
    """


@click.group(cls=SottoGroup)
def lab() -> None:
    """Choose settings, measure and compare: plans, sweeps, studies on shaped links.

    \b
    Examples:
      sotto lab plan --model resnet20 --peers 8 --link 1mbit
      sotto lab compare runs/a runs/b
    """


@click.group(cls=SottoGroup)
def admin() -> None:
    """Certificates, members and state of devices, beyond what a run needs every day.

    \b
    Examples:
      sotto admin revoke kits peer-3
      sotto admin rollback --round 40 --config peer.toml
    """


def _arrange(cli: SottoGroup, lab: SottoGroup, admin: SottoGroup) -> None:
    cli.add_section("On this machine", {"up": "up", "simulate": "simulate", "data": "data"})
    devices = {"init": "init", "invite": "invite", "join": "invite", "run": "run", "doctor": "devices"}
    cli.add_section("Your devices", devices | {"remove": "control"})
    cli.add_section("During a run", {"watch": "watch", "status": "control", "stop": "control"})
    cli.add_section("After a run", {"report": "results", "export": "results"})
    cli.add_section("More", {"version": "version"})
    settings = {"plan": "plan", "graph": "graph", "list": "listing.list_kinds", "profile": "costs", "tune": "tune"}
    lab.add_section("Before a run", {"validate": "validate"} | settings)
    figures = {"compare": "results", "metrics": "results", "track": "track", "replay": "results"}
    lab.add_section("Figures of runs", figures)
    lab.add_section("Links and studies", {"shape": "shape", "study": "study", "sweep": "sweep"})
    admin.add_section("Certificates", {"sign": "devices", "revoke": "devices", "audit": "devices"})
    peers = {"reload": "control", "leave": "control", "rollback": "control", "rejoin": "control"}
    admin.add_section("Peers", peers)
    for group in (lab, admin):
        cli.add_group("More", group)


_arrange(cli, lab, admin)


def main() -> None:
    """Run the command line and exit."""
    # Warnings of libraries (an overflow in a run that diverges) go to the log, which is silent without -v.
    logging.captureWarnings(True)
    cli.main()
