"""Trains with real peers over shaped links, and measures what goes over each of them.

    tools/shaped_run.py --rate 1000 --budget 60 --peers 4 --rounds 200      (as root; kbit/s and kB/s)
    tools/shaped_run.py --rate 10000 --set algorithm.name=sgp --set graph.kind=ring

Every peer runs in a network namespace of its own, with TLS and disk as on a device of its own. Each link of the graph
is a pair of interfaces that serves this link alone, shaped on both ends, so that the kernel's counters of an interface
are those of one direction of one link. Nothing of it is visible to the rest of the machine, nothing can leave it, and
all of it is gone when the command ends.

The table holds, for each direction of each link: the budget, the bytes a second that left the interface (Ethernet
headers included) over the run and in its busiest `--window` seconds, what the peer's own accounts say, and how far the
two are apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from peer.config.options import Config, load
from peer.errors import SottoError
from peer.links.network import add_namespace, no_namespaces, remove_namespace
from peer.ops.cluster_files import Host
from peer.ops.local_cluster import Cluster
from peer.report.numbers import MISSING, count, percent, significant, size
from peer.state.metrics import LinkRecord

PORT = 7700
ETHERNET_BYTES = 14
"""Bytes that an interface counts on top of each IP packet."""
SEGMENT_HEADER_BYTES = 52
"""IP and TCP headers of a segment over IPv4, with time stamps."""
_BURST_BYTES = 4 * 1514
_QUEUE_MS = 2000
"""Room for the queue of a modem. If it overflows, TCP counts segments that never reach the interface."""
_SAMPLE_S = 0.25

_serial = itertools.count()


def missing_tools() -> str | None:
    """Return the reason why links cannot be shaped here, in a sentence; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} of iproute2 is not installed"
    return no_namespaces(f"sotto-{os.getpid()}-probe")


@dataclass(frozen=True)
class Sample:
    """Bytes that had left an interface at some time between a question and its answer."""

    asked_s: float
    """Time of the question to the kernel (time.monotonic)."""
    told_s: float
    """Time of its answer; on a busy machine that is later."""
    num_bytes: int

    def rate_until(self, later: Sample) -> float:
        """Return the least bytes a second that left the interface, from this sample to a later one."""
        return (later.num_bytes - self.num_bytes) / (later.told_s - self.asked_s)


