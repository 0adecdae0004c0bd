"""The command `sotto`. Each file holds one command or one group of commands.

Modules here import click and nothing that is slow; what a command works with is imported inside it, so that
`sotto --help` answers at once and never loads torch.
"""

from __future__ import annotations

import logging

import click

from peer.cli import (
    compare,
    control,
    costs,
    data,
    devices,
    graph,
    init,
    listing,
    plan,
    results,
    run,
    shape,
    simulate,
    study,
    sweep,
    track,
    tune,
    up,
    validate,
    watch,
)
from peer.cli.app import CONTEXT, EXIT_CODES, SottoCommand, SottoGroup, print_json, verbosity
from peer.cli.options import json_option

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
        from peer.run_summary import machine_facts

        facts = {key: value for key, value in machine_facts().items() if key != "sottovoce"}
    if as_json:
        print_json({"version": __version__, **facts})
        return
    click.echo(f"sotto {__version__}")
    for key, value in facts.items():
        click.echo(f"{key}: {value}")


cli.add_section(
    "Before a run",
    (init.init, validate.validate, graph.graph, listing.list_kinds, data.data, costs.profile, plan.plan, tune.tune),
)
cli.add_section("Devices", (devices.doctor, devices.sign, devices.revoke))
cli.add_section("Train", (up.up, run.run, simulate.simulate))
cli.add_section(
    "During a run",
    (watch.watch, control.status, control.stop, control.reload, control.leave, control.remove, control.rollback),
)
cli.add_section(
    "After a run",
    (results.export, results.report, compare.compare, compare.metrics, track.track, results.replay, version),
)
cli.add_section("Links and studies", (shape.shape, study.study, sweep.sweep))


def main() -> None:
    """Run the command line and exit."""
    # Warnings of libraries (an overflow in a run that diverges) go to the log, which is silent without -v.
    logging.captureWarnings(True)
    cli.main()
