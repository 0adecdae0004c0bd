"""Four devices fine-tune a text model over slow links: adapters by gossip, beside other ways to do it.

    tools/lora_study.py --data FOLDER --vocabulary FILE --folder study [--steps 400] [--ways start,…]   (as root)

A small BERT is first trained on one half of SST-2 and saved in `--folder`. Then four devices train it on the other
half, of which 80 % is dealt by label. Each has a network namespace with 1 Mbit/s to and from all others. All ways take
as many optimizer steps, of the same batches; gossip exchanges every 10 of them.

Seconds count from the first step of the first device to the last of the last; bytes are those that the kernel counted
on a device's interface in that time, headers included. Accuracies are those on the 2,693 sentences of dev and test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import sottovoce
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from sottovoce.lora import freeze_a
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from peer.config.options import load
from peer.links.network import INTERFACE, LinkNetwork
from peer.links.profiles import Profile
from peer.ops.cluster_files import Host, write_cluster
from peer.train.datasets.text_files import Sentences, read_sst2
from peer.train.datasets.tokens import TextData, make_tokenizer, read_vocabulary
from peer.train.partition import partition

DEVICES = 4
EVERY = 10
LENGTH, BATCH = 40, 32
RANK = 4
FIRST_STEPS = 200
"""Steps of the training before, with batches of twice the size."""
LINK = Profile(up_kbit=1000, down_kbit=1000, latency_ms=10)
GOSSIP = ("training.task=loop", "graph.kind=exponential-one-peer", "evaluation.every_rounds=0", "transport.linger_s=60")
EXACT = ("algorithm.name=sgp", "compressor.kind=none")


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train on the devices."""

    adapters: bool = True
    """Whether only adapters and the classifier are trained."""
    frozen: bool = True
    """Whether A is frozen."""
    settings: tuple[str, ...] | None = None
    """Settings of gossip."""
    rate: float = 3e-3
    devices: int = DEVICES


