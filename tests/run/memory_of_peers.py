"""What two peers in one process hold in memory, in bytes a parameter; run by `test_memory` in a process of its own.

    python -m tests.run.memory_of_peers FOLDER ALGORITHM…

Two peers of a complete graph train, save, evaluate, write their models and begin again from their checkpoints. Frames
go from one to the other as they are. Prints JSON: algorithm → what a peer holds between two rounds, and for each thing
that it does, how much it holds for the time beyond that.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from peer.config.options import load
from peer.gossip.effects import Effects
from peer.node.disk_state import DiskState
from peer.node.durable import DurablePeer
from peer.run.setup import RunSetup
from peer.state.disk import Disk
from peer.train.data import Classification, TensorData
from peer.train.local_step import Trainer
from peer.train.threads import use_one_thread

LARGE = 1024
"""Rows and columns of the eight layers of the model that is measured: 8.4 million parameters."""
SMALL = 16


def make_task(*, width: int) -> Classification:
    def data() -> TensorData:
        return TensorData(torch.ones(8, width), torch.arange(8) % 2)

    def model() -> nn.Module:
        hidden = [nn.Linear(width, width, bias=False) for _ in range(8)]
        return nn.Sequential(*hidden, nn.Linear(width, 2))

    return Classification(name="wide", num_classes=2, model=model, train=data, test=data)


class Peers:
    """Two peers, their trainers and their state folders."""

    def __init__(self, algorithm: str, width: int, folder: Path) -> None:
        settings = (
            "run.rounds=100",
            "training.task=tests.run.memory_of_peers:make_task",
            f"training.task_options.width={width}",
            "training.batch_size=2",
            "data.partition=iid",
            "graph.kind=complete",
            f"algorithm.name={algorithm}",
            *(["compressor.fraction=0.01"] if algorithm in ("quant-sgp", "sparse-push") else []),
        )
        setup = RunSetup.open(load(environment={}, overrides=settings), folder, 2)
        self.trainers: list[Trainer] = [setup.trainer(index) for index in (0, 1)]
        self.size = self.trainers[0].layout.size
        self.peers = []
        for index, trainer in enumerate(self.trainers):
            participant = setup.participant(index, trainer, trainer.layout, trainer.initial_vector())
            home = folder / str(index)
            home.mkdir(parents=True, exist_ok=True)
            self.peers.append(
                DurablePeer(participant, DiskState(Disk(home), {"peer": str(index)}), neighbors=[1 - index])
            )
        for peer in self.peers:
            peer.open()

    def round(self) -> None:
        """Take both through a round."""
        sent: list[list[tuple[int, bytes]]] = [[], []]
        for index, peer in enumerate(self.peers):
            peer.step()
            sent[1 - index] += self._performed(index, peer.begin(0.0))
        while any(sent):
            for index, peer in enumerate(self.peers):
                while sent[index]:
                    seq, frame = sent[index].pop(0)
                    sent[1 - index] += self._performed(index, peer.receive(1 - index, seq, frame, 0.0))
        for index, peer in enumerate(self.peers):
            self._confirm(index, peer.sync())

    def _performed(self, index: int, effects: Effects) -> list[tuple[int, bytes]]:
        self._confirm(index, effects.receipts)
        return [(each.seq, each.frame) for each in self.peers[index].publish(effects)]

    def _confirm(self, index: int, receipts: dict[int, int]) -> None:
        for sender, upto in receipts.items():
            self.peers[sender].links.acknowledge(index, upto)

    def save(self) -> None:
        """Write a checkpoint of each."""
        for index, peer in enumerate(self.peers):
            self._confirm(index, peer.save({}))

    def evaluate(self) -> None:
        """Evaluate the model of each."""
        for trainer, peer in zip(self.trainers, self.peers, strict=True):
            trainer.evaluate(peer.participant.model())

    def write(self, folder: Path) -> None:
        """Write the model of each."""
        for trainer, peer in zip(self.trainers, self.peers, strict=True):
            trainer.save_model(peer.participant.model(), folder / "model.safetensors")

    def close(self) -> None:
        """Close their files."""
        for peer in self.peers:
            peer.disk_state.close()


def held(which: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def _more(call: Callable[[], object]) -> int:
    """Return how many bytes more than before the process holds at most during a call."""
    gc.collect()
    before = held()
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    call()
    return held("VmHWM") - before


def measure(algorithm: str, width: int, folder: Path) -> dict[str, float]:
    """Return the figures of a width, in bytes a parameter. What one peer does is measured while the other waits; what
    the two hold is halved."""
    before = held()
    peers = Peers(algorithm, width, folder)
    for _ in range(2):
        peers.round()
    gc.collect()
    found = {
        "held": (held() - before) / 2,
        "round": _more(peers.round),
        "save": _more(peers.save),
        "evaluate": _more(peers.evaluate),
        "write": _more(lambda: peers.write(folder)),
    }
    size = peers.size
    peers.close()
    # Its cycles would keep it alive.
    vars(peers).clear()
    found["resume"] = _more(lambda: Peers(algorithm, width, folder).close()) / 2
    return {name: each / size for name, each in found.items()}


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    use_one_thread()
    for algorithm in sys.argv[2:]:
        # What is imported and made once has to be there.
        measure(algorithm, SMALL, folder / f"{algorithm}-small")
        found[algorithm] = measure(algorithm, LARGE, folder / algorithm)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
