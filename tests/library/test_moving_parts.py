"""What moves beside the parameters that are trained survives a stop: a script that goes on comes to the bits of one
that nobody stopped."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sottovoce
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from peer.library.kept_state import LooseValues
from peer.library.parameters import ExchangedParameters
from tests.library.processes import check_mass
from tests.library.scripts import write_kits

EVERY, ROUNDS = 3, 4


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


@dataclass
class Script:
    """What a script has beside its loop."""

    model: nn.Module
    loss: Callable[[int], torch.Tensor]
    """Of a step."""
    after: Callable[[], object] = lambda: None
    """Done in each step."""
    keep: list[Any] = field(default_factory=list)

    def everything(self) -> list[torch.Tensor]:
        """Return all that the script holds, by which it is compared."""
        kept = [each.state_dict() for each in self.keep if isinstance(each, nn.Module)]
        tensors = [
            *self.model.parameters(),
            *(each.to_dense() for each in self.model.buffers()),
            *(each for state in kept for each in state.values()),
        ]
        return [each.detach().clone() for each in tensors]


def of_model(model: nn.Module, **more: Any) -> Script:
    return Script(model, lambda step: (model(torch.randn(8, 4)) ** 2).mean(), **more)


def momentum_encoder() -> Script:
    model = nn.ModuleDict({"online": net(), "target": net()})
    target = model["target"].requires_grad_(False)
    target.load_state_dict(model["online"].state_dict())

    def loss(step: int) -> torch.Tensor:
        inputs = torch.randn(8, 4)
        return (model["online"](inputs) - target(inputs + 0.1)).pow(2).mean()

    def after() -> None:
        with torch.no_grad():
            for slow, quick in zip(target.parameters(), model["online"].parameters(), strict=True):
                # As many scripts do: past autograd, which counts no such change.
                slow.data.lerp_(quick.data, 0.05)

    return Script(model, loss, after)


class Grows(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.net, self.place = net(), place
        if place == "none":
            self.register_buffer("table", None)
        elif place == "small":
            self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, inputs: torch.Tensor, length: int) -> torch.Tensor:
        table = getattr(self, "table", None)
        if table is None or len(table) < length:
            # Of random numbers: computed anew, they would be others.
            self.register_buffer("table", torch.randn(length), persistent=self.place == "none")
        return self.net(inputs + self.table[:length].mean())


def a_buffer_that_grows(place: str) -> Script:
    model = Grows(place)
    return Script(model, lambda step: (model(torch.randn(8, 4), 3 + step // 2) ** 2).mean())


class Scaled(nn.Linear):
    """Counts in a plain number, as 8-bit layers keep their largest values."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.largest = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.largest = max(0.9 * self.largest, float(inputs.abs().max()))
        return super().forward(inputs / self.largest)

    def get_extra_state(self) -> dict[str, Any]:
        return {"largest": self.largest}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.largest = state["largest"]


def moving_average() -> Script:
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return of_model(model, after=lambda: average.update_parameters(model), keep=[average])


def a_loss_with_a_state() -> Script:
    model, head = net(), nn.BatchNorm1d(4)
    return Script(model, lambda step: (head(model(torch.randn(8, 4))) - 1).pow(2).mean(), keep=[head])


def own_generators() -> Script:
    model = net()
    torch_own, numpy_own = torch.Generator().manual_seed(1), np.random.default_rng(2)
    old, plain = np.random.RandomState(3), random.Random(4)

    def loss(step: int) -> torch.Tensor:
        numbers = torch.randn(8, 4, generator=torch_own) + numpy_own.normal() + old.normal() + plain.random()
        return (model(numbers) ** 2).mean()

    return Script(model, loss, keep=[torch_own, numpy_own, old, plain])


