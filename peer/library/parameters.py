"""The exchanged parameters of a user's model as one flat vector, and the refusal of models that cannot be exchanged.

The parameters that require a gradient when the script joins are exchanged, in float32. They stay where they are: on any
device, and the very tensors that the optimizer holds. Those in bfloat16 or float16 get the mixed model rounded to
nearest. What is handed over is by how far they have moved since, so that the peer's float32 model keeps what rounding
left out; where the optimizer holds float32 masters of them, these are the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from peer.compress.layout import Layout
from peer.compress.magnitude import max_magnitude
from peer.errors import DivergenceError, LocalProtocolError, StateError, UsageError
from peer.library.kept_state import unpack
from peer.node.checkpoint_arrays import Arrays, group
from peer.records import ModelParts
from peer.train.model_file import model_parts, start_model
from peer.train.moving import Fingerprint, FrozenParameters, fingerprint, is_expanded, matching, set_buffer_
from peer.wire.start_model import StartModel

Vector = npt.NDArray[np.float32]
_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_REFUSED_MODELS = {
    "FullyShardedDataParallel": "is sharded by FSDP, so that no process holds all of its parameters",
    "FSDPModule": "is sharded by FSDP, so that no process holds all of its parameters",
    "DeepSpeedEngine": "is a DeepSpeed engine, which owns the parameters and steps by itself",
    "PipelineEngine": "is a DeepSpeed engine, which owns the parameters and steps by itself",
    "DistributedDataParallel": "averages its gradients with other processes already (DistributedDataParallel)",
}
"""Name of a class → fault of its modules, and of modules inside them."""

_ADVICE = "put torch.manual_seed(0) right before the line that builds the model, or load the same file, on all devices"


class ExchangedParameters:
    """The parameters of a model that a peer exchanges."""

    def __init__(self, model: nn.Module, private: Sequence[str] = ()) -> None:
        """`private`: names or patterns of the parameters that stay on this device. Raises UsageError for a model whose
        parameters cannot be exchanged."""
        if not isinstance(model, nn.Module):
            raise UsageError(f"the model is of type {type(model).__name__}; join takes a torch.nn.Module")
        _refuse_wrappers(model)
        # torch.compile wraps a model; names are those of the model itself.
        inner = getattr(model, "_orig_mod", model)
        assert isinstance(inner, nn.Module)
        self.model = inner
        self.private = _private(inner, private)
        """Parameters by name that are neither exchanged nor compared with those of others."""
        self._parameters = self._exchanged_now()
        self.frozen = FrozenParameters(inner)
        self._not_trained = [each for each in inner.parameters() if not each.requires_grad]
        if not self._parameters:
            raise UsageError(
                "the model has no parameters that require a gradient, so there is nothing to train together"
                if not self.private
                else "all parameters that require a gradient are private, so there is nothing to train together"
            )
        for name, parameter in self._parameters.items():
            _refuse_parameter(name, parameter)
        shapes = [tuple(parameter.shape) for parameter in self._parameters.values()]
        self.layout = Layout.of_shapes(shapes, list(self._parameters))
        self._forms = {name: (each.dtype, each.shape) for name, each in self._parameters.items()}
        self.masters: Mapping[int, torch.Tensor] = {}
        """Identity of a rounded parameter → the float32 tensor that an optimizer trains in its place."""
        self._end: dict[str, Fingerprint] = {}
        """Fingerprints at the end of the run; empty before."""

    def start_model(self) -> StartModel:
        """Return digests of all parameters and buffers, frozen ones included and private ones not."""
        return replace(start_model(self.model, without=self.private), advice=_ADVICE)

    def note_end(self) -> None:
        """Take note of the parameters as those that the run ends with."""
        self._end = {name: fingerprint(each) for name, each in self._parameters.items()}

    def replaced(self) -> str | None:
        """Return the name of a parameter that has other values than the run ended with, if there is one. Other types,
        as of a model that is made smaller at the end, are no other values."""
        for name, each in self.model.named_parameters():
            is_same_kind = (each.dtype, each.shape) == self._forms.get(name)
            if is_same_kind and name in self._end and fingerprint(each) != self._end[name]:
                return name
        return None

    def check_frozen(self) -> None:
        """Raise UsageError if a parameter that was frozen is trained now: before its steps are counted, and quickly."""
        if any(each.requires_grad for each in self._not_trained):
            self.check()

    def check(self) -> None:
        """Raise UsageError if the model has other parameters than when it joined. Whether they require a gradient at
        this moment does not count: scripts of two networks switch that off and on."""
        now = dict(self.model.named_parameters())
        added = next((name for name in self._exchanged_now() if name not in self._parameters), None)
        if added is not None:
            raise UsageError(
                f"parameter {added} requires a gradient and did not when the script joined; build and unfreeze all of"
                " the model before sottovoce.join, and give an optimizer later what is to rest at first"
                " (optimizer.add_param_group)"
            )
        for name, parameter in self._parameters.items():
            if name not in now:
                raise UsageError(f"parameter {name} was removed after sottovoce.join; the others still train it")
            if now[name] is not parameter:
                raise UsageError(
                    f"parameter {name} is another tensor than when the script joined; change values in place, as"
                    " load_state_dict does"
                )
            if (parameter.dtype, parameter.shape) != self._forms[name]:
                raise UsageError(
                    f"parameter {name} was {_form(*self._forms[name])} when the script joined and is"
                    f" {_described(parameter)} now; use torch.autocast for other types"
                )

    @property
    def are_on_cpu(self) -> bool:
        """Whether they are where arithmetic is repeatable."""
        return all(each.device.type == "cpu" for each in self._parameters.values())

    @property
    def exchanged(self) -> Mapping[str, nn.Parameter]:
        """The parameters that are exchanged, by name, in the order of the vector."""
        return self._parameters

    def is_at(self, vector: Vector) -> bool:
        """Whether the parameters have the values of a vector, rounded to their types."""
        # No generator: what interrupts one that is given up is lost.
        for each, part in zip(self._parameters.values(), self.layout.slices, strict=True):
            if not torch.equal(each.detach().cpu(), _copied(vector[part]).view(each.shape).to(each.dtype)):
                return False
        return True

    def vector(self) -> Vector:
        """Return the values of all parameters or their masters, float32[n], in memory of their own. Raises
        DivergenceError where one is not finite."""
        return self._joined(
            lambda each: self.masters.get(id(each), each).detach(),
            "parameter {} holds values that are not finite, so nothing of this round is sent; look at loss and samples,"
            " lower the learning rate, clip gradients, or skip such steps as torch.amp.GradScaler does",
        )

    def displacement(self, base: Vector) -> Vector:
        """Return how far the parameters have moved since they got the values of `base: float32[n]`, with the opposite
        sign: float32[n], in memory of its own. Raises DivergenceError where one of them is not finite."""
        moved = self.vector()
        for parameter, part in zip(self._parameters.values(), self.layout.slices, strict=True):
            # What the script trains in float32 began with all of it.
            is_whole = parameter.dtype == torch.float32 or id(parameter) in self.masters
            begun = base[part] if is_whole else _copied(base[part]).to(parameter.dtype).float().numpy()
            np.subtract(begun, moved[part], out=moved[part])
        return moved

    def gradients(self) -> Vector:
        """Return the gradients of all parameters: float32[n], zeros where there is none, in memory of their own. Raises
        DivergenceError where one is not finite."""
        return self._joined(
            lambda each: torch.zeros_like(each) if each.grad is None else each.grad.to_dense(),
            "the gradient of parameter {} holds values that are not finite, so nothing of this step is sent; lower the"
            " learning rate, or compute in bfloat16 rather than float16, which needs no GradScaler",
        )

    def write_gradients(self, vector: Vector) -> None:
        """Give all parameters their gradients from `vector: float32[n]`, in place where they have one."""
        for parameter, part in self._parts(vector):
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part)

    def displacements(self, vector: Vector) -> dict[int, torch.Tensor]:
        """Return by how much each parameter is away from a vector, by its identity."""
        return {id(each): part.to(each.device) - each.detach() for each, part in self._parts(vector)}

    def write(self, vector: npt.NDArray[Any]) -> None:
        """Give all parameters and their masters their values from `vector: float32[n]`, in place."""
        if vector.dtype != np.float32 or vector.shape != (self.layout.size,):
            raise LocalProtocolError(f"{vector.dtype}{list(vector.shape)} for a model of float32[{self.layout.size}]")
        with torch.no_grad():
            for parameter, part in self._parts(vector):
                parameter.copy_(part)
                if id(parameter) in self.masters:
                    self.masters[id(parameter)].copy_(part)

    def _joined(self, of: Callable[[nn.Parameter], torch.Tensor], complaint: str) -> Vector:
        """Return a tensor of each parameter as one vector, float32[n], in memory of its own. Raises DivergenceError
        with the complaint about the first that is not finite."""
        vector = np.empty(self.layout.size, np.float32)
        for each, part in zip(self._parameters.values(), self.layout.slices, strict=True):
            torch.from_numpy(vector[part]).view(each.shape).copy_(of(each))
        if not math.isfinite(max_magnitude(vector)):
            name = next(name for name, each in self._parameters.items() if not torch.isfinite(of(each).float()).all())
            raise DivergenceError(complaint.format(name))
        return vector

    def _parts(self, vector: npt.NDArray[Any]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with a copy of its part of a vector, in its shape."""
        for parameter, part in zip(self._parameters.values(), self.layout.slices, strict=True):
            yield parameter, _copied(vector[part]).view(parameter.shape)

    def parts(self) -> ModelParts | None:
        """See `train.model_file.model_parts`."""
        return model_parts(self.model, self._parameters, private=self.private)

    def own(self) -> dict[str, torch.Tensor]:
        """Return the private parameters by name; not copies."""
        return {name: each.detach() for name, each in self.private.items()}

    def load_own(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Set private parameters to a result of `own`. Raises StateError if they are those of another model."""
        for name, value in kept.items():
            if name not in self.private or self.private[name].shape != value.shape:
                raise StateError(f"the state folder holds {name}, {_described(value)}, which is not private here")
            with torch.no_grad():
                self.private[name].copy_(value)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the model by name, such as the statistics of batch norms: each peer's own."""
        return dict(self.model.named_buffers())

    def fleeting(self) -> list[str]:
        """Return the names of the buffers that are no part of the model's state_dict."""
        return [
            f"{path}.{leaf}" if path else leaf
            for path, module in self.model.named_modules()
            for leaf in sorted(module._non_persistent_buffers_set)
        ]

    def load_buffers(self, kept: Mapping[str, torch.Tensor], fleeting: Collection[str] = ()) -> None:
        """Set the buffers, in place where they have the same shape and type. Raises StateError if they are those of
        another model; what is `fleeting` and has no place there is computed anew by the model."""
        for name, value in kept.items():
            try:
                set_buffer_(self.model, name, value, persistent=name not in fleeting)
            except ValueError as error:
                if name not in fleeting:
                    raise StateError(
                        f"the state folder holds buffer {name}, {_described(value)}, which the model has not: {error}"
                    ) from None

    def extra_states(self) -> dict[str, Any]:
        """Return the extra states of modules beside parameters and buffers, by their names."""
        plain = nn.Module.get_extra_state
        modules = self.model.named_modules()
        return {name: module.get_extra_state() for name, module in modules if type(module).get_extra_state is not plain}

    def load_extra_states(self, kept: Mapping[str, Any]) -> None:
        """Give modules their states from `extra_states`. Raises StateError if it is that of another model."""
        for name, value in kept.items():
            try:
                self.model.get_submodule(name).set_extra_state(value)
            except Exception as error:  # Code of others: any error means that it refuses its own state.
                raise StateError(f"module {name!r} does not take the extra state that it had: {error}") from error

    def _exchanged_now(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in _trained(self.model) if name not in self.private}

    def shares_with(self, module: nn.Module) -> str | None:
        """Return the name of a parameter of the model that another module has as well, if there is one."""
        theirs = {id(each) for each in module.parameters()}
        return next((name for name, each in self.model.named_parameters() if id(each) in theirs), None)


def _copied(part: npt.NDArray[Any]) -> torch.Tensor:
    """Return a part of a vector that may be the algorithm's own memory, which nothing may write to."""
    return torch.from_numpy(np.array(part))


def kept_beside(training: Arrays) -> dict[str, torch.Tensor]:
    """Return what a script had beside the exchanged parameters, by name, in the training part of a checkpoint: buffers
    that its saved model holds, private parameters, frozen ones that it has moved, and tensors of modules of its own.
    Raises StateError if it cannot be read."""
    state = unpack(group(group(training, "script"), "script"))
    fleeting = state.get("fleeting", ())
    buffers = {name: each for name, each in state["buffers"].items() if name not in fleeting}
    extra = {f"{module}._extra_state".lstrip("."): each for module, each in state.get("extra", {}).items()}
    beside = {**buffers, **state.get("private", {}), **state.get("frozen", {}), **extra}
    return {name: each for name, each in beside.items() if isinstance(each, torch.Tensor)}


def factors_apart(model: nn.Module) -> str | None:
    """Return the name of a module whose two LoRA factors are both trained, if there is one: the mean of B times the
    mean of A is not the mean of B A."""
    name: str
    for name, module in model.named_modules():
        pairs = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
        if any(all(_trains(getattr(module, factor, None)) for factor in pair) for pair in pairs):
            return name
    return None


def _trains(module: object) -> bool:
    return isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())


