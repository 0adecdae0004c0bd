"""Whole models on disk: what is written is read back, and what does not fit is refused and changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import nn

from peer.errors import DataError
from peer.train.model_file import file_parts, load_model_, save_model, start_model


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))


def test_a_model_comes_back_as_it_was(tmp_path: Path):
    model, other = small(), small()
    model(torch.randn(5, 1, 3, 3))
    save_model(model, tmp_path / "m.safetensors", metadata={"task": "t"})
    assert start_model(model) != start_model(other)
    load_model_(other, tmp_path / "m.safetensors")
    assert start_model(model) == start_model(other)


def test_the_file_is_a_plain_state_dict(tmp_path: Path):
    model, other = small(), small()
    save_model(model, tmp_path / "m.safetensors")
    other.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert start_model(model) == start_model(other)


def test_nothing_but_the_file_is_left_behind(tmp_path: Path):
    save_model(small(), tmp_path / "m.safetensors")
    save_model(small(), tmp_path / "m.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_are_written_under_both_names(tmp_path: Path):
    model, other, strict = tied(), tied(), tied()
    save_model(model, tmp_path / "m.safetensors")
    strict.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    load_model_(other, tmp_path / "m.safetensors")
    assert start_model(strict) == start_model(other) == start_model(model)


def test_a_file_of_an_earlier_release_has_tied_weights_once(tmp_path: Path):
    stored = dict(tied().state_dict())
    save_file({name: tensor for name, tensor in stored.items() if name != "1.weight"}, tmp_path / "m.safetensors")
    load_model_(tied(), tmp_path / "m.safetensors")


def test_tied_weights_that_differ_are_refused(tmp_path: Path):
    stored = {name: tensor.clone() for name, tensor in tied().state_dict().items()}
    stored["1.weight"] += 1
    save_file(stored, tmp_path / "m.safetensors")
    with pytest.raises(DataError, match=r"1\.weight and 0\.weight differ"):
        load_model_(tied(), tmp_path / "m.safetensors")


def test_the_digest_sees_names_shapes_and_values():
    torch.manual_seed(0)
    model = small()
    before = start_model(model)
    with torch.no_grad():
        model[3].bias[1] += 1e-6
    assert start_model(model) != before
    assert start_model(nn.Sequential(nn.Flatten())) == start_model(nn.Identity())


def tensors() -> dict[str, torch.Tensor]:
    return dict(small().state_dict())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("3.bias"), r"lacks 3\.bias"),
        (lambda t: t.update({"4.weight": torch.zeros(2)}), r"contains 4\.weight, which the model does not have"),
        (
            lambda t: t.update({"3.weight": torch.zeros(2, 3)}),
            r"3\.weight has shape \[2, 3\], but the model needs \[2, 2\]",
        ),
        (
            lambda t: t.update({"3.weight": torch.full((2, 2), torch.nan)}),
            r"3\.weight contains values that are not finite",
        ),
        (lambda t: t.update({"3.weight": torch.zeros(2, 2, dtype=torch.int32)}), r"3\.weight has type torch\.int32"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path, change, sentence: str):
    content = tensors()
    change(content)
    save_file(content, tmp_path / "m.safetensors")
    model = small()
    before = start_model(model)
    with pytest.raises(DataError, match=sentence):
        load_model_(model, tmp_path / "m.safetensors")
    assert start_model(model) == before


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x08" + bytes(7) + b"not json", (2**62).to_bytes(8, "little")]
)
def test_bytes_that_are_no_safetensors_file_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"is not a valid safetensors file"):
        load_model_(small(), tmp_path / "m.safetensors")


def test_a_cut_off_file_is_refused(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    save_model(small(), path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"is not a valid safetensors file"):
        load_model_(small(), path)


def test_half_precision_files_start_a_float32_model(tmp_path: Path):
    content = {name: t.half() if t.is_floating_point() else t for name, t in tensors().items()}
    save_file(content, tmp_path / "m.safetensors")
    model = small()
    load_model_(model, tmp_path / "m.safetensors")
    assert model[3].weight.dtype == torch.float32
    assert torch.equal(model[3].weight, content["3.weight"].float())


def test_the_pieces_of_a_file_are_the_bytes_that_the_library_writes():
    tensors = {
        "weight": torch.randn(5, 3),
        "é": torch.tensor(3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(3, 0),
        "flag": torch.tensor([True, False]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "wide": torch.ones(2, dtype=torch.float64),
    }
    metadata = {"format": "pt"}
    assert b"".join(file_parts(tensors, metadata)) == save(tensors, metadata=metadata)
    shared = tensors | {"turned": tensors["weight"].T, "tied": tensors["weight"], "conj": tensors["complex"].conj()}
    copies = {name: each.resolve_conj().clone().contiguous() for name, each in shared.items()}
    assert b"".join(file_parts(shared, metadata)) == save(copies, metadata=metadata)
    facts = {name: name for name in "abcdef"}
    assert len({b"".join(file_parts(shared, facts)) for _ in range(9)}) == 1, "one model, one file"
    pieces = [np.frombuffer(each, np.uint8) for each in file_parts({"weight": tensors["weight"]}, metadata)]
    assert np.shares_memory(pieces[1], tensors["weight"].numpy())
