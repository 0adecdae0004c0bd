"""`sotto lab validate`: what is wrong with a configuration before anything runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from peer.cli.app import COLORS, SottoCommand, print_json
from peer.cli.options import DEFAULT_FILE, job_options, json_option, load_job, peers_option
from peer.errors import ConfigError


@click.command(cls=SottoCommand)
@peers_option
@job_options
@click.option("--read-data", is_flag=True, help="Also read the data of the task, to its last file.")
@json_option
def validate(
    config_file: Path | None, settings: tuple[str, ...], num_peers: int | None, read_data: bool, as_json: bool
) -> int:
    """Check a configuration, its graph and its algorithm before anything runs.

    Reports errors for configurations that cannot run or converge, or whose task or data are not on this device, and
    warnings for those that may not converge or cost more than expected. The exit code is 2 if there is an error.
    Without --config it checks ./peer.toml; with --peers and no --config, the default configuration.

    \b
    Examples:
      sotto lab validate --config peer.toml
      sotto lab validate --config peer.toml --read-data
      sotto lab validate --peers 8 --algorithm d-psgd --graph directed-ring
    """
    from peer.gossip.validate import Objection
    from peer.run import plan as run_plan

    if num_peers is None and not settings and "peer.shorthands" not in click.get_current_context().meta:
        config_file = config_file or DEFAULT_FILE
    config, base, count = load_job(config_file, settings, num_peers)
    findings = [*run_plan.validate_config(config, base, count), *run_plan.missing_here(config, base)]
    if config_file is not None and not config.peers:
        sentence = "lists no peers, so it is the file of a run (`sotto up --config`) and of no device (`sotto run`)"
        findings.append(Objection("warning", "peers", sentence))
    failed = any(finding.level == "error" for finding in findings)
    data: dict[str, tuple[str, ...]] = {}
    if read_data and not failed:
        from peer.train.tasks import read_all_data

        data = read_all_data(config, base)
    if as_json:
        told = {"data": data} if read_data else {}
        print_json({"valid": not failed, "num_peers": count, "findings": [asdict(each) for each in findings], **told})
        return ConfigError.exit_code if failed else 0
    for finding in findings:
        key = f"{finding.key}: " if finding.key else ""
        click.secho(f"{finding.level}: ", bold=True, fg=COLORS.get(finding.level), nl=False)
        click.echo(f"{key}{finding.sentence}")
    for split, sentences in data.items():
        for sentence in sentences:
            click.echo(f"{split} data: {sentence}")
    if not failed:
        click.echo(f"valid: {config.algorithm.name} for {count} peers, {config.run.rounds} rounds")
    return ConfigError.exit_code if failed else 0
