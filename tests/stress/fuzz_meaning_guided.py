"""The fuzzer of meaning in the form that libFuzzer and OSS-Fuzz take: an input decides which lies are told, and where.

    python -m tests.stress.fuzz_meaning_guided -max_total_time=60 FOLDER     # libFuzzer's own options

The first two bytes of an input choose the algorithm and the moment of its run, the others all that is drawn to make
three lies up. Coverage of `peer.gossip` and `peer.node` guides the mutation.
"""

from __future__ import annotations

import sys
from functools import cache
from random import Random

import atheris

with atheris.instrument_imports(include=["peer.gossip", "peer.node"], exclude=[]):
    from tests.stress.fuzz_meaning import quiet
    from tests.stress.meaning.circumstances import CIRCUMSTANCES
    from tests.stress.meaning.report import Report
    from tests.stress.meaning.trial import Honest, Scene, Told
    from tests.stress.meaning.worlds import World, build_world

_MOMENTS = 4
_LIES = 3
_SEED = 1


class DecidedByBytes(Random):
    """Draws what an input says; after its end, what seed 0 says."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data = data

    def getrandbits(self, k: int, /) -> int:
        size = (k + 7) // 8
        taken, self._data = self._data[:size], self._data[size:]
        if len(taken) < size:
            return super().getrandbits(k)
        return int.from_bytes(taken, "little") >> (8 * size - k)

    def random(self) -> float:
        return self.getrandbits(32) / (1 << 32)


class _Here(Exception):
    """A run has come to the moment that was asked for."""


@cache
def moment_of(number: int, moment: int) -> tuple[World, Honest]:
    """Return the run of some circumstances, stopped at one of its moments, and what is honest in it."""
    first = build_world(CIRCUMSTANCES[number], _SEED, keeps_state=False)
    first.records = True
    first.run()
    last = max(2, first.turns * (moment + 1) // (_MOMENTS + 1))
    second = build_world(CIRCUMSTANCES[number], _SEED, keeps_state=False)

    def stop(world: World) -> None:
        if world.turns == last:
            raise _Here

    try:
        second.run(stop)
    except _Here:
        return second, Honest.of(first)
    raise AssertionError("the second run is shorter than the first")


def one_input(data: bytes) -> None:
    """Tell the lies of one input; whatever they break is raised."""
    if len(data) < 3:
        return
    number, random = data[0] % len(CIRCUMSTANCES), DecidedByBytes(data[2:])
    world, honest = moment_of(number, data[1] % _MOMENTS)
    victim = random.choice([peer for peer in range(3) if peer not in world.dead])
    liar = random.choice([peer for peer in range(world.num_peers) if peer != victim])
    report = Report()
    Scene(world, victim, liar, honest, Told(CIRCUMSTANCES[number], _SEED, "guided", report), random).batch(_LIES)
    if report.findings:
        raise AssertionError("\n".join(report.lines()))


if __name__ == "__main__":
    quiet()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
