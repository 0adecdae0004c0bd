"""What a GPU computes is what the processor computes, to within its rounding, and survives a crash.

    pytest tests/test_cuda.py

runs all of it where PyTorch finds a CUDA device; elsewhere each test is skipped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sottovoce
import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

from peer.config.options import TrainingOptions, load
from peer.ops.local_cluster import Cluster
from peer.ops.peer_processes import ForkServer
from peer.simulate.run import run
from peer.train.eight_bit.products import MAX_TERMS, int8_product
from peer.train.local_step import Trainer
from peer.train.models.resnet import resnet20
from peer.train.private_step import ClippedSum
from peer.train.stacked import StackedTrainer, _Stacked
from peer.train.task import Task
from peer.train.tasks import resolve_task
from tests.daemon.running_cluster import trained
from tests.library import scripts
from tests.library.processes import check_mass, finish, kill_now_and_then, start, starts_of
from tests.library.scripts import write_kits
from tests.train.small_tasks import all_indices, images, normed_points, points
from tests.train.test_stacked import assert_equal_training, rounding_of_resnet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")

TASKS = {
    "points": points,
    "batch norm": normed_points,
    "digits": lambda: resolve_task("digits"),
    "resnet-20": lambda: images("evonorm"),
    "resnet-20, batch norm": lambda: images("batch"),
}
KINDS = [
    *((kind, precision) for precision in ("float32", "bfloat16") for kind in TASKS),
    *((kind, "int8") for kind in ("digits", "resnet-20", "resnet-20, batch norm")),
]
AS_EXACT = 8.0
"""How many times as far from the exact gradient as the processor's one of the GPU may lie. Both add up the same
products in other orders, so that their deviations are of one size; products in TF32 would be 2¹³ times as far."""


@pytest.fixture(autouse=True)
def without_tf32() -> Iterator[None]:
    """Convolutions in float32, which PyTorch computes in TF32 on a GPU unless it is told otherwise."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def trainer_of(task: Task, device: str, **options: object) -> Trainer:
    chosen = TrainingOptions(**{"momentum": "none", "batch_size": 16, "warmup_rounds": 0} | options)
    return Trainer(task, chosen, rounds=20, seed=3, peer=1, train_indices=all_indices(task), device=device)


def exact_gradient(trainer: Trainer, z: np.ndarray) -> np.ndarray:
    """Return the gradient of round 0 at z of a trainer on the processor, computed in float64."""
    model, (samples, *rest) = trainer.task.make_model().double(), trainer._batch(0, 0)
    vector_to_parameters(torch.from_numpy(z.astype(np.float64)), model.parameters())
    loss = trainer._loss(model, (samples.double(), *rest))
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(model.parameters()))]).numpy()


def distances(kind: str, precision: str) -> tuple[float, float, float]:
    """Return how far the gradients of the GPU and of the processor lie from the exact one, and how long that is."""
    task = TASKS[kind]()
    if precision == "int8" and "resnet" in kind:
        task.model = partial(resnet20, norm="batch" if "batch" in kind else "range-evonorm")
    gpu, cpu = (trainer_of(task, device, precision=precision) for device in ("cuda", "cpu"))
    z = cpu.initial_vector()
    assert np.array_equal(gpu.initial_vector(), z)
    # The first step of a network in 8 bits measures its ranges.
    found, expected = (trainer.gradient(z, 0, 0.1, 0.1) for trainer in (gpu, cpu))
    assert found.loss == pytest.approx(expected.loss, rel=1e-5 if precision == "float32" else 0.05)
    exact = exact_gradient(trainer_of(task, "cpu"), z)
    off = [float(np.linalg.norm(step.gradient - exact)) for step in (found, expected)]
    return off[0], off[1], float(np.linalg.norm(exact))


@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_gradients_are_as_exact_as_those_of_the_processor(kind: str, precision: str) -> None:
    of_gpu, of_cpu, norm = distances(kind, precision)
    assert of_gpu <= AS_EXACT * max(of_cpu, 2.0**-24 * norm)


