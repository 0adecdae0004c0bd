"""`sotto invite` and `sotto join`: a device becomes a member with one line of text."""

from __future__ import annotations

import os
import queue
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli.app import SottoCommand, print_json
from peer.cli.devices import is_print, passphrase_of, show_proposal
from peer.cli.options import KITS, script_options, set_option
from peer.errors import SecurityError, SottoError
from peer.terminal import command, telling

if TYPE_CHECKING:
    from peer.config.options import Config
    from peer.ops.invitations import Event, Invitations


@click.command(cls=SottoCommand)
@click.argument("directory", type=click.Path(path_type=Path), default=KITS)
@click.option(
    "--count",
    type=click.IntRange(0, 64),
    default=1,
    metavar="N",
    help="Number of devices to invite. 0: make no invitation, and answer those that are open.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Address at which the devices reach this machine; up to three. By default the one from which it reaches them.",
)
@click.option(
    "--port", type=click.IntRange(1, 65535), default=7710, metavar="PORT", help="Port to listen on meanwhile."
)
@click.option(
    "--hours", type=click.IntRange(min=1), default=1, metavar="N", help="Validity of an invitation, 168 at most."
)
@click.option(
    "--relay",
    metavar="NAME",
    help="Peer that relays between devices that cannot be dialled. By default the first that can.",
)
@click.option(
    "--key", "keys", multiple=True, metavar="THUMBPRINT", help="Admit the device with this key without asking."
)
@click.option("--yes", is_flag=True, help="Admit every invited device without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document a line to stdout, for scripts.")
def invite(
    directory: Path,
    count: int,
    hosts: tuple[str, ...],
    port: int,
    hours: int,
    relay: str | None,
    keys: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> None:
    """Print invitations for new devices, and admit the devices that come with them.

    DIRECTORY is the cluster folder that holds ca.key, by default ./kits. Give each device one of the printed lines, by
    a way that only its user reads, and run `sotto join` there. While this command runs, it listens on a port of its
    own. For each device that proves that it was invited, it shows name, address and thumbprint of the key, and asks.
    Compare the thumbprint with the one that the device shows. A device that is admitted gets its certificate and the
    settings of the run, and joins the run, even one in progress.

    The command ends when all its invitations have been used, or all seats are filled that they are for. Ctrl-C ends it
    earlier: devices then wait, and `sotto invite DIRECTORY --count 0` goes on. An invitation belongs to the first key
    that comes with it. A second one is refused, and reported: the invitation has leaked.

    \b
    Examples:
      sotto invite kits
      sotto invite kits --count 2 --hours 24
      sotto invite kits --host 203.0.113.7 --relay peer-0
      sotto invite kits --count 0
    """
    from peer.config.options import OWN_LOOP
    from peer.ops.cluster_files import join_address
    from peer.ops.enrollment import any_peer_file, free_seats
    from peer.ops.invitations import Invitations, own_hosts

    at = [join_address(host.strip("[]"), port) for host in hosts] or own_hosts(directory, port)
    with Invitations(directory, relay=relay, passphrase=passphrase_of(directory)) as desk:
        listener = desk.listen(at)
        try:
            made = [desk.issue(at, hours * 3600) for _ in range(count)]
            config, _ = any_peer_file(directory)
            more = " SCRIPT" if config.training.task == OWN_LOOP else ""
            more += " --set data.directory=FOLDER" if config.data.directory is not None else ""
            seats = len(free_seats(directory))
            for number, each in enumerate(made):
                expires = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.expires))
                device = "one free seat" if number < seats else "one new member"
                what = {"event": "invitation", "invitation": each.text(), "expires": each.expires}
                _tell(as_json, what, f"for {device}, until {expires}; run there: sotto join{more}")
                if not as_json:
                    click.echo(each.text())
            click.echo(f"answering at {', '.join(at)} until all are used; Ctrl-C ends", err=True)
            sys.stdout.flush()
            while (event := _next_event(desk, [each.id for each in made], is_for_seats=0 < seats >= count)) is not None:
                approved = yes or any(is_print(key, event.thumbprint) for key in keys)
                _handle(desk, event, approved, as_json)
            click.echo("all seats are filled" if seats and not free_seats(directory) else "all are used", err=True)
        finally:
            listener.close()


def _next_event(desk: Invitations, made: list[bytes], *, is_for_seats: bool) -> Event | None:
    """Return what happened next; None once nobody is waited for. `made`: IDs of the invitations, or all if empty."""

    def waits() -> int:
        return len(desk.unanswered(made or None, is_for_seats=is_for_seats))

    with telling(lambda: f"invited devices that have not come: {waits()}", partial(click.echo, err=True)):
        while waits() or not desk.events.empty():
            with suppress(queue.Empty):
                return desk.events.get(timeout=0.5)
    return None


