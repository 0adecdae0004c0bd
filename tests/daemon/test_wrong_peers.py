"""A peer with something wrong around it: ports, state folders, certificates, checkpoints, models, neighbours.

Each case is one sentence that says what to do, and an exit code that says whose fault it is; no traceback, and no peer
that waits for what cannot come.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from peer.config.options import Config, load
from peer.config.writer import write_resolved
from peer.daemon import neighbors
from peer.daemon.process import open_peer
from peer.errors import HandshakeRefused, PeerUnreachable, RemoteError
from peer.net.security.authority import CertificateAuthority
from peer.net.security.certificates import Role
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.state.checkpoints import StateFolder, find_checkpoints, load_checkpoint
from tests.cli.runner import sotto

JOB = (
    "run.rounds=4",
    "evaluation.every_rounds=0",
    "training.warmup_rounds=1",
    "training.task_options={hidden=4}",
    "transport.backoff_max_s=0.2",
    "transport.linger_s=5",
)
Folders = list[Path]


def write_kits(directory: Path, num_peers: int = 3) -> Folders:
    hosts = [Host("127.0.0.1", port) for port in free_ports(num_peers)]
    config = load(environment={}, overrides=JOB)
    return [file.parent for file in write_cluster(directory, config, hosts)]


@pytest.fixture
def kits(tmp_path: Path) -> Folders:
    """The folders of three peers on this machine that have not run yet."""
    return write_kits(tmp_path)


@pytest.fixture(scope="module")
def finished_kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster folder whose two peers have finished their run."""
    directory = tmp_path_factory.mktemp("finished")
    folders = write_kits(directory, 2)

    async def both() -> None:
        await asyncio.gather(*(run_peer(folder) for folder in folders))

    asyncio.run(both())
    assert all(find_checkpoints(folder / "state") for folder in folders)
    return directory


async def run_peer(folder: Path, *overrides: str) -> int:
    """Run the peer of a folder on this event loop, as `sotto run` does on its own."""
    config: Config = load(folder / "peer.toml", environment={}, overrides=overrides)
    peer = open_peer(config, folder)
    try:
        return await peer.main()
    finally:
        peer.close()


# -- what a peer finds wrong by itself ---------------------------------------------------------------------------------

Breakage = Callable[[Folders], contextlib.AbstractContextManager[object] | None]


@dataclass(frozen=True)
class Case:
    """Something wrong with peer 0, and what it says to that."""

    name: str
    breaks: Breakage
    says: tuple[str, ...]
    code: int
    settings: tuple[str, ...] = ()


def nothing(folders: Folders) -> None:
    """All is well but the settings."""


def take_port(folders: Folders) -> contextlib.AbstractContextManager[object]:
    listen = load(folders[0] / "peer.toml", environment={}).peer.listen
    taken = socket.create_server(("127.0.0.1", int(str(listen).rpartition(":")[2])))
    return contextlib.closing(taken)


def take_state(folders: Folders) -> contextlib.AbstractContextManager[object]:
    return contextlib.closing(StateFolder(folders[0] / "state"))


def own_authority(folders: Folders) -> CertificateAuthority:
    directory = folders[0].parent
    return CertificateAuthority.load(directory / "ca.pem", directory / "ca.key")


def certificate_of_another_run(folders: Folders) -> None:
    reissue(folders[0], CertificateAuthority.create("other"))


def certificate_of_another_peer(folders: Folders) -> None:
    for name in ("peer.pem", "peer.key"):
        shutil.copy(folders[1] / name, folders[0] / name)


def certificate_of_an_operator(folders: Folders) -> None:
    reissue(folders[0], own_authority(folders), role=Role.OPERATOR)


def expired_certificate(folders: Folders) -> None:
    reissue(folders[0], own_authority(folders), now=datetime.datetime(2001, 2, 3, tzinfo=datetime.UTC))


def certificate_of_tomorrow(folders: Folders) -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=9)
    reissue(folders[0], own_authority(folders), now=later)


def reissue(
    folder: Path, authority: CertificateAuthority, *, role: Role = Role.PEER, now: datetime.datetime | None = None
) -> None:
    for name in ("peer.pem", "peer.key"):
        (folder / name).unlink()
    authority.issue("peer-0", role=role, now=now).write(folder / "peer.pem", folder / "peer.key")


def no_key(folders: Folders) -> None:
    (folders[0] / "peer.key").unlink()


def key_of_another(folders: Folders) -> None:
    shutil.copy(folders[1] / "peer.key", folders[0] / "peer.key")


