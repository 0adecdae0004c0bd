"""Addresses as people write them: "host:port", "[::1]:port"."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple

from peer.errors import ConfigError, remedy

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
"""A host name or peer name."""
_MAX_LABEL, _MAX_HOST = 63, 253
"""Limits of DNS in characters: one label, and the whole name."""
_BROADCAST = ipaddress.ip_address("255.255.255.255")
RESERVED_NAMES = frozenset({"operator"})
"""Names that no peer is given, in lower case."""


def split_address(address: str, *, key: str) -> tuple[str, int]:
    """Return host and port of an address. Raises ConfigError that names the setting `key`."""
    host, colon, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not host or not is_port or (":" in host and host[0] != "["):
        raise ConfigError("is not an address with a port", key=key, value=address, valid="host:port, [ipv6]:port")
    return host.strip("[]"), int(port)


def is_host_name(host: str) -> bool:
    """Return whether a text can be the name of a host, which DNS lets be longer than the name of a peer."""
    return len(host) <= _MAX_HOST and max(map(len, host.split("."))) <= _MAX_LABEL and NAME.fullmatch(host) is not None


def why_no_name(name: str, others: Iterable[str] = ()) -> str | None:
    """Return why no peer can be given a name, where `others` have theirs; None if one can. To be asked wherever a name
    begins: when a cluster is written, a request made, or a certificate signed."""
    if len(name) > 63 or not NAME.fullmatch(name):
        return "a name has letters, digits, '-' and '.', at most 63"
    if name.casefold() in RESERVED_NAMES:
        return "that is what an operator's certificate is made out to"
    # TLS takes names for the same that differ in case only.
    taken = next((other for other in others if other.casefold() == name.casefold()), None)
    return None if taken is None else f"{taken!r} has it, and names that differ in case only are the same"


def dialled_address(address: str, *, key: str) -> tuple[str, int]:
    """Return host and port of an address that others are to dial. Raises ConfigError that names the setting `key`."""
    host, port = split_address(address, key=key)
    problem = why_never_dialled(host)
    if problem is None and not port:
        problem = "has port 0, at which nobody can be dialled"
    if problem is not None:
        raise ConfigError(problem, key=key, value=address, valid="host:port, [ipv6]:port")
    return host, port


def why_never_dialled(host: str) -> str | None:
    """Return why nobody can dial a host, in any network; None if somebody may."""
    if "%" in host:
        return "has a scope, which means something else on each device"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch(r"[\w.-]+", host):
            return "is neither a host name nor an IP address"
        # A reader that takes such a text for a number dials somewhere.
        return "is no IPv4 address, which has four numbers up to 255" if re.fullmatch(r"[0-9.]+", host) else None
    address = _unmapped(address)
    if address.is_unspecified:
        return "stands for all addresses of a device to listen on, and leads to none"
    if address.is_multicast or address == _BROADCAST:
        return "is the address of many devices"
    if address.version == 6 and address.is_link_local:
        return "needs a scope, which means something else on each device"
    return None


def is_loopback(host: str) -> bool:
    """Return whether a host is the device that asks, on whichever device."""
    try:
        return _unmapped(ipaddress.ip_address(host)).is_loopback
    except ValueError:
        return host.casefold().rstrip(".").rpartition(".")[2] == "localhost"


def is_private(host: str) -> bool:
    """Return whether a host is an address that only its own network has, such as that of an office."""
    try:
        return _unmapped(ipaddress.ip_address(host)).is_private and not is_loopback(host)
    except ValueError:
        return False


def _unmapped(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


class NotBound(NamedTuple):
    """Why an address cannot be listened on."""

    sentence: str
    advice: str
    passes: bool = False
    """Whether it may pass by itself: an interface, a tunnel or a name that is not there yet."""

    def error(self, key: str, value: str) -> ConfigError:
        """Return the error for the setting `key`."""
        error = ConfigError(f"{self.sentence}; {self.advice}", key=key, value=value)
        error.may_pass = self.passes
        return error


def why_not_bound(host: str, port: int, *, key: str) -> NotBound | None:
    """Return why an address cannot be listened on, by trying with a plain socket; None if it can. `key`: the setting
    that names it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return not_bound(error, host, port, key=key)
    return None


def not_bound(error: OSError, host: str, port: int, *, key: str) -> NotBound:
    """Return the text of an error that ended an attempt to listen."""
    if isinstance(error, socket.gaierror):
        return NotBound(f"the host name {host!r} is not known here", f"correct {key}, or the DNS settings", True)
    if error.errno == errno.EADDRINUSE:
        return NotBound(
            f"port {port} is in use by another program", f"stop that program, or change {key}: choose another port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        advice = f"set {key} to 0.0.0.0:{port}, unless an interface with that address is still to come"
        return NotBound(f"this machine has no address {host}", advice, True)
    if error.errno in (errno.EACCES, errno.EPERM) and 0 < port < 1024:
        return NotBound(f"only root may listen on port {port}", f"set {key} to a port from 1024 on")
    return NotBound(f"{host} port {port} cannot be listened on: {error.strerror}", remedy(error))
