from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

import pytest

from peer.net import tcp_info

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_counts_what_was_sent(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} here")
    with server, socket.create_connection(server.getsockname()[:2]) as caller, server.accept()[0] as answerer:
        caller.sendall(bytes(10_000))
        answerer.sendall(b"thanks")
        answerer.recv(10_000, socket.MSG_WAITALL)
        caller.recv(6, socket.MSG_WAITALL)
        port = caller.getsockname()[1]
        (found,) = (each for each in tcp_info.connections() if each.local == (host, port))
        counters = found.counters()
        assert counters is not None
        assert (counters.bytes_sent, counters.bytes_received) == (10_000, 6)
        headers = counters.segments_sent * counters.header_bytes
        assert counters.packet_bytes_sent == 10_000 + headers
        assert counters.delivered_bytes_per_s > 0
        assert counters.header_bytes == (40 if ":" in host else 20) + 32
        caller.sendall(b"asking took nothing away")
        assert answerer.recv(100) == b"asking took nothing away"


def dialled(server: socket.socket) -> tuple[socket.socket, tcp_info.Connection]:
    caller = socket.create_connection(server.getsockname())
    (found,) = (each for each in tcp_info.connections() if each.local == caller.getsockname())
    return caller, found


def of_a_pipe() -> int:
    return os.pipe()[0]


def of_a_file() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def of_unix() -> int:
    # As workers of a DataLoader make them.
    return socket.socketpair()[0].detach()


def of_netlink() -> int:
    # Its protocol has the number of TCP's, 6.
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_XFRM).detach()


def of_udp() -> int:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()


def of_a_listener() -> int:
    return socket.create_server(("127.0.0.1", 0)).detach()


def of_another_connection() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()).detach()


@pytest.mark.parametrize(
    "another", [of_a_pipe, of_a_file, of_unix, of_netlink, of_udp, of_a_listener, of_another_connection]
)
def test_a_descriptor_that_belongs_to_something_else_by_now_counts_nothing(another: Callable[[], int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller, found = dialled(server)
        with caller:
            descriptor = another()
            os.dup2(descriptor, found.descriptor)
            assert found.counters() is None
            assert tcp_info.connections() is not None
            assert os.fstat(found.descriptor).st_ino == os.fstat(descriptor).st_ino
        assert found.counters() is None
        os.close(descriptor)


def test_counters_of_a_connection_that_another_thread_closes_meanwhile_count_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller, found = dialled(server)
        with caller, socket.create_connection(server.getsockname()) as other:
            asked = tcp_info._option

            def option(descriptor: int, level: int, name: int, size: int) -> bytes:
                if name == socket.TCP_INFO:
                    os.dup2(other.fileno(), found.descriptor)
                return asked(descriptor, level, name, size)

            assert found.counters() is not None
            monkeypatch.setattr(tcp_info, "_option", option)
            assert found.counters() is None


def test_sockets_of_the_script_stay_as_they_are() -> None:
    before = socket.getdefaulttimeout()
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server:
        caller, found = dialled(server)
        with caller:
            socket.setdefaulttimeout(5)
            try:
                assert found.counters() is not None
                tcp_info.connections()
                tcp_info.listening()
            finally:
                socket.setdefaulttimeout(before)
            for each in (ours, server, caller):
                assert os.get_blocking(each.fileno())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ipv4:10.0.0.1:7700", ("10.0.0.1", 7700)),
        ("ipv6:[::1]:7700", ("::1", 7700)),
        ("ipv6:%5B::1%5D:7700", ("::1", 7700)),
        ("ipv6:[::ffff:10.0.0.1]:7700", ("10.0.0.1", 7700)),
        ("unix:/tmp/socket", None),
        ("ipv4:10.0.0.1", None),
        ("ipv4:nonsense:7700", None),
        ("", None),
    ],
)
def test_addresses_of_callers_are_read(text: str, address: tuple[str, int] | None) -> None:
    assert tcp_info.parse_peer(text) == address


def test_only_the_sockets_that_are_named_stop_listening() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        host, port = ours.getsockname()
        # The script may listen on the same port of another address.
        with socket.create_server(("127.0.0.2", port)) as other:
            inode = os.fstat(ours.fileno()).st_ino
            assert tcp_info.listening()[inode] == port
            with socket.create_connection((host, port)) as caller, ours.accept()[0] as accepted:
                named = (inode, os.fstat(accepted.fileno()).st_ino)
                tcp_info.stop_listening(lambda inode, port: inode in named)
                with pytest.raises(OSError, match="Bad file descriptor"):
                    ours.getsockname()
                ours.detach()
                accepted.sendall(b"on")
                assert caller.recv(2) == b"on"
            with socket.create_connection(("127.0.0.2", port)):
                other.accept()[0].close()
