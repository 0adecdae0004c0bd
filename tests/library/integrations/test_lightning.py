"""A Lightning `Trainer` trains as a bare loop does, with accumulation, two optimizers and a plateau scheduler."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sottovoce
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.library.integrations.kits import EVERY, ROUNDS, digits, kit
from tests.library.scripts import digest_of, vector_of, write_kits

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning: the extra lightning installs it")

from sottovoce.lightning import GossipCallback  # noqa: E402

STEPS = ROUNDS * EVERY
BATCH, ACCUMULATED = 8, 2


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Let Lightning give no advice on processors and workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def loader(peer: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*digits(peer)), batch_size=BATCH, shuffle=True)


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """One optimizer, clipping by the trainer, a schedule by steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 6))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Classifier):
    """A learning rate that follows a figure of the validation, which never gets better."""

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("figure", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "figure"}}


class Pair(Classifier):
    """Two networks with an optimizer each, stepped by hand, the second one every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        for optimizer in self.optimizers()[: 2 - batch_idx % 2]:
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.layers(inputs), labels))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.layers[at].parameters(), lr=0.01) for at in (0, 3)]


def trainer(folder: Path, callback: GossipCallback, **options: Any) -> Any:
    settings = {"max_epochs": -1, "callbacks": [callback], **options}
    return lightning.Trainer(
        default_root_dir=str(folder),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def with_trainer(
    where: sottovoce.Place, folder: Path, kind: type[Classifier], average: str = "displacements", **options: Any
) -> tuple[str, int, Any]:
    torch.set_num_threads(1)
    every = 1 if average == "gradients" else EVERY
    module, callback = kind(), GossipCallback(where, every=every, average=average)
    torch.manual_seed(5 + where.index)
    own = trainer(folder, callback, **options)
    own.fit(module, loader(where.index), loader(99))
    return digest_of(module), callback.peer.steps, own


def with_bare_loop(where: sottovoce.Place, accumulated: int, average: str = "displacements") -> tuple[str, int]:
    torch.set_num_threads(1)
    model = Classifier()
    parts = model.configure_optimizers()
    optimizer, scheduler = parts["optimizer"], parts["lr_scheduler"]["scheduler"]
    torch.manual_seed(5 + where.index)
    batches = loader(where.index)
    every = 1 if average == "gradients" else EVERY
    with sottovoce.join(model, where, every=every, average=average, keep=[optimizer, scheduler]) as peer:
        while not peer.done:
            for number, batch in enumerate(batches, start=1):
                (model.training_step(batch, 0) / accumulated).backward()
                if number % accumulated == 0:
                    if average == "gradients":
                        peer.average_gradients()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    if average == "displacements":
                        peer.step()
                    if peer.done:
                        break
    return digest_of(model), peer.steps


@pytest.mark.parametrize("average", ["displacements", "gradients"])
@pytest.mark.parametrize("accumulated", [1, ACCUMULATED])
def test_the_trainer_comes_to_the_bits_of_a_bare_loop(tmp_path: Path, accumulated: int, average: str) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.5, "average": average}
    trained = sottovoce.simulate(
        lambda where: with_trainer(where, tmp_path / "out", Classifier, **options)[:2], kit(tmp_path / "a")
    )
    bare = sottovoce.simulate(lambda where: with_bare_loop(where, accumulated, average), kit(tmp_path / "b"))
    assert trained.results == bare.results
    assert trained.results[0][1] == (ROUNDS if average == "gradients" else STEPS)
    assert trained.results[0] == trained.results[1]


def test_a_batch_that_two_optimizers_step_on_is_one_step(tmp_path: Path) -> None:
    simulated = sottovoce.simulate(lambda where: with_trainer(where, tmp_path / "out", Pair), kit(tmp_path))
    for digest, steps, own in simulated.results:
        assert digest == simulated.results[0][0]
        assert (steps, own.global_step) == (STEPS, STEPS * 3 // 2)


def test_a_plateau_lowers_the_rate_of_every_peer(tmp_path: Path) -> None:
    simulated = sottovoce.simulate(lambda where: with_trainer(where, tmp_path / "out", Plateau), kit(tmp_path))
    # Twelve steps are two passes of six batches. The first figure is the best, and the second does not better it.
    for _, _, own in simulated.results:
        assert own.optimizers[0].param_groups[0]["lr"] == 0.05


def test_a_trainer_that_ends_too_soon_is_refused_before_it_begins(tmp_path: Path) -> None:
    message = f"ends after 6 optimizer steps, but the run needs {STEPS} more"
    with pytest.raises(sottovoce.UsageError, match=message):
        sottovoce.simulate(lambda where: with_trainer(where, tmp_path / "out", Classifier, max_epochs=1), kit(tmp_path))


def test_layers_that_a_callback_unfreezes_are_refused_before_it_begins(tmp_path: Path) -> None:
    class Frozen(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.layers[0]

    (file,) = write_kits(tmp_path, 1, "algorithm.name=local", "graph.kind=complete")
    gossip, unfreezes = GossipCallback(file, every=EVERY), lightning.callbacks.BackboneFinetuning()
    module, own = Frozen(), trainer(tmp_path, gossip, callbacks=[gossip, unfreezes])
    message = r"the callback BackboneFinetuning unfreezes layers in mid-run.*leave it out"
    with pytest.raises(sottovoce.UsageError, match=message):
        own.fit(module, loader(0))
    assert "sotto" not in {thread.name for thread in threading.enumerate()}


def test_a_trainer_that_fails_leaves_no_peer_behind_and_the_next_start_continues(tmp_path: Path) -> None:
    (file,) = write_kits(tmp_path, 1, f"run.rounds={ROUNDS}", "algorithm.name=local", "graph.kind=complete")

    class Failing(Classifier):
        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            if callback.peer.steps == EVERY + 1:
                raise RuntimeError("the disk is gone")
            return super().training_step(batch, batch_idx)

    callback = GossipCallback(file, every=EVERY)
    with pytest.raises(RuntimeError, match="disk is gone"):
        trainer(tmp_path, callback).fit(Failing(), loader(0))
    assert callback.peer.stopped == "the script raised RuntimeError"
    assert "sotto" not in {thread.name for thread in threading.enumerate()}

    callback = GossipCallback(file, every=EVERY)
    own = trainer(tmp_path, callback)
    own.fit(Classifier(), loader(0))
    # The round that was exchanged is trained once more.
    assert (callback.peer.round, callback.peer.steps, own.global_step) == (ROUNDS, STEPS, STEPS)
    # The schedule went on where it was: a cosine is at 0 after all steps.
    assert own.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def fitted(folder: Path, *others: Any, first: bool = True) -> list[torch.Tensor]:
    """Return the final parameters of two simulated peers whose trainers have callbacks beside."""

    def script(where: sottovoce.Place) -> torch.Tensor:
        module = Classifier()
        gossip = GossipCallback(where, every=EVERY)
        extra = [make() for make in others]
        both = trainer(folder / str(where.index), gossip, callbacks=[gossip, *extra] if first else [*extra, gossip])
        both.fit(module, loader(where.index))
        return vector_of(module)

    return list(sottovoce.simulate(script, kit(folder)).results)


@pytest.mark.parametrize("first", [True, False], ids=["before it", "after it"])
@pytest.mark.parametrize("kind", ["EMAWeightAveraging", "WeightAveraging", "Scaling"])
def test_a_callback_that_replaces_the_model_of_the_run_is_named(
    kind: str, first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With all-reduce, the run ends with one model on all devices, and each average is one device's own."""
    make = Scaling if kind == "Scaling" else getattr(lightning.callbacks, kind)
    one, other = fitted(tmp_path / "plain", first=first)
    assert torch.equal(one, other)
    assert "replaced the model" not in caplog.text
    replaced, _ = fitted(tmp_path / "replaced", make, first=first)
    assert not torch.equal(replaced, one)
    told = [line for line in caplog.messages if "replaced the model that the run ended with" in line]
    assert len(told) == 2
    by = "something in the script" if kind == "Scaling" else f"the callback {kind}"
    assert all(line.startswith(f"{by} has replaced") and "(parameter layers.0.weight)" in line for line in told)


class Scaling(lightning.Callback):  # type: ignore[misc]
    """Changes the model in its own way."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layers[0].weight.data.mul_(0.5)
