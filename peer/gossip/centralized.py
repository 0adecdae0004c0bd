"""The centralized baselines, over the same messages and the same accounting: all-reduce and a parameter server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from peer.compress import build
from peer.compress.base import Compressor, Draws, compress_layers
from peer.compress.decompress import add_all_decompressed_, add_sum_decompressed_, decompress_layers
from peer.compress.payload import FloatArray, Kept, Payload
from peer.compress.payload_norm import norm
from peer.errors import ConfigError
from peer.gossip.base import (
    Algorithm,
    AlgorithmSpec,
    Exchange,
    GraphNeed,
    MomentumRule,
    NodeContext,
    NoMomentum,
    in_sender_order,
)
from peer.gossip.mixing import (
    add_scaled_,
    can_lose_peers,
    check_inbox,
    other_members,
    shares_of_mean,
    whole,
)
from peer.gossip.plausibility import norm_of
from peer.wire.message import Message, MessageKind

_MOMENTUM = "momentum."


class MeanStep(Algorithm):
    """Common part of the algorithms that step by the mean of all peers' gradients, on which momentum may act. Nobody's
    model is seen in them, so how far the models are apart is not known."""

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self._momentum = node.momentum()
        self._rate = 0.0

    def _step_reach(self, sender: int, gradient_norm: float, rate: float) -> float:
        """Return how far a gradient of that norm would bring x in its round if it were the mean. Adam's steps have a
        length of their own, as long as it can square the numbers."""
        if not self._momentum.first_step:
            return 0.0 if gradient_norm < math.sqrt(np.finfo(self.x.dtype).max) else math.inf
        length = self._momentum.first_step * rate * gradient_norm
        return length + (0.0 if self.reaches.is_free(sender, length) else norm_of(self.x))

    def shortened(self, t: int, gradient: FloatArray, rate: float) -> FloatArray:
        """Do as others do, though nobody is told where the gradient leads."""
        share = self._share_of(t, gradient, rate)
        return gradient if share == 1.0 else gradient.dtype.type(share) * gradient

    def _share_of(self, t: int, vector: Kept, rate: float) -> float:
        """Return which share of a gradient x may move by, so that it reaches no further than own messages may."""
        return self.reaches.share_of_step(t, self.x, self._momentum.first_step * rate * norm_of(vector))

    def hears(self, t: int, sender: int) -> bool:
        return sender in other_members(self.node, t)

    def weights_from(self, t: int, sender: int) -> tuple[float, ...]:
        return shares_of_mean(self.node, t)

    def start_anew(self) -> None:
        self._momentum = self.node.momentum()

    def state(self) -> dict[str, Any]:
        momentum = {f"{_MOMENTUM}{name}": value for name, value in self._momentum.state().items()}
        return {**super().state(), **momentum}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        self._momentum = self.node.momentum()
        self._momentum.restore({k.removeprefix(_MOMENTUM): state[k] for k in state if k.startswith(_MOMENTUM)})


class AllReduce(MeanStep):
    """x ← x − γ · mean_j g_j(x), or x ← x − γ · Adam(mean_j g_j(x)): every peer sends its whole gradient to all others.

    Synchronous data-parallel SGD. If every peer sends the same gradient to all, the mean (in ascending index) and x are
    bit for bit the same on all peers whose processors round alike. Only some peers may have heard a lost peer's last
    gradient: when the graph without it begins, all take the model of the first member (`boundary.transfers`). Where
    members change, Adam begins anew at all peers, since a newcomer has no moments.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="allreduce",
        summary="Every peer gets the mean of all gradients in full precision; the centralized reference.",
        source="baseline; Lu et al., empirical study, section 4.1",
        graph=GraphNeed.COMPLETE,
        changes_members=True,
        uses_averaging_rate=False,
        local_steps=False,
        adam_of_mean=True,
        tells_all=0,
    )

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self._others: tuple[int, ...] = ()

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        self._t, self._rate = t, rate
        self._own = self.node.imposed.pop(t, ()) or whole(gradient, self.node.layout)
        self._others = other_members(self.node, t)
        share = 1.0 / (len(self._others) + 1)
        message = Message(MessageKind.GOSSIP, self.node.peer, t, mixing_weight=share, layers=self._own)
        return Exchange(dict.fromkeys(self._others, message), frozenset(self._others))

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        # The mean of the peers that were heard: only lost peers are left out.
        check_inbox(inbox, self._others, self._t, self.node.layout, may_lack=can_lose_peers(self.node))
        step_by_mean_(self.x, self.node, self._momentum, self._rate, self._own, inbox)
        return None

    def reach(self, message: Message, rate: float, receiver: int) -> float:
        return self._step_reach(message.sender, norm(message.layers), rate)


