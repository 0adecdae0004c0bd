"""Names and addresses are checked where they are signed: none stands for another, and somebody can dial each."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from peer.config.options import Config, PeerAddress, load
from peer.errors import ConfigError, SecurityError, SottoError
from peer.net.security.authority import CertificateAuthority
from peer.net.security.certificates import ADDRESS_URI
from peer.net.security.keys import new_key
from peer.net.security.requests import read_request, request_certificate
from peer.ops import enrollment
from peer.ops.cluster_files import Host, write_cluster

STRANGE = [
    "",
    "operator",
    "Operator",
    "fe80::1%eth0",
    "::1",
    "a b",
    "a/../b",
    "-a",
    "a..b",
    "x" * 64,
    "ä",
    "a\x1b[2J",
    "*",
]
"""Names that no peer can have; none of them may end a command otherwise than with a sentence."""


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    config = load(environment={}, overrides=["run.rounds=10"])
    write_cluster(tmp_path / "kits", config, [Host("127.0.0.1", 7700), Host("127.0.0.1", 7701)])
    return tmp_path / "kits"


def forged(name: str, address: str | None = None) -> bytes:
    """Return a request that no `sotto init` writes."""
    names: list[x509.GeneralName] = [x509.DNSName("a")]
    if address is not None:
        names.append(x509.UniformResourceIdentifier(ADDRESS_URI + address))
    request = x509.CertificateSigningRequestBuilder()
    if name:
        request = request.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
    else:
        request = request.subject_name(x509.Name([]))
    signed = request.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(new_key(), hashes.SHA256())
    return signed.public_bytes(Encoding.PEM)


@pytest.mark.parametrize("name", STRANGE)
def test_strange_names_are_neither_asked_for_nor_read_nor_signed(name: str, tmp_path: Path) -> None:
    with pytest.raises(SecurityError):
        request_certificate(name)
    with pytest.raises(SecurityError):
        enrollment.request(tmp_path / "device", name, None, 7700)
    assert not (tmp_path / "device").exists()
    with pytest.raises(SecurityError):
        CertificateAuthority.create("tests").issue(name)
    with pytest.raises(SecurityError):
        read_request(forged(name))


@pytest.mark.parametrize("name", [*STRANGE, "PEER-0", "Peer-0"])
def test_the_authority_signs_no_name_that_stands_for_another(kits: Path, name: str) -> None:
    with pytest.raises(SottoError):
        enrollment.propose(kits, forged(name))
    config = Config.model_construct(peers=(PeerAddress(name="peer-0"), PeerAddress.model_construct(name=name)))
    with pytest.raises(ConfigError):
        write_cluster(kits.with_name("other"), config, [Host("127.0.0.1", 7700), Host("127.0.0.1", 7701)])
    assert not kits.with_name("other").exists()


@pytest.mark.parametrize("address", ["[fe80::1%eth0]:7700", "10.0.0.9:0", "10.0.0.9", "a b:7700", "[::1]:99999", ":1"])
def test_the_authority_signs_no_address_that_nobody_can_dial(kits: Path, address: str) -> None:
    with pytest.raises(SottoError):
        enrollment.propose(kits, forged("garage", address))


def test_a_host_with_a_scope_is_no_place_of_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a scope"):
        write_cluster(tmp_path / "kits", load(environment={}), [Host("fe80::1%eth0", 7700), Host("127.0.0.1", 7700)])
    assert not (tmp_path / "kits").exists()


def test_lists_with_names_that_differ_in_case_only_are_refused() -> None:
    with pytest.raises(ValueError, match="two peers have the same name"):
        Config(peers=(PeerAddress(name="peer-0"), PeerAddress(name="PEER-0")))
