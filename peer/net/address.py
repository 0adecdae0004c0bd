"""Addresses as people write them: "host:port", "[::1]:port"."""

from __future__ import annotations

import errno
import socket
from typing import NamedTuple

from peer.errors import ConfigError, remedy


def split_address(address: str, *, key: str) -> tuple[str, int]:
    """Return host and port of an address. Raises ConfigError that names the setting `key`."""
    host, colon, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not host or not is_port or (":" in host and host[0] != "["):
        raise ConfigError("is not an address with a port", key=key, value=address, valid="host:port, [ipv6]:port")
    return host.strip("[]"), int(port)


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
    """Return what an error says that an attempt to listen ended with."""
    if isinstance(error, socket.gaierror):
        return NotBound(f"the host name {host!r} is not known here", f"correct {key}, or the DNS settings", True)
    if error.errno == errno.EADDRINUSE:
        return NotBound(f"port {port} is in use by another program", f"stop that program, or change {key}")
    if error.errno == errno.EADDRNOTAVAIL:
        advice = f"set {key} to 0.0.0.0:{port}, unless an interface with that address is still to come"
        return NotBound(f"this machine has no address {host}", advice, True)
    if error.errno in (errno.EACCES, errno.EPERM) and 0 < port < 1024:
        return NotBound(f"only root may listen on port {port}", f"set {key} to a port from 1024 on")
    return NotBound(f"{host} port {port} cannot be listened on: {error.strerror}", remedy(error))
