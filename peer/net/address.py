"""Addresses as people write them: "host:port", "[::1]:port"."""

from __future__ import annotations

import errno
import socket

from peer.errors import ConfigError


def split_address(address: str, *, key: str) -> tuple[str, int]:
    """Return host and port of an address. Raises ConfigError that names the setting `key`."""
    host, colon, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not host or not is_port or (":" in host and host[0] != "["):
        raise ConfigError("is not an address with a port", key=key, value=address, valid="host:port, [ipv6]:port")
    return host.strip("[]"), int(port)


def why_not_bound(host: str, port: int) -> str:
    """Return why an address cannot be listened on, by trying with a plain socket."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except socket.gaierror:
        return f"the host name {host!r} is not known here"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use by another program; choose another port, or end that program"
        if error.errno == errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}; listen on 0.0.0.0 and put the public address into advertise"
        return f"cannot be listened on: {error.strerror}"
    return "cannot be listened on"
