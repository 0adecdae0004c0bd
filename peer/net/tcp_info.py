"""The kernel's counters of one TCP connection of this process.

gRPC opens its sockets itself and hides them, so they are found by their addresses among the open files of the process
and asked for TCP_INFO. Nothing here keeps a socket open: a duplicated descriptor would hold back the FIN.

The process may be a training script's, whose threads open and close files at any time. A descriptor may therefore
change hands meanwhile: it is identified before and after the query, and the answer counts only if it was the connection
both times. It is asked by system calls, not through a socket object. Such an object closes its descriptor when an
exception drops it, and makes it non-blocking where the script has set `socket.setdefaulttimeout`. Linux only; elsewhere
nothing is found, and nothing is reported rather than guessed.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any
from urllib.parse import unquote

Address = tuple[str, int]

_TIMESTAMPS = 1  # TCPI_OPT_TIMESTAMPS
_TCP_INFO_BYTES = 216
_SOCKADDR_BYTES = 128  # struct sockaddr_storage


@dataclass(frozen=True)
class TcpCounters:
    """Counters of one connection since it was opened. Bytes are TCP payload, so TLS and HTTP/2 are in them."""

    bytes_sent: int
    """Bytes sent, with retransmissions."""
    bytes_received: int
    bytes_retransmitted: int
    segments_sent: int
    segments_received: int
    delivered_bytes_per_s: int
    """Rate at which the other end has confirmed bytes lately, while there was something to send; 0 before."""
    header_bytes: int
    """TCP and IP headers of one segment (SYN options aside)."""

    @property
    def packet_bytes_sent(self) -> int:
        """Bytes that left through the interface: payload plus TCP and IP headers, link-layer headers left out."""
        return self.bytes_sent + self.segments_sent * self.header_bytes

    @property
    def packet_bytes_received(self) -> int:
        return self.bytes_received + self.segments_received * self.header_bytes


@dataclass(frozen=True)
class Connection:
    """A TCP connection of this process: where it was found, and both (normalised) addresses."""

    descriptor: int
    local: Address
    remote: Address

    def counters(self) -> TcpCounters | None:
        """Return the kernel's counters; None if the descriptor no longer belongs to this connection."""
        info = _option(self.descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        # Asked last: another thread may have closed it, and opened something else, just before.
        addresses = _address(self.descriptor, "getsockname"), _address(self.descriptor, "getpeername")
        if len(info) < _TCP_INFO_BYTES or addresses != (self.local, self.remote):
            return None
        ip_header = 40 if ":" in self.remote[0] else 20
        # struct tcp_info of linux/tcp.h: tcpi_options at 5, tcpi_bytes_received at 128, tcpi_segs_out and _in at 136,
        # tcpi_delivery_rate at 160, tcpi_bytes_sent and _retrans at 200.
        (received,) = struct.unpack_from("=Q", info, 128)
        segments_out, segments_in = struct.unpack_from("=II", info, 136)
        (rate,) = struct.unpack_from("=Q", info, 160)
        sent, retransmitted = struct.unpack_from("=QQ", info, 200)
        tcp_header = 32 if info[5] & _TIMESTAMPS else 20
        return TcpCounters(sent, received, retransmitted, segments_out, segments_in, rate, ip_header + tcp_header)


def connections() -> list[Connection]:
    """Return all established TCP connections of this process."""
    found = []
    for descriptor in _descriptors():
        local, remote = _address(descriptor, "getsockname"), _address(descriptor, "getpeername")
        if local is not None and remote is not None and _is_tcp(descriptor):
            found.append(Connection(descriptor, local, remote))
    return found


def listening() -> dict[int, int]:
    """Return the TCP sockets of this process that listen: inode, which no other socket has while it is open → port."""
    return {inode: port for _, inode, port in _listeners()}


def stop_listening(is_ours: Callable[[int, int], bool]) -> None:
    """Close the descriptors of this process that listen and of which `is_ours(inode, port)`: in a fork, whose parent
    goes on listening. The fork has no thread but this one, so that none of them changes meanwhile."""
    for descriptor, inode, port in _listeners():
        if is_ours(inode, port):
            os.close(descriptor)


def parse_peer(peer: str) -> Address | None:
    """Return address and port of gRPC's "ipv4:10.0.0.1:7700" or "ipv6:[::1]:7700"; None if it is something else."""

    family, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return _normalise(host.strip("[]")), int(port)
    except ValueError:
        return None


def _descriptors() -> list[int]:
    if sys.platform != "linux":
        return []
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []


def _listeners() -> list[tuple[int, int, int]]:
    """Return (descriptor, inode, port) of the TCP sockets that listen."""
    found = []
    for descriptor in _descriptors():
        listens = any(_option(descriptor, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, 4))
        local = _address(descriptor, "getsockname") if listens and _is_tcp(descriptor) else None
        try:
            if local is not None:
                found.append((descriptor, os.fstat(descriptor).st_ino, local[1]))
        except OSError:
            continue  # Another thread has closed it.
    return found


def _is_tcp(descriptor: int) -> bool:
    """Return whether a descriptor is a TCP socket: netlink and others have protocols of the same numbers."""
    family, protocol = (
        int.from_bytes(_option(descriptor, socket.SOL_SOCKET, option, 4), sys.byteorder)
        for option in (socket.SO_DOMAIN, socket.SO_PROTOCOL)
    )
    return family in (socket.AF_INET, socket.AF_INET6) and protocol == socket.IPPROTO_TCP


def _option(descriptor: int, level: int, option: int, size: int) -> bytes:
    """Return the result of getsockopt(2), at most `size` bytes; none where the descriptor is no such socket."""
    value, length = ctypes.create_string_buffer(size), ctypes.c_uint32(size)
    failed = _libc().getsockopt(descriptor, level, option, value, ctypes.byref(length))
    return b"" if failed else value.raw[: length.value]


def _address(descriptor: int, call: str) -> Address | None:
    """Return the result of getsockname(2) or getpeername(2); None where that is no IP address."""
    value, length = ctypes.create_string_buffer(_SOCKADDR_BYTES), ctypes.c_uint32(_SOCKADDR_BYTES)
    if _libc()[call](descriptor, value, ctypes.byref(length)):
        return None
    # struct sockaddr_in: family, port, address; sockaddr_in6 has the flow between port and address.
    (family,), (port,) = struct.unpack_from("=H", value), struct.unpack_from("!H", value, 2)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host = value.raw[4:8] if family == socket.AF_INET else value.raw[8:24]
    return _normalise(socket.inet_ntop(family, host)), port


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


@lru_cache(maxsize=1024)
def _normalise(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)
