"""Certificates are renewed while peers run: new connections show the new ones, and the new keys sign."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from peer.config.options import SecurityOptions
from peer.errors import SecurityError
from peer.gossip.membership import ChangeKind
from peer.net.security.certificates import identify
from peer.net.security.credentials import Credentials, load_credentials
from peer.ops.enrollment import admit, propose, request, revoke
from peer.train.threads import use_one_thread
from tests.daemon.test_members import Devices


def renew(devices: Devices, peer: int) -> str:
    """Give a device a new key and certificate, as `sotto init --join` and `sotto admin sign` do; return its print."""
    device = devices.kits.parent / f"renewed-{peer}"
    request(device, f"peer-{peer}", None, 7700)
    admit(devices.kits, propose(devices.kits, (device / "request.pem").read_bytes()), days=30)
    folder = devices.files[peer].parent
    (device / "peer.key").replace(folder / "peer.key")
    return identify((folder / "peer.pem").read_bytes()).thumbprint


@pytest.mark.slow
def test_certificates_are_renewed_without_a_restart(tmp_path: Path) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3).run(_renew)


async def _renew(devices: Devices) -> None:
    await devices.train(*range(3), beyond=2)
    assert "certificate_until" not in await devices.ask(0, "reload")
    for peer in range(3):
        thumbprint = renew(devices, peer)
        assert "certificate_until" in await devices.ask(peer, "reload")
        access = devices.daemons[peer].local.access
        assert isinstance(access, Credentials)
        assert access.identity.thumbprint == thumbprint
        assert devices.status(peer)["certificate"]["days_left"] in (28, 29)
    # With the old certificates revoked, only the new ones are let in: as diallers and as listeners.
    for peer in range(3):
        _, pem = revoke(devices.kits, f"peer-{peer}", keep_newest=True)
    for peer in range(3):
        transport = devices.daemons[peer].neighbors.transport
        with contextlib.suppress(SecurityError):
            transport._revocations.take(pem)  # type: ignore[union-attr]
    await asyncio.sleep(0.5)
    reached = max(devices.participant(peer).round for peer in range(3))
    await devices.until(lambda: all(devices.participant(peer).round > reached + 5 for peer in range(3)))
    # And a statement that is signed with the new key is believed.
    answer = await devices.daemons[0].loop.requests.announce(ChangeKind.LEAVE, 0)  # type: ignore[attr-defined]
    assert answer["name"] == "peer-0"
    await devices.until(lambda: devices.members(1) == ["peer-1", "peer-2"])
    await devices.stop(1, 2)


def test_a_certificate_of_another_peer_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    devices = Devices(tmp_path / "kits", rounds=10, num_peers=2)
    one, other = (_credentials(devices, peer) for peer in range(2))
    before = one.identity
    with pytest.raises(SecurityError, match="not that of 'peer-0'"):
        one.renew(other)
    assert one.identity == before
    assert not one.renew(_credentials(devices, 0))


def _credentials(devices: Devices, peer: int) -> Credentials:
    found = load_credentials(SecurityOptions(), devices.files[peer].parent, f"peer-{peer}")
    assert isinstance(found, Credentials)
    return found
