from __future__ import annotations

import codecs
import datetime
import hashlib
import ipaddress
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from peer.config.options import SecurityOptions
from peer.errors import SecurityError
from peer.net.security.authority import CA_DAYS, PEER_DAYS, CertificateAuthority
from peer.net.security.certificates import ROLE_URI, Role, der, identify
from peer.net.security.credentials import Access, TokenAccess, load_credentials
from peer.net.security.keys import write_secret
from peer.net.security.proofs import check_proof, prove
from peer.net.security.requests import read_request, request_certificate

OPTIONS = SecurityOptions()
NOW = datetime.datetime(2030, 5, 1, 12, tzinfo=datetime.UTC)


@pytest.fixture
def authority() -> CertificateAuthority:
    return CertificateAuthority.create("digits", now=NOW)


@pytest.fixture
def folder(tmp_path: Path, authority: CertificateAuthority) -> Path:
    """A device's folder: ca.pem, peer.pem, peer.key."""
    authority.write(tmp_path / "ca.pem", tmp_path / "elsewhere" / "ca.key")
    authority.issue("ada", now=NOW).write(tmp_path / "peer.pem", tmp_path / "peer.key")
    return tmp_path


def load(folder: Path, name: str | None = "ada", *, role: Role = Role.PEER, days: float = 0) -> Access | None:
    return load_credentials(OPTIONS, folder, name, role=role, now=NOW + datetime.timedelta(days=days))


def test_what_was_issued_and_written_loads(folder: Path, authority: CertificateAuthority) -> None:
    loaded = load(folder)
    assert loaded is not None
    assert loaded.ca == authority.certificate
    assert (loaded.identity.name, loaded.identity.role) == ("ada", Role.PEER)
    assert loaded.identity.not_after == NOW + datetime.timedelta(days=PEER_DAYS)
    assert loaded.identity.not_before < NOW
    assert load(folder, None) == loaded


def test_a_mark_in_front_of_a_file_is_no_part_of_it(folder: Path) -> None:
    """Editors of other systems put one there, and gRPC finds no certificate behind it."""
    plain = load(folder)
    for name in ("ca.pem", "peer.pem", "peer.key"):
        file = folder / name
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert load(folder) == plain


def test_insecure_mode_loads_nothing(tmp_path: Path) -> None:
    assert load_credentials(SecurityOptions(mode="insecure"), tmp_path, "ada") is None


def test_keys_are_readable_by_their_owner_alone(folder: Path) -> None:
    for key in (folder / "peer.key", folder / "elsewhere" / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_keys_do_not_show_in_messages(folder: Path) -> None:
    loaded = load(folder)
    assert "PRIVATE KEY" not in repr(loaded)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o666])
def test_a_key_that_every_user_may_read_is_not_used(folder: Path, mode: int) -> None:
    (folder / "peer.key").chmod(mode)
    words = rf"every user .* may read .*peer.key \(mode 0{mode:o}\).*chmod 600.* mounted with umask=077"
    with pytest.raises(SecurityError, match=words):
        load(folder)


def test_a_key_that_a_group_may_read_is_used_as_orchestrators_hand_it_out(folder: Path) -> None:
    (folder / "peer.key").chmod(0o440)
    assert load(folder) is not None


def test_the_key_of_the_authority_is_as_much_of_a_secret(folder: Path) -> None:
    (folder / "elsewhere" / "ca.key").chmod(0o644)
    with pytest.raises(SecurityError, match="every user of this machine may read"):
        CertificateAuthority.load(folder / "ca.pem", folder / "elsewhere" / "ca.key")


