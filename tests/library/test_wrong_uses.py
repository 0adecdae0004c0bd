"""Each wrong use of `sottovoce` has a sentence of its own."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import sottovoce
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from peer.config.options import load
from peer.daemon.process import open_peer
from peer.errors import DivergenceError
from peer.state.checkpoints import find_checkpoints
from tests.library.scripts import write_kits


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """Return the configuration of a run with one peer, which waits for nobody."""
    settings = ("run.rounds=4", "algorithm.name=local", "graph.kind=complete", "state.checkpoint_every_rounds=1")
    (file,) = write_kits(tmp_path, 1, *settings)
    return file


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    made = model()
    made.register_parameter("extra", parameter)
    return made


def named(name: str, inside: nn.Module) -> nn.Module:
    """Return a model inside a wrapper that is called like one of another library, which this machine cannot start."""
    wrapper: nn.Module = type(name, (nn.Module,), {})()
    wrapper.inner = inside
    return wrapper


class Shard(nn.Parameter):
    """Looks like what FSDP 2 leaves of a parameter."""


Shard.__name__ = "DTensor"


def zero_size() -> nn.Module:
    made = with_parameter(nn.Parameter(torch.zeros(0, 3)))
    made[1].register_buffer("conjugated", torch.ones(2, dtype=torch.complex64).conj())
    return made


class Broken:
    """Keeps what cannot be kept."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"fine": 1, "inside": [self.value]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return model()


MODELS: list[tuple[str, Callable[[], object], str]] = [
    ("no module", lambda: [1.0], "the model is of type list; join takes a torch.nn.Module"),
    ("nothing to train", lambda: model().requires_grad_(False), "no parameters that require a gradient"),
    (
        "float64",
        lambda: model().double(),
        "parameter 0.weight is float64[3, 2]; join takes float32, bfloat16 or",
    ),
    ("meta", lambda: model().to("meta"), "parameter 0.weight is on the meta device"),
    ("lazy", lambda: nn.LazyLinear(2), "parameter weight has no shape yet"),
    ("FSDP", lambda: named("FullyShardedDataParallel", model()), "the model is sharded by FSDP"),
    ("FSDP inside", lambda: nn.Sequential(named("FSDPModule", model())), "module 0 is sharded by FSDP"),
    ("DeepSpeed", lambda: named("DeepSpeedEngine", model()), "the model is a DeepSpeed engine"),
    ("DDP", lambda: named("DistributedDataParallel", model()), "averages its gradients with other processes already"),
    (
        "expanded",
        lambda: with_parameter(nn.Parameter(torch.ones(1).expand(3))),
        "parameter extra is expanded: several of its elements are one number in memory",
    ),
    (
        "complex",
        lambda: with_parameter(nn.Parameter(torch.ones(3, dtype=torch.complex64))),
        "parameter extra is complex64[3]; join takes real parameters: hold torch.view_as_real of it",
    ),
    ("inference", made_for_inference, "parameter 0.weight was made under torch.inference_mode"),
    ("a shard", lambda: with_parameter(Shard(torch.zeros(2))), "parameter extra is a shard of a larger one"),
]