def _handle(desk: Invitations, event: Event, approved: bool, as_json: bool) -> None:
    """Tell what happened, and decide where something is to be decided."""
    what: dict[str, Any] = {"event": event.kind, "name": event.name, "host": event.host, "key": event.thumbprint}
    if event.kind == "leak":
        if as_json:
            print_json({**what, "first_key": event.bound}, indent=None)
        return
    if event.kind == "kept":
        _tell(as_json, what, f"{event.name} has its certificate, and joins once its peer runs")
        return
    try:
        event = desk.asked_now(event)
    except SottoError as error:
        click.echo(f"not admitted: {error}", err=True)
        return
    assert event.proposal is not None
    if as_json:
        print_json({**what, "address": event.proposal.entry.advertise}, indent=None)
    click.echo(f"{event.name} at {event.host} asks:", err=True)
    show_proposal(event.proposal)
    try:
        admitted = approved or click.confirm(f"Does {event.name} show this thumbprint? Admit it?", err=True)
    except click.Abort:
        raise SecurityError(
            "nobody confirmed the device, which goes on waiting; a script gives --key, or --yes to admit unseen"
        ) from None
    try:
        done = desk.decide(event, admit=admitted)
    except SottoError as error:
        click.echo(f"not admitted: {error}", err=True)
        return
    if done is not None:
        seat = "" if done.identity.name == event.name else f" as {done.identity.name}"
        what = {**what, "event": "admitted", "index": done.index, "folder": str(done.folder)}
        _tell(as_json, what, f"signed     {event.name}{seat}, until {done.identity.not_after:%Y-%m-%d}")
    elif not admitted:
        _tell(as_json, {**what, "event": "refused"}, f"refused    {event.name}; its invitation is spent")


def _tell(as_json: bool, what: dict[str, Any], sentence: str) -> None:
    if as_json:
        print_json(what, indent=None)
    else:
        click.echo(sentence, err=True)


@click.command(cls=SottoCommand)
@script_options
@click.option("--name", metavar="NAME", help="Name of this device in the run; by default that of the host.")
@click.option(
    "--host",
    metavar="HOST[:PORT]",
    help='Address at which others reach this device; "-" if it can only dial out. By default the one that the '
    "operator's machine sees, unless addresses are translated in between.",
)
@click.option(
    "-o",
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of this device, for its key, certificate, settings and state; by default its name.",
)
@set_option
@click.option("--no-run", is_flag=True, help="Write the folder and do not start the peer.")
@click.pass_context
def join(
    context: click.Context,
    words: tuple[str, ...],
    module: str | None,
    name: str | None,
    host: str | None,
    folder: Path | None,
    settings: tuple[str, ...],
    no_run: bool,
) -> int:
    """Join a run with an invitation, and start this device's peer.

    The command asks for the line that `sotto invite` printed, or reads it from standard input. It makes the private key
    of this device, which never leaves it, and asks the operator's machine for a certificate. It waits while the
    operator decides or is away, and says so; if it is interrupted, start it again with the same invitation. The run's
    settings come with the certificate, and are shown before they are used. Code, data and paths do not come: the script
    or the task has to be on this device. Then it starts the peer, as `sotto run` does, with a SCRIPT if one is named.

    Settings of this device alone (sections peer, security, state, guard, transport, limits and privacy, and
    data.directory) can be given with --set.

    \b
    Examples:
      sotto join train.py
      sotto join train.py --name garage --host 10.0.0.9
      sotto join --set data.directory=/data/images
      sotto join --no-run < invitation.txt
    """
    from peer.config.options import OWN_LOOP, load
    from peer.library.script import named_script
    from peer.net.security.invitations import read_invitation
    from peer.ops.joining import device_name, join

    if any(word.startswith("sotto-invitation-") for word in words):
        raise click.UsageError("an invitation is a secret: leave it out here, and paste it when it is asked for")
    if (script := named_script(words, module)) is not None:
        script.refuse_missing()
    own = load(None, overrides=settings)
    if own.data.directory is not None:
        # Typed here, and kept in a file in another folder.
        data = own.data.model_copy(update={"directory": os.path.abspath(own.data.directory)})
        own = own.model_copy(update={"data": data})
    name = name or device_name()
    folder = folder or Path(name)
    invitation = read_invitation(_pasted())
    file = join(folder, invitation, name=name, host=host, own=own, say=partial(click.echo, err=True))
    config = load(file, environment={})
    begins = "it joins some rounds after it connects" if config.own.admitted else "round 0 begins when all are there"
    click.echo(f"admitted to {invitation.run} as {config.own.name}; {begins}; folder {folder}", err=True)
    named = script.words if script else ("SCRIPT",) * (config.training.task == OWN_LOOP)
    start = command("run", *named, "--config", file)
    _show_settings(config)
    if no_run:
        click.echo(f"start it with: {start}", err=True)
        return 0
    if sys.stdin.isatty() and not click.confirm("Train with these settings?", default=True, err=True):
        click.echo(f"not started; change {file} where it is wrong, and start it with: {start}", err=True)
        return 0
    click.echo(f"from now on, start this device with: {start}", err=True)
    from peer.cli.run import run

    return int(context.invoke(run, words=words, module=module, config_file=file, settings=(), deal=False) or 0)


def _pasted() -> str:
    """Return the invitation, from a prompt that does not show it, or else the first line of standard input."""
    from peer.net.security.invitations import MOST_CHARACTERS

    if sys.stdin.isatty():
        return str(click.prompt("Invitation (it is not shown)", hide_input=True, err=True))
    return sys.stdin.readline(MOST_CHARACTERS + 1)


def _show_settings(config: Config) -> None:
    """Show on standard error what the run has set for all devices, other than the defaults."""
    from peer.config.options import SHARED_SECTIONS
    from peer.config.writer import spell

    for section in SHARED_SECTIONS[:-1]:
        changed = getattr(config, section).model_dump(exclude_defaults=True)
        for key, value in changed.items():
            click.echo(f"  {section}.{key} = {spell(value)}", err=True)
    click.echo(f"  peers: {', '.join(peer.name for peer in config.peers)}", err=True)
