"""What release 0.2 wrote is read: state folders of peers that were killed, which lead to the same bits, and
configurations.

An installation of 0.2.0 made the fixtures. In each case three peers trained until they were past a checkpoint, and were
killed with SIGKILL, so that their journals hold what happened since; in the case `joined`, when a fourth had begun to
join them. `expected.json` says where that release came back to from a copy of each folder, and, where a run has rounds,
with which bits it ended; `configurations.json` what it read from each configuration.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import load
from peer.daemon.process import open_peer
from peer.ops.local_cluster import free_ports
from peer.train.eight_bit import linear_kernels

FOLDER = Path(__file__).parents[1] / "fixtures" / "release_0_2"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
READ: dict[str, dict[str, Any]] = json.loads((FOLDER / "configurations.json").read_text())


def unpacked(name: str, folder: Path) -> list[Path]:
    """Return the configuration files of the peers of a case, with ports that are free here, and at full speed."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    files = sorted((folder / name / "kits").glob("peer-*/peer.toml"))
    old = sorted({int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", files[0].read_text())})
    for before, now in zip(old, free_ports(len(old)), strict=True):
        for file in files:
            text = file.read_text().replace(f":{before}", f":{now}")
            file.write_text(re.sub(r"(?m)^min_step_s = .*", "min_step_s = 0.0", text))
    return files


def digest(peer: Any) -> str:
    algorithm = peer.loop.participant.algorithm
    return hashlib.sha256(algorithm.x.tobytes() + struct.pack("<d", getattr(algorithm, "u", 1.0))).hexdigest()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_killed_peers_of_release_0_2_resume_and_finish(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What such a state asks for holds for the whole process, in which other tests run as well.
    monkeypatch.setattr(linear_kernels, "_rounds_as_before", False)
    expected = EXPECTED[name]
    peers = [open_peer(load(file, environment={}), file.parent) for file in unpacked(name, tmp_path)]
    try:
        assert {peer.local.config.run_digest() for peer in peers} == {expected["run_digest"]}
        assert [peer.loop.round for peer in peers] == expected["rounds"]
        assert [digest(peer) for peer in peers] == expected["restored"]

        async def finish() -> list[int]:
            return await asyncio.gather(*(peer.main() for peer in peers))

        assert set(asyncio.run(finish())) == {0}
        assert {peer.loop.round for peer in peers} == {60}
        # Which pairs meet without rounds is a matter of time.
        assert [digest(peer) for peer in peers] == expected.get("final", [digest(peer) for peer in peers])
    finally:
        for peer in peers:
            peer.close()


@pytest.mark.parametrize("name", sorted(READ))
def test_a_configuration_of_release_0_2_means_the_same(name: str) -> None:
    config = load(FOLDER / f"{name}.toml", environment={})
    assert config.run_digest() == READ[name]["run_digest"]
    values = config.model_dump(mode="json")
    for section, options in READ[name]["values"].items():
        if isinstance(options, dict):
            assert options.items() <= values[section].items(), section
        else:
            assert options == values[section], section
