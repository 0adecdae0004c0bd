"""Commands for the devices of a cluster: sign the request of a new one, revoke the certificate of a lost one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from peer.cli.app import COLORS, SottoCommand, print_json, tell
from peer.cli.options import DAYS, PASSPHRASE, config_option, json_option, load_peer, own_file
from peer.errors import ConfigError, PeerUnreachable, SecurityError, SottoError

if TYPE_CHECKING:
    from peer.ops.enrollment import Admitted, Proposal


@click.command(cls=SottoCommand)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("request", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--relay", metavar="NAME", help="Peer that relays for the new one, which others cannot dial.")
@click.option("--name", metavar="NAME", help="Refuse the request unless it is for this name.")
@click.option("--address", metavar="HOST:PORT", help='Refuse it unless it is for this address; "-" for none.')
@click.option("--key", metavar="THUMBPRINT", help="Refuse it unless its key has this thumbprint.")
@click.option("--days", type=DAYS, metavar="N", help="Days for which the certificate is valid; by default two years.")
@click.option("--yes", is_flag=True, help="Sign without asking.")
@json_option
def sign(
    directory: Path,
    request: Path,
    relay: str | None,
    name: str | None,
    address: str | None,
    key: str | None,
    days: int | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Sign the certificate request that a new device made with `sotto init --join`.

    DIRECTORY is the cluster folder that holds ca.key. The command writes a folder peer-K with everything but the
    private key, which never leaves the device: copy these files beside peer.key. Once started, the new peer joins the
    run, even one in progress; the other devices need no change. A request by the name of a listed peer renews that
    one's certificate: copy the *.pem alone, and `sotto admin reload` there takes them up without a restart.

    The command shows name, address and thumbprint of the key, and asks before it signs. Compare the thumbprint with
    the one that the device printed. The certificate holds nothing else that the request may name. With --name,
    --address and --key together nothing is asked.

    \b
    Examples:
      sotto admin sign kits request.pem
      sotto admin sign kits request.pem --relay peer-0
      sotto admin sign kits request.pem --yes
    """
    from peer.ops import enrollment

    try:
        data = request.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(request)) from None
    passphrase = passphrase_of(directory)
    proposal = enrollment.propose(directory, data, relay=relay, passphrase=passphrase)
    expected = {"name": name, "address": address, "key": key}
    _refuse_others(proposal, expected)
    show_proposal(proposal)
    if not yes and None in expected.values():
        _ask()
    done = enrollment.admit(directory, proposal, days=days, passphrase=passphrase)
    # The key that may lie beside them is the one that the device no longer has.
    files = f"{done.folder}/*.pem, and peer.toml if it has none," if proposal.known else f"{done.folder}/*"
    lines = [
        f"signed     {done.identity.name}, until {done.identity.not_after:%Y-%m-%d}",
        f"copy       {files} to the device, into the folder that holds its peer.key",
    ]
    if not (done.folder / "peer.toml").exists():
        lines.append(
            f"keep       the device's peer.toml, or copy another's and set peer.index = {done.index} and peer.listen"
        )
    if not proposal.known:
        lines.append(f"new peer   index {done.index}; it joins when it is started: sotto run --config peer.toml")
    tell(as_json, _described(done, proposal), lines)


def passphrase_of(directory: Path) -> bytes | None:
    """Return the passphrase of the key of a cluster's authority, from the environment or from a prompt; None if it has
    none."""
    from peer.ops import enrollment

    if not enrollment.needs_passphrase(directory):
        return None
    given = os.environ.get(PASSPHRASE)
    if given is None:
        given = click.prompt(f"Passphrase of {directory / 'ca.key'}", hide_input=True, err=True)
    return str(given).encode()


def _refuse_others(proposal: Proposal, expected: Mapping[str, str | None]) -> None:
    """Raise SecurityError if a request is for anything but what the command line says."""
    entry = proposal.entry
    asked = {"name": entry.name, "address": entry.advertise or "-", "key": proposal.request.thumbprint}
    for what, value in expected.items():
        if value is not None and value != asked[what] and not (what == "key" and is_print(value, asked[what])):
            raise SecurityError(f"not signed: the request is for {what} {asked[what]}, not {value!r}")


def is_print(given: str, thumbprint: str) -> bool:
    """Return whether a thumbprint was given, with colons or without, in either case."""
    return given.replace(":", "").upper() == thumbprint.replace(":", "")


def show_proposal(proposal: Proposal) -> None:
    """Show on standard error what is about to be signed."""
    entry = proposal.entry
    click.echo(f"name       {proposal.request.name}", err=True)
    if proposal.takes_seat:
        click.echo(f"seat       {entry.name}, which is its name in the run", err=True)
    click.echo(f"address    {entry.advertise or 'none: nobody can dial it'}", err=True)
    if entry.relay is not None:
        click.echo(f"relay      {entry.relay}", err=True)
    click.echo(f"key        {proposal.request.thumbprint}", err=True)
    if proposal.known:
        click.echo(f"renewal    of the certificate of peer {proposal.index}, which is in the list", err=True)
    elif not proposal.takes_seat:
        click.echo("new member of the run; a device that replaces one asks by its name in `sotto status`", err=True)
    if proposal.left_out:
        click.echo(f"left out   {', '.join(proposal.left_out)}: the request names it, and it is not signed", err=True)


def _ask() -> None:
    """Raise SecurityError unless somebody says that name, address and key are right."""
    try:
        confirmed = click.confirm("Did the device print this thumbprint? Sign its request?", err=True)
    except click.Abort:
        confirmed = False
    if not confirmed:
        raise SecurityError(
            "not signed: nobody confirmed it; a script gives --name, --address and --key, or --yes to confirm unseen"
        )


