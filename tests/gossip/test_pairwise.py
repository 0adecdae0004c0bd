"""AD-PSGD: the pair is atomic under every order of concurrent requests, on every graph, through crashes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import wire
from peer.compress.layout import Layout
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip import build, build_pair_node
from peer.simulate.replay import exchange_pair, parse_scenario, replay
from peer.wire.message import MessageKind
from tests.gossip.drive import contexts, ring, schedule_of
from tests.gossip.event_logs import merge_events, next_exchange
from tests.gossip.scenarios import doubly_stochastic, events, scenario

SIZES = [3, 5]


def _nodes(name, w, x0, **more):
    layout = Layout.of_sizes(SIZES)
    if name == "moniqua-ad-psgd":
        more = {"compressor": ("modulo", {"bits": 8}), "theta": (1.0,), "verified": True, **more}
    return [
        build_pair_node(name, node, start)
        for node, start in zip(contexts(schedule_of(w), layout, **more), x0, strict=True)
    ]


class Network:
    """Ordered links between nodes; a crash loses what is on the way to a node and the end of what it sent."""

    def __init__(self, nodes, rng, targets):
        self.nodes, self.rng, self.targets = nodes, rng, targets
        n = len(nodes)
        self.links = {(i, j): [] for i in range(n) for j in range(n) if i != j}
        self.gradients = [None] * n
        self.moved = np.zeros(len(targets[0]))
        self.saved = [self._snapshot(node) for node in nodes]
        self.mixes = 0

    @staticmethod
    def _snapshot(node):
        return {name: np.array(value) for name, value in node.state().items()}

    def send(self, sender, sends):
        for receiver, message in sends:
            layout = self.nodes[sender].node.layout
            self.links[sender, receiver].append(wire.encode(message, layout))

    def act(self, kind, i):
        """Let node i do something if it can."""
        node = self.nodes[i]
        sends = ()
        if kind == "request" and node.idle:
            partner = node.choose_partner()
            sends = ((partner, node.request(partner)),)
        elif kind == "read" and node.can_read and self.gradients[i] is None:
            self.gradients[i] = node.read() - self.targets[i]
        elif kind == "step" and self.gradients[i] is not None:
            node.step(self.gradients[i], 0.1)
            self.moved -= 0.1 * self.gradients[i]
            self.gradients[i] = None
        elif kind == "deliver":
            full = [link for link, frames in self.links.items() if link[1] == i and frames]
            if full:
                link = full[int(self.rng.integers(len(full)))]
                message = wire.decode(self.links[link].pop(0), node.node.layout, dtype=node.x.dtype)
                outcome = node.receive(message)
                self.mixes += outcome.mixed_with is not None
                sends = outcome.sends
        elif kind == "crash":
            self.crash(i)
            return
        # The state is on disk before anything leaves.
        self.saved[i] = self._snapshot(node)
        self.send(i, sends)

    def crash(self, i):
        for (a, b), frames in self.links.items():
            if b == i:
                frames.clear()
            elif a == i:
                del frames[int(self.rng.integers(len(frames) + 1)) :]
        self.nodes[i].restore(self.saved[i])
        self.gradients[i] = None
        self.reconnect(i)

    def reconnect(self, i):
        """Both ends repeat what is open between them."""
        for j, node in enumerate(self.nodes):
            if node.open_request is not None and (j == i or node.open_request[0] == i):
                self.send(j, [node.open_request])

    def drain(self):
        """Deliver everything, in random order. A node that is never refused for good comes to rest."""
        for _ in range(10_000):
            waiting = [link for link, frames in self.links.items() if frames]
            if not waiting:
                return
            self.act("deliver", waiting[int(self.rng.integers(len(waiting)))][1])
        raise AssertionError("the nodes do not come to rest")


ACTIONS = ["request", "request", "read", "step", "deliver", "deliver", "deliver", "deliver"]


@pytest.mark.parametrize("name", ["ad-psgd", "moniqua-ad-psgd"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 6), crashes=st.booleans(), theta=st.sampled_from([0.01, 10.0]))
def test_any_order_of_requests_is_free_of_deadlock_and_conserves_mass(name, seed, n, crashes, theta):
    rng = np.random.default_rng(seed)
    start = rng.normal(size=(n, 8))
    more = {} if name == "ad-psgd" else {"theta": (theta,)}
    nodes = _nodes(name, doubly_stochastic(rng, n), start, **more)
    network = Network(nodes, rng, rng.normal(size=(n, 8)))
    for _ in range(800):
        network.act("crash" if crashes and rng.random() < 0.02 else str(rng.choice(ACTIONS)), int(rng.integers(n)))
    network.drain()
    # At rest nothing is open: no exchange hangs, nobody waits for anybody.
    assert all(node.idle for node in nodes)
    assert network.mixes > 10
    total = sum(node.x for node in nodes)
    assert np.abs(total - start.sum(axis=0) - network.moved).max() < 1e-10
    # The merged log is a serial order in which the same happens.
    merged = merge_events([node.take_events() for node in nodes])
    if name == "ad-psgd":
        assert np.abs(_replayed(merged, start, network.targets) - np.stack([node.x for node in nodes])).max() < 1e-10


def _replayed(merged, start, targets):
    x, read = start.copy(), start.copy()
    for event in merged:
        if event[0] == "read":
            read[event[1]] = x[event[1]]
        elif event[0] == "step":
            x[event[1]] -= event[2] * (read[event[1]] - targets[event[1]])
        else:
            x[event[1]] = x[event[2]] = (x[event[1]] + x[event[2]]) / 2
    return x


def test_requests_that_cross_are_won_by_the_lower_peer():
    nodes = _nodes("ad-psgd", np.full((2, 2), 0.5), np.array([[0.0] * 8, [2.0] * 8]))
    first, second = nodes[0].request(1), nodes[1].request(0)
    refused = nodes[0].receive(second)
    assert refused.sends[0][1].kind is MessageKind.PAIR_BUSY
    answered = nodes[1].receive(first)
    assert answered.sends[0][1].kind is MessageKind.PAIR_REPLY
    assert nodes[1].receive(refused.sends[0][1]).retry_after_s > 0
    assert nodes[0].receive(answered.sends[0][1]).mixed_with == 1
    assert all(np.array_equal(node.x, np.ones(8)) for node in nodes)
    assert all(node.idle for node in nodes)


def test_a_cycle_of_requests_ends_in_refusals_not_in_a_deadlock():
    nodes = _nodes("ad-psgd", ring(4), np.eye(4, 8))
    requests = [node.request((i + 1) % 4) for i, node in enumerate(nodes)]
    answers = [nodes[(i + 1) % 4].receive(message).sends[0][1] for i, message in enumerate(requests)]
    assert all(answer.kind is MessageKind.PAIR_BUSY for answer in answers)
    for node, answer in zip(nodes, answers, strict=True):
        node.receive(answer)
    assert all(node.idle for node in nodes)


def test_a_repeated_request_gets_the_same_reply_and_is_applied_once():
    nodes = _nodes("ad-psgd", np.full((2, 2), 0.5), np.array([[0.0] * 8, [2.0] * 8]))
    request = nodes[0].request(1)
    first = nodes[1].receive(request)
    after = nodes[1].x.copy()
    nodes[1].step(np.ones(8), 0.5)
    again = nodes[1].receive(request)
    assert again.sends[0][1] is first.sends[0][1]
    assert again.mixed_with is None
    assert np.array_equal(nodes[1].x, after - 0.5)
    nodes[0].receive(first.sends[0][1])
    assert nodes[0].receive(again.sends[0][1]).mixed_with is None
    assert np.array_equal(nodes[0].x, np.ones(8))


def test_what_was_refused_stays_refused():
    """Otherwise a copy of the request that is still on its way would mix one side only."""
    nodes = _nodes("ad-psgd", ring(3), np.eye(3, 8))
    request = nodes[0].request(1)
    own = nodes[1].request(2)
    busy = nodes[1].receive(request).sends[0][1]
    nodes[0].receive(busy)
    nodes[1].receive(nodes[2].receive(own).sends[0][1])
    assert nodes[1].idle
    assert nodes[1].receive(request).sends[0][1].kind is MessageKind.PAIR_BUSY


def test_a_step_between_request_and_reply_commutes_with_the_mix():
    nodes = _nodes("ad-psgd", np.full((2, 2), 0.5), np.array([[0.0] * 8, [2.0] * 8]))
    nodes[0].read()
    request = nodes[0].request(1)
    nodes[0].step(np.ones(8), 1.0)
    assert not nodes[0].can_read
    with pytest.raises(LocalProtocolError):
        nodes[0].read()
    nodes[0].receive(nodes[1].receive(request).sends[0][1])
    assert np.array_equal(nodes[0].x, np.zeros(8))
    assert np.array_equal(nodes[1].x, np.ones(8))
    assert [event[0] for event in nodes[0].take_events()] == ["read", "mix", "step"]


def test_backoff_grows_with_refusals_and_depends_on_the_seed_alone():
    def pauses(seed):
        node = _nodes("ad-psgd", np.full((2, 2), 0.5), np.zeros((2, 8)), seed=seed)[0]
        result = []
        for _ in range(10):
            message = node.request(1)
            busy = dataclasses.replace(message, kind=MessageKind.PAIR_BUSY, sender=1, mixing_weight=0.0, layers=())
            result.append(node.receive(busy).retry_after_s)
        return result

    first = pauses(1)
    assert first == pauses(1)
    assert first != pauses(2)
    for k, pause in enumerate(first):
        assert 0.005 * 2 ** min(k, 6) <= pause < 0.015 * 2 ** min(k, 6)


def test_staleness_is_counted():
    nodes = _nodes("ad-psgd", np.full((2, 2), 0.5), np.zeros((2, 8)))
    gradient = nodes[0].read()
    for exchange in range(3):
        exchange_pair(nodes, 1, 0, exchange, lambda m: m)
    nodes[0].step(gradient, 0.1)
    nodes[0].read()
    nodes[0].step(gradient, 0.1)
    staleness = nodes[0].staleness
    assert (staleness.steps, staleness.exchanges) == (2, 3)
    assert (staleness.exchanges_between, staleness.most_exchanges_between) == (3, 3)


def test_partners_are_drawn_from_the_neighbours_alike():
    node = _nodes("ad-psgd", ring(5), np.zeros((5, 8)))[0]
    counts = dict.fromkeys((1, 4), 0)
    for _ in range(400):
        partner = node.choose_partner()
        counts[partner] += 1
        message = node.request(partner)
        node.receive(
            dataclasses.replace(message, kind=MessageKind.PAIR_BUSY, sender=partner, mixing_weight=0.0, layers=())
        )
    assert min(counts.values()) > 150


@pytest.mark.parametrize(("bits", "rounding"), [(3, "dither"), (4, "stochastic"), (8, "nearest")])
def test_moniqua_pairs_repair_within_the_exchange(bits, rounding):
    rng = np.random.default_rng(1)
    start = 50.0 * rng.normal(size=(2, 8)).astype(np.float32)
    nodes = _nodes(
        "moniqua-ad-psgd",
        np.full((2, 2), 0.5),
        start,
        compressor=("modulo", {"bits": bits, "rounding": rounding}),
        theta=(0.01,),
    )
    exchange_pair(nodes, 0, 1, 0, lambda m: m)
    assert nodes[1].metrics().repairs > 0
    assert all(node.idle for node in nodes)
    total = sum(node.x.astype(np.float64) for node in nodes)
    assert np.abs(total - start.sum(axis=0, dtype=np.float64)).max() < 1e-4
    # The initiator's code was fine (θ 0.01), the reply's θ had to span the distance of the two; it heals from there.
    for exchange in range(1, 500):
        exchange_pair(nodes, exchange % 2, 1 - exchange % 2, exchange, lambda m: m)
    assert np.abs(nodes[0].x - nodes[1].x).max() < 1e-2


def test_the_reply_is_always_read_without_repair():
    """The responder knows the distance when it chooses its θ."""
    rng = np.random.default_rng(2)
    for trial in range(200):
        scale = 10.0 ** rng.uniform(-5, 4)
        start = (rng.normal() * 100 + scale * rng.normal(size=(2, 8))).astype(np.float32)
        bits = int(rng.integers(3, 9))
        nodes = _nodes(
            "moniqua-ad-psgd",
            np.full((2, 2), 0.5),
            start,
            compressor=("modulo", {"bits": bits}),
            theta=(1.0,),
            seed=trial,
            largest_loss=1e12,
        )
        exchange_pair(nodes, 0, 1, 0, lambda m: m)
        assert nodes[0].idle


def test_theta_of_theorem_5_serves_without_hashes():
    rng = np.random.default_rng(3)
    nodes = _nodes("moniqua-ad-psgd", ring(5), np.zeros((5, 8)), verified=False, theta_mode="theorem", theta=())
    targets = rng.normal(size=(5, 8))
    network = Network(nodes, rng, targets)
    for _ in range(3000):
        network.act(str(rng.choice(ACTIONS)), int(rng.integers(5)))
    network.drain()
    assert np.abs(sum(node.x for node in nodes) - network.moved).max() < 1e-9
    assert max(np.abs(node.x).max() for node in nodes) < 10


def test_replay_takes_the_logs_of_real_nodes():
    """Merged events with exchange numbers and rates are a scenario like any other."""
    rng = np.random.default_rng(4)
    s = scenario("ad-psgd", 3, nodes=4, layers=[3, 5], events=[])
    start = np.tile(np.array(s["x0"]), (4, 1))
    nodes = _nodes("ad-psgd", ring(4), start)
    curvature, target = np.array(s["objective"]["curvature"]), np.array(s["objective"]["target"])
    network = Network(nodes, rng, target)
    for _ in range(300):
        i = int(rng.integers(4))
        kind = str(rng.choice(ACTIONS))
        if kind == "read" and nodes[i].can_read and network.gradients[i] is None:
            network.gradients[i] = curvature[i] * (nodes[i].read() - target[i])
        else:
            network.act(kind, i) if kind != "read" else None
    network.drain()
    merged = merge_events([node.take_events() for node in nodes])
    result = replay(parse_scenario({**s, "events": [list(event) for event in merged], "lr": 999.0}))
    assert np.abs(np.array(result["x"][-1]) - np.stack([node.x for node in nodes])).max() < 1e-12


def test_merge_refuses_logs_that_do_not_belong_together():
    with pytest.raises(ValueError, match="one run"):
        merge_events([[("mix", 0, 1, 0)], [("read", 1)]])


def test_merge_keeps_the_order_of_every_log():
    rng = np.random.default_rng(5)
    serial = [tuple(e) if e[0] != "mix" else (*e, k) for k, e in enumerate(events(rng, 5, 200))]
    serial = [(*e, 0.1) if e[0] == "step" else e for e in serial]
    logs = [[e for e in serial if i in e[1:3] and (e[0] == "mix" or e[1] == i)] for i in range(5)]
    merged = merge_events(logs)
    assert sorted(map(str, merged)) == sorted(map(str, serial))
    for i, log in enumerate(logs):
        assert [e for e in merged if i in e[1:3] and (e[0] == "mix" or e[1] == i)] == log


def test_messages_that_do_not_belong_are_refused():
    nodes = _nodes("ad-psgd", ring(4), np.zeros((4, 8)))
    request = nodes[0].request(1)
    with pytest.raises(RemoteProtocolError, match="neighbour"):
        nodes[2].receive(request)
    with pytest.raises(RemoteProtocolError, match="asynchronous"):
        nodes[1].receive(dataclasses.replace(request, kind=MessageKind.GOSSIP))
    with pytest.raises(RemoteProtocolError, match="over"):
        nodes[1].receive(dataclasses.replace(request, kind=MessageKind.REPAIR_REQUEST, mixing_weight=0.0, layers=()))
    with pytest.raises(RemoteProtocolError, match="layers"):
        nodes[1].receive(dataclasses.replace(request, layers=request.layers[:1]))
    with pytest.raises(LocalProtocolError, match="one exchange"):
        nodes[0].request(3)
    with pytest.raises(LocalProtocolError, match="neighbour"):
        nodes[1].request(3)


def test_rounds_and_pairs_are_built_by_their_own_functions():
    node = contexts(schedule_of(ring(3)), Layout.of_sizes(SIZES))[0]
    with pytest.raises(LocalProtocolError):
        build("ad-psgd", node, np.zeros(8))
    with pytest.raises(LocalProtocolError):
        build_pair_node("sgp", node, np.zeros(8))


def test_an_initiator_that_went_back_to_an_old_state_is_released():
    """It repeats a request that was answered long ago, and whose reply is no longer kept."""
    nodes = _nodes("ad-psgd", np.full((2, 2), 0.5), np.array([[0.0] * 8, [2.0] * 8]))
    old = nodes[0].request(1)
    state = nodes[0].state()
    nodes[0].receive(nodes[1].receive(old).sends[0][1])
    nodes[0].receive(nodes[1].receive(nodes[0].request(1)).sends[0][1])
    nodes[0].restore(state)
    nodes[0].skip_exchanges(100)
    answer = nodes[1].receive(nodes[0].open_request[1]).sends[0][1]
    assert answer.kind is MessageKind.PAIR_BUSY
    assert nodes[0].receive(answer).retry_after_s > 0
    # Its next number stands for no exchange that anybody remembers.
    again = nodes[0].request(1)
    assert again.round == next_exchange(nodes[0]) - 1 == 101
    assert nodes[0].receive(nodes[1].receive(again).sends[0][1]).mixed_with == 1


def test_a_responder_is_free_again_when_the_link_of_a_repair_breaks():
    rng = np.random.default_rng(0)
    nodes = _nodes("moniqua-ad-psgd", ring(3), 50.0 * rng.normal(size=(3, 8)), theta=(0.01,))
    request = nodes[0].request(1)
    wish = nodes[1].receive(request).sends[0][1]
    assert wish.kind is MessageKind.REPAIR_REQUEST
    assert not nodes[1].idle
    nodes[1].disconnected(2)
    assert not nodes[1].idle
    nodes[1].disconnected(0)
    assert nodes[1].idle
    # The repeated request starts the repair again.
    message, receiver = request, 1
    while not nodes[0].idle:
        ((receiver, message),) = nodes[receiver].receive(message).sends or ((0, None),)
        if message is None:
            break
    assert nodes[0].idle
    assert nodes[1].idle


@pytest.mark.parametrize("answers", [0, 1])
def test_a_repair_under_way_survives_a_restart(answers):
    """The answer comes to a node that was restored from its state: it replies as the one that went on."""
    rng = np.random.default_rng(1)
    start = 50.0 * rng.normal(size=(2, 8)).astype(np.float32)
    settings = {"compressor": ("modulo", {"bits": 3, "rounding": "dither"}), "theta": (0.01,)}
    initiator, responder = _nodes("moniqua-ad-psgd", np.full((2, 2), 0.5), start, **settings)
    ((_, wish),) = responder.receive(initiator.request(1)).sends
    for _ in range(answers):
        ((_, repair),) = initiator.receive(wish).sends
        ((_, wish),) = responder.receive(repair).sends
    assert wish.kind is MessageKind.REPAIR_REQUEST
    restored = _nodes("moniqua-ad-psgd", np.full((2, 2), 0.5), start, **settings)[1]
    restored.restore({name: np.array(value) for name, value in responder.state().items()})
    assert not restored.idle
    ((_, repair),) = initiator.receive(wish).sends
    ((_, one),), ((_, other),) = responder.receive(repair).sends, restored.receive(repair).sends
    layout = responder.node.layout
    assert wire.encode(one, layout) == wire.encode(other, layout)
    assert responder.x.tobytes() == restored.x.tobytes()


def test_only_those_who_come_into_question_are_chosen():
    node = _nodes("ad-psgd", ring(5), np.zeros((5, 8)))[0]
    for _ in range(20):
        assert node.choose_partner([4]) == 4
        node.skip_exchanges(1)
    chosen = set()
    for _ in range(50):
        chosen.add(node.choose_partner([1, 4]))
        node.skip_exchanges(1)
    assert chosen == {1, 4}
