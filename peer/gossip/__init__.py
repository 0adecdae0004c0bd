"""Gossip algorithms: one readable file for each family, found in one table by name.

An algorithm is a sans-I/O state machine for one peer (`base`): values in, values out. `exact` sends whole models,
`naive` quantizes them, `error_feedback` and `replicas` make up for a compressor's error, `moniqua` sends modulo codes,
`d2` cancels the difference between the peers' data, `pairs` has no rounds, `low_rank` sums factors of the gradients
and `compressed_allreduce` what a compressor keeps of them, `centralized` are the baselines. The gossip step that they
share is in `mixing`, the graphs in `topology`.
"""

from __future__ import annotations

from peer.compress.payload import FloatArray
from peer.errors import ConfigError, LocalProtocolError
from peer.gossip.base import Algorithm, AlgorithmSpec, NodeContext
from peer.gossip.centralized import AllReduce, ParameterServer
from peer.gossip.compressed_allreduce import CompressedAllReduce
from peer.gossip.d2 import D2
from peer.gossip.error_feedback import DeepSqueeze, Scsp, SparsePush
from peer.gossip.exact import DPsgd, Local, Sgp
from peer.gossip.low_rank import LowRank
from peer.gossip.moniqua import Moniqua, MoniquaD2
from peer.gossip.naive import NaiveQuantized
from peer.gossip.pairs.ad_psgd import AdPsgd
from peer.gossip.pairs.moniqua_ad_psgd import MoniquaAdPsgd
from peer.gossip.pairs.node import PairNode
from peer.gossip.replicas import ChocoSgd, DcdPsgd, EcdPsgd, QuantSgp

__all__ = ["ALGORITHMS", "build", "build_pair_node", "specs"]

_CLASSES: tuple[type[Algorithm] | type[PairNode], ...] = (
    Local,
    AllReduce,
    ParameterServer,
    LowRank,
    CompressedAllReduce,
    DPsgd,
    NaiveQuantized,
    Sgp,
    DeepSqueeze,
    SparsePush,
    Scsp,
    ChocoSgd,
    QuantSgp,
    DcdPsgd,
    EcdPsgd,
    Moniqua,
    D2,
    MoniquaD2,
    AdPsgd,
    MoniquaAdPsgd,
)

ALGORITHMS: dict[str, type[Algorithm] | type[PairNode]] = {cls.spec.name: cls for cls in _CLASSES}
"""Every algorithm by its name. Those with `spec.asynchronous` are `PairNode`s, the others `Algorithm`s."""


def specs() -> tuple[AlgorithmSpec, ...]:
    """Return the properties of every algorithm, baselines first."""
    return tuple(cls.spec for cls in ALGORITHMS.values())


def build(name: str, node: NodeContext, x0: FloatArray) -> Algorithm:
    """Return one peer of a synchronous algorithm, ready for round 0. Raises ConfigError for an unknown name."""
    cls = _class_of(name)
    if not issubclass(cls, Algorithm):
        raise LocalProtocolError(f"{name} has no rounds; build_pair_node makes its peers")
    return cls(node, x0)


def build_pair_node(name: str, node: NodeContext, x0: FloatArray) -> PairNode:
    """Return one peer of an asynchronous algorithm. Raises ConfigError for an unknown name."""
    cls = _class_of(name)
    if not issubclass(cls, PairNode):
        raise LocalProtocolError(f"{name} works in rounds; build makes its peers")
    return cls(node, x0)


def _class_of(name: str) -> type[Algorithm] | type[PairNode]:
    if name not in ALGORITHMS:
        raise ConfigError("unknown algorithm", key="algorithm.name", value=name, valid=", ".join(ALGORITHMS))
    return ALGORITHMS[name]