def _described(done: Admitted, proposal: Proposal) -> dict[str, Any]:
    return {
        "name": done.identity.name,
        "index": done.index,
        "advertise": proposal.entry.advertise,
        "folder": str(done.folder),
        "renewed": proposal.known,
        "not_after": done.identity.not_after.isoformat(),
        "key": proposal.request.thumbprint,
        "left_out": list(proposal.left_out),
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
      sotto admin revoke kits peer-3
      sotto admin revoke kits peer-3 --keep-newest
    """
    from peer.ops import enrollment

    revoked, pem = enrollment.revoke(directory, name, keep_newest=keep_newest, passphrase=passphrase_of(directory))
    told, failed = _tell(directory, name, pem)
    document = {
        "revoked": [{"name": each.name, "certificate": each.thumbprint} for each in revoked],
        "list": str(directory / enrollment.LIST_FILE),
        "told": told,
        "failed": failed,
    }
    lines = [f"revoked  {each.name}, certificate {each.thumbprint}" for each in revoked]
    lines += [f"informed {peer}" for peer in told] + [f"failed   {peer}: {why}" for peer, why in failed.items()]
    if not told:
        lines.append(f"no peer was informed; copy {directory / enrollment.LIST_FILE} beside the ca.pem of any peer")
    tell(as_json, document, lines)
    return 0 if told else PeerUnreachable.exit_code


@click.command(cls=SottoCommand)
@click.argument("place", required=False, metavar="[DIR]", type=click.Path(path_type=Path, exists=True))
@config_option
@click.option(
    "--offline", is_flag=True, help="Ask nobody: check the file, the task and its data, as `sotto lab validate`."
)
@json_option
def doctor(place: Path | None, config_file: Path | None, offline: bool, as_json: bool) -> int:
    """Diagnose the connections between this peer and its neighbours, and suggest remedies.

    DIR is the folder of one device, or one with the folder of no other; by default the one here.

    Checks the configuration, certificates, keys and port. For each neighbour, checks whether it can be dialled and can
    dial back and whether full packets reach it, and compares release, shared configuration and clock. It works whether
    or not this peer is running, but its neighbours must be. The exit code is 0 if no fault is found, otherwise that of
    the first error.

    \b
    Examples:
      sotto doctor kits/peer-0
      sotto doctor --offline
    """
    if config_file is None and place is not None:
        config_file = place if place.is_file() else own_file(folder=place)
    if offline:
        from peer.cli.validate import validate

        given = {"config_file": config_file, "settings": (), "num_peers": None, "read_data": False, "as_json": as_json}
        return cast(int, click.get_current_context().invoke(validate, **given))
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
            click.secho(f"{each.level:<8}", fg=COLORS.get(each.level), bold=True, nl=False)
            click.echo(f"{each.check:<{width}}{each.sentence}")
            if each.advice:
                click.echo(f"{'':<{width + 8}}→ {each.advice}")
    return next((each.exit_code for each in findings if each.exit_code), 0)


def _tell(directory: Path, name: str, pem: bytes) -> tuple[list[str], dict[str, str]]:
    """Hand the list to every peer that listens; return who took it, and why others did not."""
    from peer.ops.cluster_files import peer_files
    from peer.ops.control import Asked, call_all

    asked = {}
    for file in peer_files(directory):
        config, base = load_peer(file)
        peer = config.own.name
        if peer != name:
            asked[peer] = Asked(config, base)
    answers = dict(zip(asked, call_all(list(asked.values()), "revoke", {"list": pem.decode()}), strict=True))
    told = [peer for peer, answer in answers.items() if not isinstance(answer, SottoError)]
    failed = {peer: str(answer) for peer, answer in answers.items() if isinstance(answer, SottoError)}
    return told, failed


@click.command(cls=SottoCommand)
@config_option
@click.option(
    "--chain", metavar="DIGITS", help="Fail unless an entry has this chain, which `sotto status --json` showed."
)
@json_option
def audit(config_file: Path | None, chain: str | None, as_json: bool) -> None:
    """Show and verify the log of who came, went, was refused, and gave orders.

    It names joins, departures, losses, lists of revoked certificates, refusals and control calls. Each entry contains a
    hash of all before it, so that nothing can be changed, removed or inserted in between without notice. To notice that
    entries were removed at the end, or that the whole log was written anew, keep the chain that `sotto status --json`
    shows under admissions, and pass it with --chain. The command reads the state folder; the peer may run meanwhile.

    \b
    Examples:
      sotto admin audit --config peer.toml
      sotto admin audit --config peer.toml --chain 5f3a...
    """
    from peer.errors import StateError
    from peer.state.admission_log import FILE, read_entries
    from peer.state.disk import Disk

    config, base = load_peer(config_file)
    folder = base / config.state.directory
    entries = read_entries(Disk(folder)) if folder.is_dir() else []
    if chain is not None and all(entry["chain"] != chain for entry in entries):
        raise StateError(
            f"{folder / FILE}: no entry has the chain {chain[:80]!r}: entries were removed or written anew"
        )

    def lines() -> Iterator[str]:
        apart = ("number", "at", "what", "frame", "chain")
        for entry in entries:
            details = ", ".join(f"{key} {value}" for key, value in entry.items() if key not in apart)
            yield f"{entry['number']:>4}  {entry['at']}  {entry['what']:<8}  {details}"
        last = f"; the chain ends with {entries[-1]['chain']}" if entries else ""
        yield f"{len(entries)} entries, each follows from those before it{last}"

    tell(as_json, entries, lines())
