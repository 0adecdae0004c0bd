"""A Hugging Face `Trainer` trains as a bare loop does, to the bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import sottovoce
import torch

from tests.library.integrations.kits import EVERY, ROUNDS, kit
from tests.library.scripts import digest_of, write_kits

transformers = pytest.importorskip("transformers", reason="needs transformers: the extra huggingface installs it")

from sottovoce.huggingface import GossipCallback  # noqa: E402

WORDS, LENGTH, BATCH, ACCUMULATED = 50, 6, 4, 2
STEPS = ROUNDS * EVERY


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of words whose label says whether the first is a low one."""

    def __init__(self, seed: int, count: int = 24) -> None:
        self.words = torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (words[0] < WORDS // 2).long()}


def make_model() -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "dim": 16, "n_layers": 1, "n_heads": 2}
    config = transformers.DistilBertConfig(**size, hidden_dim=32, dropout=0.1, seq_classif_dropout=0.1)
    return transformers.DistilBertForSequenceClassification(config)


def arguments(folder: Path, **options: Any) -> Any:
    settings = {"max_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "linear", "seed": 5, **options}
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        weight_decay=0.01,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **({"save_strategy": "no"} | settings),
    )


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: int) -> torch.Tensor:
    """Return the share of a batch in the mean loss of a step."""
    return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def make_trainer(model: Any, folder: Path, samples: Texts, *callbacks: Any, **options: Any) -> Any:
    return transformers.Trainer(
        model,
        arguments(folder, **options),
        train_dataset=samples,
        eval_dataset=samples,
        compute_loss_func=mean_loss,
        callbacks=list(callbacks),
    )


def with_trainer(where: sottovoce.Place, folder: Path, **options: Any) -> tuple[str, int, int]:
    torch.set_num_threads(1)
    model = make_model()
    with GossipCallback(where, every=EVERY) as callback:
        trainer = make_trainer(model, folder, Texts(where.index), callback, **options)
        trainer.train()
    return digest_of(model), trainer.state.global_step, callback.peer.round


def with_bare_loop(where: sottovoce.Place, folder: Path) -> tuple[str, int, int]:
    """Do in a loop what the trainer does, with the loader, optimizer and schedule that it makes."""
    torch.set_num_threads(1)
    model = make_model()
    parts = make_trainer(model, folder, Texts(where.index))
    loader = parts.get_train_dataloader()
    parts.create_optimizer_and_scheduler(STEPS)
    optimizer, scheduler = parts.optimizer, parts.lr_scheduler
    model.train()
    with sottovoce.join(model, where, every=EVERY, keep=[optimizer, scheduler]) as peer:
        epoch = 0
        while not peer.done:
            loader.set_epoch(epoch)
            for number, columns in enumerate(loader, start=1):
                mean_loss(model(**columns), columns["labels"], BATCH * ACCUMULATED).backward()
                if number % ACCUMULATED == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    model.zero_grad()
                    peer.step()
                    if peer.done:
                        break
            epoch += 1
    return digest_of(model), peer.steps, peer.round


def test_the_trainer_comes_to_the_bits_of_a_bare_loop(tmp_path: Path) -> None:
    trained = sottovoce.simulate(lambda where: with_trainer(where, tmp_path / "out"), kit(tmp_path / "a"))
    bare = sottovoce.simulate(lambda where: with_bare_loop(where, tmp_path / "out"), kit(tmp_path / "b"))
    assert trained.results == bare.results
    assert trained.results[0] == (trained.results[1][0], STEPS, ROUNDS)
    assert trained.sent_bytes == bare.sent_bytes > 0


def test_a_run_ends_the_training_of_a_trainer_that_would_go_on(tmp_path: Path) -> None:
    simulated = sottovoce.simulate(
        lambda where: with_trainer(where, tmp_path / "out", max_steps=10 * STEPS), kit(tmp_path)
    )
    assert {result[1:] for result in simulated.results} == {(STEPS, ROUNDS)}


def test_a_trainer_that_ends_too_soon_is_refused_before_it_begins(tmp_path: Path) -> None:
    message = f"ends after {STEPS - 1} optimizer steps, but the run needs {STEPS} more"
    with pytest.raises(sottovoce.UsageError, match=message):
        sottovoce.simulate(lambda where: with_trainer(where, tmp_path / "out", max_steps=STEPS - 1), kit(tmp_path))


def test_a_trainer_that_fails_leaves_no_peer_behind_and_the_next_start_continues(tmp_path: Path) -> None:
    (file,) = write_kits(tmp_path, 1, f"run.rounds={ROUNDS}", "algorithm.name=local", "graph.kind=complete")

    class Failing(Texts):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            if callback.peer.steps == EVERY + 1:
                raise RuntimeError("the disk is gone")
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="disk is gone"), GossipCallback(file, every=EVERY) as callback:
        make_trainer(make_model(), tmp_path / "out", Failing(0), callback).train()
    assert callback.peer.stopped == "the script raised RuntimeError"
    assert "sotto" not in {thread.name for thread in threading.enumerate()}

    model = make_model()
    with GossipCallback(file, every=EVERY) as callback:
        trainer = make_trainer(model, tmp_path / "out", Texts(0), callback)
        trainer.train()
    assert (callback.peer.round, callback.peer.steps) == (ROUNDS, STEPS)
    # The round that was exchanged is trained once more.
    assert trainer.state.global_step == STEPS
    # The schedule went on where it was.
    assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]


def test_it_belongs_into_a_with_block(tmp_path: Path) -> None:
    callback = GossipCallback(kit(tmp_path), every=EVERY)
    with pytest.raises(sottovoce.UsageError, match="outside of the callback's with block"):
        make_trainer(make_model(), tmp_path / "out", Texts(0), callback).train()
    with pytest.raises(sottovoce.UsageError, match="no peer yet"):
        callback.peer.save("model.safetensors")


def test_gradients_that_the_trainer_has_clipped_are_not_averaged(tmp_path: Path) -> None:
    with GossipCallback(kit(tmp_path), every=1, average="gradients") as callback:
        trainer = make_trainer(make_model(), tmp_path / "out", Texts(0), callback)
        with pytest.raises(sottovoce.UsageError, match="clips gradients before a callback could average them"):
            trainer.train()


class Halving(transformers.TrainerCallback):  # type: ignore[misc]
    """Changes the model in its own way."""

    def on_train_end(self, *others: Any, model: Any, **more: Any) -> None:
        model.classifier.weight.data.mul_(0.5)


@pytest.mark.parametrize("by", [None, "load_best_model_at_end of the trainer's arguments", "something in the script"])
def test_what_replaces_the_model_of_the_run_is_named(
    by: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With all-reduce, the run ends with one model on all devices, and the best of each is another one: here, the one
    with the largest loss."""
    options: dict[str, Any] = {}
    if by is not None and by.startswith("load_best"):
        options = {
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "greater_is_better": True,
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "eval_steps": 1,
            "save_steps": 1,
        }

    def script(where: sottovoce.Place) -> str:
        model = make_model()
        with GossipCallback(where, every=EVERY) as callback:
            callbacks = [callback, Halving()] if by == "something in the script" else [callback]
            make_trainer(model, tmp_path / str(where.index), Texts(where.index), *callbacks, **options).train()
        return digest_of(model)

    sottovoce.simulate(script, kit(tmp_path))
    told = [line for line in caplog.messages if "replaced the model that the run ended with" in line]
    assert len(told) == (2 if by else 0)
    assert all(line.startswith(f"{by} has replaced") for line in told)
