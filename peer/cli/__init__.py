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
      sotto up                     eight peers train handwritten digits, then a report
      sotto up --skew 1 --rounds 2000 --algorithm scsp
    \b
    Train on several devices:
      sotto init cluster kits --peers 3 --host 10.0.0.1 --host 10.0.0.2 --host 10.0.0.3
      (copy one folder kits/peer-K to each device)
      sotto run --config peer-0/peer.toml
    \b
    Check before you start:
      sotto validate --config peer.toml
      sotto graph --peers 8 --graph torus

    Every command has its own --help. Every command also accepts -v (log to stderr; -vv logs more) and --debug (show
    the traceback of an error).
    """


cli.add_section(
    "Before a run",
    {
        "init": "init.init",
        "validate": "validate.validate",
        "graph": "graph.graph",
        "list": "listing.list_kinds",
        "data": "data.data",
        "profile": "costs.profile",
        "plan": "plan.plan",
        "tune": "tune.tune",
    },
)
cli.add_section(
    "Devices",
    {
        "invite": "invite.invite",
        "join": "invite.join",
        "doctor": "devices.doctor",
        "sign": "devices.sign",
        "revoke": "devices.revoke",
        "audit": "devices.audit",
    },
)
cli.add_section("Train", {"up": "up.up", "run": "run.run", "simulate": "simulate.simulate"})
cli.add_section(
    "During a run",
    {
        "watch": "watch.watch",
        "status": "control.status",
        "stop": "control.stop",
        "reload": "control.reload",
        "leave": "control.leave",
        "remove": "control.remove",
        "rollback": "control.rollback",
        "rejoin": "control.rejoin",
    },
)
cli.add_section(
    "After a run",
    {
        "export": "results.export",
        "report": "results.report",
        "compare": "compare.compare",
        "metrics": "compare.metrics",
        "track": "track.track",
        "replay": "results.replay",
        "version": "version.version",
    },
)
cli.add_section("Links and studies", {"shape": "shape.shape", "study": "study.study", "sweep": "sweep.sweep"})


def main() -> None:
    """Run the command line and exit."""
    # Warnings of libraries (an overflow in a run that diverges) go to the log, which is silent without -v.
    logging.captureWarnings(True)
    cli.main()
