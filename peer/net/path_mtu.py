"""The largest packet on the way to another device, as far as the kernel has learned."""

from __future__ import annotations

import socket
import sys

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
