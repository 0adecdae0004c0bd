"""Optimizers that hold a second copy of the weights: mixing moves it with the parameters, or they are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sottovoce
import torch
from torch import nn

from peer.library.weight_copies import WeightCopies
from tests.library.scripts import write_kits

EVERY, ROUNDS = 5, 12


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: z is trained, y is in the parameters, x is the mean of all z, recovered from both."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": beta, "k": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            share, beta, rate = 1 / (group["k"] + 1), group["momentum"], group["lr"]
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, share)
                each.add_(each.grad, alpha=rate * (beta * (1 - share) - 1))
                z.sub_(each.grad, alpha=rate)
            group["k"] += 1

    def averaged(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return x."""
        return parameter.lerp(self.state[parameter]["z"], 1 - 1 / self.param_groups[0]["momentum"])


class Lookahead(torch.optim.SGD):
    """Every three steps, slow weights go half of the way to the parameters, which then go on from there."""

    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.taken:
            for each in self.param_groups[0]["params"]:
                self.state[each]["slow_buffer"] = each.detach().clone()
        super().step()
        self.taken += 1
        with torch.no_grad():
            for each in self.param_groups[0]["params"] if self.taken % 3 == 0 else ():
                each.copy_(self.state[each]["slow_buffer"].lerp_(each, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken = state_dict["taken"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "taken"})


class Masters(torch.optim.SGD):
    """Trains copies of the parameters, and copies them into the model."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float = 0.1) -> None:
        self.model = list(params)
        wider = torch.float64 if self.model[0].dtype == torch.float32 else torch.float32
        super().__init__([each.detach().to(wider) for each in self.model], lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for master, each in zip(self.param_groups[0]["params"], self.model, strict=True):
            assert each.grad is not None
            master.grad = each.grad.to(master)
        super().step()
        for master, each in zip(self.param_groups[0]["params"], self.model, strict=True):
            each.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": [each.clone() for each in self.param_groups[0]["params"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for master, value in zip(self.param_groups[0]["params"], state_dict["masters"], strict=True):
            master.copy_(value)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "masters"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.model:
            each.grad = None


def of_side(side: int, numbers: torch.Generator, count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of one half of the inputs, whose labels differ from the other half's by a constant."""
    inputs = torch.randn(count, 8, generator=numbers)
    inputs[:, 0] = inputs[:, 0].abs() * (1 - 2 * side)
    return inputs, torch.tanh(inputs[:, :4]) + 1.0 - 2 * side


def descend(model: nn.Module, optimizer: Any, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(inputs.to(model[0].weight.dtype)) - labels).square().mean().backward()
    optimizer.step()


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)


def loss_of(model: nn.Module) -> float:
    numbers = torch.Generator().manual_seed(9)
    both = [torch.cat(parts) for parts in zip(*(of_side(side, numbers, 500) for side in (0, 1)), strict=True)]
    with torch.no_grad():
        return float((model(both[0]) - both[1]).square().mean())


def as_averaged(model: nn.Module, optimizer: ScheduleFree) -> float:
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(optimizer.averaged(each))
    return loss_of(model)


def files(folder: Path, *settings: str, peers: int = 2, rounds: int = ROUNDS) -> list[Path]:
    return write_kits(
        folder, peers, f"run.rounds={rounds}", "algorithm.name=allreduce", "graph.kind=complete", *settings
    )


def test_schedule_free_devices_with_other_data_agree(tmp_path: Path) -> None:
    """As well as where z is exchanged too, which would take twice the bytes."""
    rounds = 30

    def script(where: sottovoce.Place) -> tuple[float, torch.Tensor]:
        model, numbers = net(), torch.Generator().manual_seed(50 + where.index)
        optimizer = ScheduleFree(model.parameters())
        with sottovoce.join(model, where, every=EVERY, keep=[optimizer]) as peer:
            while not peer.done:
                descend(model, optimizer, *of_side(where.index, numbers))
                peer.step()
        z = torch.cat([optimizer.state[each]["z"].flatten() for each in model.parameters()])
        return as_averaged(model, optimizer), z

    models, optimizers, numbers = [net(), net()], [], [torch.Generator().manual_seed(50 + side) for side in (0, 1)]
    optimizers = [ScheduleFree(model.parameters()) for model in models]
    for _ in range(rounds):
        for side in (0, 1):
            for _ in range(EVERY):
                descend(models[side], optimizers[side], *of_side(side, numbers[side]))
        with torch.no_grad():
            for pair in zip(models[0].parameters(), models[1].parameters(), strict=True):
                copies = [optimizer.state[each]["z"] for optimizer, each in zip(optimizers, pair, strict=True)]
                for tensors in (pair, copies):
                    mean = torch.stack([each.detach() for each in tensors]).mean(0)
                    for each in tensors:
                        each.copy_(mean)
    both_mixed = as_averaged(models[0], optimizers[0])
    apart = net()
    z_of_start = nn.utils.parameters_to_vector(apart.parameters()).detach()
    (one, z_one), (other, z_other) = sottovoce.simulate(script, files(tmp_path, rounds=rounds)[0]).results
    assert max(one, other) < 1.1 * both_mixed
    # Mixing the parameters alone, the two have moved as far from each other as from the start.
    assert float((z_one - z_other).norm()) < 0.1 * float((z_one - z_of_start).norm())