class OfAGraph(nn.Module):
    """With the edges of a graph, which the script draws anew now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("edges", torch.eye(8).to_sparse(), persistent=False)
        self.register_buffer("rows", torch.eye(8).to_sparse_csr(), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.rows @ (self.edges @ inputs))


def edges_that_change() -> Script:
    model = OfAGraph()

    def after() -> None:
        if torch.rand(()) < 0.5:
            model.edges = torch.rand(8, 8).sub(0.5).relu().to_sparse()

    return of_model(model, after=after)


def networks_in_turns() -> Script:
    """One rests while the other is trained, and still does at the exchange, as in many adversarial pairs."""
    model = nn.ModuleDict({"one": net(), "other": net()})

    def loss(step: int) -> torch.Tensor:
        model["one"].requires_grad_(True)
        (model["other"](model["one"](torch.randn(8, 4)))).square().mean().backward()
        model["one"].requires_grad_(False)
        return (model["other"](model["one"](torch.randn(8, 4))) - 1).square().mean()

    return Script(model, loss)


class FourBits(nn.Module):
    """A frozen layer in 4 bits, as libraries for adapters hold it, and the factors of LoRA beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs)
        self.scale = nn.Parameter(weight.abs().amax(1, keepdim=True) / 7, requires_grad=False)
        codes = (weight / self.scale).round().to(torch.int8) + 8
        self.weight = nn.Parameter((codes[:, ::2] * 16 + codes[:, 1::2]).view(torch.uint8), requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        codes = torch.stack((self.weight >> 4, self.weight & 15), 2).flatten(1)
        base = (codes.float() - 8) * self.scale
        return inputs @ base.T + inputs @ self.down.T @ self.up.T


def in_bfloat16() -> Script:
    model = net().bfloat16()
    return Script(model, lambda step: (model(torch.randn(8, 4).bfloat16()) ** 2).mean())


def adapters_beside_a_base_in_16_bits() -> Script:
    base, down, up = nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 2), nn.Linear(2, 4)
    model = nn.ModuleDict({"base": base, "down": down, "up": up})

    def loss(step: int) -> torch.Tensor:
        inputs = torch.randn(8, 4)
        return (base(inputs.bfloat16()).float() + up(down(inputs)) - 1).square().mean()

    return Script(model, loss)


SCRIPTS: dict[str, Callable[[], Script]] = {
    "bfloat16": in_bfloat16,
    "adapters beside bfloat16": adapters_beside_a_base_in_16_bits,
    "adapters beside 4 bits": lambda: of_model(nn.Sequential(FourBits(4, 6), nn.Tanh(), FourBits(6, 4))),
    "momentum encoder": momentum_encoder,
    "a buffer that grows": lambda: a_buffer_that_grows("small"),
    "a buffer that is None at first": lambda: a_buffer_that_grows("none"),
    "a buffer that is not there at first": lambda: a_buffer_that_grows("later"),
    "extra state": lambda: of_model(nn.Sequential(Scaled(), nn.Tanh(), nn.Linear(4, 2))),
    "moving average": moving_average,
    "a loss with a state": a_loss_with_a_state,
    "generators": own_generators,
    "a graph": edges_that_change,
    "networks in turns": networks_in_turns,
}


def train(
    file: Path, make: Callable[[], Script], until: int, *, last: bool = True, parts: int = 1, **options: Any
) -> list[torch.Tensor]:
    """Train until so many steps are done since the run began; return what the script holds then.

    `last`: whether `peer.step` is the last that is done in a step. `parts`: how often the loop looks for its end in
    each step.
    """
    torch.manual_seed(0)
    script = make()
    optimizer = torch.optim.AdamW([each for each in script.model.parameters() if each.requires_grad], lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=ROUNDS * EVERY)
    torch.manual_seed(1)
    with sottovoce.join(script.model, file, every=EVERY, keep=[optimizer, scheduler, *script.keep], **options) as peer:
        part = 0
        while not peer.done and peer.steps < until:
            loss = script.loss(peer.steps) / parts
            loss.backward()
            part += 1
            if part % parts:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if last:
                scheduler.step()
                script.after()
            peer.step(loss)
            if not last:
                if peer.done:
                    continue
                scheduler.step()
                script.after()
        if peer.done:
            peer.save(file.parent / "saved.safetensors")
    return script.everything()


def kit(folder: Path, *settings: str) -> Path:
    (file,) = write_kits(folder, 1, f"run.rounds={ROUNDS}", "algorithm.name=local", "graph.kind=complete", *settings)
    return file