class ShapedNetwork:
    """Namespaces, one for each peer, joined by one shaped pair of interfaces for each link."""

    def __init__(self, num_peers: int, links: Iterable[tuple[int, int]], *, rate_kbit: float) -> None:
        """Build it. `links` are pairs of peers in any order; `rate_kbit` (1000 bit/s) is that of each direction.

        Raises LinkError or CalledProcessError if the kernel refuses; nothing is left behind then.
        """
        self._names = [f"sotto-{os.getpid()}-{next(_serial)}" for _ in range(num_peers)]
        self.links = sorted({(min(a, b), max(a, b)) for a, b in links})
        try:
            for peer in range(num_peers):
                self._make_namespace(peer)
            for a, b in self.links:
                self._make_link(a, b, rate_kbit)
        except BaseException:
            self.close()
            raise

    def address(self, peer: int) -> str:
        """Return the address of a peer, the same on all of its interfaces."""
        return f"10.77.{peer // 250}.{peer % 250 + 1}"

    def command(self, peer: int) -> list[str]:
        """Return the prefix of a command that is to run in a peer's network."""
        return ["ip", "netns", "exec", self._names[peer]]

    def sent_bytes(self) -> dict[tuple[int, int], Sample]:
        """Return (sender, receiver) → bytes that left the interface so far, as the kernel counts them."""
        counted = {}
        for peer, name in enumerate(self._names):
            asked = time.monotonic()
            interfaces = json.loads(_ip("-n", name, "-s", "-j", "link", "show"))
            told = time.monotonic()
            for interface in interfaces:
                if interface["ifname"].startswith("to-"):
                    receiver = int(interface["ifname"].removeprefix("to-"))
                    counted[peer, receiver] = Sample(asked, told, int(interface["stats64"]["tx"]["bytes"]))
        return counted

    def close(self) -> None:
        """Kill the processes that still run inside, and remove everything."""
        for name in self._names:
            remove_namespace(name)

    def _make_namespace(self, peer: int) -> None:
        name = self._names[peer]
        add_namespace(name)
        # Announcements of IPv6 would be counted among the bytes of the links.
        quiet = "net.ipv6.conf.default.disable_ipv6=1"
        subprocess.run([*self.command(peer), "sysctl", "-qw", quiet], capture_output=True, check=False)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "address", "add", f"{self.address(peer)}/32", "dev", "lo")

    def _make_link(self, a: int, b: int, rate_kbit: float) -> None:
        one, other = self._names[a], self._names[b]
        ends = ["link", "add", f"to-{b}", "netns", one, "type", "veth", "peer", "name", f"to-{a}", "netns", other]
        _ip(*ends)
        for peer, neighbor in ((a, b), (b, a)):
            name, interface = self._names[peer], f"to-{neighbor}"
            # One segment a packet, as on a wire: several at once would be counted with one header.
            _ip("-n", name, "link", "set", interface, "gso_max_segs", "1", "up")
            rate = ["rate", f"{round(rate_kbit)}kbit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *rate)
        for peer, neighbor in ((a, b), (b, a)):
            route = [f"{self.address(neighbor)}/32", "dev", f"to-{neighbor}", "src", self.address(peer)]
            _ip("-n", self._names[peer], "route", "add", *route)


@contextmanager
def shaped_network(num_peers: int, links: Iterable[tuple[int, int]], *, rate_kbit: float) -> Iterator[ShapedNetwork]:
    """Lend a network that is gone afterwards, however it ends."""
    network = ShapedNetwork(num_peers, links, rate_kbit=rate_kbit)
    try:
        yield network
    finally:
        network.close()


@dataclass
class LinkFigures:
    """One direction of one link."""

    sender: int
    receiver: int
    samples: list[Sample] = field(default_factory=list)
    record: LinkRecord | None = None
    """The sender's own accounts."""

    @property
    def interface_bytes(self) -> int:
        return self.samples[-1].num_bytes - self.samples[0].num_bytes

    @property
    def mean_rate(self) -> float:
        """Bytes a second at least, from the first to the last byte."""
        moving = [
            (before, after) for before, after in itertools.pairwise(self.samples) if after.num_bytes > before.num_bytes
        ]
        return moving[0][0].rate_until(moving[-1][1]) if moving else 0.0

    def busiest_rate(self, window_s: float) -> float:
        """Return the most bytes a second, at least, over windows of `window_s` seconds or a little more."""
        highest, first = 0.0, 0
        for sample in self.samples:
            while first + 1 < len(self.samples) and self.samples[first + 1].told_s <= sample.asked_s - window_s:
                first += 1
            if self.samples[first].told_s <= sample.asked_s - window_s:
                highest = max(highest, self.samples[first].rate_until(sample))
        return highest

    @property
    def expected_interface_bytes(self) -> float | None:
        """Bytes of the interface by the peer's own accounts: its packets, in Ethernet frames."""
        record = self.record
        if record is None or record.packet_bytes is None or record.socket_bytes is None:
            return None
        segments = (record.packet_bytes - record.socket_bytes) / SEGMENT_HEADER_BYTES
        return record.packet_bytes + segments * ETHERNET_BYTES


@dataclass
class ShapedRun:
    """The result of a run over shaped links."""

    seconds: float
    links: list[LinkFigures]
    accuracy: float | None
    """Accuracy of the averaged model."""
    settings: list[list[float]]
    """For each peer, the fraction or the bits of every round."""
    logs: list[str]


def run_shaped(
    config: Config, directory: Path, *, num_peers: int, rate_kbit: float, base: Path | None = None, limit_s: float = 600
) -> ShapedRun:
    """Train over shaped links to the last round; return the figures. `directory` exists and is empty.

    Raises SottoError if a peer fails or the run takes longer than `limit_s` seconds.
    """
    from peer.run.setup import RunSetup

    base = base or Path()
    schedule = RunSetup.open(config, base, num_peers).schedule
    edges = [(peer, receiver) for peer in range(num_peers) for receiver in schedule.all_receivers(peer)]
    with shaped_network(num_peers, edges, rate_kbit=rate_kbit) as network:
        hosts = [Host(network.address(peer), PORT) for peer in range(num_peers)]
        cluster = Cluster(config, base, num_peers=num_peers, directory=directory, hosts=hosts, launcher=network.command)
        links = {pair: LinkFigures(*pair) for a, b in network.links for pair in ((a, b), (b, a))}
        started = time.monotonic()

        def sample() -> float:
            for pair, taken in network.sent_bytes().items():
                links[pair].samples.append(taken)
            return time.monotonic() - started

        try:
            cluster.start()
            while not cluster.finished():
                now = sample()
                cluster.poll()
                if (failure := cluster.failed()) is not None:
                    raise SottoError(f"peer {failure[0]} failed: {cluster.last_words(failure[0])}")
                if now > limit_s:
                    raise SottoError(f"the run takes longer than {limit_s:g} s")
                time.sleep(_SAMPLE_S)
            seconds = sample()
            if (failure := cluster.failed()) is not None:
                raise SottoError(f"peer {failure[0]} failed: {cluster.last_words(failure[0])}")
            cluster.poll()
            cluster.evaluate(config.run.rounds, cluster.final_states())
            for record in cluster.links():
                links[record.peer, record.neighbor].record = record
            return ShapedRun(
                seconds=seconds,
                links=list(links.values()),
                accuracy=cluster.averaged_figure,
                settings=[
                    [float(r.fraction or r.bits or 0.0) for r in store.rounds()] for store in cluster.stores()[1:]
                ],
                logs=[(file.parent / "log.txt").read_text() for file in cluster.peer_files],
            )
        finally:
            cluster.stop()
            cluster.close()


def table(run: ShapedRun, config: Config, window_s: float) -> str:
    """Return the figures of every link as text."""
    budget = config.compressor.budget_kbytes_per_s
    heads = ["link", "budget", "interface", "busiest", "socket", "packets", "interface total", "accounts differ"]
    rows = [heads]
    for link in run.links:
        expected, record = link.expected_interface_bytes, link.record
        rows.append(
            [
                f"{link.sender} → {link.receiver}",
                MISSING if budget is None else f"{budget:g} kB/s",
                f"{link.mean_rate / 1000:.1f} kB/s",
                f"{link.busiest_rate(window_s) / 1000:.1f} kB/s",
                size(record.socket_bytes if record is not None else None),
                size(record.packet_bytes if record is not None else None),
                size(link.interface_bytes),
                MISSING if not expected else f"{100 * (link.interface_bytes / expected - 1):+.2f} %",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for peer, used in enumerate(run.settings):
        if any(used):
            spread = f"{significant(min(used))} to {significant(max(used))}, at the end {significant(used[-1])}"
            lines.append(f"peer {peer} sent a fraction (or bits) of {spread}")
    lines.append(f"{count(config.run.rounds)} rounds in {run.seconds:.0f} s, averaged model {percent(run.accuracy)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="TOML file of the job; without one, the defaults")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override an option")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1000.0, help="kbit/s of each direction of each link")
    parser.add_argument("--budget", type=float, help="kB/s (compressor.budget_kbytes_per_s); without one, no limit")
    parser.add_argument("--window", type=float, default=5.0, help="seconds of the busiest window")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which the run is given up")
    options = parser.parse_args(arguments)
    if (reason := missing_tools()) is not None:
        print(f"{reason}; nothing was run", file=sys.stderr)
        return 2
    overrides = [f"run.rounds={options.rounds}", *options.set]
    if options.budget is not None:
        overrides.append(f"compressor.budget_kbytes_per_s={options.budget}")
    try:
        config = load(options.config, overrides=overrides)
        with tempfile.TemporaryDirectory(prefix="sotto-shaped-") as directory:
            base = options.config.parent if options.config is not None else Path()
            run = run_shaped(
                config,
                Path(directory),
                num_peers=options.peers,
                rate_kbit=options.rate,
                base=base,
                limit_s=options.limit,
            )
    except SottoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(table(run, config, options.window))
    return 0


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
