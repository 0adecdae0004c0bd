"""`sotto init`: configuration files, the folders of a cluster's devices, a new device's request."""

from __future__ import annotations

import os
from pathlib import Path

import click

from peer.cli.app import SottoGroup
from peer.cli.options import (
    DAYS,
    DEFAULT_FILE,
    KITS,
    PASSPHRASE,
    job_options,
    load_config,
    output_option,
    set_option,
    shorthand_options,
)
from peer.errors import ConfigError
from peer.terminal import command

force_option = click.option("--force", is_flag=True, help="Overwrite existing files.")
all_keys_option = click.option(
    "--all-keys", is_flag=True, help="Write and explain every key, not only those that differ from the defaults."
)


@click.group(cls=SottoGroup, invoke_without_command=True)
@output_option("File to write, by default peer.toml; with --peers, the folder, by default kits.", metavar="PATH")
@set_option
@shorthand_options
@click.option(
    "--join",
    "join",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="On a new device: write its private key and a certificate request into DIR.",
)
@click.option("--name", metavar="NAME", help="With --join: name of the new peer.")
@click.option(
    "-n",
    "--peers",
    "num_peers",
    type=click.IntRange(min=2),
    metavar="N",
    help="Write a folder for a script on N devices: this one, and seats that `sotto invite` fills.",
)
@click.option(
    "--host",
    metavar="HOST[:PORT]",
    help='With --peers or --join: address at which others reach this device. With --join, omit it (or give "-") if it'
    " can only dial out.",
)
@all_keys_option
@force_option
@click.pass_context
def init(
    context: click.Context,
    output: Path | None,
    settings: tuple[str, ...],
    join: Path | None,
    name: str | None,
    num_peers: int | None,
    host: str | None,
    all_keys: bool,
    force: bool,
) -> None:
    """Write a configuration file with what differs from the defaults.

    With --join: prepare a new device for an existing cluster. Its private key stays on the device. Take DIR/request.pem
    to the machine that holds the cluster folder, and sign it there with `sotto admin sign`.

    \b
    Examples:
      sotto init                            write ./peer.toml with default values
      sotto init --peers 3                  for a script: this device, two seats
      sotto init -o run.toml --graph torus
      sotto init -o all.toml --all-keys     write every key and what it accepts
      sotto init cluster kits --peers 8     write certificates and device folders
      sotto init --join garage --name garage --host 10.0.0.9
    """
    if context.invoked_subcommand is not None:
        return
    settings = (*context.meta.pop("peer.shorthands", ()), *settings)
    if join is not None:
        from peer.ops import enrollment

        if not name:
            raise ConfigError("is missing", key="--name", valid="the name of the new peer")
        thumbprint = enrollment.request(join, name, host, 7700)
        click.echo(f"wrote {join / 'peer.key'} and {join / enrollment.REQUEST_FILE}; key {thumbprint}")
        signs = command("admin", "sign", "KITS", enrollment.REQUEST_FILE)
        click.echo(f"next, where the cluster was created: {signs}")
        return
    if num_peers is not None:
        from peer.ops.invitations import address_towards

        at, folder = host or address_towards(), output or KITS
        job = {"settings": ("training.task=loop", *settings), "all_keys": all_keys, "force": force}
        context.invoke(cluster, directory=folder, num_peers=num_peers, seats=num_peers - 1, hosts=(at,), **job)
        again = ["--peers", num_peers, "-o", folder, *(word for each in settings for word in ("--set", each))]
        anew = command("init", *again, *["--all-keys"] * all_keys, "--host", "HOST", "--force")
        click.echo(f"the others reach this machine at {at}; if that is wrong: {anew}")
        return
    if name or host:
        raise ConfigError("can only be used with --join", key="--name" if name else "--host")
    from peer.config.writer import write_peer_file

    config, output = load_config(None, settings)[0], output or DEFAULT_FILE
    write_peer_file(output, config, force=force, all_keys=all_keys)
    click.echo(f"wrote {output}")