@pytest.mark.parametrize("private", [[], ["one.*"]], ids=["exchanged", "private"])
def test_networks_in_turns_survive_a_stop_as_they_are(
    tmp_path: Path, private: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(kit(tmp_path / "1"), networks_in_turns, ROUNDS * EVERY, private=private)
    file = kit(tmp_path / "2")
    train(file, networks_in_turns, 2 * EVERY + 1, private=private)
    found = train(file, networks_in_turns, ROUNDS * EVERY, private=private)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert "frozen" not in caplog.text


def test_what_changes_and_is_not_saved_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Counters and tensors that are plain attributes; not what `get_extra_state` or a state_dict of its own has."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.updates, self.decay, self.seen, self.nothing = 0, 0.9, torch.zeros(2), float("nan")

        def update(self) -> None:
            self.updates, self.seen = self.updates + 1, self.seen + 1

    class Saves(Average):
        def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:
            return {"updates": torch.tensor(self.updates), "seen": self.seen}

    def make() -> Script:
        model, one, other = nn.Sequential(Scaled(), Average()), Average(), Saves()
        inner = model[1]
        inner.forward = lambda inputs: inputs

        def after() -> None:
            for each in (inner, one, other):
                each.update()

        return of_model(model, keep=[one, other], after=after)

    train(kit(tmp_path), make, ROUNDS * EVERY)
    told = [line.partition(" changes and is no part")[0] for line in caplog.messages if "is no part of its" in line]
    assert sorted(told) == [
        "1.seen of the model",
        "1.updates of the model",
        "seen of keep[2] (Average)",
        "updates of keep[2] (Average)",
    ]


@pytest.mark.parametrize(
    "derive",
    [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)],
    ids=["weight norm", "spectral norm", "pruning"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_is_computed_of_parameters_is_not_told_to_be_lost(
    tmp_path: Path, derive: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """The weight itself is a plain attribute then."""
    train(kit(tmp_path), lambda: of_model(nn.Sequential(derive(nn.Linear(4, 4)))), ROUNDS * EVERY)
    assert "no part of its state_dict" not in caplog.text


@pytest.mark.parametrize("change", ["replaced", "in place", "past autograd"])
def test_values_that_no_state_dict_has_are_found(change: str) -> None:
    module = nn.Linear(2, 2)
    module.seen, module.same = torch.zeros(3), torch.ones(3)
    values, found = LooseValues({"it": module}), []
    for look in range(40):
        if look == 20 and change == "replaced":
            module.seen = torch.ones(3)
        elif look == 20:
            (module.seen if change == "in place" else module.seen.data).add_(1)
        found += [(look, what) for what in values.changed()]
    # Where nothing tells of a change but the values, these are read at every look that is a power of two, from 1.
    assert found == [(31 if change == "past autograd" else 20, "seen of it")]


def test_buffers_that_a_validation_makes_are_no_obstacle(tmp_path: Path) -> None:
    """Under inference mode it makes tensors that nothing outside of that may write to."""

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.register_buffer("last", torch.zeros(4))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.last = inputs.mean(0)
            return self.net(inputs)

    def make() -> Script:
        model = Caches()

        @torch.inference_mode()
        def after() -> None:
            model.eval()(torch.randn(8, 4))
            model.train()

        return of_model(model, after=after)

    @torch.inference_mode()
    def evaluate(model: nn.Module) -> tuple[int, int]:
        return int((model(torch.ones(4, 4)) > 0).sum()), 16

    settings = "evaluation.every_rounds=1"
    expected = train(kit(tmp_path / "1", settings), make, ROUNDS * EVERY, evaluate=evaluate)
    file = kit(tmp_path / "2", settings)
    train(file, make, 2 * EVERY + 1, evaluate=evaluate)
    found = train(file, make, ROUNDS * EVERY, evaluate=evaluate)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_was_stopped_comes_to_the_same_bits(tmp_path: Path, name: str) -> None:
    expected = train(kit(tmp_path / "undisturbed"), SCRIPTS[name], ROUNDS * EVERY)
    file = kit(tmp_path / "stopped")
    train(file, SCRIPTS[name], 2 * EVERY + 1)
    found = train(file, SCRIPTS[name], ROUNDS * EVERY)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert (file.parent / "saved.safetensors").exists()


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlap"])
def test_a_model_in_fewer_bits_is_the_mixed_one_rounded(
    tmp_path: Path, dtype: torch.dtype, unit: float, overlap: bool
) -> None:
    """Of four devices one moves, by the least that its type can tell: a quarter of that is lost on none."""
    files = write_kits(tmp_path, 4, "run.rounds=12", "algorithm.name=sgp", "graph.kind=complete")

    def script(where: sottovoce.Place) -> list[float]:
        model, seen = nn.Linear(3, 2).to(dtype), []
        nn.init.ones_(model.weight)
        with sottovoce.join(model, where, every=1, overlap=overlap) as peer:
            while not peer.done:
                seen.append(model.weight[0, 0].item())
                with torch.no_grad():
                    model.weight += unit * (where.index == 0)
                peer.step()
        return seen

    whole = [1.0 + n * unit / 4 for n in range(12)]
    own = [1.0, *(each + unit for each in whole[:-1])] if overlap else whole
    for index, seen in enumerate(sottovoce.simulate(script, files[0]).results):
        expected = own if index == 0 else [1.0, *whole[:-1]] if overlap else whole
        assert seen == torch.tensor(expected).to(dtype).tolist()


def clamped() -> Script:
    """After each step, its weights are put back into a range, and each is drawn anew now and then."""
    model = net()

    def after() -> None:
        with torch.no_grad():
            model[0].weight.clamp_(-0.2, 0.2)
            model[3].bias[int(torch.randint(4, ()))] = float(torch.rand(()))

    return of_model(model, after=after)


@pytest.mark.parametrize("stop", range(1, ROUNDS * EVERY))
@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlap"])
def test_nothing_is_lost_that_a_script_does_behind_an_exchange(tmp_path: Path, stop: int, overlap: bool) -> None:
    """Wherever it ends: what stands behind `peer.step()` in the loop has been done once for each step."""
    for make in (moving_average, clamped):
        folder = tmp_path / make.__name__
        options: dict[str, Any] = {"last": False, "overlap": overlap}
        expected = train(kit(folder / "undisturbed"), make, ROUNDS * EVERY, **options)
        file = kit(folder / "stopped")
        train(file, make, stop, **options)
        found = train(file, make, ROUNDS * EVERY, **options)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_script_may_accumulate_and_be_stopped(tmp_path: Path) -> None:
    options = {"last": False, "parts": 3}
    expected = train(kit(tmp_path / "undisturbed"), moving_average, ROUNDS * EVERY, **options)
    file = kit(tmp_path / "stopped")
    train(file, moving_average, 2 * EVERY + 1, **options)
    found = train(file, moving_average, ROUNDS * EVERY, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_round_that_comes_out_otherwise_counts_as_it_was_journaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it differs by rounding; here by far more. Neighbours have what was sent, which is what must count."""
    monkeypatch.setattr(ExchangedParameters, "are_on_cpu", False)
    file, after_exchange = kit(tmp_path, "state.keep_checkpoints=100"), []

    def part(noise: float, rounds: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        with sottovoce.join(model, file, every=1) as peer:
            for _ in range(rounds):
                with torch.no_grad():
                    model.weight += noise
                peer.step()
                after_exchange.append(model.weight.detach().clone())
        return after_exchange

    part(1.0, 2)
    part(7.0, 3)
    assert torch.equal(after_exchange[2], after_exchange[1])
    assert torch.allclose(after_exchange[3], after_exchange[1] + 7.0)
    check_mass([file], rounds=ROUNDS)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_loop_without_a_head_is_told_of_the_right_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_last: bool
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with sottovoce.join(model, kit(tmp_path), every=EVERY, keep=[optimizer, scheduler]) as peer:
        for _ in range(ROUNDS * EVERY):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if is_last:
                scheduler.step()
            peer.step()
            if not is_last:
                scheduler.step()
    told = [line for line in caplog.messages if "Call peer.step() last in the loop" in line]
    assert len(told) == (0 if is_last else 1)
    assert not told or told[0].startswith("keep[1] (ExponentialLR) has changed")


def test_what_does_not_change_is_journaled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a megabyte among the buffers, and one in an object in `keep`."""

    def make() -> Script:
        model, other = net(), nn.Module()
        model.register_buffer("table", torch.ones(250_000))
        other.register_buffer("table", torch.full((250_000,), 2.0))
        return of_model(model, keep=[other])

    monkeypatch.setattr(ExchangedParameters, "are_on_cpu", False)
    file = kit(tmp_path, "state.checkpoint_every_rounds=1000")
    train(file, make, ROUNDS * EVERY - 1)
    (journal,) = (file.parent / "state").glob("journal-00000000.log")
    assert 2_000_000 < journal.stat().st_size < 2_100_000
    found = train(file, make, ROUNDS * EVERY)
    expected = train(kit(tmp_path / "undisturbed"), make, ROUNDS * EVERY)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("stop", range(1, ROUNDS * EVERY))
def test_parameter_groups_that_come_later_survive_a_stop(tmp_path: Path, stop: int) -> None:
    """A head and a loss that are trained from the fifth step on, as in fine-tuning, with a rate of their own."""

    def run(file: Path, until: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, last = net(), nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1)
        with sottovoce.join(model, file, every=EVERY, keep=[optimizer, last]) as peer:
            while not peer.done and peer.steps < until:
                if peer.steps >= 4 and len(optimizer.param_groups) == 1:
                    optimizer.add_param_group({"params": [*model[3].parameters()], "lr": 0.05})
                    optimizer.add_param_group({"params": [*last.parameters()], "momentum": 0.5})
                optimizer.zero_grad()
                last(model(torch.randn(8, 4))).square().mean().backward()
                optimizer.step()
                peer.step()
        momenta = [
            optimizer.state[each]["momentum_buffer"] for group in optimizer.param_groups for each in group["params"]
        ]
        return [each.detach().clone() for each in (*model.parameters(), *last.parameters(), *momenta)]

    expected = run(kit(tmp_path / "undisturbed"), ROUNDS * EVERY)
    file = kit(tmp_path / "stopped")
    run(file, stop)
    found = run(file, ROUNDS * EVERY)
    assert len(found) == len(expected) == 14
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_optimizer_may_hold_its_parameters_in_another_order_in_each_process(tmp_path: Path) -> None:
    """As where a script makes the list of a set. States are given by position, and many have the same shape."""

    def run(file: Path, until: int, order: int, *, left_out: int = 0) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        weights = [each.weight for each in model][::order]
        biases = {"params": [each.bias for each in model][left_out:], "momentum": 0.5}
        optimizer = torch.optim.SGD([{"params": weights}, biases], lr=0.1, momentum=0.9)
        torch.manual_seed(1)
        with sottovoce.join(model, file, every=EVERY, keep=[optimizer]) as peer:
            while not peer.done and peer.steps < until:
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                peer.step()
        momenta = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
        return [each.detach().clone() for each in (*model.parameters(), *momenta)]

    expected = run(kit(tmp_path / "undisturbed"), ROUNDS * EVERY, 1)
    file = kit(tmp_path / "stopped")
    run(file, ROUNDS * EVERY - 1, 1)
    with pytest.raises(
        sottovoce.StateError, match=r"had other parameters in its group 1 when.*: 0\.bias was added or left"
    ):
        run(file, ROUNDS * EVERY, 1, left_out=1)
    found = run(file, ROUNDS * EVERY, -1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_parameter_group_of_something_that_is_not_kept_is_refused(tmp_path: Path) -> None:
    model, other = net(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sottovoce.join(model, kit(tmp_path), every=1, keep=[optimizer]) as peer:
        peer.step()
        optimizer.add_param_group({"params": other.parameters()})
        with pytest.raises(
            sottovoce.UsageError, match="neither to the model nor to a module in keep, so a crash would"
        ):
            peer.step()


def two_heads() -> nn.ModuleDict:
    return nn.ModuleDict({"body": net(), "head": nn.Linear(4, 2)})


def test_private_parameters_stay_on_their_device(tmp_path: Path) -> None:
    """FedPer and FedBN: the head, and the norms. Devices may begin with others, too."""
    private = ["head.*", "body.1.weight"]

    def script(where: sottovoce.Place) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = two_heads()
        torch.manual_seed(where.index)
        model["head"].reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sottovoce.join(model, where, every=EVERY, keep=[optimizer], private=private) as peer:
            while not peer.done:
                optimizer.zero_grad()
                model["head"](model["body"](torch.randn(8, 4))).square().mean().backward()
                optimizer.step()
                peer.step()
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    settings = (f"run.rounds={ROUNDS}", "algorithm.name=allreduce", "graph.kind=complete")
    one, other = sottovoce.simulate(script, write_kits(tmp_path, 2, *settings)[0]).results
    differing = {name for name in one if not torch.equal(one[name], other[name])}
    assert differing == {"head.weight", "head.bias", "body.1.weight"}


def test_private_parameters_survive_a_stop(tmp_path: Path) -> None:
    def make() -> Script:
        model = two_heads()
        return Script(model, lambda step: model["head"](model["body"](torch.randn(8, 4))).square().mean())

    expected = train(kit(tmp_path / "1"), make, ROUNDS * EVERY, private=["head.*"])
    file = kit(tmp_path / "2")
    train(file, make, 2 * EVERY + 1, private=["head.*"])
    # The name of a module stands for its parameters.
    found = train(file, make, ROUNDS * EVERY, private=["head"])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # What was private is none of the model that others have: with other private ones it is another run.
    with pytest.raises(sottovoce.StateError, match="model"):
        train(file, make, ROUNDS * EVERY)


@pytest.mark.parametrize(
    ("private", "why"),
    [
        (["hea"], "private: 'hea' matches no parameter of the model, which has body.0.weight"),
        (["heads.*"], "private: 'heads.*' matches no parameter of the model, which has body.0.weight"),
        ("head.weight", "private is 'head.weight'; give a list"),
        (["*"], "all parameters that require a gradient are private"),
    ],
)
def test_private_parameters_that_are_none(tmp_path: Path, private: Any, why: str) -> None:
    with pytest.raises(sottovoce.UsageError, match=re.escape(why)):
        sottovoce.join(two_heads(), kit(tmp_path), every=1, private=private)


@pytest.mark.parametrize("place", ["small", "none", "later"])
def test_an_evaluation_leaves_buffers_as_they_are(tmp_path: Path, place: str) -> None:
    """With a longer input than any before, it makes a larger table."""
    holder: list[nn.Module] = []

    def make() -> Script:
        script = a_buffer_that_grows(place)
        holder.append(script.model)
        return script

    def evaluate(model: nn.Module) -> tuple[int, int]:
        return int((model(torch.randn(4, 4), 50) > 0).sum()), 16

    settings = "evaluation.every_rounds=1"
    expected = train(kit(tmp_path / "1", settings), make, ROUNDS * EVERY)
    found = train(kit(tmp_path / "2", settings), make, ROUNDS * EVERY, evaluate=evaluate)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(holder[-1].table) < 50


def test_buffers_of_the_same_shape_stay_the_tensors_that_others_hold(tmp_path: Path) -> None:
    file = kit(tmp_path, "state.checkpoint_every_rounds=1")
    train(file, lambda: of_model(net()), 2 * EVERY)
    model = net()
    held = list(model.buffers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=ROUNDS * EVERY)
    with sottovoce.join(model, file, every=EVERY, keep=[optimizer, scheduler]):
        assert all(one is other for one, other in zip(model.buffers(), held, strict=True))
        assert int(held[-1]) == EVERY


def test_frozen_parameters_that_rest_are_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Script:
        model = net()
        model[0].requires_grad_(False)
        return of_model(model)

    train(kit(tmp_path / "rests"), make, ROUNDS * EVERY)
    assert "frozen" not in caplog.text
    with caplog.at_level("INFO"):
        train(kit(tmp_path / "moves"), momentum_encoder, ROUNDS * EVERY)
    told = [line for line in caplog.messages if "frozen parameters have changed" in line]
    assert len(told) == 1
    assert "target.0.weight" in told[0]


def test_a_state_beside_tensors_is_told_to_be_missing_in_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(kit(tmp_path), SCRIPTS["extra state"], 1)
    assert any("0._extra_state of the model is no tensor" in line for line in caplog.messages)


def test_evaluations_are_told_in_a_simulation(tmp_path: Path) -> None:
    told: list[list[sottovoce.Evaluated]] = [[], []]

    def script(where: sottovoce.Place) -> None:
        torch.manual_seed(0)
        model = net()
        with sottovoce.join(
            model, where, every=1, evaluate=lambda model: (where.index + 1, 4), on_evaluation=told[where.index].append
        ) as peer:
            while not peer.done:
                peer.step()

    settings = ("run.rounds=4", "algorithm.name=sgp", "graph.kind=complete", "evaluation.every_rounds=2")
    sottovoce.simulate(script, write_kits(tmp_path, 2, *settings)[0])
    each = [(name, done, accuracy) for done in (2, 4) for name, accuracy in (("peer-0", 0.25), ("peer-1", 0.5))]
    for heard in told:
        assert sorted((event.name, event.round, event.accuracy) for event in heard) == sorted(each)
