from __future__ import annotations

import asyncio
import datetime
from pathlib import Path

import pytest

from peer.config.options import SecurityOptions, TransportOptions
from peer.errors import SecurityError
from peer.net.control import call_control
from peer.net.rpc import Caller, Server
from peer.net.security.authority import CertificateAuthority, Issued
from peer.net.security.certificates import Role
from peer.net.security.credentials import Credentials, load_credentials
from peer.net.security.proofs import prove
from peer.net.security.revocation_list import RevocationList
from peer.net.services import CONTROL_SERVICE
from peer.proto.sottovoce.v1 import control_pb2
from tests.net.transport_peers import NAMES, Mind, build, dialled, passive, running, until

OPTIONS = TransportOptions(backoff_max_s=0.3, dial_timeout_s=5)


@pytest.fixture
def authority() -> CertificateAuthority:
    return CertificateAuthority.create("tests")


def held(authority: CertificateAuthority, issued: Issued, folder: Path) -> Credentials:
    """Return credentials whose list lies in a folder of their own."""
    folder.mkdir()
    listed = RevocationList(authority.certificate, folder / "revoked.pem")
    return Credentials(issued.identity, authority.certificate, issued.certificate, issued.key, listed)


def test_a_list_names_what_was_revoked_and_when(authority: CertificateAuthority) -> None:
    ada, ben = authority.issue("ada").identity, authority.issue("ben").identity
    when = datetime.datetime(2030, 5, 1, 12, tzinfo=datetime.UTC)
    listed = RevocationList(authority.certificate)
    listed.check(ada.serial, "ada")
    assert listed.take(authority.revoke(b"", [ada.serial], now=when))
    listed.check(ben.serial, "ben")
    with pytest.raises(SecurityError, match="the certificate of 'ada' was revoked on 2030-05-01 12:00 UTC"):
        listed.check(ada.serial, "ada")