WAYS: Mapping[str, Way] = {
    "start": Way(devices=0),
    "one-process": Way(devices=1),
    "alone": Way(settings=("algorithm.name=local", "graph.kind=complete")),
    "lora-gossip": Way(settings=EXACT),
    "lora-gossip-both": Way(settings=EXACT, frozen=False),
    "lora-ddp": Way(),
    "whole-gossip": Way(adapters=False, settings=("algorithm.name=quant-sgp",), rate=3e-4),
    "whole-ddp": Way(adapters=False, rate=3e-4),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a device."""

    accuracy: float
    """Accuracy in percent."""
    began: float
    ended: float
    sent_bytes: int
    message_bytes: int
    """Size of the messages of gossip, without headers."""
    trained: int
    """Count of the numbers that are trained, and so exchanged."""
    steps: int
    cpu_s: float


def main() -> None:
    """Prepare the model, then measure the ways."""
    arguments = _arguments()
    folder = arguments.folder.resolve()
    if arguments.rank is not None:
        result = train(arguments, WAYS[arguments.way], arguments.rank)
        (folder / arguments.way / f"{arguments.rank}.json").write_text(json.dumps(asdict(result)))
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "start" / "config.json").exists():
        pretrain(arguments).save_pretrained(folder / "start")
    for way in arguments.ways.split(","):
        print(json.dumps({"way": way, **measure(arguments, way)}), flush=True)


def measure(arguments: argparse.Namespace, way: str) -> dict[str, object]:
    """Train in one way on all devices; return the row of the table."""
    folder, devices = arguments.folder.resolve() / way, max(1, WAYS[way].devices)
    folder.mkdir(parents=True, exist_ok=True)
    with LinkNetwork([LINK] * devices) as network:
        settings = WAYS[way].settings
        if settings is not None:
            rounds = f"run.rounds={arguments.steps // EVERY}"
            hosts = [Host(network.address(device), 7700) for device in range(devices)]
            write_cluster(folder, load(environment={}, overrides=(*GOSSIP, rounds, *settings)), hosts)
        command = [
            sys.executable,
            "-m",
            "tools.lora_study",
            *sys.argv[1:],
            "--way",
            way,
            "--master",
            network.address(0),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        processes = [
            subprocess.Popen([*network.command(device), *command, "--rank", str(device)], env=environment)
            for device in range(devices)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{way}: a device failed")
    results = [Result(**json.loads((folder / f"{device}.json").read_text())) for device in range(devices)]
    accuracies = [each.accuracy for each in results]
    return {
        "worst": min(accuracies),
        "mean": sum(accuracies) / devices,
        "seconds": max(each.ended for each in results) - min(each.began for each in results),
        "sent_bytes": sum(each.sent_bytes for each in results) / devices,
        "message_bytes": sum(each.message_bytes for each in results) / devices,
        "cpu_s": sum(each.cpu_s for each in results) / devices,
        "trained": results[0].trained,
        "steps": results[0].steps,
    }


def train(arguments: argparse.Namespace, way: Way, rank: int) -> Result:
    """Train on one device."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = BertForSequenceClassification.from_pretrained(arguments.folder / "start")
    if way.adapters:
        layers = ["query", "key", "value", "dense"]
        model = get_peft_model(
            model,
            LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers, modules_to_save=["classifier"]),
        )
        if way.frozen:
            freeze_a(model)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=way.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=arguments.steps)
    _, half = halves(arguments)
    labels = half.labels.numpy()
    owned = partition(labels, DEVICES, "skew", skew=0.8, seed=1).train
    data = _encoded(arguments, half)
    orders = [_batches(torch.from_numpy(part), device) for device, part in owned.items()]
    if way.devices != 1:
        orders = orders[rank : rank + 1]
    sent, messages, began, ended, cpu = 0, 0, 0.0, 0.0, 0.0

    def step(average: Callable[[], None] = lambda: None) -> torch.Tensor:
        pieces, targets = data.batch(torch.cat([next(order) for order in orders]))
        loss = nn.functional.cross_entropy(_logits(model, pieces), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        average()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        return loss.detach()

    def count(event: sottovoce.RoundDone) -> None:
        nonlocal messages
        messages += event.sent_bytes

    def begin() -> None:
        nonlocal sent, began, cpu
        sent, began, cpu = _interface_bytes(), time.time(), time.process_time()

    steps = arguments.steps
    model.train()
    begin()
    if way.devices == 0:
        steps = 0
    elif way.devices == 1:
        for _ in range(steps):
            step()
    elif way.settings is not None:
        file = arguments.folder.resolve() / arguments.way / f"peer-{rank}" / "peer.toml"
        with sottovoce.join(model, file, every=EVERY, keep=[optimizer, schedule], on_round=count) as peer:
            begin()
            while not peer.done:
                peer.step(step())
            steps, ended = peer.steps, time.time()
            sent = _interface_bytes() - sent
    else:
        os.environ |= {"MASTER_ADDR": arguments.master, "MASTER_PORT": "7701"}
        dist.init_process_group("gloo", rank=rank, world_size=DEVICES)

        def average() -> None:
            gradient = torch.cat([each.grad.reshape(-1) for each in parameters if each.grad is not None])
            dist.all_reduce(gradient)
            means = torch.split(gradient / DEVICES, [each.numel() for each in parameters])
            for each, mean in zip(parameters, means, strict=True):
                each.grad = mean.view_as(each)

        steps = min(steps, arguments.ddp_steps) if not way.adapters else steps
        dist.barrier()
        begin()
        for _ in range(steps):
            step(average)
    if way.settings is None:
        sent, ended = _interface_bytes() - sent, time.time()
    cpu = time.process_time() - cpu
    trained = sum(each.numel() for each in parameters)
    return Result(
        accuracy=accuracy(arguments, model), began=began, ended=ended, sent_bytes=sent, message_bytes=messages,
        trained=trained, steps=steps, cpu_s=cpu,
    )  # fmt: skip


def pretrain(arguments: argparse.Namespace) -> BertForSequenceClassification:
    """Return a small BERT trained on the first half, so briefly that there is something left to learn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    model = BertForSequenceClassification(size)
    first, _ = halves(arguments)
    data = _encoded(arguments, first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=FIRST_STEPS)
    order = _batches(torch.arange(len(first.texts)), 99)
    model.train()
    for _ in range(FIRST_STEPS):
        pieces, targets = data.batch(torch.cat([next(order), next(order)]))
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(_logits(model, pieces), targets))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def halves(arguments: argparse.Namespace) -> tuple[Sentences, Sentences]:
    """Return the training set in two halves, drawn at random."""
    whole = read_sst2(arguments.data, "train")
    order = torch.randperm(len(whole.texts), generator=torch.Generator().manual_seed(0))
    parts = order.chunk(2)
    one, other = (Sentences(tuple(whole.texts[at] for at in part.tolist()), whole.labels[part]) for part in parts)
    return one, other


def accuracy(arguments: argparse.Namespace, model: nn.Module) -> float:
    """Return the accuracy on dev and test, in percent."""
    right = total = 0
    model.eval()
    with torch.no_grad():
        for split in ("dev", "test"):
            data = _encoded(arguments, read_sst2(arguments.data, split))
            for part in torch.split(torch.arange(len(data)), 128):
                pieces, targets = data.batch(part)
                right += int((_logits(model, pieces).argmax(1) == targets).sum())
                total += len(targets)
    return 100 * right / total


def _encoded(arguments: argparse.Namespace, sentences: Sentences) -> TextData:
    vocabulary = read_vocabulary(arguments.vocabulary)
    return TextData(sentences, make_tokenizer(vocabulary, length=LENGTH), padding=vocabulary["[PAD]"])


def _logits(model: nn.Module, pieces: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=pieces, attention_mask=(pieces != 0).long())["logits"]
    return logits


def _batches(indices: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches without end, in an order that depends on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = indices[torch.randperm(len(indices), generator=generator)]
        yield from torch.split(order[: len(order) // BATCH * BATCH], BATCH)


def _interface_bytes() -> int:
    file = Path("/sys/class/net") / INTERFACE / "statistics" / "tx_bytes"
    return int(file.read_text()) if file.exists() else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with SentEval's SST-2")
    parser.add_argument("--vocabulary", type=Path, required=True, help="vocabulary of BERT, one piece a line")
    parser.add_argument("--folder", type=Path, required=True, help="where the model and all runs are kept")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each device")
    parser.add_argument("--ddp-steps", type=int, default=1, help="steps in which DDP averages whole models")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
