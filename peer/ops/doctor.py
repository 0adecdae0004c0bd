"""Diagnoses the connections between a peer and its neighbours, and suggests remedies.

Checks the configuration, the certificates, the port, and each neighbour in both directions: the neighbour is dialled,
and asked to dial back (the control call `Probe`). Full packets are tried apart: a tunnel on the way may lose them.
If this peer is not running, its port answers during the check. Nothing is changed on any device.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from peer import __version__
from peer.config.options import OWN_LOOP, SHARED_SECTIONS, Config, PeerAddress
from peer.errors import ConfigError, RemoteError, SecurityError, SottoError, StateError
from peer.net.address import is_private, split_address, why_not_bound
from peer.net.answers import EXAMINED
from peer.net.control import call_control
from peer.net.hello import PROTOCOL_MAX, PROTOCOL_MIN, HelloInfo, differing_settings
from peer.net.security.credentials import Access, Credentials, TokenAccess, load_credentials
from peer.net.transport import Transport
from peer.net.tunnels import make_socket_folder
from peer.net.unreachable import OTHER_CA
from peer.ops.control import newcomers
from peer.ops.releases import mixed, versions_of
from peer.ops.standing import from_folder
from peer.run import plan as run_plan
from peer.wire.start_model import StartModel

SOON_DAYS = 30
CLOCK_WARNING_S = 5.0
CLOCK_ERROR_S = 86_400.0
TIMEOUT_S = 8.0
FULL_PACKETS_BYTES = 4000
"""Size above two Ethernet packets."""

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """Subject of the check: configuration, certificate, port, address, or the name of a neighbour."""
    level: Level
    sentence: str
    advice: str = ""
    """Remedy."""
    exit_code: int = field(default=0, repr=False)


def _fault(check: str, error: SottoError, advice: str = "") -> Finding:
    return Finding(check, "error", str(error), advice, error.exit_code)


def examine(config: Config, base: Path) -> list[Finding]:
    """Return the findings, in the order in which they should be mended. No fault makes it raise."""
    return asyncio.run(_examine(config, base))


def described(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON values."""
    return {key: value for key, value in asdict(finding).items() if key != "exit_code"}


async def _examine(config: Config, base: Path) -> list[Finding]:
    found = list(_configuration(config, base))
    try:
        security = load_credentials(config.security, base, config.own.name)
    except SecurityError as error:
        found.append(_fault("certificate", error))
        return found
    found += _certificate(security)
    status = await _own_status(config, security)
    standing = None if status is not None else from_folder(config, base)
    ended = "" if standing is None else f"this peer {standing.sentence}"
    found += _port(config, status, ended)
    found += _addresses(config)
    answering = status is None and config.peer.listen and all(each.level != "error" for each in found)
    async with contextlib.AsyncExitStack() as listening:
        if answering:
            try:
                await listening.enter_async_context(_answer(config, security))
            except SottoError as error:
                found.append(_fault("port", error))
        entries = [config.peers[peer] for peer in _neighbors(config, base)]
        known = newcomers(config, base, status or {}).values()
        entries += [each for each in known if each.name in (status or {}).get("links", {})]
        versions = {config.own.name: __version__, **versions_of([] if status is None else [status])}
        for each in await asyncio.gather(*(_neighbor(config, security, entry, versions, ended) for entry in entries)):
            found += each
    found += _releases(versions)
    found += _links(status)
    return found


def _configuration(config: Config, base: Path) -> Iterator[Finding]:
    try:
        findings = [*run_plan.validate_config(config, base), *run_plan.missing_here(config, base)]
    except SottoError as error:
        yield _fault("configuration", error)
        return
    errors = [each for each in findings if each.level == "error"]
    for each in errors:
        yield Finding("configuration", "error", f"{each.key}: {each.sentence}", exit_code=ConfigError.exit_code)
    if not errors:
        sentence = f"{config.algorithm.name} for {config.num_peers} peers; this is {config.own.name}"
        yield Finding("configuration", "ok", f"{sentence}, version {__version__}")


def _neighbors(config: Config, base: Path) -> list[int]:
    me = config.peer.index
    try:
        schedule = run_plan.build_schedule(config, base, config.num_members(config.num_peers))
    except SottoError:
        return []
    if me >= schedule.num_peers:
        return [*range(schedule.num_peers)]  # It joins later, through any of those.
    return sorted({*schedule.all_receivers(me), *schedule.all_senders(me)})


