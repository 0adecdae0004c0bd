"""Σu = n and Σx conserved: on every column-stochastic sequence, with messages late by any number of rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.compress.decompress import decompress_layers
from peer.compress.float_types import floats_of
from peer.gossip.replicas import replicas_of
from peer.wire.message import MessageKind
from tests.gossip.drive import carry_for, gossip, peers, ring, schedule_of, spread, total
from tests.gossip.scenarios import column_stochastic, doubly_stochastic

TOP_K = ("top_k", {"fraction": 0.3})


@pytest.mark.parametrize("name", ["sgp", "sparse-push", "scsp", "quant-sgp"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 7), matrices=st.integers(1, 5), eta=st.floats(0.05, 1.0))
def test_push_sum_conserves_mass_on_any_column_stochastic_sequence(name, seed, n, matrices, eta):
    rng = np.random.default_rng(seed)
    schedule = schedule_of(*(column_stochastic(rng, n) for _ in range(matrices)))
    compressor = "none" if name == "sgp" else TOP_K
    algorithms = peers(
        name,
        schedule,
        rng.normal(size=(n, 12)),
        sizes=[5, 7],
        compressor=compressor,
        averaging_rate=eta,
        rounds=20,
        final_rounds=5,
    )
    start, carry = total(algorithms), carry_for(algorithms)
    for t in range(20):
        gossip(algorithms, t, carry=carry)
        assert abs(sum(a.u for a in algorithms) - n) < 1e-12 * n
        assert np.abs(total(algorithms) - start).max() < 1e-11 * n


@pytest.mark.parametrize("name", ["choco-sgd", "quant-sgp"])
def test_choco_in_the_conserving_form_keeps_the_mean_where_rows_do_not_sum_to_one(name):
    """With the printed form Σ x drifted by 2.7 in 300 rounds on such a graph."""
    rng = np.random.default_rng(3)
    w = column_stochastic(rng, 6)
    assert np.abs(w.sum(axis=1) - 1).max() > 0.1
    algorithms = peers(name, schedule_of(w), rng.normal(size=(6, 20)), compressor=TOP_K, averaging_rate=0.1)
    start = total(algorithms)
    for t in range(300):
        gossip(algorithms, t)
    assert np.abs(total(algorithms) - start).max() < 1e-11
    if name == "quant-sgp":
        assert spread(algorithms) < 1e-3


class LateNetwork:
    """Delivers messages late at random, each link in order, and knows what every message on its way will contribute."""

    def __init__(self, algorithms, rng, chance):
        self.algorithms, self.rng, self.chance = algorithms, rng, chance
        n = len(algorithms)
        self.links = {(j, i): [] for j in range(n) for i in range(n) if i != j}
        self.num_late = 0
        self.most_behind = 0
        self.num_left_out = 0

    def round(self, t, gradients, rate):
        exchanges = []
        for i, a in enumerate(self.algorithms):
            # What has come since is absorbed between rounds, in order of round and sender.
            arrived = [m for (_, to), link in self.links.items() if to == i for m in self._arrived(link)]
            for message, _, _ in sorted(arrived, key=lambda entry: (entry[0].round, entry[0].sender)):
                a.absorb_late(message)
            if a.spec.push_sum:
                receivers = a.node.schedule.all_receivers(i)
                a.left_out = frozenset(j for j in receivers if self.rng.random() < self.chance / 2)
                self.num_left_out += len(a.left_out)
            exchanges.append(a.begin(t, gradients[i], rate))
        for j, exchange in enumerate(exchanges):
            for i, message in exchange.sends.items():
                self.links[j, i].append((message, *self._contribution(i, message)))
        for i, a in enumerate(self.algorithms):
            inbox = {}
            for j in sorted(exchanges[i].awaits):
                link = self.links[j, i]
                # A message is on time only if it is not late itself and nothing earlier of its sender is missing.
                if len(link) == 1 and self.rng.random() >= self.chance:
                    inbox[j] = link.pop()[0]
                else:
                    self.num_late += 1
                    self.most_behind = max(self.most_behind, len(link))
            assert a.advance(inbox) is None

    def _arrived(self, link):
        """Take the messages of a link that have come: a random number of the oldest."""
        count = 0
        while count < len(link) and self.rng.random() >= self.chance:
            count += 1
        arrived, link[:] = link[:count], link[count:]
        return arrived

    def _contribution(self, receiver, message):
        """Return what the message adds to Σ x and Σ u when it comes."""
        if message.kind is MessageKind.NOTHING:
            return 0.0, 0.0
        a, sender = self.algorithms[receiver], self.algorithms[message.sender]
        rate = a.averaging_rate(message.round) if hasattr(a, "averaging_rate") else a.node.averaging_rate
        scale = rate * message.mixing_weight

        def value(algorithm):
            if (replicas := replicas_of(algorithm)) is not None:
                return floats_of(replicas.own.copy())
            return decompress_layers(algorithm._own, algorithm.node.layout, algorithm.x.dtype)

        vector = value(sender)
        if not a.spec.push_sum:
            vector = vector - value(a)
        return scale * vector, scale * message.push_weight

    def in_flight(self):
        entries = [entry for link in self.links.values() for entry in link]
        return sum(e[1] for e in entries) if entries else 0.0, sum(e[2] for e in entries)


@pytest.mark.parametrize(
    ("name", "in_bfloat16"),
    [
        *((name, False) for name in ("sgp", "sparse-push", "scsp", "quant-sgp", "d-psgd", "deep-squeeze", "choco-sgd")),
        *((name, True) for name in ("quant-sgp", "choco-sgd", "sparse-push", "deep-squeeze")),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_mass_with_what_is_in_flight_is_exact_in_every_round_with_late_messages(name, in_bfloat16, seed):
    """Whatever copies and memories are rounded to: what is given away is what is taken."""
    rng, number = np.random.default_rng(seed), np.float32 if in_bfloat16 else np.float64
    n, d, rounds = 5, 15, 40
    push_sum = name in ("sgp", "sparse-push", "scsp", "quant-sgp")
    make = column_stochastic if push_sum else doubly_stochastic
    schedule = schedule_of(*(make(rng, n) for _ in range(3)), period=2)
    algorithms = peers(
        name,
        schedule,
        rng.normal(size=(n, d)).astype(number),
        sizes=[4, 11],
        in_bfloat16=in_bfloat16,
        compressor="none" if name in ("sgp", "d-psgd") else TOP_K,
        averaging_rate=0.3,
        rounds=rounds,
        final_rounds=8,
        push_weight_guard=0.0,
    )
    network, expected = LateNetwork(algorithms, rng, chance=0.4), total(algorithms)
    for t in range(rounds):
        gradients = [(rng.normal(size=d) if a.wants_gradient(t) else np.zeros(d)).astype(number) for a in algorithms]
        expected = expected - 0.05 * sum(gradients)
        network.round(t, gradients, 0.05)
        flying_x, flying_u = network.in_flight()
        assert np.abs(total(algorithms) + flying_x - expected).max() < (1e-4 if in_bfloat16 else 1e-11)
        if push_sum:
            assert abs(sum(a.u for a in algorithms) + flying_u - n) < 1e-12
    assert network.num_late > 50
    assert network.num_left_out > 50 or not push_sum
    assert network.most_behind >= 3
    if hasattr(algorithms[0], "_held"):
        held = sum(len(a._held._values) for a in algorithms)
        assert held <= sum(len(link) for link in network.links.values()), "held values are dropped when settled"


def test_late_messages_change_nothing_in_the_end():
    """Without gradients and with a frozen network at the end, the mean that all reach is that of the start."""
    rng = np.random.default_rng(5)
    schedule = schedule_of(column_stochastic(rng, 4))
    start = rng.normal(size=(4, 10))
    algorithms = peers("quant-sgp", schedule, start, compressor=("top_k", {"fraction": 0.5}), averaging_rate=0.3)
    network = LateNetwork(algorithms, rng, chance=0.3)
    zeros = [np.zeros(10)] * 4
    for t in range(400):
        network.chance = 0.3 if t < 200 else 0.0
        network.round(t, zeros, 0.0)
    for a in algorithms:
        assert np.abs(a.model() - start.mean(axis=0)).max() < 1e-6


def test_replicas_are_the_same_to_the_last_bit_at_sender_and_receivers():
    rng = np.random.default_rng(8)
    schedule = schedule_of(*(column_stochastic(rng, 5) for _ in range(3)))
    x0 = rng.normal(size=(5, 30)).astype(np.float32)
    algorithms = peers("quant-sgp", schedule, x0, compressor=("qsgd", {"bits": 3}), averaging_rate=0.3)
    carry = carry_for(algorithms)
    for t in range(25):
        gossip(algorithms, t, [rng.normal(size=30).astype(np.float32) for _ in algorithms], 0.1, carry)
    for a in algorithms:
        for j, copy in a.replicas.of.items():
            assert copy.tobytes() == algorithms[j].replicas.own.tobytes()


def test_a_starved_peer_with_the_guard_does_not_explode():
    """A peer that hears nobody loses u geometrically; its step in z is γ/u."""
    cut = np.array([[0.5, 0.0, 0.0], [0.25, 0.5, 0.5], [0.25, 0.5, 0.5]])
    full = ring(3)
    target = np.array([1.0, -1.0, 0.5, 2.0])

    def largest(guard):
        schedule = schedule_of(*[cut] * 40, *[full] * 40)
        algorithms = peers("sgp", schedule, np.zeros(4), push_weight_guard=guard)
        worst = 0.0
        for t in range(80):
            gradients = [np.clip(5.0 * (a.model() - target), -5, 5) for a in algorithms]
            gossip(algorithms, t, gradients, 0.2)
            worst = max(worst, *(float(np.abs(a.model()).max()) for a in algorithms))
        assert abs(sum(a.u for a in algorithms) - 3) < 1e-12
        return worst, float(np.abs(algorithms[0].model() - target).max())

    unguarded, _ = largest(0.0)
    guarded, error = largest(0.5)
    assert unguarded > 1e6
    assert guarded < 10.0
    assert error < 0.5
