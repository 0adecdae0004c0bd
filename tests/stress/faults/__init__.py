"""The production peer under everything that can go wrong, on a virtual clock: one number reproduces a failure.

What runs is the real thing: participant, session, algorithm, frames, links, chunks, journal and checkpoints
(`peer.node.durable.DurablePeer`). What is simulated is what surrounds them: streams that are late, slow, cut and broken
(`streams`), disks that fill up, tear and forget (`tests.state.failing_disk`), clocks that jump, processes that die in
the middle of a write (`process`, `world`), and a model of a few dozen numbers (`training`). A seed decides what is run
(`scenario`) and what goes wrong (`plan`); `invariants` are checked after every round. `tests.stress.chaos` runs many
seeds.
"""

from __future__ import annotations

from tests.stress.faults.invariants import InvariantBroken
from tests.stress.faults.scenario import Scenario
from tests.stress.faults.world import Outcome, SimulationFailed, World, simulate

__all__ = ["InvariantBroken", "Outcome", "Scenario", "SimulationFailed", "World", "simulate"]