def test_a_request_made_on_the_device_becomes_a_certificate_for_its_key(tmp_path: Path) -> None:
    authority = CertificateAuthority.create("digits", now=NOW)
    request, key = request_certificate("gus", ["10.0.0.7"], address="10.0.0.7:7700")
    asked = read_request(request)
    assert (asked.name, asked.address, asked.beyond) == ("gus", "10.0.0.7:7700", ())
    identity, certificate = authority.grant(asked, address=asked.address, now=NOW)
    assert (identity.name, identity.role) == ("gus", Role.PEER)
    authority.write(tmp_path / "ca.pem", tmp_path / "ca.key")
    (tmp_path / "peer.pem").write_bytes(certificate)
    write_secret(tmp_path / "peer.key", key)
    loaded = load(tmp_path, "gus")
    assert loaded is not None
    names = x509.load_pem_x509_certificate(certificate).extensions
    addresses = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert addresses.get_values_for_type(x509.DNSName) == ["gus"]
    assert [str(each) for each in addresses.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]


@pytest.mark.parametrize("spoil", ["text", "signature"])
def test_a_request_that_is_none_is_not_signed(authority: CertificateAuthority, spoil: str) -> None:
    request, _ = request_certificate("gus")
    if spoil == "text":
        request = b"please"
    else:
        lines = request.splitlines()
        lines[-2] = lines[-2][:-8] + b"AAAA" + lines[-2][-4:]
        request = b"\n".join(lines) + b"\n"
    with pytest.raises(SecurityError, match="request"):
        read_request(request)