def certificate_is_nonsense(folders: Folders) -> None:
    (folders[0] / "peer.pem").write_text("nonsense")


def no_authority(folders: Folders) -> None:
    (folders[0] / "ca.pem").unlink()


def warm_start_of_another_shape(folders: Folders) -> None:
    write_warm_start(folders[0], 0.0, hidden=5)


def warm_start_that_is_not_finite(folders: Folders) -> None:
    write_warm_start(folders[0], math.nan)


def write_warm_start(folder: Path, value: float, *, hidden: int = 4) -> None:
    sizes = {
        "linear1.weight": (hidden, 64),
        "linear1.bias": (hidden,),
        "linear2.weight": (10, hidden),
        "linear2.bias": (10,),
    }
    save_file({name: torch.full(size, value) for name, size in sizes.items()}, folder / "start.safetensors")


def nobody_can_be_dialled(folders: Folders) -> None:
    """Peers 0 and 1 lose their addresses; peer 2 keeps its own."""
    for folder in folders:
        file = folder / "peer.toml"
        config = load(file, environment={})
        peers = (*(peer.model_copy(update={"advertise": None}) for peer in config.peers[:2]), config.peers[2])
        write_resolved(config.model_copy(update={"peers": peers}), file, file.parent)


def state_is_a_file(folders: Folders) -> None:
    (folders[0] / "state").write_text("")