@init.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("-n", "--peers", "num_peers", type=click.IntRange(min=1), metavar="N", help="Number of peers.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Address at which peer 0, 1, 2, … is reached. Give it once for each peer, or once for all on one machine "
    '(ports then count up). "-" is a peer that others cannot reach: it dials out. Default: all on this machine.',
)
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="PORT", default=7700, help="Port, or the first of several."
)
@click.option(
    "--relay",
    type=click.IntRange(min=0),
    metavar="K",
    help='Peer K relays between peers given as "-"; without a relay, two of them cannot be neighbours.',
)
@click.option(
    "--join-later",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=False,
    help="Begin the run without the last N peers; each becomes a member when it is started.",
)
@click.option(
    "--seats",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=False,
    help="Keep the last N peers free for devices that `sotto invite` admits; the run begins when all have come.",
)
@click.option("--days", type=DAYS, metavar="N", help="Days for which certificates are valid; by default two years.")
@click.option("--ca-days", type=DAYS, metavar="N", help="Days for which the authority is valid; by default ten years.")
@click.option("--passphrase", is_flag=True, help=f"Encrypt ca.key; asks for a passphrase, or takes ${PASSPHRASE}.")
@job_options
@all_keys_option
@force_option
def cluster(
    directory: Path,
    num_peers: int | None,
    hosts: tuple[str, ...],
    port: int,
    relay: int | None,
    join_later: int,
    seats: int,
    days: int | None,
    ca_days: int | None,
    passphrase: bool,
    config_file: Path | None,
    settings: tuple[str, ...],
    all_keys: bool,
    force: bool,
) -> None:
    """Write everything that the devices of a run need into DIRECTORY.

    DIRECTORY then holds a certificate authority (ca.pem, ca.key), an operator certificate for `sotto status` and
    `sotto stop`, and for each peer a folder peer-K with peer.toml, peer.pem, peer.key and a copy of ca.pem. Copy one of
    these folders to each device. Keep ca.key private: whoever has it can issue certificates.

    \b
    Examples:
      sotto init cluster kits --peers 8
      sotto init cluster kits --host 10.0.0.1 --host 10.0.0.2 --host -
      sotto init cluster kits --host 10.0.0.1 --host - --host - --relay 0
      sotto init cluster kits --peers 4 --config run.toml --set run.rounds=5000
      sotto init cluster kits --peers 6 --join-later 2
      sotto init cluster kits --peers 3 --seats 2 --host 10.0.0.1
    """
    from peer.config.options import OWN_LOOP
    from peer.ops.cluster_files import place_peers, write_cluster

    places = place_peers(num_peers, hosts, port)
    config, base = load_config(config_file, settings, num_peers=len(places))
    options = {"force": force, "to_be_copied": True, "all_keys": all_keys}
    secret, replaces = _new_passphrase() if passphrase else None, (directory / "ca.key").exists()
    files = write_cluster(
        directory,
        config,
        places,
        base=base,
        relay=relay,
        join_later=join_later,
        seats=seats,
        days=days,
        ca_days=ca_days,
        passphrase=secret,
        **options,
    )
    click.echo(f"wrote {directory}: {len(files)} peers")
    if replaces:
        click.echo(f"replaced the keys in {directory}: devices that were given the old ones need their new folder")
    script = ["SCRIPT"] if config.training.task == OWN_LOOP else []
    if seats:
        click.echo(f"fill the seats with: {command('invite', directory, '--count', seats)}")
    where = config.data.directory
    if where is not None and config.data.partition == "own" and not Path(where).is_absolute():
        click.echo(f"put the data of each device into its folder: {files[0].parent / where}")
    which = "each but the seats" if seats else "each"
    click.echo(f"start {which} with: {command('run', *script, '--config', files[0])}")


def _new_passphrase() -> bytes:
    """Return the passphrase for a new authority. Raises ConfigError for an empty one."""
    given = os.environ.get(PASSPHRASE)
    if given is None:
        given = click.prompt("Passphrase for ca.key", hide_input=True, confirmation_prompt=True, err=True)
    if not given:
        raise ConfigError("is empty", key=PASSPHRASE, valid="a passphrase for ca.key")
    return str(given).encode()