class ParameterServer(MeanStep):
    """x ← x − γ · mean_j C[g_j(x)]: workers push compressed gradients, the server answers with the model.

    Lu et al., empirical study, section 4.1. The server is a worker too and its own
    gradient goes through C like the others'; the pull is in full precision.

    With `ServerOptions.model_bits` the quantized model of section 5.4: x ← Q(x − γ · mean_j Q(g_j)), Q a stochastic
    grid of that many bits over ± `model_range` (gradients: ± `gradient_range`). The study gives no range: report it
    with the result. The pull then needs those bits only.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="parameter-server",
        summary="Workers push compressed gradients to one server and pull the model.",
        source="Lu et al., An Empirical Study of Low-precision Training, sections 4.1 and 5.4",
        graph=GraphNeed.SERVER,
        compresses=True,
        needs_unbiased=True,
        uses_averaging_rate=False,
        local_steps=False,
        adam_of_mean=True,
        tells_all=1,
    )

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        # The momentum that acts is the server's; that of a worker is never used.
        super().__init__(node, x0)
        peers = range(node.schedule.num_peers)
        self.server = node.server.peer
        if self.server not in peers:
            raise ConfigError(
                "is not a peer of this run", key="algorithm.server", value=self.server, valid=f"0 to {len(peers) - 1}"
            )
        self._workers = tuple(j for j in peers if j != self.server)
        self._model_grid: Compressor | None
        self._gradient_grid: Compressor | None
        self._model_grid, self._gradient_grid = _grids(node)
        self._pulling = False

    @property
    def is_server(self) -> bool:
        return self.node.peer == self.server

    def hears(self, t: int, sender: int) -> bool:
        return (sender in self._workers) if self.is_server else sender == self.server

    def phases_from(self, sender: int) -> tuple[int, ...]:
        return (int(sender == self.server),)

    def reach(self, message: Message, rate: float, receiver: int) -> float:
        reach = norm(message.layers)
        return reach if message.phase else self._step_reach(message.sender, reach, rate)

    def unsent(self) -> Mapping[int, Message]:
        own = Message(MessageKind.GOSSIP, self.server, self._t, layers=self._own)
        return {self.server: own} if self.is_server else {}

    def weights_from(self, t: int, sender: int) -> tuple[float, ...]:
        return (1.0 if sender == self.server else 1.0 / self.node.schedule.num_peers,)

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        """Push the own gradient; the server waits for all of them."""
        self._t, self._rate, self._pulling = t, rate, False
        node, compressor = self.node, self._gradient_grid or self.node.compressor
        draws = node.draw_source.draws(t)
        self._own = compress_layers(compressor, gradient, node.layout, draws, whole_below=node.whole_below)
        if self.is_server:
            return Exchange({}, frozenset(self._workers))
        share = 1.0 / node.schedule.num_peers
        push = Message(MessageKind.GOSSIP, node.peer, t, mixing_weight=share, layers=self._own)
        return Exchange({self.server: push}, frozenset())

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        if self._pulling:
            if not self.is_server:
                check_inbox(inbox, {self.server}, self._t, self.node.layout, may_lack=False)
                self.x = decompress_layers(inbox[self.server].layers, self.node.layout, self.x.dtype)
            return None
        self._pulling = True
        if not self.is_server:
            return Exchange({}, frozenset({self.server}), phase=1)
        check_inbox(inbox, self._workers, self._t, self.node.layout, may_lack=False)
        step_by_mean_(self.x, self.node, self._momentum, self._rate, self._own, inbox)
        pulled = whole(self.x.copy(), self.node.layout)
        if self._model_grid is not None:
            draws = SharedDraws(self.node.draw_source.draws(self._t))
            pulled = compress_layers(self._model_grid, self.x, self.node.layout, draws)
            self.x = decompress_layers(pulled, self.node.layout, self.x.dtype)
        pull = Message(MessageKind.GOSSIP, self.server, self._t, phase=1, mixing_weight=1.0, layers=pulled)
        return Exchange(dict.fromkeys(self._workers, pull), frozenset(), phase=1)


def step_by_mean_(
    x: FloatArray, node: NodeContext, momentum: MomentumRule, rate: float, own: Payload, inbox: Mapping[int, Message]
) -> None:
    """Take the step x ← x − γ · momentum(mean_j c_j) in place, over the senders and the peer itself, ascending."""
    payloads = [own if message is None else message.layers for message in in_sender_order(node.peer, inbox)]
    num_peers = len(inbox) + 1
    if isinstance(momentum, NoMomentum):
        # One rounding less, and the bits of all releases.
        add_sum_decompressed_(x, payloads, node.layout, -rate / num_peers)
        return
    mean = np.zeros_like(x)
    add_all_decompressed_(mean, [(each, 1.0) for each in payloads], node.layout)
    mean /= mean.dtype.type(num_peers)
    add_scaled_(x, -rate, momentum.direction_(mean, x))


def _grids(node: NodeContext) -> tuple[Compressor, Compressor] | tuple[None, None]:
    """Return Q of the model and Q of the gradients, or None twice where the model is not quantized."""
    options = node.server
    if options.model_bits is None:
        return None, None
    gradient_range = options.model_range if options.gradient_range is None else options.gradient_range
    try:
        return (
            build("grid", bits=options.model_bits, range=options.model_range),
            build("grid", bits=options.model_bits, range=gradient_range),
        )
    except ValueError as error:
        raise ConfigError(str(error), key="algorithm.model_bits") from None


class SharedDraws:
    """Draws whose own uniforms are the shared ones: the server's second draw of a round, for the model."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def own(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        return self._draws.shared(layer, size, dtype)

    def shared(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        return self._draws.shared(layer, size, dtype)

    def words(self, layer: int, size: int) -> npt.NDArray[np.uint32]:
        return self._draws.words(layer, size)
