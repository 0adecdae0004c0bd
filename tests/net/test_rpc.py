from __future__ import annotations

import ast
import asyncio
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import peer
from peer.net import rpc


def test_grpc_is_imported_in_one_place_where_its_environment_is_set_first() -> None:
    """It reads its environment when it is imported, whoever imports it first."""
    root = Path(peer.__file__).parent
    importing = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "grpc" for name in names):
                importing.append(path)
                break
    assert importing == [Path(rpc.__file__)]
    source = importing[0].read_text()
    for variable in ("GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY", "GRPC_DNS_RESOLVER"):
        assert source.index(f'setdefault("{variable}"') < source.index("\nimport grpc\n")


@pytest.mark.parametrize("name", ["job #2", "50%20off", "what?", "Ähre", os.fsdecode(b"caf\xe9")])
def test_a_socket_is_where_its_path_says_whatever_that_holds(name: str, tmp_path: Path) -> None:
    (folder := tmp_path / name).mkdir()
    address = rpc.socket_address(folder / "own.sock")

    async def story() -> None:
        server = rpc.Server((), max_concurrent=8)
        assert server.bind(address, None)
        await server.start()
        assert [*folder.iterdir()] == [folder / "own.sock"]
        assert [*tmp_path.iterdir()] == [folder]
        with pytest.raises(rpc.StreamLost) as lost:
            await rpc.Channel(address, "ada", None).call("nobody", "Nothing", b"", timeout_s=20)
        assert lost.value.status is rpc.Status.UNIMPLEMENTED, "somebody listens there"
        await server.stop(0.0)

    asyncio.run(story())


WRAPPER = Path("/usr/lib") / f"{platform.machine()}-linux-gnu" / "libnss_wrapper.so"

DIAL = """
import asyncio, sys
from peer.net.rpc import Channel, StreamLost

async def main():
    try:
        await Channel(sys.argv[1], "ada", None).call("nobody", "Nothing", b"", timeout_s=20)
    except StreamLost as lost:
        print(lost.status.name, lost)

asyncio.run(main())
"""


@pytest.mark.skipif(not WRAPPER.exists(), reason="libnss-wrapper is not installed, which gives this machine a name")
def test_a_name_that_the_machine_knows_by_other_means_than_dns_is_dialled(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 pi-a.local\n")
    environment = os.environ | {"LD_PRELOAD": str(WRAPPER), "NSS_WRAPPER_HOSTS": str(hosts)}
    environment.pop("GRPC_DNS_RESOLVER", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said = subprocess.run(
        [sys.executable, "-c", DIAL, f"pi-a.local:{port}"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "Connection refused" in said, "the name was resolved"
