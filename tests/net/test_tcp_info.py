from __future__ import annotations

import os
import socket
import sys

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
        assert counters.header_bytes == (40 if ":" in host else 20) + 32
        caller.sendall(b"asking took nothing away")
        assert answerer.recv(100) == b"asking took nothing away"


def test_a_descriptor_that_belongs_to_something_else_by_now_counts_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        port = caller.getsockname()[1]
        (found,) = (each for each in tcp_info.connections() if each.local == ("127.0.0.1", port))
        caller.close()
        assert found.counters() is None
        with open(os.devnull, "rb") as file:
            assert file.fileno() == found.descriptor
            assert found.counters() is None
        with socket.create_connection(server.getsockname()) as other:
            assert other.getsockname()[1] != port
            assert found.counters() is None


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


def test_only_the_socket_that_listens_on_a_port_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as other:
        port = ours.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller, ours.accept()[0] as accepted:
            tcp_info.stop_listening(port)
            with pytest.raises(OSError, match="Bad file descriptor"):
                ours.getsockname()
            ours.detach()
            accepted.sendall(b"on")
            assert caller.recv(2) == b"on"
        assert other.getsockname()[1] != port