CASES = [
    Case("port-in-use", take_port, ("peer.listen", "in use", "choose another port"), 2),
    Case(
        "address-of-another-machine",
        nothing,
        ("peer.listen", "no address 203.0.113.7", "0.0.0.0"),
        2,
        ("peer.listen=203.0.113.7:7700",),
    ),
    Case(
        "unknown-host-to-listen-on", nothing, ("peer.listen", "nowhere.invalid"), 2, ("peer.listen=nowhere.invalid:1",)
    ),
    Case("nobody-can-be-dialled", nobody_can_be_dialled, ("peer-0 and peer-1 are neighbours", "advertise", "graph"), 2),
    Case("state-in-use", take_state, ("state", "in use by another peer", "stop that process"), 5),
    Case("state-is-a-file", state_is_a_file, ("state", "cannot be used as a state folder"), 5),
    Case("certificate-of-another-run", certificate_of_another_run, ("peer.pem", "not signed by", "different runs"), 3),
    Case("certificate-of-another-peer", certificate_of_another_peer, ("made out to 'peer-1'", "peer.index"), 3),
    Case("certificate-of-an-operator", certificate_of_an_operator, ("peer.pem", "operator", "peer"), 3),
    Case("expired-certificate", expired_certificate, ("peer.pem", "expired on 2003-02-04", "issue a new one"), 3),
    Case("certificate-of-tomorrow", certificate_of_tomorrow, ("peer.pem", "valid from", "clock"), 3),
    Case("no-key", no_key, ("peer.key", "does not exist", "sotto init"), 3),
    Case("key-of-another", key_of_another, ("peer.key", "is not the key of", "same device"), 3),
    Case("certificate-is-nonsense", certificate_is_nonsense, ("peer.pem", "PEM certificate"), 3),
    Case("no-authority", no_authority, ("ca.pem", "does not exist"), 3),
    Case(
        "insecure-in-other-words",
        nothing,
        ("security.mode", "'off'", '"mtls", "tls+token" or "insecure"'),
        2,
        ("security.mode=off",),
    ),
    Case(
        "warm-start-of-another-shape",
        warm_start_of_another_shape,
        ("start.safetensors", "linear1.weight", "[5, 64]", "[4, 64]"),
        2,
        ("training.warm_start=start.safetensors",),
    ),
    Case(
        "warm-start-that-is-not-finite",
        warm_start_that_is_not_finite,
        ("start.safetensors", "not finite"),
        2,
        ("training.warm_start=start.safetensors",),
    ),
    Case(
        "task-that-is-no-task",
        nothing,
        ("training.task", "tests.train.wrong_tasks:without_loss", "lacks make_model(), loss()"),
        2,
        ("training.task=tests.train.wrong_tasks:without_loss", "training.task_options={}"),
    ),
    Case(
        "task-that-fails",
        nothing,
        ("in your task: RuntimeError: the sensor is not plugged in", "wrong_tasks.py:20, in that_fails"),
        2,
        ("training.task=tests.train.wrong_tasks:that_fails", "training.task_options={}"),
    ),
    Case(
        "task-whose-module-fails",
        nothing,
        ("training.task", "tests.train.wrong_module", "missing_library", "not installed"),
        2,
        ("training.task=tests.train.wrong_module:make_task", "training.task_options={}"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_peer_that_cannot_start_says_why(case: Case, kits: Folders) -> None:
    with case.breaks(kits) or contextlib.nullcontext():
        expect_sentence(kits[0], case.settings, case.says, case.code)


@pytest.fixture(autouse=True)
def waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `sotto up`, which waits for its peers. A peer of its own waits for what passes by itself."""
    monkeypatch.setenv("SOTTO_PARENT", str(os.getppid()))


def expect_sentence(folder: Path, settings: tuple[str, ...], says: tuple[str, ...], code: int) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    result = sotto("run", "--config", str(folder / "peer.toml"), *words)
    sentence = result.stderr.strip().splitlines()[-1]
    assert result.exit_code == code, result.output
    # It stands in a log, and has its time.
    assert re.match(r"[\d-]+ [\d:,]+ sotto: error: ", sentence)
    assert "Traceback" not in result.output
    for fragment in says:
        assert fragment in sentence
    assert result.stdout == ""


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param(("run.name=other",), ("checkpoint", "run 'digits'", "'other'", "state.directory"), id="run"),
        pytest.param(
            ("graph.kind=file", "graph.file=graph.json"),
            ("checkpoint", "another graph", "state.directory"),
            id="graph",
        ),
        pytest.param(("algorithm.name=sgp",), ("checkpoint", "algorithm", "state.directory"), id="algorithm"),
        pytest.param(
            ("training.task_options={hidden=5}",),
            ("another model", "(there 5×64)", "state.directory"),
            id="model",
        ),
        pytest.param(("training.momentum=adam",), ("checkpoint", "momentum", "state.directory"), id="optimizer"),
    ],
)
def test_a_checkpoint_of_something_else_is_not_gone_on_with(
    settings: tuple[str, ...], says: tuple[str, ...], finished_kits: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_kits, tmp_path, dirs_exist_ok=True)
    (tmp_path / "peer-0" / "graph.json").write_text("[[[0.25, 0.75], [0.75, 0.25]]]")
    expect_sentence(tmp_path / "peer-0", settings, says, 5)


@pytest.mark.parametrize("keep", [0, 7, 1000, -1], ids=["nothing", "length", "header", "all-but-a-byte"])
def test_a_truncated_checkpoint_is_named_where_nothing_is_left_in_its_place(
    keep: int, finished_kits: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_kits, tmp_path, dirs_exist_ok=True)
    state = tmp_path / "peer-0" / "state"
    newest = find_checkpoints(state)[-1]
    newest.write_bytes(newest.read_bytes()[:keep])
    for journal in state.glob("journal-*"):
        journal.unlink()
    expect_sentence(tmp_path / "peer-0", (), (newest.name, "cannot be read as a checkpoint"), 5)


def test_a_truncated_checkpoint_is_made_good_from_the_journal(finished_kits: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_kits, tmp_path, dirs_exist_ok=True)
    state = tmp_path / "peer-0" / "state"
    newest = find_checkpoints(state)[-1]
    before = load_checkpoint(newest).arrays["algorithm/x"].tobytes()
    newest.write_bytes(newest.read_bytes()[:-1])
    settings = ("--set", "transport.linger_s=0.1")
    result = sotto("run", "--config", str(tmp_path / "peer-0" / "peer.toml"), *settings)
    assert result.exit_code == 0, result.output
    assert load_checkpoint(newest).arrays["algorithm/x"].tobytes() == before


def test_a_finished_run_is_not_repeated(finished_kits: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_kits, tmp_path, dirs_exist_ok=True)
    settings = ("--set", "transport.linger_s=0.1")
    result = sotto("run", "--config", str(tmp_path / "peer-0" / "peer.toml"), *settings)
    assert result.exit_code == 0, result.output


# -- neighbours --------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Peers that wait only a moment for neighbours that refuse them."""
    monkeypatch.setattr(neighbors, "_REFUSED_S", 0.3)
    return


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        # Either end says so first.
        pytest.param(("run.name=other",), ("is in run '", "'other'", "'digits'"), id="run"),
        pytest.param(
            ("run.seed=1",),
            ("the configuration of 'peer-", "' differs from ours: run.seed is ", "compare [run] on both"),
            id="seed",
        ),
        pytest.param(
            ("training.learning_rate=0.2",),
            (": training.learning_rate is", "0.2", "not set", "compare [training] on"),
            id="learning-rate",
        ),
        pytest.param(("algorithm.name=sgp",), ("'sgp'", "'quant-sgp'", "[algorithm]"), id="algorithm"),
        pytest.param(("training.precision=fastest",), ("configuration", "compare [training] on"), id="precision"),
        pytest.param(("graph.kind=complete",), ("configuration", "[graph]"), id="graph"),
        pytest.param(("training.task_options={hidden=5}",), ("configuration", "[training]"), id="model"),
        pytest.param(
            ("training.warm_start=start.safetensors",),
            (
                "initial model",
                "linear1.weight, linear1.bias, linear2.weight and 1 more have other",
                "training.warm_start",
            ),
            id="warm-start",
        ),
        pytest.param(
            ("compressor.fraction=0.5", "data.skew=0.1"),
            ("configuration", "compare [compressor] and [data] on"),
            id="two-parts",
        ),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_peer_that_no_neighbour_lets_in_ends_and_says_why(
    settings: tuple[str, ...], says: tuple[str, ...], kits: Folders
) -> None:
    """Peer 1 waits for peer 0 alone (a directed ring), and peer 0 trains something else."""

    mine: tuple[str, ...] = ()
    if "training.warm_start=start.safetensors" in settings:
        # The same words in both configurations, another file behind them.
        mine = settings
        for value, folder in enumerate(kits[:2]):
            write_warm_start(folder, float(value))

    async def story() -> str:
        other = asyncio.create_task(run_peer(kits[0], *settings))
        with pytest.raises(HandshakeRefused) as refusal:
            async with asyncio.timeout(30):
                await run_peer(kits[1], *mine)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        return str(refusal.value)

    sentence = asyncio.run(story())
    assert "none of the neighbours that it waits for lets it in" in sentence
    for fragment in says:
        assert fragment in sentence


def other_authority(folders: Folders) -> None:
    authority = CertificateAuthority.create("other")
    for name in ("ca.pem", "peer.pem", "peer.key"):
        (folders[2] / name).unlink()
    authority.issue("peer-2").write(folders[2] / "peer.pem", folders[2] / "peer.key")
    (folders[2] / "ca.pem").write_bytes(authority.certificate)


@pytest.mark.parametrize(
    ("breaks", "settings", "says"),
    [
        pytest.param(nothing, None, ("nobody listens at", "peer-2"), id="not-running"),
        pytest.param(other_authority, (), ("peer-2", "CA did not sign"), id="other-authority"),
        pytest.param(nothing, ("security.mode=insecure",), ("peer-2", "security.mode"), id="insecure"),
    ],
)
def test_a_neighbour_out_of_reach_is_given_up_and_the_cause_is_told(
    breaks: Breakage, settings: tuple[str, ...] | None, says: tuple[str, ...], kits: Folders
) -> None:
    """Peer 0 waits for peer 2, which does not run (None) or cannot be talked to."""
    breaks(kits)

    async def story() -> RemoteError:
        other = None if settings is None else asyncio.create_task(run_peer(kits[2], *settings))
        with pytest.raises(PeerUnreachable) as loss:
            async with asyncio.timeout(30):
                await run_peer(kits[0], "transport.give_up_after_s=4")
        if other is not None:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
        return loss.value

    error = asyncio.run(story())
    assert error.exit_code == 6
    assert "round 0 needs it" in str(error)
    for fragment in says:
        assert fragment in str(error)


# -- what a neighbour has wrong, and this peer can do without ----------------------------------------------------------


def test_a_device_at_another_address_than_the_others_know_dials_them_itself(
    kits: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    """Peer 0, which is to dial both others, knows a former address of each."""
    mended = (kits[0] / "peer.toml").read_text()
    for folder in kits[1:]:
        port = str(load(folder / "peer.toml", environment={}).peer.listen).rpartition(":")[2]
        mended = mended.replace(f'advertise = "127.0.0.1:{port}"', f'advertise = "127.0.0.1:{free_ports(1)[0]}"')
    (kits[0] / "peer.toml").write_text(mended)

    async def all_three() -> list[int]:
        return await asyncio.gather(*(run_peer(folder, "transport.dial_timeout_s=1") for folder in kits))

    with caplog.at_level(logging.INFO):
        assert asyncio.run(all_three()) == [0, 0, 0]
    said = [record.getMessage() for record in caplog.records]
    address = load(kits[1] / "peer.toml", environment={}).peers[1].advertise
    assert f"no link to peer-0 yet: it is to dial this peer at {address}, and has not so far" in said
    assert not any("broke the protocol" in each for each in said)
