"""Shaped links: named profiles, their measurement, devices connected by them, and limits for containers."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from peer.cli.app import SottoCommand, SottoGroup, print_json, tell
from peer.cli.options import json_option
from peer.errors import LinkError

if TYPE_CHECKING:
    from peer.links.measure import Measured
    from peer.links.profiles import Profile

UNSHAPED = "unshaped"

interface_option = click.option(
    "--interface", metavar="NAME", default="eth0", help="Network interface inside the containers."
)


@click.group(cls=SottoGroup)
def shape() -> None:
    """Give links the rate, latency and loss of links in the field.

    Shapes links between network namespaces or for running containers. The machine's own network does not change. Every
    command except `list` needs Linux, root, and the programs ip and tc (iproute2).

    \b
    Examples:
      sotto lab shape list
      sotto lab shape measure dsl
      sotto lab shape up dsl --devices 3
      sotto lab shape down
    """


@shape.command(name="list", cls=SottoCommand)
@json_option
def list_profiles(as_json: bool) -> None:
    """List the link profiles with rate, latency and loss of one device.

    \b
    Examples:
      sotto lab shape list
      sotto lab shape list --json
    """
    from peer.links.profiles import PROFILES

    lines = (f"{name:26}{_describe(profile)} ({profile.source})" for name, profile in PROFILES.items())
    tell(as_json, [{"name": name, **asdict(profile)} for name, profile in PROFILES.items()], lines)


@shape.command(cls=SottoCommand)
@click.argument("profiles", metavar="[PROFILE]...", nargs=-1)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=4.0, help="Duration of each transfer.")
@json_option
def measure(profiles: tuple[str, ...], seconds: float, as_json: bool) -> None:
    """Measure profiles between two namespaces.

    Without arguments, measures every profile that has a limit or a latency. Shows the goodput of TCP, whose headers
    take up to 4.4 % of the rate, and the median and shortest round trip of small datagrams. The exit code is 1 if a
    link deviates from its profile.

    \b
    Examples:
      sudo sotto lab shape measure
      sudo sotto lab shape measure dsl 3g --seconds 2
    """
    from peer.links import network
    from peer.links.measure import measure as measure_link
    from peer.links.profiles import PROFILES, find

    chosen = {name: find(name) for name in profiles or [name for name in PROFILES if name != UNSHAPED]}
    _require(network.missing)
    if not as_json:
        click.echo(
            f"{'profile':26}{'':6}{'requested':>12}{'goodput':>12}{'':8}"
            f"{'requested':>10}{'round trip':>12}{'shortest':>10}"
        )
    rows, right = [], True
    for name, profile in chosen.items():
        with network.LinkNetwork([profile, profile]) as links:
            for pair in ((0, 1), (1, 0)) if profile.up_kbit != profile.down_kbit else ((0, 1),):
                found = measure_link(links, *pair, seconds=seconds)
                right &= found.is_right
                rows.append({"profile": name, **asdict(found), "is_right": found.is_right})
                if not as_json:
                    click.echo(_line(name, found))
    if as_json:
        print_json(rows)
    if not right:
        raise LinkError("a link deviates from its profile; measure again while this machine is otherwise idle")


@shape.command(cls=SottoCommand)
@click.argument("profile")
@click.argument("containers", metavar="[CONTAINER]...", nargs=-1)
@click.option(
    "--devices", type=click.IntRange(min=2), metavar="N", help="Create N devices, each a namespace with an address."
)
@interface_option
@json_option
def up(profile: str, containers: tuple[str, ...], devices: int | None, interface: str, as_json: bool) -> None:
    """Create shaped links between new devices or for running containers.

    With --devices, creates N network namespaces that reach each other over links of the profile, and keeps them until
    the command is interrupted (Ctrl-C or SIGTERM). For each device it prints the prefix with which commands run there.

    With CONTAINER (Docker names or ids), limits what these containers send until `sotto lab shape down`. Latency and
    loss need a kernel with netem; without it, only the rate is limited, and a remark says so.

    \b
    Examples:
      sudo sotto lab shape up dsl --devices 3
      sudo sotto lab shape up 3g site-peer-1 site-peer-2
    """
    from peer.links import network, tc
    from peer.links.profiles import find

    found = find(profile)
    if bool(containers) == (devices is not None):
        raise click.UsageError("Give either containers or --devices N.")
    if devices is not None:
        _require(network.missing)
        _lend_devices(found, devices, as_json)
        return
    _require(tc.missing)
    rows = []
    for container in containers:
        remark = tc.shape(tc.process_of(container), interface, found)
        rows.append({"container": container, "profile": profile, "remark": remark})
        if not as_json:
            click.echo(f"{container}: {_describe(found)}{f'; {remark}' if remark else ''}")
    if as_json:
        print_json(rows)


@shape.command(cls=SottoCommand)
@click.argument("containers", metavar="[CONTAINER]...", nargs=-1)
@interface_option
@json_option
def down(containers: tuple[str, ...], interface: str, as_json: bool) -> None:
    """Remove shaped links.

    With CONTAINER, removes the limits of these containers. Without arguments, removes namespaces whose command was
    killed before it could remove them; namespaces of a running command stay.

    \b
    Examples:
      sudo sotto lab shape down site-peer-1 site-peer-2
      sudo sotto lab shape down
    """
    from peer.links import network, tc

    _require(tc.missing)
    for container in containers:
        tc.release(tc.process_of(container), interface)
    removed = [] if containers else network.clean()
    line = f"removed {len(removed)} namespaces" if removed else "nothing to remove"
    line = f"released {len(containers)} containers" if containers else line
    tell(as_json, {"released": list(containers), "removed": removed}, [line])


def _require(missing: Callable[[], str | None]) -> None:
    """Raise LinkError if something is missing here, which is named in a sentence."""
    if (reason := missing()) is not None:
        raise LinkError(reason)


def _lend_devices(profile: Profile, count: int, as_json: bool) -> None:
    """Keep a network of `count` devices until the process is interrupted."""
    from peer.links.network import LinkNetwork

    with LinkNetwork([profile] * count) as network:
        devices = [
            {"device": device, "address": network.address(device), "command": network.command(device)}
            for device in range(count)
        ]
        with contextlib.suppress(KeyboardInterrupt):
            if as_json:
                print_json(devices)
            else:
                for device in range(count):
                    command = " ".join(network.command(device))
                    click.echo(f"device {device}  {network.address(device):12}  {command} COMMAND")
                click.echo("Ctrl-C removes them", err=True)
            # A reader of this pipe may start programs on the devices now.
            sys.stdout.flush()
            while True:
                signal.pause()


def _describe(profile: Profile) -> str:
    rate = f"{profile.up_kbit:g}/{profile.down_kbit:g} kbit/s up/down" if profile.up_kbit else "no limit"
    loss = f", {profile.loss:.1%} lost" if profile.loss else ""
    return f"{rate}, {profile.latency_ms:g} ms one way{loss}"


def _line(name: str, found: Measured) -> str:
    share = f"{found.goodput_kbit / found.asked_kbit:.1%}" if found.asked_kbit else ""
    return (
        f"{name:26}{found.sender} → {found.receiver} {found.asked_kbit:9g} kb {found.goodput_kbit:9.0f} kb {share:>7}"
        f"{found.asked_round_trip_ms:8.2f} ms{found.round_trip_ms:9.2f} ms{found.least_round_trip_ms:7.2f} ms"
        f"{'' if found.is_right else '  deviates from its profile'}"
    )
