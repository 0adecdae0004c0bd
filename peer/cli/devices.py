"""Commands for the devices of a cluster: sign the request of a new one, revoke the certificate of a lost one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli.app import SottoCommand, print_json
from peer.cli.options import config_option, json_option, load_peer
from peer.errors import ConfigError, PeerUnreachable, SottoError

if TYPE_CHECKING:
    from peer.ops.enrollment import Admitted


@click.command(cls=SottoCommand)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("request", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--relay", metavar="NAME", help="Peer that relays for the new one, which others cannot dial.")
@json_option
def sign(directory: Path, request: Path, relay: str | None, as_json: bool) -> None:
    """Sign the certificate request that a new device made with `sotto init --join`.

    DIRECTORY is the cluster folder that holds ca.key. Before you sign, compare the key's thumbprint with the one that
    the device printed. The command writes a folder peer-K with everything but the private key, which never leaves the
    device: copy these files beside peer.key. Once started, the new peer joins the run, even one in progress; the other
    devices need no change. A device that is already listed gets a renewed certificate.

    \b
    Examples:
      sotto sign kits request.pem
      sotto sign kits request.pem --relay peer-0
    """
    from peer.net.security.requests import request_thumbprint
    from peer.ops import enrollment

    try:
        data = request.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(request)) from None
    print_ = request_thumbprint(data)
    done = enrollment.admit(directory, data, relay=relay)
    if as_json:
        print_json(_described(done, print_))
        return
    click.echo(f"key        {print_}")
    click.echo(f"signed     {done.identity.name}, until {done.identity.not_after:%Y-%m-%d}")
    click.echo(f"copy       {done.folder}/* to the device, into the folder that holds its peer.key")
    if not done.known:
        click.echo(f"new peer   index {done.index}; it joins when it is started: sotto run --config peer.toml")


def _described(done: Admitted, thumbprint: str) -> dict[str, Any]:
    return {
        "name": done.identity.name,
        "index": done.index,
        "advertise": done.entry.advertise,
        "folder": str(done.folder),
        "renewed": done.known,
        "not_after": done.identity.not_after.isoformat(),
        "key": thumbprint,
        "certificate": done.identity.thumbprint,
    }


@click.command(cls=SottoCommand)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("name")
@click.option(
    "--keep-newest",
    is_flag=True,
    help="Keep the newest certificate: for a device that has a new one because its old key was lost.",
)
@json_option
def revoke(directory: Path, name: str, keep_newest: bool, as_json: bool) -> int:
    """Revoke the certificates of a peer or operator, and inform the running peers.

    DIRECTORY is the cluster folder that holds ca.key. Peers close their links to a revoked peer at once, store the list
    and pass it on, so it is enough to reach one of them. If none can be reached, copy DIRECTORY/revoked.pem beside the
    ca.pem of any peer.

    \b
    Examples:
      sotto revoke kits peer-3
      sotto revoke kits peer-3 --keep-newest
    """
    from peer.ops import enrollment

    revoked, pem = enrollment.revoke(directory, name, keep_newest=keep_newest)
    told, failed = _tell(directory, name, pem)
    if as_json:
        print_json(
            {
                "revoked": [{"name": each.name, "certificate": each.thumbprint} for each in revoked],
                "list": str(directory / enrollment.LIST_FILE),
                "told": told,
                "failed": failed,
            }
        )
    else:
        for each in revoked:
            click.echo(f"revoked  {each.name}, certificate {each.thumbprint}")
        for peer in told:
            click.echo(f"informed {peer}")
        for peer, why in failed.items():
            click.echo(f"failed   {peer}: {why}")
        if not told:
            click.echo(f"no peer was informed; copy {directory / enrollment.LIST_FILE} beside the ca.pem of any peer")
    return 0 if told else PeerUnreachable.exit_code


@click.command(cls=SottoCommand)
@config_option
@json_option
def doctor(config_file: Path | None, as_json: bool) -> int:
    """Diagnose the connections between this peer and its neighbours, and suggest remedies.

    Checks the configuration, certificates, keys and port. For each neighbour, checks whether it can be dialled and can
    dial back, and compares release, shared configuration and clock. It works whether or not this peer is running, but
    its neighbours must be. The exit code is 0 if no fault is found, otherwise that of the first error.

    \b
    Examples:
      sotto doctor --config peer.toml
      sotto doctor --json
    """
    from peer.ops.doctor import described, examine

    config, base = load_peer(config_file)
    findings = examine(config, base)
    if as_json:
        print_json(
            {"healthy": all(each.level != "error" for each in findings), "findings": list(map(described, findings))}
        )
    else:
        width = max(len(each.check) for each in findings) + 2
        for each in findings:
            click.secho(f"{each.level:<8}", fg=_COLORS.get(each.level), bold=True, nl=False)
            click.echo(f"{each.check:<{width}}{each.sentence}")
            if each.advice:
                click.echo(f"{'':<{width + 8}}→ {each.advice}")
    return next((each.exit_code for each in findings if each.exit_code), 0)


_COLORS = {"error": "red", "warning": "yellow", "ok": "green"}


def _tell(directory: Path, name: str, pem: bytes) -> tuple[list[str], dict[str, str]]:
    """Hand the list to every peer that listens; return who took it, and why others did not."""
    from peer.cli.control import find_peer_files
    from peer.cli.options import load_peer
    from peer.ops import control

    told: list[str] = []
    failed: dict[str, str] = {}
    for file in find_peer_files(directory):
        config, base = load_peer(file)
        peer = config.peers[config.peer.index].name
        if peer == name:
            continue
        try:
            control.call(config, base, None, "revoke", {"list": pem.decode()})
            told.append(peer)
        except SottoError as error:
            failed[peer] = str(error)
    return told, failed
