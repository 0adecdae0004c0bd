"""What a script keeps comes back as it was, without pickle."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from peer.errors import StateError
from peer.library.kept_state import Kept, pack, unpack
from peer.library.random_state import RandomNumbers
from peer.state.checkpoints import arrays_of, entries_of


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) and one.layout is not torch.strided:
        assert one.layout == other.layout
        assert one.layout is not torch.sparse_coo or one.is_coalesced() == other.is_coalesced()
        return same(one.to_dense(), other.to_dense())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or one != one


VALUES: list[Any] = [
    {"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None, "maximize": False, "name": "a"},
    {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}, 1: {}},
    Counter({5: 1, 9: 2}),
    {(1, "two"): {3}, "frozen": frozenset({1})},
    [float("inf"), -0.0, float("nan"), 2**70],
    [
        torch.zeros(0, 4),
        torch.ones((), dtype=torch.bool),
        torch.arange(3, dtype=torch.int16),
        torch.randn(3).bfloat16(),
    ],
    torch.randn(4, dtype=torch.complex64),
    torch.randn(3, 5).t(),
    torch.randn(3, 4).relu().to_sparse(),
    torch.sparse_coo_tensor(torch.tensor([[1, 1], [0, 0]]), torch.ones(2), (3, 3)),
    torch.randn(3, 4).relu().to_sparse_csr(),
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.float64(0.25),
    b"\x00\xff",
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back(value: Any) -> None:
    packed = pack(value, "it")
    # As they lie in a checkpoint.
    entries, parts = entries_of(packed)
    assert same(unpack(arrays_of(entries, memoryview(b"".join(parts)))), value)


def test_what_comes_back_is_a_copy() -> None:
    tensor = torch.zeros(3)
    packed = pack(tensor, "it")
    unpack(packed).add_(2)
    assert unpack(packed).tolist() == [0.0, 0.0, 0.0]
    assert tensor.tolist() == [0.0, 0.0, 0.0]


def test_an_ordered_table_comes_back_as_a_table() -> None:
    assert same(unpack(pack(OrderedDict(b=1, a=2), "it")), {"b": 1, "a": 2})


@pytest.mark.parametrize("text", [b"{", b'{"tensor": ["7", "float32", [1]]}', b'{"what": 1}', b'{"a": 1, "b": 2}'])
def test_arrays_that_are_no_state_are_refused(text: bytes) -> None:
    with pytest.raises(StateError, match="what was kept of the training script cannot be read"):
        unpack({"values": np.frombuffer(text, np.uint8)})


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3]),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
            milestones=[2],
        ),
        lambda optimizer: torch.amp.GradScaler("cpu"),
    ],
    ids=["one cycle", "milestones", "plateau", "sequence", "scaler"],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_schedulers_go_on_as_they_would_have(make: Any) -> None:
    def rates(steps: int, kept: dict[str, Any] | None = None) -> tuple[list[float], dict[str, Any]]:
        optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.3)
        objects = [optimizer, make(optimizer)]
        found = []
        if kept is not None:
            Kept(objects).load(kept, {}, nn.Module())
        for number in range(steps):
            if hasattr(objects[1], "step") and not isinstance(objects[1], torch.amp.GradScaler):
                objects[1].step(*([1.0 + number] if "Plateau" in type(objects[1]).__name__ else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found, Kept(objects).pack()

    whole, _ = rates(6)
    first, kept = rates(3)
    rest, _ = rates(3, kept)
    assert first + rest == whole


def test_random_numbers_go_on_where_they_were() -> None:
    numbers = RandomNumbers()

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    state = unpack(pack(numbers.state(), "it"))
    drawn = draw()
    with numbers.kept():
        assert draw() != drawn
    numbers.set(state)
    assert draw() == drawn


class Codes(torch.optim.Optimizer):
    """Holds for each parameter what optimizers of few bits do: codes, a count, and moments of other precisions."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in (each for group in self.param_groups for each in group["params"]):
            state = self.state[each]
            if not state:
                state["codes"] = torch.zeros_like(each, dtype=torch.uint8)
                state["moments"] = {
                    "coarse": torch.zeros_like(each, dtype=torch.bfloat16),
                    "fine": [torch.zeros_like(each, dtype=torch.float64)],
                }
                state["count"] = torch.zeros((), dtype=torch.int64)
            state["codes"] += 200  # Of 256, so that it runs over.
            state["moments"]["coarse"].lerp_(each.bfloat16() + 1 / 3, 0.3)
            state["moments"]["fine"][0].lerp_(each.double() + 1 / 3, 0.3)
            state["count"] += 2**24 + 1
            each -= (state["codes"] / 2550 + state["moments"]["coarse"] + state["moments"]["fine"][0]).float() / 10
            each -= (state["count"] % 7) / 100


class Wrapped(torch.optim.Optimizer):
    """An optimizer by its type alone, as frameworks wrap one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapped], ids=["plain", "wrapped"])
def test_an_optimizer_has_its_state_back_in_the_types_that_it_had(wrap: Any) -> None:
    """Optimizers of torch load each tensor in the type of its parameter."""

    def steps(count: int, model: nn.Module, kept: dict[str, Any] | None = None) -> dict[str, Any]:
        optimizer = Codes(model.parameters())
        objects = Kept([wrap(optimizer)])
        if kept is not None:
            objects.load(kept, {}, model)
        for _ in range(count):
            optimizer.step()
        return objects.pack()

    model = nn.Linear(3, 2)
    other = copy.deepcopy(model)
    whole = steps(6, model)
    halves = steps(3, other, steps(3, other))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    assert all(np.array_equal(each, halves[name]) for name, each in whole.items())
