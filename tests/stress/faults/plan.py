"""Which faults a seed brings. Each seed has some kinds of them and not others: all at once would hide each other."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from tests.stress.faults.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How often what goes wrong. Intervals are means, in virtual seconds over the whole cluster; None: never."""

    durability: Literal["process", "power"]
    checkpoint_every_rounds: int
    delay_s: float
    spike_chance: float = 0.0
    spike_s: float = 0.0
    rate_bytes_s: float | None = None
    kill_every_s: float | None = None
    kill_in_write: float = 0.0
    """The share of kills that come in the middle of an operation of the disk."""
    power_share: float = 0.0
    """The share of kills that are power cuts: what was not synced is lost in part."""
    restart_s: float = 1.0
    damage_chance: float = 0.0
    """How often a peer finds its newest checkpoint damaged when it starts again."""
    break_every_s: float | None = None
    cut_every_s: float | None = None
    cut_s: float = 2.0
    partition_chance: float = 0.0
    """How often a cut divides the whole cluster, rather than two peers."""
    full_every_s: float | None = None
    full_s: float = 1.0
    operation_s: float = 0.0
    sync_s: float = 0.0
    slow_disk_every_s: float | None = None
    slow_peer_every_s: float | None = None
    clock_jump_every_s: float | None = None

    def kinds(self) -> set[str]:
        """Return the names of the faults that this plan has."""
        killed = self.kill_every_s is not None
        present = {
            "kills": killed,
            "kills in a write": killed and self.kill_in_write > 0.0,
            "power cuts": killed and self.power_share > 0.0,
            "damaged checkpoints": killed and self.damage_chance > 0.0,
            "broken streams": self.break_every_s is not None,
            "cuts": self.cut_every_s is not None,
            "partitions": self.cut_every_s is not None and self.partition_chance > 0.0,
            "full disks": self.full_every_s is not None,
            "slow disks": self.slow_disk_every_s is not None,
            "slow peers": self.slow_peer_every_s is not None,
            "clock jumps": self.clock_jump_every_s is not None,
            "delays": self.spike_chance > 0.0,
            "thin links": self.rate_bytes_s is not None,
        }
        return {kind for kind, is_present in present.items() if is_present}


def plan_for(scenario: Scenario) -> Plan:
    """Return the faults of a scenario: a function of its seed."""
    random = Random(f"faults {scenario.seed}")

    def maybe(chance: float, low: float, high: float) -> float | None:
        value = random.uniform(low, high)
        return value if random.random() < chance else None

    durability: Literal["process", "power"] = random.choice(("process", "power"))
    # What the clock had a say in cannot be repeated to the bit, nor what came of a peer that is gone for good and
    # sends nothing again, nor where in its stream a peer passed a change on that it hears of while it repeats rounds:
    # that is why there is `durability = "power"`.
    power = durability == "power" or not (scenario.case.late or scenario.happenings)
    kill_every_s = maybe(0.75, 0.5, 4.0)
    return Plan(
        durability=durability,
        checkpoint_every_rounds=random.choice((1, 3, 10, 25)),
        delay_s=random.choice((0.001, 0.01, 0.05)),
        spike_chance=random.choice((0.0, 0.05, 0.2)),
        spike_s=random.choice((0.1, 0.5)),
        rate_bytes_s=maybe(0.3, 2_000.0, 50_000.0),
        kill_every_s=kill_every_s,
        kill_in_write=random.choice((0.0, 0.5, 1.0)),
        power_share=random.choice((0.0, 0.5, 1.0)) if power else 0.0,
        restart_s=random.choice((0.1, 1.0)),
        damage_chance=random.choice((0.0, 0.0, 0.3)),
        break_every_s=maybe(0.5, 0.3, 3.0),
        cut_every_s=maybe(0.4, 2.0, 8.0),
        cut_s=random.choice((0.3, 2.0, 5.0)),
        partition_chance=random.choice((0.0, 0.5)),
        full_every_s=maybe(0.25, 1.0, 5.0),
        operation_s=random.choice((0.0, 0.0, 0.0005)),
        sync_s=random.choice((0.0, 0.002, 0.02)),
        slow_disk_every_s=maybe(0.25, 2.0, 8.0),
        slow_peer_every_s=maybe(0.4, 1.0, 6.0),
        clock_jump_every_s=maybe(0.3, 1.0, 6.0),
    )
