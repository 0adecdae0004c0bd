"""What the kernel counted on one TCP connection of this process.

gRPC opens its sockets itself and hides them, so they are found by their addresses among the open files of the process
and asked for TCP_INFO. Nothing here keeps a socket open: a duplicated descriptor would hold back the FIN.
Linux only; elsewhere nothing is found, and nothing is reported rather than guessed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

_TIMESTAMPS = 1  # TCPI_OPT_TIMESTAMPS
_TCP_INFO_BYTES = 216


@dataclass(frozen=True)
class TcpCounters:
    """Counters of one connection since it was opened. Bytes are TCP payload, so TLS and HTTP/2 are in them."""

    bytes_sent: int
    """With retransmissions."""
    bytes_received: int
    bytes_retransmitted: int
    segments_sent: int
    segments_received: int
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
    """A TCP connection of this process: its descriptor, its family and both (normalised) addresses."""

    descriptor: int
    family: socket.AddressFamily
    local: tuple[str, int]
    remote: tuple[str, int]

    def counters(self) -> TcpCounters | None:
        """Return the kernel's counters; None if the descriptor no longer belongs to this connection."""
        try:
            # Every round asks every link: a kind that is told need not be asked for.
            sock = socket.socket(self.family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=self.descriptor)
        except OSError:
            return None
        try:
            if _addresses(sock) != (self.local, self.remote):
                return None
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            return None
        finally:
            sock.detach()
        if len(info) < _TCP_INFO_BYTES:
            return None
        ip_header = 40 if ":" in self.remote[0] else 20
        # struct tcp_info of linux/tcp.h: tcpi_options at 5, tcpi_bytes_received at 128, tcpi_segs_out and _in at 136,
        # tcpi_bytes_sent and _retrans at 200.
        (received,) = struct.unpack_from("=Q", info, 128)
        segments_out, segments_in = struct.unpack_from("=II", info, 136)
        sent, retransmitted = struct.unpack_from("=QQ", info, 200)
        tcp_header = 32 if info[5] & _TIMESTAMPS else 20
        return TcpCounters(sent, received, retransmitted, segments_out, segments_in, ip_header + tcp_header)


def connections() -> list[Connection]:
    """Return all established TCP connections of this process."""
    found = []
    for descriptor in _descriptors():
        with _borrowed(descriptor) as sock:
            if sock is not None and (addresses := _addresses(sock)) is not None:
                found.append(Connection(descriptor, sock.family, *addresses))
    return found


def stop_listening(port: int) -> None:
    """Close the descriptors of this process that listen on a TCP port: in a fork, whose parent goes on listening."""
    for descriptor in _descriptors():
        with _borrowed(descriptor) as sock:
            listens = (
                sock is not None
                and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and sock.getsockname()[1] == port
            )
        if listens:
            os.close(descriptor)


def parse_peer(peer: str) -> tuple[str, int] | None:
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


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """Lend a socket object for a descriptor that somebody else owns; None if it is no TCP socket."""
    sock = None
    try:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            sock = socket.socket(fileno=descriptor)
    except OSError:
        pass
    try:
        is_tcp = sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6)
        yield sock if is_tcp and sock is not None and sock.type == socket.SOCK_STREAM else None
    finally:
        if sock is not None:
            sock.detach()


def _addresses(sock: socket.socket) -> tuple[tuple[str, int], tuple[str, int]] | None:
    try:
        local, remote = sock.getsockname(), sock.getpeername()
        return (_normalise(local[0]), local[1]), (_normalise(remote[0]), remote[1])
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=1024)
def _normalise(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)