def test_masters_of_a_model_in_fewer_bits_are_what_is_mixed(tmp_path: Path) -> None:
    """Also steps that change no bit of the model reach the others."""

    def script(where: sottovoce.Place) -> list[torch.Tensor]:
        model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        optimizer = Masters(model.parameters(), lr=0.1)
        seen = []
        with sottovoce.join(model, where, every=1, keep=[optimizer]) as peer:
            while not peer.done:
                (master,) = optimizer.param_groups[0]["params"]
                seen.append(master.clone())
                assert torch.equal(model.weight, master.bfloat16())
                with torch.no_grad():
                    # The first moves both models, by which the masters are seen.
                    master.sub_(2.0**-10 * (1 - where.index) if peer.round else 0.25 - 0.5 * where.index)
                    model.weight.copy_(master)
                peer.step()
        return seen

    for seen in sottovoce.simulate(script, files(tmp_path, rounds=9)[0]).results:
        assert [float(each[0, 0]) for each in seen] == [1.0, *(1.0 - n * 2.0**-11 for n in range(8))]


MAKERS: list[Callable[[Iterator[nn.Parameter]], Any]] = [ScheduleFree, Lookahead, Masters]


@pytest.mark.parametrize("make", [Lookahead, Masters])
def test_copies_go_where_the_parameters_go(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Of two devices, only the first trains. What the other holds beside its parameters follows all the same, and a
    step without a gradient leaves its model where mixing has put it."""

    def script(where: sottovoce.Place) -> float:
        model, numbers = net(), torch.Generator().manual_seed(1)
        optimizer = make(model.parameters(), lr=0.1)
        after = 0.0
        with sottovoce.join(model, where, every=EVERY, keep=[optimizer]) as peer:
            while not peer.done:
                inputs, labels = of_side(0, numbers)
                before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
                if where.index:
                    optimizer.zero_grad()
                    (0.0 * model(inputs)).sum().backward()
                    if peer.round < 2:
                        # Something has to move for a copy to be seen.
                        model[0].bias.grad += 1e-3
                    optimizer.step()
                else:
                    descend(model, optimizer, inputs, labels)
                if peer.round > 2:
                    moved = nn.utils.parameters_to_vector(model.parameters()) - before
                    after = max(after, float(moved.detach().norm()))
                peer.step()
        return after

    trained, followed = sottovoce.simulate(script, files(tmp_path)[0]).results
    assert followed < 0.15 * trained


@pytest.mark.parametrize(
    ("make", "dtype"),
    [*((make, torch.float32) for make in MAKERS), (Masters, torch.bfloat16), (Masters, torch.float16)],
)
@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlap"])
def test_a_script_that_was_stopped_moves_the_same_copies(
    tmp_path: Path, make: Callable[..., Any], dtype: torch.dtype, overlap: bool
) -> None:
    """With momentum of the rounds, the model that comes back is another one than that which was sent."""

    def train(file: Path, until: int) -> torch.Tensor:
        model, numbers = net(dtype), torch.Generator().manual_seed(1)
        optimizer = make(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"outer_momentum": 0.5, "outer_learning_rate": 0.7, "overlap": overlap}
        with sottovoce.join(model, file, every=EVERY, keep=[optimizer, numbers], **options) as peer:
            while not peer.done and peer.steps < until:
                descend(model, optimizer, *of_side(0, numbers))
                peer.step()
        held = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        return torch.cat([each.detach().double().flatten() for each in (*model.parameters(), *held, *trained)])

    settings = ("algorithm.name=local",)
    expected = train(files(tmp_path / "1", *settings, peers=1)[0], ROUNDS * EVERY)
    file = files(tmp_path / "2", *settings, peers=1)[0]
    train(file, 3 * EVERY + 2)
    assert torch.equal(train(file, ROUNDS * EVERY), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9, centered=True),
        lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    ],
    ids=["adamw", "sgd", "adagrad", "rmsprop", "rprop", "nadam"],
)
def test_what_is_made_of_gradients_is_no_copy(make: Callable[..., torch.optim.Optimizer]) -> None:
    model, numbers = net(), torch.Generator().manual_seed(1)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    copies = WeightCopies([optimizer, scheduler], dict(model.named_parameters()), EVERY)
    for _ in range(EVERY):
        descend(model, optimizer, *of_side(0, numbers))
        copies.look()
    copies.look_at_masters()
    assert copies.is_empty


class Hidden(torch.optim.SGD):
    """Holds its copy where nobody finds it."""

    def train(self) -> None:
        """Put y into the parameters."""

    def eval(self) -> None:
        """Put x into the parameters."""


def test_a_copy_that_is_not_found_is_refused(tmp_path: Path) -> None:
    model, numbers = net(), torch.Generator().manual_seed(1)
    optimizer = Hidden(model.parameters(), lr=0.1)

    def run() -> None:
        with sottovoce.join(model, files(tmp_path, peers=1)[0], every=1, keep=[optimizer]) as peer:
            while not peer.done:
                descend(model, optimizer, *of_side(0, numbers))
                peer.step()

    with pytest.raises(sottovoce.UsageError, match=r"Hidden has train\(\) and eval\(\), as optimizers have"):
        run()
