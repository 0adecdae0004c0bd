"""What passes by itself after a boot is waited for: an address, a certificate of tomorrow, a disk."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from peer.config.options import Config, load
from peer.daemon import process
from peer.errors import ConfigError, DataError, SecurityError, SottoError
from peer.net.security.authority import CertificateAuthority
from peer.net.security.certificates import check_dates, parse_certificate
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    write_cluster(tmp_path, load(environment={}), [Host("127.0.0.1", port) for port in free_ports(2)])
    return tmp_path / "peer-0"


def configured(kit: Path, *settings: str) -> Config:
    return load(kit / "peer.toml", overrides=settings, environment={})


class Looked(Exception):
    """A peer looked again."""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens while the peer waits, each time that it does; at the end it is interrupted."""
    happens: list[Callable[[], None]] = []

    def sleep(_: float) -> None:
        if not happens:
            raise Looked
        happens.pop(0)()

    monkeypatch.setattr(process, "_pause", sleep)
    monkeypatch.delenv("SOTTO_PARENT", raising=False)
    return happens


@pytest.mark.parametrize("key", ["peer.listen", "peer.metrics_listen"])
def test_an_address_that_is_not_there_yet_is_waited_for(
    key: str, kit: Path, looks: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    looks.extend([lambda: None] * 2)
    with caplog.at_level(logging.INFO), pytest.raises(Looked):
        process.run(configured(kit, f"{key}=192.0.2.1:7750"), kit)
    said = [record.getMessage() for record in caplog.records]
    assert sum("this machine has no address 192.0.2.1" in each for each in said) == 1, "once, however long it takes"
    assert any("waits until that has passed" in each for each in said)
    assert sum(each.startswith("that has not passed yet, ") for each in said) == 2, "at each further look"
    assert not any("samples" in each for each in said), "its data is not read each time that it looks"


def test_a_peer_that_another_process_waits_for_ends(
    kit: Path, looks: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOTTO_PARENT", "1")
    with pytest.raises(ConfigError, match="no address"):
        process.run(configured(kit, "peer.listen=192.0.2.1:7750"), kit)


class Ran:
    """A daemon that is over at once."""

    async def main(self) -> int:
        return 0

    def close(self) -> None: ...


@pytest.mark.parametrize("mounted", [False, True], ids=["missing", "an empty mount point"])
def test_data_that_is_not_mounted_yet_is_waited_for(
    mounted: bool, kit: Path, tmp_path: Path, looks: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "usb"
    if mounted:
        directory.mkdir()

    def open_peer(*_: object) -> Ran:
        if not (directory / "data").exists():
            raise DataError(f"data.directory: {directory} does not contain data")
        return Ran()

    def mount() -> None:
        directory.mkdir(exist_ok=True)
        (directory / "data").touch()

    monkeypatch.setattr(process, "open_peer", open_peer)
    looks.extend([lambda: None, mount])
    assert process.run(configured(kit, f"data.directory={directory}"), kit) == 0
    assert not looks


def test_a_peer_that_waits_for_its_data_holds_nothing_meanwhile(kit: Path, looks: list[Callable[[], None]]) -> None:
    """It tries again in the same process: the lock on its state folder would be its own."""
    looks.extend([lambda: None] * 2)
    with pytest.raises(Looked):
        process.run(configured(kit, "training.task=mnist", "data.directory=/nowhere/mnist"), kit)


def test_a_state_folder_on_a_disk_that_is_not_mounted_yet_is_not_made_elsewhere(
    kit: Path, tmp_path: Path, looks: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    looks.extend([lambda: None] * 2)
    with pytest.raises(Looked):
        process.run(configured(kit, f"state.directory={tmp_path}/usb/sotto/state"), kit)
    assert "usb/sotto does not exist; mount its disk, or make that folder" in caplog.text
    assert not (tmp_path / "usb").exists()


def test_data_that_is_there_and_wrong_is_an_error_at_once(
    kit: Path, tmp_path: Path, looks: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").touch()

    def open_peer(*_: object) -> Ran:
        raise DataError("data.directory: it does not contain data")

    monkeypatch.setattr(process, "open_peer", open_peer)
    with pytest.raises(DataError):
        process.run(configured(kit, f"data.directory={tmp_path}"), kit)


def test_a_certificate_of_tomorrow_is_waited_for_and_one_of_yesterday_is_not() -> None:
    certificate = parse_certificate(CertificateAuthority.create("run").certificate, "ca.pem")
    caught: list[SottoError] = []
    for now in (
        certificate.not_valid_before_utc - datetime.timedelta(days=400),
        certificate.not_valid_after_utc + datetime.timedelta(days=1),
    ):
        with pytest.raises(SecurityError) as error:
            check_dates(certificate, "ca.pem", now)
        caught.append(error.value)
    assert [each.may_pass for each in caught] == [True, False]