def _certificate(security: Access | None) -> Iterator[Finding]:
    if security is None:
        yield Finding(
            "certificate",
            "warning",
            'security.mode is "insecure": connections are neither encrypted nor authenticated',
            "create certificates with `sotto init cluster kits --peers N`, unless this is an experiment on one machine",
        )
        return
    if isinstance(security, TokenAccess):
        yield Finding(
            "certificate", "ok", "this peer presents a shared token, which does not distinguish peers from each other"
        )
        return
    left = security.identity.not_after - datetime.datetime.now(datetime.UTC)
    sentence = f"issued to {security.identity.name}, valid until {security.identity.not_after:%Y-%m-%d}"
    if left < datetime.timedelta(days=SOON_DAYS):
        advice = f"renew it: {_renewal(security.identity.name)}"
        yield Finding("certificate", "warning", f"{sentence}, {left.days} days from now", advice)
    else:
        revoked = 0 if security.revoked is None else len(security.revoked.entries)
        yield Finding("certificate", "ok", f"{sentence}; {revoked} certificates of this run are revoked")


def _renewal(name: str) -> str:
    ask = f"`sotto init --join renewed --name {name}` here"
    return f"{ask}, then `sotto admin sign kits request.pem` where the cluster was created"


async def _own_status(config: Config, security: Access | None) -> dict[str, Any] | None:
    """Return this peer's answer, if it runs."""
    if not config.peer.listen:
        return None
    host, _, port = config.peer.listen.rpartition(":")
    address = f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "") else f"{host}:{port}"
    name = config.own.name
    with contextlib.suppress(SottoError):
        answer = await call_control(address, "status", name=name, security=security, timeout_s=3.0)
        if answer.get("name") == name:
            return answer
    return None


def _port(config: Config, status: dict[str, Any] | None, ended: str) -> Iterator[Finding]:
    if not config.peer.listen:
        yield Finding("port", "ok", "this peer accepts no connections; it dials all its neighbours")
        return
    if status is not None:
        yield Finding("port", "ok", f"this peer is running and listens on {config.peer.listen}")
        return
    try:
        host, port = split_address(config.peer.listen, key="peer.listen")
    except ConfigError as error:
        yield _fault("port", error)
        return
    why = why_not_bound(host, port, key="peer.listen")
    if why is not None:
        yield Finding("port", "error", why.sentence, why.advice, exit_code=ConfigError.exit_code)
        return
    yield Finding("port", "ok", f"{config.peer.listen} is free; {ended or 'this peer is not running'}")


def _addresses(config: Config) -> Iterator[Finding]:
    own = config.own
    if own.advertise is None:
        where = f"it is reached through relay {own.relay}" if own.relay else "it has no relay"
        if own.relay:
            try:
                shutil.rmtree(make_socket_folder(), ignore_errors=True)
            except StateError as error:
                yield _fault("address", error)
                return
        yield Finding("address", "ok", f"other peers cannot dial this one (no advertise address); {where}")
    elif not config.peer.listen:
        sentence = f"other peers are told to dial {own.advertise}, but this peer accepts no connections"
        advice = "set peer.listen, or remove its advertise address on every device"
        yield _fault("address", ConfigError(sentence), advice)
    else:
        yield Finding("address", "ok", f"listens on {config.peer.listen}; other peers dial {own.advertise}")


async def _neighbor(
    config: Config, security: Access | None, entry: PeerAddress, versions: dict[str, str], ended: str
) -> list[Finding]:
    """Look at one neighbour in both directions; add its release to `versions`. `ended`: a clause where this peer has
    finished or left."""
    me = config.peer.index
    if entry.advertise is None:
        return [_unreachable_neighbor(config, entry)]
    if (trouble := await _tcp_trouble(entry.name, entry.advertise, ended)) is not None:
        return [trouble]
    if (trouble := await _full_packets(entry.name, entry.advertise)) is not None:
        return [trouble]
    asked = time.time()
    try:
        answer = await call_control(
            entry.advertise, "probe", {"index": me}, name=entry.name, security=security, timeout_s=TIMEOUT_S
        )
    except SecurityError as error:
        return [_fault(entry.name, error, f"get a valid certificate: {_renewal(config.own.name)}")]
    except RemoteError as error:
        advice = next(advice for words, advice in _ADVICE.items() if words in str(error))
        return [_fault(entry.name, error, advice)]
    answered = time.time()
    versions[entry.name] = answer["software"].removeprefix("sottovoce ")
    return [
        Finding(entry.name, "ok", f"answers at {entry.advertise}, as {answer['software']}"),
        *await _path(entry.name, entry.advertise),
        *_compare(config, entry.name, answer),
        *_clock(entry.name, answer["time"] - (asked + answered) / 2, (answered - asked) / 2),
        *_way_back(config, entry.name, answer),
    ]


