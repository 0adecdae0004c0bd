"""One worker of CHOCO as decentralizepy sends it, on a ring (see `peer.lab.study.rivals.worker`).

decentralizepy is on no package index. This is a program of ours that does what its sources say (communication/TCP.py,
sharing/Choco.py, compression/EliasFpzip.py): a ROUTER socket of ZeroMQ that listens and a DEALER for each neighbour; a
pickled dictionary as the message; of x − x̂, over all layers together, the largest numbers, their places as Elias gamma
codes of the gaps and their values through fpzip without loss; lockstep with both neighbours. Its averaging is that of
Koloskova et al. 2019, Algorithm 2. No TLS and no disk, as there.
"""

from __future__ import annotations

import pickle
import sys
import time
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from peer.lab.study.rivals.worker import Orders, read_orders, run

PORT = 7703
_INSTALL = "pip install --target FOLDER pyzmq fpzip, and name the folder with --packages"
FRACTION = 0.01
STEP_SIZE = 0.1
"""γ of the averaging; of no consequence for bytes and seconds."""

FloatArray = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]


class Message(TypedDict):
    """The message that decentralizepy pickles."""

    params: bytes
    indices: Codes
    send_partial: bool
    degree: int
    iteration: int
    CHANNEL: str


class Neighbours:
    """The sockets of one worker."""

    def __init__(self, orders: Orders) -> None:
        me, count = orders.rank, orders.num_workers
        self.ranks = sorted({(me - 1) % count, (me + 1) % count})
        try:
            import zmq
        except ImportError as error:
            sys.exit(f"{error}; {_INSTALL}")
        context = zmq.Context()
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(f"tcp://{orders.addresses[me]}:{PORT}")
        self._dealers = {}
        for rank in self.ranks:
            self._dealers[rank] = context.socket(zmq.DEALER)
            self._dealers[rank].setsockopt(zmq.IDENTITY, str(me).encode())
            self._dealers[rank].connect(f"tcp://{orders.addresses[rank]}:{PORT}")
        self._early: list[tuple[int, Message]] = []

    def send(self, message: Message) -> None:
        """Send the same to all."""
        for dealer in self._dealers.values():
            dealer.send(pickle.dumps(message))

    def receive(self, iteration: int) -> dict[int, Message]:
        """Return the message of each for an iteration."""
        heard: dict[int, Message] = {}
        held, self._early = self._early, []
        while len(heard) < len(self.ranks):
            if held:
                sender, message = held.pop()
            else:
                name, text = self._router.recv_multipart()
                # As decentralizepy does. What arrives here are this program's own bytes, in a network of its own.
                sender, message = int(name.decode()), pickle.loads(text)
            if message["iteration"] == iteration:
                heard[sender] = message
            else:
                self._early.append((sender, message))
        return heard


def main() -> None:
    """Run one worker."""
    try:
        import fpzip
    except ImportError as error:
        sys.exit(f"{error}; {_INSTALL}")
    orders = read_orders()
    torch.set_num_threads(1)
    random = np.random.default_rng(orders.rank)
    size = sum(int(np.prod(shape)) for shape in orders.shapes)
    noise = random.standard_normal(size, dtype=np.float32)
    x: FloatArray = 0.01 * noise
    x_hat, mixed = np.zeros_like(x), np.zeros_like(x)
    kept = round(FRACTION * size)
    neighbours = Neighbours(orders)
    iterations = iter(range(orders.rounds))

    def step() -> None:
        time.sleep(orders.step_s)
        iteration = next(iterations)
        np.add(x, -0.01 * np.roll(noise, 997 * iteration), out=x)
        change = torch.from_numpy(x - x_hat)
        places = np.sort(torch.topk(change.abs(), kept, sorted=False).indices.numpy())
        values = change.numpy()[places]
        neighbours.send(
            {
                "params": fpzip.compress(values, precision=0, order="C"), "indices": encode_places(places),
                "send_partial": True, "degree": len(neighbours.ranks), "iteration": iteration, "CHANNEL": "DPSGD",
            }
        )  # fmt: skip
        x_hat[places] += values
        own_weight = 1.0
        for message in neighbours.receive(iteration).values():
            weight = 1 / (max(len(neighbours.ranks), message["degree"]) + 1)
            own_weight -= weight
            mixed[decode_places(message["indices"])] += weight * fpzip.decompress(message["params"], order="C").ravel()
        mixed[places] += own_weight * values
        np.add(x, STEP_SIZE * (mixed - x_hat), out=x)

    run(orders, step)


def encode_places(places: Places) -> Codes:
    """Return ascending places as Elias gamma codes of their gaps; the first, and the number of bits, in 16 bytes."""
    gaps = np.diff(places)
    lengths = np.log2(gaps).astype(np.int64)
    ends = np.cumsum(2 * lengths + 1)
    bits = np.zeros(int(ends[-1]), np.uint8)
    for weight in range(int(lengths.max()) + 1):
        has = lengths >= weight
        bits[ends[has] - 1 - weight] = (gaps[has] >> weight) & 1
    tail = np.array([places[0], bits.size], np.int64).view(np.uint8)
    return np.concatenate([np.packbits(bits), tail])


def decode_places(codes: Codes) -> Places:
    """Return the places that `encode_places` was given."""
    first, num_bits = np.frombuffer(codes[-16:].tobytes(), np.int64).tolist()
    bits = np.unpackbits(codes[:-16], count=num_bits)
    # A code begins with as many zeros as bits follow its first one: where the next code begins, from every bit on.
    positions = np.arange(num_bits)
    ones = np.minimum.accumulate(np.where(bits, positions, num_bits)[::-1])[::-1]
    following = (2 * ones - positions + 1).tolist()
    starts, start = [], 0
    while start < num_bits:
        starts.append(start)
        start = following[start]
    begins = ones[starts]
    lengths = begins - starts
    gaps = np.zeros(begins.size, np.int64)
    for place in range(int(lengths.max(initial=0)) + 1):
        has = lengths >= place
        gaps[has] = gaps[has] << 1 | bits[begins[has] + place]
    return np.concatenate([[first], first + np.cumsum(gaps)])


if __name__ == "__main__":
    main()