def _private(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters that patterns name. Raises UsageError for a pattern that matches none."""
    if isinstance(patterns, str) or not all(isinstance(each, str) for each in patterns):
        raise UsageError(f"private is {patterns!r}; give a list of names or patterns, such as private=['head.*']")
    named, found = dict(model.named_parameters()), set[str]()
    for pattern in patterns:
        if not (names := matching(named, pattern)):
            raise UsageError(f"private: {pattern!r} matches no parameter of the model, which has {', '.join(named)}")
        found.update(names)
    return {name: each for name, each in named.items() if name in found}


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the non-empty parameters that require a gradient."""
    named = model.named_parameters()
    # Whether a lazy parameter holds numbers is not known yet.
    return ((name, each) for name, each in named if each.requires_grad and (is_lazy(each) or each.numel()))


def _refuse_wrappers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _REFUSED_MODELS:
                what = f"module {name}" if name else "the model"
                raise UsageError(
                    f"{what} {_REFUSED_MODELS[kind.__name__]}; give join the plain model, in one process for each peer"
                )


def _refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    kinds = {kind.__name__ for kind in type(parameter).__mro__}
    if "DTensor" in kinds or hasattr(parameter, "ds_id"):
        raise UsageError(f"parameter {name} is a shard of a larger one (FSDP or DeepSpeed); join takes whole models")
    if is_lazy(parameter):
        raise UsageError(f"parameter {name} has no shape yet (a lazy module); run one batch before sottovoce.join")
    if parameter.is_meta:
        raise UsageError(f"parameter {name} is on the meta device and has no values; load the model before it joins")
    if parameter.is_inference():
        raise UsageError(
            f"parameter {name} was made under torch.inference_mode, so nothing can train it; leave that out"
        )
    if parameter.is_quantized or hasattr(parameter, "quant_state"):
        raise UsageError(
            f"parameter {name} is quantized; join takes float32, bfloat16 or float16 parameters: freeze it, and train"
            " adapters beside it"
        )
    if is_expanded(parameter):
        raise UsageError(
            f"parameter {name} is expanded: several of its elements are one number in memory, which cannot be"
            " written to; expand it in forward()"
        )
    if parameter.is_complex():
        raise UsageError(
            f"parameter {name} is {_described(parameter)}; join takes real parameters: hold torch.view_as_real of it,"
            " and use torch.view_as_complex in forward()"
        )
    if parameter.dtype not in _TYPES or parameter.layout is not torch.strided:
        raise UsageError(
            f"parameter {name} is {_described(parameter)}; join takes float32, bfloat16 or float16 parameters"
            " (model.float() converts them)"
        )


def _described(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" ({tensor.layout})"
    return _form(tensor.dtype, tensor.shape) + layout


def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
