"""The walk-through for bare devices in deploy/README.md, followed line by line on two systems with real systemds."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peer.state.metrics import MetricsStore
from tests.compose import devices, engine
from tests.compose.test_cluster import KEPT, TARGET

_MISSING = devices.missing()

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(_MISSING is not None, reason=f"there are no devices here: {_MISSING}"),
]

ROUNDS = 5000
"""Of the walk-through."""
WHEELS = "/var/registry"
PIP = f"[global]\nno-index = true\nfind-links = {WHEELS}\n"
"""What the first device has for the Internet. The second has nothing."""
UNIT = "sotto@digits"
STATUS = "/opt/sottovoce/bin/sotto status --config /var/lib/sotto/digits/peer.toml --json"


def steps() -> list[tuple[str, str]]:
    """Return the blocks of the walk-through, each with the address of the device that it is for."""
    text = (engine.ROOT / "deploy" / "README.md").read_text().partition("\n### Two devices, step by step\n")[2]
    text = text.partition("\n### ")[0]
    found = re.findall(r"\bon (10\.0\.0\.\d):\n\n^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    assert len(found) == text.count("```sh"), "a block does not say which device it is for"
    return found


@pytest.fixture
def two(tmp_path: Path) -> Iterator[dict[str, devices.Device]]:
    """Return two devices by address: booted, a cable between them, the first may log in to the second."""
    tree = engine.copy_of_the_tree(tmp_path / "tree")
    base = devices.base_system(KEPT)
    made: list[devices.Device] = []
    try:
        for number in (1, 2):
            made.append(devices.Device(f"10.0.0.{number}", base, tmp_path / f"device{number}"))
        first, second = made
        first.connect(second)
        shutil.copytree(tree, first.root / "root" / "sottovoce")
        shutil.copytree(engine.wheels(tree, KEPT), first.root / WHEELS.lstrip("/"))
        (first.root / "etc" / "pip.conf").write_text(PIP)
        for device in made:
            device.boot()
        first.shell("ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519; ssh-keyscan 10.0.0.2 > .ssh/known_hosts")
        (second.root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
        shutil.copy(first.root / "root/.ssh/id_ed25519.pub", second.root / "root/.ssh/authorized_keys")
        yield {device.address: device for device in made}
    finally:
        for device in made:
            device.close()


def round_of(device: devices.Device) -> int:
    """Return where a device's peer is; -1 if it does not answer."""
    said = device.shell(STATUS, check=False)
    return int(json.loads(said).get("round", -1)) if said else -1


def is_over(device: devices.Device) -> bool:
    """Return whether a device's service has ended, well or not."""
    return device.shell(f"systemctl is-active {UNIT} || true").strip() in ("inactive", "failed")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def test_the_walk_through_leads_two_devices_over_a_power_cut_to_a_model(
    two: dict[str, devices.Device], tmp_path: Path
) -> None:
    first, second = two.values()
    *setup, checks, collect = steps()
    assert [address for address, _ in setup] == ["10.0.0.1", "10.0.0.2"]
    for address, block in setup:
        begun = time.monotonic()
        two[address].shell(block)
        print(f"{address} was set up in {time.monotonic() - begun:.0f} s")
    for device in (first, second):
        assert device.shell(f"systemd-analyze verify --man=no /etc/systemd/system/{UNIT}.service 2>&1") == ""
    said = two[checks[0]].shell(checks[1])
    assert "active (running)" in said
    wait_for(lambda: round_of(second) > 200, "the peers do not train")

    second.cut_power()
    stood = round_of(first)
    assert stood < ROUNDS, "the run was over before the power was cut"
    second.boot()  # Nobody says anything to systemd: the service is enabled.
    # On a machine that does something else, too, a round may take 0.3 s.
    wait_for(lambda: is_over(first) and is_over(second), "the run does not come to its end", 1800.0)
    for device in (first, second):
        ended = device.shell(f"systemctl show --property=Result,ExecMainStatus {UNIT}").split()
        assert ended == ["Result=success", "ExecMainStatus=0"], device.shell(f"journalctl -u {UNIT}")
    boots = re.findall(r"^ *-?\d+ [0-9a-f]{32} ", second.shell("journalctl --list-boots"), re.MULTILINE)
    assert len(boots) == 2

    two[collect[0]].shell(collect[1])
    assert (first.root / "root" / "model.safetensors").stat().st_size > 10_000
    for number in (0, 1):
        # SQLite would resolve the link into the device's root, and look for the rest of the path on this machine.
        state = tmp_path / f"state-{number}"
        shutil.copytree(first.root / "root" / "kits" / f"peer-{number}" / "state", state)
        with contextlib.closing(MetricsStore(state / "metrics.sqlite", read_only=True)) as store:
            assert [record.round for record in store.rounds()] == list(range(ROUNDS))
            last = [each for each in store.evaluations() if each.peer == number and each.split == "test"][-1]
        assert last.round == ROUNDS
        assert last.accuracy > TARGET
        print(f"10.0.0.{number + 1}: accuracy {last.accuracy:.2%} after {ROUNDS} rounds")
    print(f"the power of 10.0.0.2 was cut when 10.0.0.1 was in round {stood}")
