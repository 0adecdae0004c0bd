"""Predictions of the simulator: the duration of a round on a link profile, and the rounds to a target.

The simulator sends the same bytes as the peers, over interfaces with the same rates and latency. It knows the stated
duration of a local step but not the processor: a round of real peers takes longer by the work of codec and sockets.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.config.options import Config
from peer.gossip.base import Memory
from peer.gossip.topology import Schedule
from peer.links.profiles import Profile
from peer.records import ACCURACY, Progress
from peer.run.setup import RunSetup
from peer.simulate import run as simulator
from peer.simulate.network import LinkModel, VirtualNetwork
from peer.state.metrics import MetricsStore

ETHERNET_SEGMENT_HEADER_BYTES = 66
"""Headers of Ethernet, IPv4 and TCP with time stamps."""
_WEIGHED_ROUNDS = 3
"""Number of last rounds from which the size of a message is taken."""


def link_model(profile: Profile) -> LinkModel:
    """Return the virtual link of a profile; losses are not simulated."""
    return LinkModel(
        up_kbit_s=profile.up_kbit or None,
        down_kbit_s=profile.down_kbit or None,
        latency_s=profile.latency_ms / 1000,
        segment_overhead_bytes=ETHERNET_SEGMENT_HEADER_BYTES,
    )


@contextmanager
def simulated(config: Config, num_peers: int, **options: Any) -> Iterator[MetricsStore]:
    """Simulate a run, with options of `peer.simulate.run`, and lend its metrics. Raises SottoError."""
    with tempfile.TemporaryDirectory(prefix="sotto-simulated-") as name:
        directory = Path(name)
        simulator.run(config, Path(), num_peers=num_peers, directory=directory, baseline=False, **options)
        with closing(MetricsStore(directory / "metrics.sqlite", read_only=True)) as store:
            yield store


@dataclass(frozen=True)
class Weight:
    """The cost of a round in the steady state."""

    frame_bytes: float
    """Mean bytes of a message over one link; 0 where there is none."""
    gossip_s: float
    """Time of one peer on this processor: algorithm, compression, coding, decoding; the least of the rounds."""


def weigh(config: Config, num_peers: int, *, rounds: int = 6) -> Weight:
    """Return the cost of the last of some simulated rounds. Raises SottoError.

    The first messages differ from those that follow: some algorithms send the whole model in them, and modulo codes
    have no reference codes yet.
    """
    short = config.model_copy(update={"run": config.run.model_copy(update={"rounds": rounds})})
    with simulated(short, num_peers) as store:
        settled = [record for record in store.rounds() if record.round >= rounds - _WEIGHED_ROUNDS]
    messages = sum(record.messages for record in settled)
    frames = sum(record.frame_bytes for record in settled)
    # Other work on this machine makes a round longer, never shorter.
    return Weight(frames / messages if messages else 0.0, min(record.gossip_s for record in settled))


def predict(config: Config, num_peers: int, profile: Profile, step_s: float, link_bytes: float) -> float:
    """Return the seconds of a round in which `link_bytes` go over each link of the graph, without training anybody.

    The simulator gives the same for a synchronous algorithm: links and the number of peers do not change the size of a
    message, only the receivers and the queues. Raises SottoError.
    """
    setup = RunSetup.open(config, Path(), num_peers)
    return round_seconds(
        setup.schedule,
        link_model(profile),
        step_s,
        link_bytes,
        to_all=setup.spec.memory is Memory.REPLICAS,
        exchanges=setup.spec.exchanges,
    )


def round_seconds(
    schedule: Schedule,
    links: LinkModel,
    step_s: float,
    link_bytes: float,
    *,
    to_all: bool = False,
    exchanges: int = 1,
    rounds: int = 4,
) -> float:
    """Return the seconds of a round in which `link_bytes` go over each link of a graph.

    With `to_all` a peer sends in every round to all peers to which it has an edge in any: the keeper of a replica needs
    each difference. Each of the `exchanges` of a round sends as much, after the one before is complete.
    """
    num_peers = schedule.num_peers
    network = VirtualNetwork(links)
    ends, finished = [0.0] * num_peers, []
    for exchange in range(rounds * exchanges):
        number, is_later = divmod(exchange, exchanges)
        heard = [end if is_later else end + step_s for end in ends]
        for now, peer in sorted((ready, peer) for peer, ready in enumerate(heard)):
            receivers = schedule.all_receivers(peer) if to_all else schedule.receivers(number, peer)
            frames = [(receiver, round(link_bytes)) for receiver in receivers]
            for (receiver, _), arrival in zip(frames, network.arrivals(peer, frames, now), strict=True):
                heard[receiver] = max(heard[receiver], arrival)
        ends = heard
        finished.append(ends[0])
    return (finished[-1] - finished[exchanges - 1]) / (rounds - 1)


def rounds_to_target(config: Config, num_peers: int, accuracy: float) -> int | None:
    """Return the number of rounds until the averaged model first reaches an accuracy; None if it does not.

    It is judged at the evaluations of the configuration. Raises SottoError, DivergenceError if the run diverges.
    """
    stop = threading.Event()

    def look(progress: Progress) -> None:
        averaged = progress.averaged_figure
        if progress.criterion == ACCURACY and averaged is not None and averaged >= accuracy:
            stop.set()

    with simulated(config, num_peers, on_progress=look, stop=stop) as store:
        averaged = [(each.round, each.accuracy) for each in store.evaluations() if each.peer == -1]
    return min((done for done, found in averaged if found is not None and found >= accuracy), default=None)
