"""One worker of hivemind: all average their models in each round, in 8 bits (see `peer.lab.study.rivals.worker`).

The averager is hivemind's own, with its matchmaking over its DHT, its butterfly all-reduce and its daemon of libp2p.
With NumPy 2.4 or newer hivemind 1.1.12 cannot decode its own 8 bits, and goes on without an average; so it is checked
here that there is one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from peer.lab.study.rivals.worker import read_orders, run

try:
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Uniform8BitQuantization
except ImportError as error:
    sys.exit(f"{error}; pip install --target FOLDER hivemind 'numpy<2.4', and name the folder with --packages")

PORT = 7702
_FOUND_BY_S = 60.0
_OFFSET = 0.01


def main() -> None:
    """Run one worker."""
    orders = read_orders()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    first = Path(orders.folder) / "first"
    if orders.rank:
        while not first.exists():
            time.sleep(0.05)
    dht = DHT(
        [] if orders.rank == 0 else first.read_text().split(),
        host_maddrs=[f"/ip4/{orders.addresses[orders.rank]}/tcp/{PORT}"],
        auto_nat=False, nat_port_map=False, use_relay=False, start=True,
    )  # fmt: skip
    if orders.rank == 0:
        beside = first.with_suffix(".new")
        beside.write_text(" ".join(map(str, dht.get_visible_maddrs())))
        beside.rename(first)
    parameters = [torch.randn(*shape) * 0.01 for shape in orders.shapes]
    averager = DecentralizedAverager(
        parameters, dht, prefix="sotto", start=True, compression=Uniform8BitQuantization(),
        target_group_size=orders.num_workers, min_group_size=orders.num_workers,
    )  # fmt: skip
    # The difference of one worker from the average of all, which averaging must remove.
    offset = _OFFSET * (orders.rank - (orders.num_workers - 1) / 2)

    def step() -> None:
        time.sleep(orders.step_s)
        with averager.get_tensors() as parts:
            expected = _mean(parts)
            for part in parts:
                part.add_(offset)
        averager.step(timeout=_FOUND_BY_S)
        with averager.get_tensors() as parts:
            if abs(_mean(parts) - expected) > _OFFSET / 4:
                sys.exit("hivemind did not average: its log says why")

    run(orders, step)


def _mean(parts: Sequence[torch.Tensor]) -> float:
    return float(sum(part.sum() for part in parts)) / sum(part.numel() for part in parts)


if __name__ == "__main__":
    main()