def test_a_longer_list_keeps_what_the_shorter_one_had_and_no_older_one_replaces_it(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    first = authority.revoke(b"", [11])
    second = authority.revoke(first, [22])
    listed = RevocationList(authority.certificate, tmp_path / "revoked.pem")
    assert listed.take(second)
    assert not listed.take(first)
    assert 11 in listed.entries
    assert 22 in listed.entries
    assert (tmp_path / "revoked.pem").read_bytes() == second
    assert RevocationList(authority.certificate, tmp_path / "revoked.pem").number == 2


def test_a_file_that_changes_is_noticed_and_an_older_one_put_back_changes_nothing(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    file = tmp_path / "revoked.pem"
    listed = RevocationList(authority.certificate, file)
    assert not listed.reload()
    first = authority.revoke(b"", [11])
    file.write_bytes(authority.revoke(first, [22]))
    assert listed.reload()
    assert not listed.reload()
    file.write_bytes(first)
    assert not listed.reload()
    assert 22 in listed.entries


def test_a_file_that_was_read_before_a_neighbour_brought_a_newer_list_changes_nothing(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    """The transport reads the file in a thread, where a list may come in between."""
    file = tmp_path / "revoked.pem"
    listed = RevocationList(authority.certificate, file)
    first = authority.revoke(b"", [11])
    file.write_bytes(first)
    read = listed.read_if_changed()
    assert read == first
    assert listed.take(authority.revoke(first, [22]))
    assert not listed.adopt(read, str(file))
    assert 22 in listed.entries


@pytest.mark.parametrize("data", [b"", b"no list", b"x" * 70_000], ids=["empty", "text", "long"])
def test_what_is_no_list_is_refused(authority: CertificateAuthority, data: bytes) -> None:
    listed = RevocationList(authority.certificate)
    with pytest.raises(SecurityError):
        listed.take(data)
    assert listed.number == 0


def test_a_list_of_another_authority_of_the_same_name_is_refused(authority: CertificateAuthority) -> None:
    forged = CertificateAuthority.create("tests").revoke(b"", [11])
    with pytest.raises(SecurityError, match="not signed by this run's CA"):
        RevocationList(authority.certificate).take(forged)


def test_a_peer_whose_own_certificate_is_revoked_does_not_start(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    issued = authority.issue("ada")
    authority.write(tmp_path / "ca.pem", tmp_path / "ca.key")
    issued.write(tmp_path / "peer.pem", tmp_path / "peer.key")
    (tmp_path / "revoked.pem").write_bytes(authority.revoke(b"", [issued.identity.serial]))
    with pytest.raises(SecurityError, match=r"peer.pem: the certificate of 'ada' was revoked on .*sotto init --join"):
        load_credentials(SecurityOptions(), tmp_path, "ada")


def test_a_revoked_peer_is_cut_off_everywhere_while_the_others_go_on(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    """ada listens to ben and cleo, cleo listens to ben. Only ada's file changes; cleo hears of it from ada."""
    issued = [authority.issue(name) for name in NAMES[:3]]
    own = [held(authority, each, tmp_path / each.identity.name) for each in issued]

    async def story() -> None:
        ada, ben, cleo = Mind(), Mind(), Mind()
        first = build(0, ada, [passive(1), passive(2)], security=own[0], options=OPTIONS)
        async with running(first):
            third = build(2, cleo, [dialled(0, first.port), passive(1)], security=own[2], options=OPTIONS)
            async with running(third):
                places = [dialled(0, first.port), dialled(2, third.port)]
                second = build(1, ben, places, security=own[1], listen=None, options=OPTIONS)
                await second.start()
                await until(lambda: first.is_up(1) and first.is_up(2) and third.is_up(1))
                listed = authority.revoke(b"", [issued[1].identity.serial])
                (tmp_path / "ada" / "revoked.pem").write_bytes(listed)
                await until(lambda: not first.is_up(1) and not third.is_up(1))
                assert first.refusals[1] == third.refusals[1]
                assert "the certificate of 'ben' was revoked" in first.refusals[1]
                assert (tmp_path / "cleo" / "revoked.pem").read_bytes() == listed
                # It is told why on each stream, and not let in again.
                await until(lambda: "was revoked" in second.refusals.get(0, ""))
                await second.close("nobody wants it")
                assert first.is_up(2)
                cleo.send(0, b"training goes on")
                await until(lambda: (2, b"training goes on") in ada.frames)

    asyncio.run(story())


def test_a_dialler_does_not_believe_a_listener_whose_certificate_is_revoked(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    """TLS alone would accept it: the name is right, and the authority signed it."""
    ada, ben = authority.issue("ada"), authority.issue("ben")
    thief, honest = held(authority, ada, tmp_path / "thief"), held(authority, ben, tmp_path / "ben")
    assert honest.revoked is not None
    honest.revoked.take(authority.revoke(b"", [ada.identity.serial]))

    async def story() -> None:
        listener = build(0, Mind(), [passive(1)], security=thief)
        async with running(listener):
            dialler = build(1, Mind(), [dialled(0, listener.port)], security=honest, listen=None, options=OPTIONS)
            async with running(dialler):
                await until(lambda: 0 in dialler.refusals)
                assert "the certificate of 'ada' was revoked" in dialler.refusals[0]
                await until(lambda: "was revoked" in listener.refusals.get(1, "was revoked"))

    asyncio.run(story())


def test_a_revoked_operator_is_refused_and_any_member_may_bring_the_list(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    operator = authority.issue("operator", role=Role.OPERATOR)
    own = held(authority, authority.issue("ada"), tmp_path / "ada")
    other = authority.credentials(authority.issue("ben"))

    async def story() -> None:
        listener = build(0, Mind(), [passive(1)], security=own)
        async with running(listener):
            address = f"127.0.0.1:{listener.port}"
            listed = authority.revoke(b"", [operator.identity.serial]).decode()
            answer = await call_control(address, "revoke", {"list": listed}, name="ada", security=other)
            assert answer == {"number": 1, "revoked": 1, "news": True}
            with pytest.raises(SecurityError, match="the certificate of 'operator' was revoked"):
                await call_control(address, "status", name="ada", security=authority.credentials(operator))

    asyncio.run(story())


def test_a_running_peer_that_is_revoked_ends_with_that_sentence(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    issued = authority.issue("ada")
    own = held(authority, issued, tmp_path / "ada")

    async def story() -> None:
        listener = build(0, Mind(), [passive(1)], security=own)
        await listener.start()
        try:
            (tmp_path / "ada" / "revoked.pem").write_bytes(authority.revoke(b"", [issued.identity.serial]))
            with pytest.raises(SecurityError, match=r"was revoked on .*: this peer may no longer take part"):
                await listener.wait_closed()
        finally:
            await listener.close("it must")

    asyncio.run(story())


def test_a_caller_does_not_believe_the_answer_of_a_peer_whose_certificate_is_revoked(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    """TLS alone would: the thief of ada's key sits where ada was, and says that all is well."""
    stolen = authority.issue("ada")
    thief = authority.credentials(stolen)
    operator = held(authority, authority.issue("operator", role=Role.OPERATOR), tmp_path / "operator")
    assert operator.revoked is not None

    async def story() -> None:
        listener = build(0, Mind(), [passive(1)], security=thief)
        async with running(listener):
            address = f"127.0.0.1:{listener.port}"
            assert (await call_control(address, "status", name="ada", security=operator))["state"] == "running"
            operator.revoked.take(authority.revoke(b"", [stolen.identity.serial]))
            with pytest.raises(SecurityError, match="not to be believed: the certificate of 'ada' was revoked"):
                await call_control(address, "status", name="ada", security=operator)

    asyncio.run(story())


@pytest.mark.parametrize("lie", ["no proof", "another's proof", "another answer"])
def test_a_caller_does_not_believe_an_answer_without_the_proof_for_it(
    authority: CertificateAuthority, lie: str
) -> None:
    ada, ben = (authority.credentials(authority.issue(name)) for name in ("ada", "ben"))
    operator = authority.credentials(authority.issue("operator", role=Role.OPERATOR))

    async def answer(caller: Caller, request: bytes) -> bytes:
        challenge = control_pb2.ControlRequest.FromString(request).challenge
        response = control_pb2.ControlResponse(result='{"stopped": true}')
        if lie != "no proof":
            said = response.result.encode() if lie == "another's proof" else b"{}"
            prover = ben if lie == "another's proof" else ada
            response.certificate, response.proof = prove(prover, challenge, verifier="operator", answer=said)
        return response.SerializeToString()

    async def story() -> None:
        server = Server([], max_concurrent=4)
        server.serve_calls(CONTROL_SERVICE, {"Stop": answer})
        port = server.bind("127.0.0.1:0", ada)
        await server.start()
        try:
            with pytest.raises(SecurityError, match=r"does not prove|proves the certificate of|does not hold the key"):
                await call_control(f"127.0.0.1:{port}", "stop", name="ada", security=operator)
        finally:
            await server.stop(0)

    asyncio.run(story())


def test_the_list_that_revokes_its_bringer_is_taken_and_answered(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    own = held(authority, authority.issue("ada"), tmp_path / "ada")
    ben = authority.issue("ben")

    async def story() -> None:
        listener = build(0, Mind(), [passive(1)], security=own)
        async with running(listener):
            listed = authority.revoke(b"", [ben.identity.serial]).decode()
            address, holder = f"127.0.0.1:{listener.port}", authority.credentials(ben)
            assert (await call_control(address, "revoke", {"list": listed}, name="ada", security=holder))["news"]
            with pytest.raises(SecurityError, match="the certificate of 'ben' was revoked"):
                await call_control(address, "status", name="ada", security=holder)

    asyncio.run(story())