def test_dropout_draws_from_the_peers_own_stream() -> None:
    task = points()
    task.model = lambda: nn.Sequential(nn.Linear(2, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    one, other = (trainer_of(task, "cuda") for _ in range(2))
    z = one.initial_vector()
    torch.cuda.manual_seed(99)
    first = one.gradient(z, 0, 0.1, 0.1).gradient
    np.testing.assert_allclose(other.gradient(z, 0, 0.1, 0.1).gradient, first, atol=1e-6)
    assert np.abs(other.gradient(z, 1, 0.1, 0.1).gradient - first).max() > 1e-3


@pytest.mark.parametrize(
    ("rows", "terms", "columns"),
    [(1, 1, 1), (16, 64, 8), (17, 7, 8), (17, 8, 9), (32, 1032, 24), (40, MAX_TERMS // 8 * 8, 8), (33, 5000, 3)],
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_bytes_are_exact(rows: int, terms: int, columns: int, is_transposed: bool) -> None:
    numbers = torch.Generator().manual_seed(4)
    a = torch.randint(-128, 128, (rows, terms), generator=numbers, dtype=torch.int8)
    shape = (columns, terms) if is_transposed else (terms, columns)
    b = torch.randint(-128, 128, shape, generator=numbers, dtype=torch.int8)
    # The largest sum that there is.
    a[0], b[:] = -128, b.clamp(max=-100)
    b = b.t() if is_transposed else b
    found = int8_product(a.cuda(), b.cuda(), torch.empty(rows, columns, dtype=torch.int32, device="cuda"))
    assert torch.equal(found.cpu(), (a.double() @ b.double()).to(torch.int32))


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("momentum", ["none", "nesterov"])
def test_stacked_peers_equal_peers_one_by_one(kind: str, momentum: str) -> None:
    """As one CUDA graph: its recording, the statistics of its norms, its replays."""
    task, shards = TASKS[kind](), [np.arange(peer, 12 + peer, dtype=np.int64) for peer in range(4)]
    chosen = TrainingOptions(momentum=momentum, batch_size=8, warmup_rounds=0, precision="float32")
    stacked = StackedTrainer(task, chosen, rounds=20, seed=3, shards=shards, device="cuda")
    single = [
        Trainer(task, chosen, rounds=20, seed=3, peer=peer, train_indices=shards[peer], device="cuda")
        for peer in range(4)
    ]
    beta = 0.9 if momentum == "nesterov" else 0.0
    tolerance = rounding_of_resnet(single, beta) if "resnet" in kind else 1e-5
    assert_equal_training(stacked, single, rounds=3, tolerance=tolerance)
    assert isinstance(stacked._engine, _Stacked)
    assert stacked._engine._graph is not None


JOB = (
    "run.rounds=30",
    "training.task=digits",
    "training.batch_size=32",
    "evaluation.every_rounds=10",
    "state.checkpoint_every_rounds=7",
    "transport.backoff_max_s=0.5",
    "transport.linger_s=20",
    "peer.device=cuda",
)


@pytest.mark.parametrize("precision", ["float32", "int8", "fastest"])
def test_a_simulation_on_the_gpu_learns_what_one_on_the_processor_does(precision: str, tmp_path: Path) -> None:
    job = (*JOB, f"training.precision={precision}")
    found = run(load(environment={}, overrides=job), tmp_path, num_peers=4, baseline=False, stacked=True)
    expected = run(load(environment={}, overrides=(*job, "peer.device=cpu")), tmp_path, num_peers=4, baseline=False)
    right, wanted = (each.trainer.evaluate(each.averaged, averaged=True) for each in (found, expected))
    assert abs(int(right.correct.sum()) - int(wanted.correct.sum())) < 0.05 * int(wanted.total.sum())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["quant-sgp", "choco-sgd"])
def test_a_killed_peer_goes_on_with_the_frames_of_its_journal(
    algorithm: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Neighbours compare digests of what is sent twice, and refuse a frame that differs."""
    settings = (
        f"algorithm.name={algorithm}",
        "peer.min_step_s=0.3",
        *(() if algorithm == "quant-sgp" else ("graph.kind=ring",)),
    )
    (tmp_path / "run").mkdir()
    config = load(environment={}, overrides=(*JOB, *settings))
    cluster = Cluster(config, tmp_path, num_peers=3, directory=tmp_path / "run", fork_server=fork_server)
    models = [np.frombuffer(model, np.float32) for model in trained(cluster, rounds=30, kill=1)]
    assert sum(float(u) for _, u in cluster.final_states()) == pytest.approx(3.0, abs=1e-12)
    undisturbed = run(config, tmp_path, num_peers=3, baseline=False)
    for model, expected in zip(models, undisturbed.models, strict=True):
        moved = np.linalg.norm(expected - cluster.trainer.initial_vector())
        assert np.linalg.norm(model - expected) < 0.05 * moved


@pytest.mark.timeout(600)
def test_killed_scripts_with_a_model_on_the_gpu_apply_no_displacement_twice(tmp_path: Path) -> None:
    settings = ("algorithm.name=sgp", "graph.kind=exponential", "state.keep_checkpoints=100")
    files = write_kits(tmp_path, 3, "run.rounds=50", *settings)
    options = {"device": "cuda", "pause_s": 0.02}
    processes = [start("adamw_by_index", file, **options) for file in files]
    kill_now_and_then("adamw_by_index", files, processes, kills=5, seed=1, **options)
    real = finish(files, processes)
    check_mass(files, rounds=50)
    assert all(len(starts_of(file)) >= 2 for file in files)
    assert {(outcome.steps, outcome.round) for outcome in real} == {(150, 50)}


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_a_simulated_script_leaves_its_model_on_the_gpu(in_8_bits: bool, tmp_path: Path) -> None:
    files = write_kits(tmp_path, 3, "run.rounds=12", "algorithm.name=quant-sgp")

    def script(where: sottovoce.Place) -> scripts.Outcome:
        return scripts.adamw_by_index(where, device="cuda", in_8_bits=in_8_bits)

    simulated = sottovoce.simulate(script, files[0])
    assert {outcome.round for outcome in simulated.results} == {12}


def test_private_steps_clip_on_the_gpu_as_on_the_processor() -> None:
    sums = []
    for device in ("cuda", "cpu"):
        trainer = trainer_of(points(), device)
        clipped = ClippedSum(trainer._loss, trainer.model, trainer.layout.names, 0.5)
        sums.append(clipped.of(trainer._batch(0, 0)))
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-5)


@pytest.mark.parametrize("command", ["up", "simulate"])
def test_commands_train_on_the_gpu(command: str, tmp_path: Path) -> None:
    """`up` uses the GPU in a process from which no peer may be forked."""
    settings = [option for setting in (*JOB, "run.rounds=20") for option in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "peer", command, "--peers", "3", *settings, "--runs-dir", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)
