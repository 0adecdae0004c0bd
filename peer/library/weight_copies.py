"""Second copies of the weights, in the optimizers that a script keeps.

Mixing writes the parameters. An optimizer that holds weights of its own beside them would pull the parameters back to
where they were, or never hear of the others: z of schedule-free optimizers, the slow weights of Lookahead, the float32
masters that others copy into the model. All of these are sums of the parameters and of the device's own steps, so that
moving them by the same displacement as the parameters leaves everything between them as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from peer.errors import UsageError

_KNOWN = {
    "ScheduleFree": ("z",),
    "Lookahead": ("slow_buffer", "slow_param", "slow_params", "lookahead_slow_buff"),
}
"""Part of the name of a class → under which names its states hold weights."""

_NEAR = 0.1
"""A state that differs from the parameters by less than this part of them is a copy of them: nothing that is made of
gradients is near the weights in all of them."""


class WeightCopies:
    """The copies of some parameters in the optimizers of a script."""

    def __init__(self, kept: Sequence[object], parameters: Mapping[str, torch.nn.Parameter], every: int) -> None:
        """`kept`: what the script keeps, the optimizers among it. `parameters`: those that are mixed, after `every`
        steps."""
        self._every = every
        self._parameters = {id(each): each for each in parameters.values()}
        self._optimizers = list(_optimizers(kept))
        self._looked_at: set[tuple[int, str]] = set()
        self._found: set[tuple[int, str]] = set()
        """(Number of an optimizer, name of a state), of those that hold weights."""
        self._masters: list[tuple[torch.Tensor, torch.nn.Parameter]] = []
        """Tensors that an optimizer trains in place of a parameter and then copies into it."""

    def look(self) -> None:
        """Look at the states that are new since the last look: those that hold weights are near the parameters then. To
        be called after a step of the optimizer."""
        for number, optimizer in enumerate(self._optimizers):
            known = [name for part, names in _KNOWN.items() if part in _class_names(optimizer) for name in names]
            states = [(each, optimizer.state.get(each, {})) for each in self._trained_by(optimizer)]
            for key in {key for _, state in states for key in state}:
                if (number, key) in self._looked_at:
                    continue
                self._looked_at.add((number, key))
                pairs = [(each, state[key]) for each, state in states if key in state]
                if key in known or _are_near([(each, held) for each, held in pairs if _is_like(held, each)]):
                    self._found.add((number, str(key)))

    def look_at_masters(self) -> None:
        """Look whether an optimizer trains tensors in place of parameters, once the model has moved: then they are
        equal to the bit, and no others are. Raises UsageError for an optimizer that says that it holds a copy, where
        none was found."""
        if self._masters:
            return
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if id(each) not in self._parameters:
                        alike = [p for p in self._parameters.values() if _is_like(each, p)]
                        self._masters += [(each, p) for p in alike if torch.equal(each.detach().to(p), p.detach())][:1]
        for number, optimizer in enumerate(self._optimizers):
            inner = getattr(optimizer, "optimizer", optimizer)
            switches = all(callable(getattr(inner, name, None)) for name in ("train", "eval"))
            if switches and self._trained_by(optimizer) and not any(found == number for found, _ in self._found):
                raise UsageError(
                    f"{type(inner).__name__} has train() and eval(), as optimizers have that hold a second copy of the"
                    " weights, and there is none in its state of any parameter: mixing does not reach it, so devices"
                    " would never agree; use another optimizer"
                )

    def move_(self, displacements: Mapping[int, torch.Tensor]) -> None:
        """Move all copies as their parameters are moved, but `masters`, which are the model: identity of a parameter →
        displacement of its shape."""
        copies = {id(each): (each, p, 1.0) for each, p in self._masters if p.dtype == torch.float32}
        for number, key in self._found:
            for parameter in self._trained_by(self._optimizers[number]):
                held = self._optimizers[number].state.get(parameter, {}).get(key)
                if _is_like(held, parameter):
                    copies[id(held)] = held, parameter, self._leverage(number, parameter)
        with torch.no_grad():
            for held, parameter, leverage in copies.values():
                held.add_(displacements[id(parameter)].to(held), alpha=leverage)

    def _leverage(self, number: int, parameter: torch.nn.Parameter) -> float:
        """Return how far a copy is moved for each unit of its parameter.

        A schedule-free optimizer trains z, and its parameter y = (1 − β) z + β x follows, with x the mean of all z so
        far: the last one enters it with weight c. If a device's z drifts from the others' in n steps, its y is off by
        (1 − β) + β c (n + 1) / 2 of that distance. Moving z by less would let devices with other data drift apart in z
        without end.
        """
        optimizer = self._optimizers[number]
        if "ScheduleFree" not in _class_names(optimizer):
            return 1.0
        group = next(each for each in optimizer.param_groups if any(parameter is one for one in each["params"]))
        given = group.get("betas", (None,))[0], group.get("momentum"), getattr(optimizer, "momentum", None)
        beta = next((float(each) for each in given if each), 0.9)
        steps = max(1.0, float(group.get("k", 1)))
        weight = steps ** group.get("r", 0.0) * group.get("lr_max", 1.0) ** group.get("weight_lr_power", 0.0)
        share = min(1.0, weight / (group.get("weight_sum") or steps * weight or 1.0))
        return float(1.0 / (1.0 - beta + beta * share * (self._every + 1) / 2))

    @property
    def masters(self) -> dict[int, torch.Tensor]:
        """Identity of a parameter in fewer bits → the tensor that an optimizer trains in its place."""
        return {id(p): each for each, p in self._masters if p.dtype != torch.float32}

    @property
    def is_empty(self) -> bool:
        """Whether there is none for `move_`."""
        return not self._found and len(self.masters) == len(self._masters)

    def state(self) -> list[list[Any]]:
        """Return which states hold weights: what a script that goes on could not see any more."""
        return [[number, key] for number, key in sorted(self._found)]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Restore a result of `state`."""
        self._found = {(number, key) for number, key in state if number < len(self._optimizers)}
        self._looked_at |= self._found

    def _trained_by(self, optimizer: Any) -> list[torch.nn.Parameter]:
        each_id = (id(each) for group in optimizer.param_groups for each in group["params"])
        return [self._parameters[number] for number in each_id if number in self._parameters]


def _optimizers(kept: Sequence[object]) -> Iterator[Any]:
    """Yield the optimizers among some objects, and those that they wrap, each once."""
    seen: set[int] = set()
    waiting = list(kept)
    while waiting:
        each = waiting.pop(0)
        if id(each) not in seen and isinstance(getattr(each, "param_groups", None), list):
            seen.add(id(each))
            if isinstance(getattr(each, "state", None), Mapping):
                yield each
            waiting += [value for value in getattr(each, "__dict__", {}).values() if hasattr(value, "param_groups")]


def _class_names(optimizer: object) -> str:
    return " ".join(kind.__name__ for kind in type(optimizer).__mro__)


def _is_like(held: object, parameter: torch.Tensor) -> bool:
    """Whether something has the shape of a parameter, and holds numbers as weights are."""
    return isinstance(held, torch.Tensor) and held.shape == parameter.shape and held.is_floating_point()


def _are_near(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether tensors are the parameters that they go with, but for a little."""
    apart = sum(float((held.detach().float() - each.detach()).square().sum()) for each, held in pairs)
    size = sum(float(each.detach().square().sum()) for each, _ in pairs)
    return size > 0.0 and apart < _NEAR**2 * size