async def _full_packets(name: str, address: str) -> Finding | None:
    """Return the finding if small packets reach a neighbour, and full ones do not.

    A tunnel on the way takes a part of each packet. If nobody tells the sender, because a firewall drops ICMP, the
    sender repeats the too large packet for ever. No listener knows what to do with zeros: it ends the connection as
    soon as it has them.
    """
    if await _ends_connection(address, b"\0" * FULL_PACKETS_BYTES) or not await _ends_connection(address, b"\0" * 16):
        return None
    sentence = f"small packets reach {address}, but full ones get lost on the way"
    advice = "on both devices, lower the MTU of the interface that leads there, first to 1280 (docs/several-devices.md)"
    return _fault(name, RemoteError(sentence), advice)


async def _ends_connection(address: str, data: bytes) -> bool:
    host, port = split_address(address, key="advertise")
    try:
        async with asyncio.timeout(TIMEOUT_S / 2):
            reader, writer = await asyncio.open_connection(host, port)
            with contextlib.closing(writer):
                writer.write(data)
                await reader.read(1)
    except TimeoutError:
        return False
    except OSError:
        pass  # Reset: it has been read.
    return True


async def _path(name: str, address: str) -> list[Finding]:
    mtu = await asyncio.to_thread(path_mtu, *split_address(address, key="advertise"))
    return [] if mtu is None else [Finding(name, "ok", f"packets of up to {mtu} bytes pass on the way there")]


def _unreachable_neighbor(config: Config, entry: PeerAddress) -> Finding:
    own = config.own
    if own.advertise is not None:
        return Finding(
            entry.name,
            "ok",
            "cannot be dialled; it dials this peer, and `sotto doctor` on that device checks whether it can",
        )
    relay = entry.relay or own.relay
    if relay is not None:
        return Finding(entry.name, "ok", f"neither it nor this peer can be dialled; relay {relay} connects the two")
    if not own.is_first:
        return Finding(entry.name, "ok", "neither it nor this peer can be dialled; this peer joins through another one")
    advice = "on every device, give one of the two an advertise address or a relay"
    return _fault(entry.name, ConfigError("neither it nor this peer can be dialled"), advice)


async def _tcp_trouble(name: str, address: str, ended: str) -> Finding | None:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(TIMEOUT_S / 2):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
    except socket.gaierror:
        sentence, advice = (
            f"the host name in {address} cannot be resolved",
            "correct its advertise address, or the DNS settings of this device",
        )
    except TimeoutError:
        sentence = f"{address} does not answer"
        advice = f"open TCP port {port} in the firewall there, or correct its advertise address"
    except ConnectionRefusedError:
        sentence = f"nobody listens at {address}"
        if ended:
            return Finding(name, "ok", f"{sentence}: it need not, since {ended}")
        advice = "start that peer, or correct its advertise address; further checks need it running"
    except OSError as error:
        sentence, advice = f"{address} cannot be reached: {error.strerror}", "check the network of this device"
        if error.errno == errno.EHOSTUNREACH:
            # A router's answer for an address that nobody has, and a firewall's for a port that it keeps shut.
            advice = f"correct its advertise address, or open TCP port {port} in the firewall there"
    else:
        return None
    if is_private(host.strip("[]")) and not sentence.startswith("nobody"):
        advice += "; a private address is reached from its own network or VPN alone: elsewhere, give it a relay"
    return _fault(name, RemoteError(sentence), advice)


_ADVICE = {
    OTHER_CA: "use folders that the same `sotto init cluster` wrote, and check the clocks",
    "made out to another name": "check whether two folders were swapped, or the address belongs to another peer",
    "not accept our cert": "use the same security.mode and the same ca.pem on both, and see the log of that peer",
    "speak TLS": "set the same security.mode on both",
    "want TLS": "set the same security.mode on both",
    "not a peer of this program": "install the same release on both, and check that no other program uses that port",
    "": "see the log of that peer",
}
"""Words in a reason why a neighbour did not answer → a remedy; the first that are found count."""


def _compare(config: Config, name: str, answer: dict[str, Any]) -> Iterator[Finding]:
    lowest, highest = answer["protocol"]
    if highest < PROTOCOL_MIN or lowest > PROTOCOL_MAX:
        sentence = f"speaks protocol versions {lowest} to {highest}, but this peer {PROTOCOL_MIN} to {PROTOCOL_MAX}"
        yield _fault(name, RemoteError(sentence), "install the same release on both")
    ours, theirs = config.run_digest().split("."), answer["job"].split(".")
    # What a training script sets when it joins is in no file.
    unknown = {"run", "training"} if config.training.task == OWN_LOOP else set()
    sections = zip(SHARED_SECTIONS, ours, theirs, strict=False) if len(ours) == len(theirs) else ()
    differing = [part for part, one, two in sections if one != two and part not in unknown]
    if differing:
        parts = " and ".join(f"[{part}]" for part in differing)
        advice = f"make {parts} equal on both; a peer refuses neighbours whose shared sections differ"
        found = "" if unknown else differing_settings(config.shared_settings(), answer.get("settings"))
        sentence = f"its configuration differs from ours in {parts}{found}"
        yield _fault(name, RemoteError(sentence), advice)
    elif answer.get("neighbor") is None and config.own.admitted:
        yield Finding(name, "ok", "does not know this peer yet; it will once this peer is started and joins")
    elif answer.get("neighbor") is None:
        sentence = "does not list this peer as a neighbour"
        yield _fault(name, RemoteError(sentence), "compare [graph] and [[peers]] on both")