@pytest.mark.parametrize(("make", "sentence"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS])
def test_models_that_cannot_be_exchanged(kit: Path, make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(sottovoce.UsageError, match=re.escape(sentence)):
        sottovoce.join(make(), kit, every=1)


def test_parameters_without_numbers_and_conjugated_buffers_are_fine(kit: Path) -> None:
    made = zero_size()
    with sottovoce.join(made, kit, every=1) as peer:
        while not peer.done:
            peer.step()
        peer.save(kit.parent / "saved.safetensors")
    assert dict(made.named_parameters())["extra"].shape == (0, 3)


def test_buffers_that_no_file_can_hold_are_named_at_once(kit: Path) -> None:
    made = model()
    made.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(sottovoce.SottoError, match=r"wide of the model is a tensor of torch\.complex128"):
        sottovoce.join(made, kit, every=1)


@pytest.mark.parametrize("wrap", [lambda made: made, lambda made: nn.Sequential(nn.Linear(1, 1), made)])
def test_the_model_itself_is_not_for_keep(kit: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    made = model()
    with pytest.raises(sottovoce.UsageError, match=r"keep\[0\] \(Sequential\) holds 0.weight of the model that joins"):
        sottovoce.join(made, kit, every=1, keep=[wrap(made)])


def test_an_optimizer_over_a_copy_is_warned_of(kit: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sottovoce.join(model(), kit, every=1) as peer:
        peer.step()
        peer.step()
    assert sum("no parameter of the model has moved in round 0" in line for line in caplog.messages) == 1


def test_unfreezing_is_told_at_the_next_step(kit: Path) -> None:
    made = model()
    made[0].requires_grad_(False)
    with sottovoce.join(made, kit, every=100) as peer:
        peer.step()
        made[0].requires_grad_(True)
        with pytest.raises(sottovoce.UsageError, match=r"0\.weight requires a gradient and did not when"):
            peer.step()


def test_a_model_over_several_devices_of_one_process_is_fine(kit: Path) -> None:
    assert sottovoce.join(DataParallel(model()), kit, every=1).rounds == 4


ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("every 0", {"every": 0}, "every is 0; it is the number of gradient steps in a round"),
    ("every 1.5", {"every": 1.5}, "every is 1.5"),
    ("outer momentum 1", {"outer_momentum": 1.0}, "outer_momentum is 1.0; it lies between 0 and 1"),
    ("outer rate 0", {"outer_learning_rate": 0.0}, "outer_learning_rate is 0.0; it lies above 0"),
    ("overlap 2", {"overlap": 2}, "overlap is 2; it is True or False"),
    ("keep no list", {"keep": torch.optim.SGD(model().parameters())}, "keep is of type SGD; give a list"),
    ("keep a number", {"keep": [3]}, "keep[0] is of type int, which has no state_dict()"),
    ("keep twice", {"keep": [Broken(1)] * 2}, "keep[1] is in keep twice (Broken)"),
    ("meaning no table", {"meaning": ["cat"]}, "meaning is ['cat']; give a list of names for each of a few kinds"),
    ("meaning a text", {"meaning": {"classes": "cat"}}, "meaning is {'classes': 'cat'}"),
    ("called already", {"evaluate": (3, 4)}, "evaluate is of type tuple; give a function, without calling it"),
    (
        "no callback",
        {"on_round": "print"},
        "the callback for RoundDone is of type str; give a function, without calling it",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), [case[1:] for case in ARGUMENTS], ids=[case[0] for case in ARGUMENTS])
def test_arguments_that_make_no_sense(kit: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sottovoce.UsageError, match=re.escape(sentence)):
        sottovoce.join(model(), kit, **{"every": 1, **options})


KEPT: list[tuple[str, object, str]] = [
    ("a function", lambda: 1, "keep[0].state_dict()['inside'][0] is of type function, which cannot be kept"),
    ("an object", Path("x"), "keep[0].state_dict()['inside'][0] is of type PosixPath"),
    ("a sparse tensor", torch.eye(2).to_sparse_csc(), "is a tensor without plain values (torch.sparse_csc)"),
    ("an array of objects", np.array([None]), "is of type ndarray, which cannot be kept"),
]


@pytest.mark.parametrize(("value", "sentence"), [case[1:] for case in KEPT], ids=[case[0] for case in KEPT])
def test_states_that_cannot_be_kept(kit: Path, value: object, sentence: str) -> None:
    peer = sottovoce.join(model(), kit, every=1, keep=[Broken(value)])
    with pytest.raises(sottovoce.UsageError, match=re.escape(sentence)):
        peer.__enter__()


CONFIGURATIONS: list[tuple[str, str, str, str]] = [
    (
        "a task",
        'task = "loop"',
        'task = "digits"',
        "a training script joins the run; create the folders with --task loop",
    ),
    (
        "a rate",
        'task = "loop"',
        'task = "loop"\nlearning_rate = 0.2',
        "training.learning_rate: has no effect with a loop of",
    ),
    (
        "an outer rate",
        "[algorithm]",
        "[algorithm]\nouter_rate = 2",
        "algorithm.outer_rate: has no effect with a loop of",
    ),
    (
        "an outer momentum",
        "[algorithm]",
        "[algorithm]\nouter_momentum = 0.5",
        "algorithm.outer_momentum: has no effect with a loop of",
    ),
    ("no peers", "[[peers]]", "[[nobody]]", "nobody"),
    ("epochs", "[graph]", '[graph]\nperiod_unit = "epochs"', "the length of an epoch is not known"),
]


@pytest.mark.parametrize(
    ("old", "new", "sentence"), [case[1:] for case in CONFIGURATIONS], ids=[case[0] for case in CONFIGURATIONS]
)
def test_configurations_for_something_else(kit: Path, old: str, new: str, sentence: str) -> None:
    text = kit.read_text()
    assert old in text
    kit.write_text(text.replace(old, new))
    with pytest.raises(sottovoce.ConfigError, match=re.escape(sentence)), sottovoce.join(model(), kit, every=1):
        pass


def test_the_bound_of_a_theorem_that_needs_the_gradients(tmp_path: Path) -> None:
    settings = ("algorithm.name=moniqua", "graph.kind=ring", "compressor.kind=modulo", "algorithm.theta=theorem")
    files = write_kits(tmp_path, 3, *settings)
    with pytest.raises(
        sottovoce.ConfigError, match="gradients and learning rates, which your own loop keeps to itself"
    ):
        sottovoce.join(model(), files[0], every=1).__enter__()


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(sottovoce.ConfigError, match="no such file"):
        sottovoce.join(model(), tmp_path / "peer.toml", every=1)
    with pytest.raises(sottovoce.UsageError, match="is a folder; give the file in it"):
        sottovoce.place(tmp_path)
    with pytest.raises(sottovoce.UsageError, match=r"the configuration is of type dict; give the path of a peer\.toml"):
        sottovoce.join(model(), {"task": "loop"}, every=1)


@pytest.fixture
def made() -> nn.Module:
    """Return the model of `peer`."""
    return model()


@pytest.fixture
def peer(kit: Path, made: nn.Module) -> Iterator[sottovoce.Peer]:
    with sottovoce.join(made, kit, every=1) as peer:
        yield peer


def test_step_outside_of_the_block(kit: Path) -> None:
    peer = sottovoce.join(model(), kit, every=1)
    with pytest.raises(sottovoce.UsageError, match=re.escape("step() belongs inside the with block")):
        peer.step()
    with pytest.raises(sottovoce.UsageError, match=re.escape("until_done() belongs inside the with block")):
        next(peer.until_done([1]))
    with peer:
        pass
    with pytest.raises(sottovoce.UsageError, match=re.escape("step() was called after the with block")):
        peer.step()
    with pytest.raises(sottovoce.UsageError, match="was in a with block already"), peer:
        pass


def test_more_steps_than_the_run_has(peer: sottovoce.Peer) -> None:
    for _ in range(4):
        peer.step()
    with pytest.raises(sottovoce.UsageError, match="the run is complete, so there is nothing left to step"):
        peer.step()


def test_two_peers_of_one_configuration_or_one_model(
    kit: Path, peer: sottovoce.Peer, made: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(sottovoce.UsageError, match=r"this process has joined with .* already"):
        sottovoce.join(model(), kit, every=1).__enter__()
    (other,) = write_kits(tmp_path / "other", 1, "algorithm.name=local", "graph.kind=complete")
    with pytest.raises(sottovoce.UsageError, match="this model is in the with block of another peer"):
        sottovoce.join(made, other, every=1).__enter__()
    with sottovoce.join(model(), other, every=1) as second:
        assert second.step()


CHANGES: list[tuple[str, Callable[[nn.Sequential], object], str]] = [
    ("added", lambda m: m.append(nn.Linear(1, 1)), "parameter 3.weight requires a gradient and did not when"),
    ("removed", lambda m: m.pop(2), "parameter 2.weight was removed after sottovoce.join"),
    ("replaced", lambda m: setattr(m[0], "bias", nn.Parameter(torch.zeros(3))), "parameter 0.bias is another tensor"),
    (
        "other type",
        lambda m: m.half(),
        "parameter 0.weight was float32[3, 2] when the script joined and is float16[3, 2]",
    ),
    ("not finite", lambda m: nn.init.constant_(m[2].weight, torch.inf), "parameter 2.weight holds values that are not"),
]


@pytest.mark.parametrize(("change", "sentence"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES])
def test_a_model_that_changed(
    peer: sottovoce.Peer, made: nn.Module, change: Callable[[Any], object], sentence: str
) -> None:
    assert peer.step()
    change(made)
    with pytest.raises(sottovoce.SottoError, match=re.escape(sentence)) as caught:
        peer.step()
    assert caught.value.exit_code == (4 if "not finite" in sentence or "that are not" in sentence else 2)
    # Nothing of it was sent.
    assert peer.round == 1


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ((1.0, torch.tensor(torch.nan), torch.inf), "the loss was nan at step 5 already; parameter"),
        ((1.0, 2.0, -torch.inf), "the loss was -inf at step 6 already; parameter"),
        ((1.0, 2.0, 3.0), "parameter"),
        ((None, torch.nan, None), "parameter"),
    ],
)
def test_a_model_that_is_not_finite_is_told_with_the_loss_that_was_not_either(
    kit: Path, losses: tuple[float | None, ...], says: str
) -> None:
    made = model()
    with sottovoce.join(made, kit, every=3) as peer:
        for _ in range(3):
            peer.step(1.0)
        made.get_parameter("2.weight").detach().fill_(torch.nan)
        for loss in losses[:2]:
            peer.step(loss)
        with pytest.raises(DivergenceError, match=f"^round 1, at step 6: {says} 2.weight holds values that are"):
            peer.step(losses[2])


def test_loaders_that_cannot_be_trained_on(peer: sottovoce.Peer) -> None:
    with pytest.raises(sottovoce.UsageError, match="the loader gave no batch: it is empty, or an iterator that can be"):
        next(peer.until_done([]))
    with pytest.raises(
        sottovoce.UsageError, match=r"a whole pass, went by .* the loop lacks peer\.step\(\) after optimizer"
    ):
        list(peer.until_done([1, 2]))


def test_a_loop_that_counts_no_step_is_told_which_line_it_lacks(kit: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters())
    with sottovoce.join(made, kit, every=1, keep=[optimizer]) as peer:
        for _ in range(20):
            assert not caplog.messages
            optimizer.step()
        (said,) = caplog.messages
        assert said.endswith("none was counted: the loop lacks peer.step() after optimizer.step()")
        batches = peer.until_done([1, 2])
        with pytest.raises(sottovoce.UsageError, match=r"2 batches, and a whole pass, .* lacks peer\.step\(\)"):
            list(batches)
        peer.step()
        optimizer.step()
        assert "the loop lacks" not in caplog.messages[-1]


def test_another_thread(peer: sottovoce.Peer) -> None:
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            peer.step()
        except sottovoce.UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "in another thread than the with block" in str(raised[0])


def test_a_forked_process_is_no_peer(peer: sottovoce.Peer) -> None:
    pid = os.fork()
    if not pid:
        try:
            peer.step()
        except sottovoce.UsageError as error:
            os._exit(7 if "in a process that was forked after sottovoce.join" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    # The one that joined goes on.
    assert peer.step()


@pytest.mark.parametrize("user", ["a peer", "another library"])
def test_a_process_that_was_forked_while_grpc_ran_is_told_how_to_join(kit: Path, user: str, made: nn.Module) -> None:
    """gRPC hangs there, or ends the process."""
    server = None
    if user == "a peer":
        trained(kit, 1)
    else:
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_insecure_port("127.0.0.1:0")
        server.start()
    pid = os.fork()
    if not pid:
        try:
            sottovoce.join(made, kit, every=1).__enter__()
        except sottovoce.UsageError as error:
            os._exit(7 if "was forked from one that uses gRPC" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    if server is not None:
        server.stop(0).wait()
    # The one that forked it may join.
    assert not trained(kit, 4).stopped


def test_a_step_that_did_not_come_to_its_end_is_the_last(kit: Path) -> None:
    """What it was to hand over may be on its way: with the next steps, it would be handed over twice."""

    def fails(event: sottovoce.RoundDone) -> None:
        raise ValueError("not for me")

    with sottovoce.join(model(), kit, every=2, on_round=fails) as peer:
        peer.step()
        with pytest.raises(ValueError, match="not for me"):
            peer.step()
        with pytest.raises(sottovoce.UsageError, match=re.escape("that an error or an interrupt ended")):
            peer.step()
    with sottovoce.join(model(), kit, every=2) as peer:
        while not peer.done:
            peer.step()
    assert peer.steps == 8


def trained(kit: Path, steps: int, then: Callable[[], object] = int, **options: Any) -> sottovoce.Peer:
    """Return a peer that took some steps in its block, in which something else happened then."""
    with sottovoce.join(model(), kit, every=1, **options) as peer:
        for _ in range(steps):
            peer.step()
        then()
    return peer


@pytest.mark.parametrize(
    "found",
    [0.5, (0.87, 1.0), (1.0, 1.0), (0.5, 10), (3, 2), (-1, 2), (True,), ("3", "4"), (torch.tensor([1, 2]), 3), None],
    ids=str,
)
def test_evaluations_that_are_none(kit: Path, found: Any) -> None:
    with pytest.raises(sottovoce.UsageError, match=re.escape(f"evaluate returned {found!r}; it must return (right,")):
        trained(kit, 4, evaluate=lambda model: found)


@pytest.mark.parametrize(
    "found", [(3, 4), (np.int64(3), np.int32(4)), (torch.tensor(3), 4), (3.0, 4.0), (torch.tensor(3.0), 4)], ids=str
)
def test_counts_of_any_type_are_an_evaluation(kit: Path, found: Any) -> None:
    told: list[sottovoce.Evaluated] = []
    trained(kit, 4, evaluate=lambda model: found, on_evaluation=told.append)
    assert [each.accuracy for each in told] == [0.75]


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (torch.ones(2, 3), "of shape [2, 3]"),
        (torch.ones((), dtype=torch.complex64), "of shape []"),
        ("small", "a str"),
        ({"loss": 1.0}, "a dict"),
    ],
    ids=["unreduced", "complex", "a text", "a dict"],
)
def test_losses_that_are_no_number(peer: sottovoce.Peer, loss: Any, what: str) -> None:
    with pytest.raises(
        sottovoce.UsageError, match=re.escape(f"the loss given to step() is {what}; give one real number")
    ):
        peer.step(loss)


def test_steps_that_a_script_skips_because_of_their_loss(kit: Path, caplog: pytest.LogCaptureFixture) -> None:
    rounds: list[sottovoce.RoundDone] = []
    losses = [1.0, torch.tensor(torch.nan), 2.0, 6.0, 1.0, torch.inf, -torch.inf, torch.tensor([3.0])]
    with sottovoce.join(model(), kit, every=4, on_round=rounds.append) as peer:
        for loss in losses:
            peer.step(loss)
        assert [event.loss for event in rounds] == [3.0, 2.0]
        assert peer.losses_not_finite == 3
        assert [line.message for line in caplog.records if "not finite" in line.message] == [
            "1 of the 4 losses of round 0 are not finite and count for nothing; further ones are counted in"
            " peer.losses_not_finite"
        ]
        for _ in range(3):
            peer.step(torch.nan)
        with pytest.raises(
            sottovoce.SottoError, match=r"round 2 is not finite; lower the learning rate .* script's own"
        ):
            peer.step(torch.nan)


def test_an_error_of_the_script_is_the_scripts(kit: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trained(kit, 2, then=lambda: 1 / 0)
    # What the block was left with is what the next start goes on with.
    assert find_checkpoints(kit.parent / "state")
    with sottovoce.join(model(), kit, every=1) as again:
        assert (again.steps, again.round) == (1, 1)


def test_a_block_that_is_left_early_says_so(kit: Path) -> None:
    peer = trained(kit, 1)
    assert peer.stopped == "the script left the with block"
    # Its first round is trained again.
    assert not trained(kit, 4).stopped


def test_resuming_with_other_things(kit: Path) -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters())
    with sottovoce.join(made, kit, every=1, keep=[optimizer]) as peer:
        peer.step()
        peer.step()
    with pytest.raises(sottovoce.UsageError, match="keep holds nothing, but the run that is resumed kept SGD"):
        sottovoce.join(model(), kit, every=1).__enter__()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(sottovoce.StateError, match=re.escape("keep[0] (SGD) does not take the state that it had")):
        sottovoce.join(model(), kit, every=1, keep=[other]).__enter__()
    wider = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))
    sizes = (
        "another model: it has 19 parameters (0.weight: 3×2), and this one 21 (there 5×2); start again what began it"
    )
    with pytest.raises(sottovoce.StateError, match=re.escape(sizes)):
        sottovoce.join(wider, kit, every=1, keep=[optimizer]).__enter__()
    with sottovoce.join(made, kit, every=1, keep=[optimizer]) as peer:
        assert peer.steps == 1


def test_commands_say_that_a_script_is_to_be_started(kit: Path) -> None:

    with pytest.raises(sottovoce.ConfigError, match="name that script: sotto run SCRIPT"):
        open_peer(load(kit), kit.parent)


def test_a_simulation_raises_what_a_script_raises_late(tmp_path: Path) -> None:
    def script(where: sottovoce.Place) -> None:
        try:
            with sottovoce.join(model(), where, every=1):
                raise ValueError("mine")
        finally:
            time.sleep(0.2)  # A framework that tidies up after its training failed.

    (file, _) = write_kits(tmp_path, 2, "run.rounds=4", "graph.kind=complete")
    with pytest.raises(ValueError, match="mine"):
        sottovoce.simulate(script, file)
