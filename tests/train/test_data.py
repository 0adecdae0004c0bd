"""Data in memory, and the augmentation of images."""

from __future__ import annotations

import pytest
import torch

from peer.errors import DataError
from peer.train.data import Classification, ImageData, TensorData, crop_and_flip
from peer.train.task import Task


def test_batches_are_copies_of_the_rows():
    data = TensorData(torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    inputs, targets = data.batch(torch.tensor([4, 1]))
    assert inputs.tolist() == [[8.0, 9.0], [2.0, 3.0]]
    assert targets.tolist() == [1, 1]
    inputs.zero_()
    assert data.batch(torch.tensor([4]))[0].tolist() == [[8.0, 9.0]]


def test_labels_can_differ_from_the_targets():
    data = TensorData(torch.zeros(3, 2), torch.zeros(3), labels=torch.tensor([2, 0, 1], dtype=torch.int32))
    assert data.labels.tolist() == [2, 0, 1]
    assert data.labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("tensors", "labels", "sentence"),
    [
        ((), None, "at least one tensor"),
        ((torch.zeros(()),), None, "at least one tensor"),
        ((torch.zeros(3, 2), torch.zeros(2).long()), None, r"same number of samples, and at least one: \[3, 2\]"),
        ((torch.zeros(0, 2), torch.zeros(0).long()), None, r"at least one: \[0, 0\]"),
        ((torch.zeros(3, 2), torch.zeros(3)), None, "one integer label per sample"),
        ((torch.zeros(3, 2), torch.zeros(3)), torch.zeros(2).long(), "one integer label per sample"),
        ((torch.zeros(3, 2), torch.zeros(3, 1).long()), None, "one integer label per sample"),
    ],
)
def test_tensors_that_make_no_data_set_are_refused(tensors, labels, sentence):
    with pytest.raises(DataError, match=sentence):
        TensorData(*tensors, labels=labels)


def test_images_are_normalised_channel_by_channel():
    pixels = torch.tensor([0, 255, 51, 102], dtype=torch.uint8).view(1, 2, 1, 2).repeat(2, 1, 1, 1)
    data = ImageData(pixels, torch.tensor([1, 0]), mean=(0.5, 0.2), std=(0.5, 0.1))
    images, labels = data.batch(torch.tensor([1]))
    assert torch.allclose(images, torch.tensor([[[[-1.0, 1.0]], [[0.0, 2.0]]]]), atol=1e-6)
    assert labels.tolist() == [0]
    assert len(data) == 2


def test_a_data_set_given_as_a_function_is_read_once_and_only_when_needed():
    reads = []

    def read() -> TensorData:
        reads.append(1)
        return TensorData(torch.zeros(2, 2), torch.tensor([0, 1]))

    task = Classification(name="lazy", num_classes=2, model=lambda: torch.nn.Linear(2, 2), train=read, test=read)
    assert isinstance(task, Task)
    assert not reads
    assert task.train_data() is task.train_data()
    assert len(reads) == 1


def test_classification_judges_as_it_loses_and_counts():
    data = TensorData(torch.randn(9, 2), torch.arange(9) % 3)
    task = Classification(name="c", num_classes=3, model=lambda: torch.nn.Linear(2, 3), train=data, test=data)
    model, batch = task.make_model(), data.batch(torch.arange(9))
    loss, right = task.judge(model, batch)
    assert torch.equal(loss, task.loss(model, batch))
    assert torch.equal(right, task.correct(model, batch))
    assert task.augment(batch, torch.zeros(9, 4)) is batch


def numbered_images(count: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + count * 3 * 6 * 6).view(count, 3, 6, 6)


def shifted(image: torch.Tensor, rows: int, columns: int, *, mirrored: bool) -> torch.Tensor:
    """Pad by 2, cut out a window of the old size at (rows, columns) and mirror it: written out with slices."""
    padded = torch.zeros(3, 10, 10)
    padded[:, 2:8, 2:8] = image
    window = padded[:, rows : rows + 6, columns : columns + 6]
    return window.flip(2) if mirrored else window


def test_crop_and_flip_shifts_and_mirrors_each_image_by_its_own_uniforms():
    images, labels = numbered_images(4), torch.arange(4)
    uniforms = torch.tensor([[0.0, 0.999, 0.9, 0.5], [0.5, 0.5, 0.1, 0.5], [0.999, 0.3, 0.499, 0], [0.41, 0.0, 0.5, 0]])
    result, targets = crop_and_flip((images, labels), uniforms, padding=2)
    cuts = [(0, 4, False), (2, 2, True), (4, 1, True), (2, 0, False)]
    for index, (rows, columns, mirrored) in enumerate(cuts):
        assert torch.equal(result[index], shifted(images[index], rows, columns, mirrored=mirrored)), index
    assert targets is labels


def test_every_shift_occurs_about_equally_often():
    images = torch.zeros(4000, 1, 8, 8)
    images[:, 0, 4, 4] = 1
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(4000, 4, generator=generator)
    uniforms[:, 2] = 0.9
    (result,) = crop_and_flip((images,), uniforms, padding=1)
    where = result.flatten(1).argmax(1)
    counts = torch.bincount(where, minlength=64).view(8, 8)[3:6, 3:6]
    assert counts.sum() == 4000
    assert counts.min() > 350
