"""The compose cluster on a real engine: it trains, two containers are killed, and nobody can tell."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from peer.state.metrics import MetricsStore
from tests.compose import engine as engines

_MISSING = engines.missing()

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(_MISSING is not None, reason=f"containers cannot be run here: {_MISSING}"),
]

NUM_PEERS = 8
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sottovoce-compose"
"""Base image and wheels, for the next run."""
ROUNDS = 400
JOB = f"--set run.rounds={ROUNDS} --set state.checkpoint_every_rounds=50 --set peer.min_step_s=0.15"
TARGET = 0.9
"""Of every peer's model; one process that trains on all the data reaches 0.97."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engines.Engine]:
    with engines.running_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture(scope="module")
def tree(engine: engines.Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a fresh copy of the tree whose image is built, and the variables for it."""
    tree = engines.copy_of_the_tree(tmp_path_factory.mktemp("tree"))
    settings = {"SOTTO_IMAGE": "sottovoce-test", **engines.build_settings(engine, tree, KEPT)}
    engine.compose(tree, settings, "build", "init")
    return tree, settings


class ComposeCluster:
    """One project: containers, network and volumes of one cluster."""

    def __init__(self, engine: engines.Engine, tree: Path, settings: Mapping[str, str], name: str) -> None:
        self.engine, self._tree, self.name = engine, tree, name
        self._settings = {**settings, "SOTTO_PEERS": str(NUM_PEERS), "SOTTO_OPTIONS": JOB}

    def compose(self, *words: str, check: bool = True, **changes: str) -> str:
        return self.engine.compose(self._tree, self._settings | changes, "-p", self.name, *words, check=check)

    def containers(self) -> list[str]:
        """Return the peers' containers, by number."""
        label = f"label=com.docker.compose.project={self.name}"
        form = '{{.Label "com.docker.compose.service"}} {{.ID}}'
        listing = self.engine.docker("ps", "--all", "--filter", label, "--format", form)
        found = dict(line.split() for line in listing.splitlines())
        return [found[f"peer-{peer}"] for peer in range(NUM_PEERS)]

    def states(self) -> list[dict[str, Any]]:
        return [state["State"] for state in json.loads(self.engine.docker("inspect", *self.containers()))]

    def round(self, peer: int) -> int:
        """Return where a peer is, asked in its own container; -1 if it does not answer."""
        said = self.engine.docker("exec", self.containers()[peer], "sotto-container", "health", check=False)
        return int(json.loads(said).get("round", -1)) if said.startswith("{") else -1

    def final_models(self, directory: Path) -> list[dict[str, bytes]]:
        """Copy the volumes to a folder; return the bytes of each tensor of each peer's final model."""
        directory.mkdir()
        for peer, container in enumerate(self.containers()):
            self.engine.docker("cp", f"{container}:/kits/peer-{peer}", str(directory))
        files = [directory / f"peer-{peer}" / "state" / "model.safetensors" for peer in range(NUM_PEERS)]
        # Not the files: the order of what their headers say of themselves is up to chance.
        return [{name: tensor.tobytes() for name, tensor in load_file(file).items()} for file in files]

    def last_words(self) -> str:
        return "\n".join(self.engine.docker("logs", "--tail", "3", each, check=False) for each in self.containers())


@pytest.fixture
def make_cluster(
    engine: engines.Engine, tree: tuple[Path, dict[str, str]]
) -> Iterator[Callable[[str], ComposeCluster]]:
    """Make clusters that leave no container, network or volume."""
    made: list[ComposeCluster] = []

    def make(name: str) -> ComposeCluster:
        made.append(ComposeCluster(engine, *tree, f"sotto-{name}"))
        return made[-1]

    yield make
    for cluster in made:
        # An engine that is busy says that a container is gone before it has left its network.
        for last in (False, False, True):
            cluster.compose("down", "--volumes", "--timeout", "5", check=last)


def wait_for(cluster: ComposeCluster, condition: Callable[[], bool], timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, cluster.last_words()
        time.sleep(1.0)


def is_over(cluster: ComposeCluster) -> bool:
    return all(state["Status"] == "exited" for state in cluster.states())


def test_kill_of_two_containers_changes_nothing_in_the_final_models(
    make_cluster: Callable[[str], ComposeCluster], tmp_path: Path
) -> None:
    disturbed, undisturbed = make_cluster("disturbed"), make_cluster("undisturbed")
    disturbed.compose("up", "--detach")
    wait_for(disturbed, lambda: disturbed.round(0) > 60)
    seen = disturbed.engine.docker("exec", disturbed.containers()[3], "find", "/kits", "-name", "*.key")
    assert seen.split() == ["/kits/peer-3/peer.key"], "a peer's container sees its own key alone"
    status = json.loads(disturbed.compose("run", "--rm", "operator", "status", "--run", "/authority/kits", "--json"))
    assert ["error" in each for each in status] == [False] * NUM_PEERS
    victims = [disturbed.containers()[k] for k in (2, 5)]
    disturbed.engine.docker("kill", *victims)
    killed = [state["ExitCode"] for state in disturbed.states() if state["Status"] == "exited"]
    assert killed == [137, 137], "the run was over before two could be killed"
    disturbed.engine.docker("start", *victims)
    wait_for(disturbed, lambda: is_over(disturbed))
    assert [state["ExitCode"] for state in disturbed.states()] == [0] * NUM_PEERS, disturbed.last_words()

    undisturbed.compose("up", "--detach")
    wait_for(undisturbed, lambda: is_over(undisturbed))
    assert [state["ExitCode"] for state in undisturbed.states()] == [0] * NUM_PEERS, undisturbed.last_words()

    models = [each.final_models(tmp_path / each.name) for each in (disturbed, undisturbed)]
    assert models[0] == models[1]
    accuracies, sent = [], []
    for peer in range(NUM_PEERS):
        store = MetricsStore(tmp_path / disturbed.name / f"peer-{peer}" / "state" / "metrics.sqlite", read_only=True)
        last = [each for each in store.evaluations() if each.peer == peer and each.split == "test"][-1]
        assert last.round == ROUNDS
        assert last.accuracy > TARGET
        rounds = [record.round for record in store.rounds()]
        assert rounds == list(range(ROUNDS))
        accuracies.append(last.accuracy)
        sent.append(sum(record.frame_bytes for record in store.rounds()))
        store.close()
    print(
        f"{NUM_PEERS} containers, {ROUNDS} rounds: accuracy {min(accuracies):.2%} to {max(accuracies):.2%}, at most "
        f"{max(sent) / 1000:.0f} kB sent by one; 2 were killed, and all {sum(map(len, models[0]))} tensors are "
        "those of an undisturbed run"
    )


def test_volumes_of_another_cluster_are_refused(make_cluster: Callable[[str], ComposeCluster]) -> None:
    cluster = make_cluster("other")
    cluster.compose("up", "init")
    with pytest.raises(RuntimeError, match="ended with 2"):
        cluster.compose("up", "--force-recreate", "--exit-code-from", "init", "init", SOTTO_PEERS="4")