def _releases(versions: dict[str, str]) -> Iterator[Finding]:
    sentence = mixed(versions)
    if sentence is not None:
        advice = "install the newer one on all devices, one after the other (docs/upgrading.md)"
        yield Finding("releases", "warning", sentence, advice)


def _clock(name: str, difference_s: float, uncertainty_s: float) -> Iterator[Finding]:
    off = max(0.0, abs(difference_s) - uncertainty_s)
    if off < CLOCK_WARNING_S:
        return
    sentence = f"its clock is {abs(difference_s):.0f} s {'ahead of' if difference_s > 0 else 'behind'} ours"
    level: Level = "error" if off > CLOCK_ERROR_S else "warning"
    advice = "synchronize the clocks (timedatectl set-ntp true); certificates depend on them"
    yield Finding(name, level, sentence, advice, exit_code=RemoteError.exit_code if level == "error" else 0)


def _way_back(config: Config, name: str, answer: dict[str, Any]) -> Iterator[Finding]:
    own = config.own
    if answer.get("neighbor") is None:
        return
    known = answer.get("address")
    if known != own.advertise:
        sentence = f"has {known or 'no address'} for this peer, but our own list has {own.advertise or 'no address'}"
        yield Finding(name, "warning", sentence, "make [[peers]] equal on both")
    if answer.get("reached"):
        yield Finding(name, "ok", f"reaches this peer at {known}")
    elif answer.get("reached") is False:
        port, reason = str(known).rpartition(":")[2], str(answer.get("reason"))
        ways = f"open TCP port {port} in the firewall of this device, or forward it if the device is behind NAT"
        place = "correct its advertise address on every device, or remove it there, so that this device only dials out"
        if "host name" in reason:
            advice = "correct the advertise address of this device in its list, or the DNS settings there"
        elif "no device answers" in reason:
            # This one is there, so that it is hardly the address of this one.
            advice = f"{place}; or {ways}"
        else:
            advice = f"{ways}; or {place}"
        sentence = f"cannot reach this peer: {reason}"
        if answer.get("link"):
            yield Finding(name, "warning", f"{sentence}; they are connected, since this peer dials as well", advice)
        else:
            yield _fault(name, RemoteError(sentence), advice)
    else:
        seen = answer["seen_as"]
        yield Finding(name, "ok", f"does not dial this peer; it sees connections from {seen.partition(':')[2] or seen}")


def _links(status: dict[str, Any] | None) -> Iterator[Finding]:
    for name, link in (status or {}).get("links", {}).items():
        if not link.get("up"):
            yield Finding(name, "warning", f"not connected: {link.get('problem') or 'no connection has been made yet'}")


class _Silent:
    """A handler for a transport without neighbours."""

    async def control(self, verb: str, arguments: dict[str, Any], caller: str) -> dict[str, Any]:
        return dict(EXAMINED)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a transport without neighbours does not call {name}")


@contextlib.asynccontextmanager
async def _answer(config: Config, security: Access | None) -> AsyncIterator[None]:
    """Listen as the peer would, so that neighbours can be asked to dial back; streams are turned away politely."""
    hello = HelloInfo(
        run=config.run.name,
        algorithm=config.algorithm.name,
        run_digest=config.run_digest(),
        start=StartModel(""),
        graph_digest="",
        num_peers=config.num_listed,
        name=config.own.name,
    )
    transport = Transport(
        me=config.peer.index,
        listen=config.peer.listen,
        neighbors=[],
        hello=hello,
        security=security if isinstance(security, Credentials | TokenAccess) else None,
        options=config.transport,
        handler=_Silent(),
    )
    await transport.start(at_home=False)
    try:
        yield
    finally:
        await transport.close("sotto doctor is done")


# linux/in.h and linux/in6.h; Python has no names for them.
_IP_MTU = 14
_IPV6_MTU = 24


def path_mtu(host: str, port: int) -> int | None:
    """Return the path MTU towards `host` in bytes, IP header included; None if it is not known here.

    It is that of the first interface until a router on the way has asked for less. Sends nothing.
    """
    if sys.platform != "linux":
        return None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)
            if family == socket.AF_INET6:
                return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
            return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return None