def test_a_request_cannot_bring_along_names_roles_or_powers(authority: CertificateAuthority) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gus")]))
        .add_extension(
            x509.SubjectAlternativeName(
                [
                    x509.DNSName("gus"),
                    x509.DNSName("ada"),
                    x509.IPAddress(ipaddress.ip_address("10.0.0.1")),
                    x509.UniformResourceIdentifier(ROLE_URI + Role.OPERATOR.value),
                ]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    asked = read_request(request.public_bytes(serialization.Encoding.PEM))
    assert asked.beyond == ("'ada'", "'10.0.0.1'", "'urn:sottovoce:role:operator'")
    identity, certificate = authority.grant(asked)
    assert identity.role is Role.PEER
    extensions = x509.load_pem_x509_certificate(certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each.value) for each in names] == ["gus", ROLE_URI + Role.PEER.value]
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_listener_proves_its_certificate_to_one_dialler_once(authority: CertificateAuthority) -> None:
    ada, ben, cleo = (authority.credentials(authority.issue(name, now=NOW)) for name in ("ada", "ben", "cleo"))
    certificate, signature = prove(ada, b"1" * 16, verifier="ben")
    assert check_proof(ben, certificate, signature, b"1" * 16, prover="ada", now=NOW) == ada.identity
    for verifier, challenge, prover in ((cleo, b"1" * 16, "ada"), (ben, b"2" * 16, "ada"), (ben, b"1" * 16, "cleo")):
        with pytest.raises(SecurityError):
            check_proof(verifier, certificate, signature, challenge, prover=prover, now=NOW)
    with pytest.raises(SecurityError, match="ada does not prove whose certificate it holds"):
        check_proof(ben, b"", b"", b"1" * 16, prover="ada", now=NOW)
    late = NOW + datetime.timedelta(days=PEER_DAYS + 1)
    with pytest.raises(SecurityError, match="expired"):
        check_proof(ben, certificate, signature, b"1" * 16, prover="ada", now=late)


def test_a_copied_certificate_proves_nothing_without_its_key(authority: CertificateAuthority) -> None:
    ada, ben = (authority.credentials(authority.issue(name, now=NOW)) for name in ("ada", "ben"))
    older = authority.credentials(authority.issue("ada", now=NOW))
    _, signature = prove(older, b"1" * 16, verifier="ben")
    certificate, _ = prove(ada, b"1" * 16, verifier="ben")
    with pytest.raises(SecurityError, match="ada does not hold the key of the certificate that it shows"):
        check_proof(ben, certificate, signature, b"1" * 16, prover="ada", now=NOW)


TOKEN = "0123456789abcdef0123456789abcdef"


def test_a_token_is_read_from_a_file_that_only_its_owner_may_read(tmp_path: Path) -> None:
    options = SecurityOptions(mode="tls+token", ca="system", plain_listener=True)
    write_secret(tmp_path / "token", TOKEN.encode() + b"\n")
    access = load_credentials(options, tmp_path, "ada")
    assert isinstance(access, TokenAccess)
    assert access.admits(access.metadata())
    assert not access.admits(())
    assert not access.admits([("authorization", f"Bearer {TOKEN}x")])
    assert TOKEN not in repr(access)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(SecurityError, match="every user of this machine may read"):
        load_credentials(options, tmp_path, "ada")


@pytest.mark.parametrize("token", ["", "short", "with spaces in between it", "ü" * 32])
def test_a_token_that_is_none_is_refused(tmp_path: Path, token: str) -> None:
    write_secret(tmp_path / "token", token.encode())
    with pytest.raises(SecurityError, match=r"does not hold a token: 16 or more .*`openssl rand -hex 32"):
        load_credentials(SecurityOptions(mode="tls+token", ca="system"), tmp_path, "ada")


def test_nothing_is_overwritten(folder: Path, authority: CertificateAuthority) -> None:
    before = (folder / "peer.key").read_bytes()
    with pytest.raises(SecurityError, match="exists already and is not overwritten"):
        authority.issue("ada").write(folder / "peer.pem", folder / "peer.key")
    assert (folder / "peer.key").read_bytes() == before


def test_the_thumbprint_is_that_of_openssl(folder: Path) -> None:
    loaded = load(folder)
    assert loaded is not None
    assert loaded.identity.thumbprint == hashlib.sha256(der(loaded.certificate)).digest().hex(":").upper()


def test_a_certificate_says_what_gRPC_checks(authority: CertificateAuthority) -> None:
    issued = authority.issue("ada", ["192.0.2.7", "ada.example.org", "::1"], now=NOW)
    certificate = x509.load_pem_x509_certificate(issued.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["ada", "ada.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "::1"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert len(list(usage)) == 2
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_an_operator_can_call_but_not_listen(authority: CertificateAuthority) -> None:
    issued = authority.issue("olga", role=Role.OPERATOR)
    certificate = x509.load_pem_x509_certificate(issued.certificate)
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    assert identify(issued.certificate).role is Role.OPERATOR


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "a-", "ä", "a..b", "x" * 64, "a\nb", "*"])
def test_names_that_cannot_stand_in_a_certificate(authority: CertificateAuthority, name: str) -> None:
    with pytest.raises(SecurityError, match="no certificate can be made out to"):
        authority.issue(name)


def test_the_authority_is_saved_so_that_devices_can_be_added_later(folder: Path) -> None:
    again = CertificateAuthority.load(folder / "ca.pem", folder / "elsewhere" / "ca.key")
    again.issue("late", now=NOW).write(folder / "late.pem", folder / "late.key")
    options = SecurityOptions(certificate="late.pem", key="late.key")
    loaded = load_credentials(options, folder, "late", now=NOW)
    assert loaded is not None
    assert loaded.identity.name == "late"


def test_an_authority_lives_ten_years_and_its_certificates_two(folder: Path) -> None:
    assert load(folder, days=PEER_DAYS - 1) is not None
    assert CA_DAYS > 3650
    with pytest.raises(SecurityError, match=r"peer\.pem expired on 2032-05-01; issue a new one"):
        load(folder, days=PEER_DAYS + 1)
    with pytest.raises(SecurityError, match=r"ca\.pem expired on"):
        load(folder, days=CA_DAYS + 1)


def test_a_clock_that_is_a_little_behind_is_forgiven_and_one_far_behind_is_named(folder: Path) -> None:
    assert load(folder, days=-0.9) is not None
    with pytest.raises(SecurityError, match="is the clock of this device right"):
        load(folder, days=-400)


def test_files_of_another_peer(folder: Path) -> None:
    with pytest.raises(
        SecurityError, match=r"made out to 'ada', but this peer is 'ben'; .*`sotto init --join ben --name"
    ):
        load(folder, "ben")


def test_an_operators_certificate_is_no_peers(folder: Path, authority: CertificateAuthority) -> None:
    for file in ("peer.pem", "peer.key"):
        (folder / file).unlink()
    authority.issue("ada", role=Role.OPERATOR, now=NOW).write(folder / "peer.pem", folder / "peer.key")
    with pytest.raises(SecurityError, match="certificate of an operator, where one of a peer is needed"):
        load(folder)
    assert load(folder, role=Role.OPERATOR) is not None


def test_a_certificate_of_another_run(folder: Path) -> None:
    for file in ("peer.pem", "peer.key"):
        (folder / file).unlink()
    CertificateAuthority.create("digits", now=NOW).issue("ada", now=NOW).write(folder / "peer.pem", folder / "peer.key")
    with pytest.raises(SecurityError, match=r"peer\.pem is not signed by .*ca\.pem"):
        load(folder)


def test_the_key_of_another_certificate(folder: Path, authority: CertificateAuthority) -> None:
    authority.issue("ben", now=NOW).write(folder / "ben.pem", folder / "ben.key")
    os.replace(folder / "ben.key", folder / "peer.key")
    with pytest.raises(SecurityError, match=r"peer\.key is not the key of .*peer\.pem"):
        load(folder)


def test_a_peers_certificate_in_place_of_the_authoritys(folder: Path) -> None:
    (folder / "ca.pem").write_bytes((folder / "peer.pem").read_bytes())
    with pytest.raises(SecurityError, match="not the certificate of an authority"):
        load(folder)


@pytest.mark.parametrize("file", ["ca.pem", "peer.pem", "peer.key"])
def test_files_that_are_missing_or_hold_something_else(folder: Path, file: str) -> None:
    (folder / file).write_bytes(b"-----BEGIN NONSENSE-----\n")
    with pytest.raises(SecurityError, match=rf"{file} does not hold a PEM"):
        load(folder)
    (folder / file).unlink()
    with pytest.raises(SecurityError, match=rf"{file} does not exist; `sotto init cluster` makes it"):
        load(folder)
    (folder / file).mkdir()
    with pytest.raises(SecurityError, match=rf"{file} cannot be read"):
        load(folder)


def test_a_key_with_a_password(folder: Path) -> None:
    key = serialization.load_pem_private_key((folder / "peer.key").read_bytes(), None)
    (folder / "peer.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(SecurityError, match="protected by a password"):
        load(folder)


def test_a_key_of_a_kind_that_gRPC_does_not_take(folder: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    (folder / "peer.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    with pytest.raises(SecurityError, match="not an ECDSA key on P-256"):
        load(folder)


def test_a_certificate_that_somebody_else_made(authority: CertificateAuthority) -> None:
    with pytest.raises(SecurityError, match="names no peer and no role"):
        identify(authority.certificate)


def test_an_authority_of_another_kind_of_key_is_refused_before_anything_is_checked_with_it(folder: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another CA")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(NOW)
        .not_valid_after(NOW + datetime.timedelta(days=9))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(SecurityError, match=r"the key of .*ca\.pem is not an ECDSA key on P-256"):
        load(folder)


def test_an_answer_to_a_call_is_proven_for_this_caller_this_challenge_and_these_words(
    authority: CertificateAuthority,
) -> None:
    ada, ben, olga = (authority.credentials(authority.issue(name, now=NOW)) for name in ("ada", "ben", "olga"))
    challenge, answer = bytes(range(16)), b'{"round": 7}'
    certificate, proof = prove(ada, challenge, verifier="olga", answer=answer)
    assert check_proof(olga, certificate, proof, challenge, prover="ada", answer=answer, now=NOW).name == "ada"
    for reader, with_challenge, with_answer in (
        (ben, challenge, answer),
        (olga, bytes(16), answer),
        (olga, challenge, b'{"round": 8}'),
        (olga, challenge, None),
    ):
        with pytest.raises(SecurityError, match="ada does not hold the key"):
            check_proof(reader, certificate, proof, with_challenge, prover="ada", answer=with_answer, now=NOW)
