"""Folders of images: every device sees the same set, decodes what it needs, and says which file is none."""

from __future__ import annotations

import os
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from peer.errors import DataError
from peer.train.datasets import image_folder
from peer.train.datasets.image_folder import FolderData, list_splits, read_image, require_pillow


def write(path: Path, color: tuple[int, int, int], *, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A set of two classes, 3 and 2 images to train and 1 each to test with."""
    for index in range(3):
        write(tmp_path / f"set/train/ant/{index}.png", (10 * index, 0, 0))
    for index in range(2):
        write(tmp_path / f"set/train/bee/{index}.JPEG", (0, 200, 0))
    write(tmp_path / "set/val/ant/0.png", (1, 2, 3))
    write(tmp_path / "set/val/bee/0.png", (4, 5, 6))
    (tmp_path / "set/train/ant/notes.txt").write_text("no image")
    return tmp_path


@pytest.mark.parametrize("inside", ["", "set"])
def test_classes_and_images_are_in_the_order_of_their_names(folder: Path, inside: str):
    classes, train, test = list_splits(folder / inside)
    assert classes == ("ant", "bee")
    assert [path.name for path in train.paths] == ["0.png", "1.png", "2.png", "0.JPEG", "1.JPEG"]
    assert train.labels.tolist() == [0, 0, 0, 1, 1]
    assert test.labels.tolist() == [0, 1]


def test_a_batch_holds_normalised_pixels(folder: Path):
    _, train, _ = list_splits(folder)
    images, labels = FolderData(train, size=16).batch(torch.tensor([2, 4, 0]))
    assert images.shape == (3, 3, 16, 16)
    assert labels.tolist() == [0, 1, 0]
    expected = (20 / 255 - 0.485) / 0.229
    assert torch.allclose(images[0, 0], torch.tensor(expected), atol=1e-5)


def test_each_image_is_decoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    decoded = []

    def counting(path: Path, size: int) -> torch.Tensor:
        decoded.append(path.name)
        return read_image(path, size)

    monkeypatch.setattr(image_folder, "read_image", counting)
    data = FolderData(list_splits(folder)[1], size=8)
    first = data.batch(torch.tensor([1, 3]))[0]
    assert torch.equal(data.batch(torch.tensor([1, 3, 1]))[0][:2], first)
    assert decoded == ["1.png", "0.JPEG"]


def test_the_middle_square_is_kept(tmp_path: Path):
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert read_image(tmp_path / "wide.png", 20).min() == 255
    Image.fromarray(pixels.transpose(1, 0, 2)).save(tmp_path / "tall.png")
    assert read_image(tmp_path / "tall.png", 10).float().mean() > 250


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_any_kind_of_pixels_becomes_three_channels(tmp_path: Path, mode: str):
    path = tmp_path / ("image.jpeg" if mode == "CMYK" else "image.png")
    Image.new("RGB", (9, 9), (255, 255, 255)).convert(mode).save(path)
    assert read_image(path, 9).shape == (3, 9, 9)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(40), b"GIF89a" + bytes(20)])
def test_a_file_that_is_no_image_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "broken.png").write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.png cannot be read as an image"):
        read_image(tmp_path / "broken.png", 8)


def test_a_long_text_beside_the_pixels_is_no_reason_to_refuse_an_image(tmp_path: Path):
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("workflow", "x" * 2_000_000, zip=True)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "long.png", pnginfo=texts)
    assert read_image(tmp_path / "long.png", 8)[:, 0, 0].tolist() == [255, 0, 0]
    # What expands without bounds is still refused.
    for _ in range(4):
        texts.add_itxt("bomb", "x" * 20_000_000, zip=True)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "bomb.png", pnginfo=texts)
    with pytest.raises(DataError, match=r"bomb.png cannot be read as an image"):
        read_image(tmp_path / "bomb.png", 8)


def test_an_image_cut_short_is_refused(tmp_path: Path):
    path = tmp_path / "noise.jpeg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(DataError, match=r"noise\.jpeg cannot be read as an image"):
        read_image(path, 64)


def test_an_image_that_claims_to_be_huge_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "large.png", (0, 0, 0), size=(90, 90))
    monkeypatch.setattr(image_folder, "MAX_PIXELS", 8000)
    with pytest.raises(DataError, match=r"large\.png has 90×90 pixels; at most 8000 pixels are allowed"):
        read_image(tmp_path / "large.png", 8)


def test_folders_that_hold_no_set_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"the folder .* does not exist"):
        list_splits(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"does not contain the folders train and val \(or test\)"):
        list_splits(tmp_path / "set/train")
    write(tmp_path / "set/val/wasp/0.png", (0, 0, 0))
    with pytest.raises(DataError, match="has the classes wasp, which are not in train"):
        list_splits(folder)


def test_a_set_needs_classes_and_images(tmp_path: Path):
    (tmp_path / "train/one").mkdir(parents=True)
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="at least two"):
        list_splits(tmp_path)
    (tmp_path / "train/two").mkdir()
    with pytest.raises(DataError, match="contains no images"):
        list_splits(tmp_path)


def test_without_pillow_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'sottovoce\[images\]'"):
        require_pillow()


# What users' folders hold besides


def paint(path: Path, *, format_: str = "JPEG") -> bytes:
    """Write an image whose left third is dark and whose rest is light; return the file."""
    pixels = np.full((40, 60, 3), 230, np.uint8)
    pixels[:, :20] = 20
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format_)
    return path.read_bytes()


def usual(root: Path) -> Path:
    for name in ("train/cat/0", "train/cat/1", "train/dog/0", "val/cat/0", "val/dog/0"):
        paint(root / f"{name}.jpg")
    return root


def train_of(root: Path) -> tuple[tuple[str, ...], list[str], tuple[str, ...]]:
    classes, train, _ = list_splits(root)
    return classes, [f"{path.parent.name}/{path.name}" for path in train.paths], train.found


IMAGES = ["cat/0.jpg", "cat/1.jpg", "dog/0.jpg"]


@pytest.mark.parametrize("name", [".ipynb_checkpoints", "@eaDir", "__MACOSX", ".Trash-1000"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_what_storage_puts_beside_the_classes_is_no_class(split: str, name: str, tmp_path: Path):
    (usual(tmp_path) / split / name).mkdir()
    classes, images, found = train_of(tmp_path)
    assert (classes, images) == (("cat", "dog"), IMAGES)
    assert found[0] == "train: cat 2, dog 1"
    assert found[1:] == ((f"train: left out: folder {name}",) if split == "train" else ())


def test_what_is_left_out_of_a_class_is_counted_by_kind(tmp_path: Path):
    cats = usual(tmp_path) / "train" / "cat"
    (cats / "._0.jpg").write_bytes(b"Mac OS X")
    (cats / "album.jpg").mkdir()
    (cats / "2024").mkdir()
    for name in ("a.tif", "b.tif", "c.heic", "d"):
        (cats / name).write_bytes(b"?")
    classes, images, found = train_of(tmp_path)
    assert (classes, images) == (("cat", "dog"), IMAGES)
    assert found[1] == (
        "train: left out: .heic, 2 .tif, files without an ending, 2 folders in class folders, hidden files"
    )


def test_a_class_without_an_image_is_shown_with_none(tmp_path: Path):
    (usual(tmp_path) / "train" / "fox").mkdir()
    assert train_of(tmp_path)[2] == ("train: cat 2, dog 1, fox 0",)


def test_a_folder_whose_name_is_no_text_is_named(tmp_path: Path):
    (usual(tmp_path) / "train" / os.fsdecode(b"caf\xe9")).mkdir()
    with pytest.raises(DataError, match=r"name is not text: 'caf\\udce9'"):
        list_splits(tmp_path)


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.7])
def test_files_that_were_cut_short_are_all_named_before_the_first_batch(format_: str, kept: float, tmp_path: Path):
    usual(tmp_path)
    content = paint(tmp_path / f"train/cat/9.{format_.lower()}", format_=format_)
    for number in range(7):
        (tmp_path / f"train/cat/short{number}.{format_.lower()}").write_bytes(content[: int(kept * len(content))])
    _, train, _ = list_splits(tmp_path)
    with pytest.raises(DataError) as caught:
        FolderData(train, size=32)
    said = str(caught.value)
    assert "7 of 11 files cannot be read" in said
    assert "short0" in said
    assert "and 2 more" in said


def test_a_file_that_says_more_after_its_end_is_whole(tmp_path: Path):
    """Cameras append previews."""
    file = usual(tmp_path) / "train/cat/0.jpg"
    file.write_bytes(file.read_bytes() + b"\0" * 100_000)
    _, train, _ = list_splits(tmp_path)
    assert len(FolderData(train, size=32)) == 3


def test_an_image_is_read_upright(tmp_path: Path):
    """Orientation 6: the camera was turned, what is stored at the left belongs to the top."""
    paint(tmp_path / "plain.jpg")
    image = Image.open(tmp_path / "plain.jpg")
    turned = image.getexif()
    turned[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=turned)
    across, down = (read_image(tmp_path / name, 30)[0].float() for name in ("plain.jpg", "turned.jpg"))
    assert across[:, :3].mean() < 60 < 200 < across[:, 10:].mean()
    assert down[:3].mean() < 60 < 200 < down[10:].mean()


def test_sixteen_bits_keep_their_shades(tmp_path: Path):
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    read = read_image(tmp_path / "deep.png", 64)
    assert (read == torch.from_numpy((ramp >> 8).astype(np.uint8))).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_is_white_and_what_is_drawn_stays(mode: str, tmp_path: Path):
    image = Image.new(mode, (40, 40), (0,) * len(mode))
    image.paste((0,) * (len(mode) - 1) + (255,), (0, 0, 40, 20))
    image.save(tmp_path / "drawn.png")
    read = read_image(tmp_path / "drawn.png", 40)
    assert (read[:, :18] == 0).all()
    assert (read[:, 22:] == 255).all()


def classes_below(root: Path, names: tuple[str, ...]) -> Path:
    for split in ("train", "val"):
        for number, name in enumerate(names):
            write(root / split / name / "a.png", (number, 0, 0))
    return root


NFC, NFD = (unicodedata.normalize(form, "Ähre") for form in ("NFC", "NFD"))


def test_classes_have_the_same_numbers_however_a_file_system_writes_their_names(tmp_path: Path):
    """As bytes, the one sorts before Zebra and the other behind it."""
    for name in (NFC, NFD):
        root = classes_below(tmp_path / str(len(name)), (name, "Zebra"))
        classes, train, test = list_splits(root)
        assert classes == ("Zebra", NFC)
        assert (
            [path.parent.name for path in train.paths] == [path.parent.name for path in test.paths] == ["Zebra", name]
        )
        assert train.labels.tolist() == test.labels.tolist() == [0, 1]
    assert image_folder.former_classes(tmp_path / str(len(NFD))) == (NFC, "Zebra")
    assert list_splits(tmp_path / str(len(NFD)), (NFC, "Zebra"))[1].labels.tolist() == [0, 1]


def test_two_folders_of_one_name_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="two folders with the name 'Ähre', written in two ways"):
        list_splits(classes_below(tmp_path, (NFC, NFD, "Zebra")))


def test_a_list_of_classes_numbers_them_and_some_may_be_missing(tmp_path: Path):
    root = classes_below(tmp_path, ("dog", "fox"))
    classes, train, test = list_splits(root, ("fox", "cat", "dog"))
    assert classes == ("fox", "cat", "dog")
    assert [path.parent.name for path in train.paths] == ["fox", "dog"]
    assert train.labels.tolist() == test.labels.tolist() == [0, 2]
    assert train.found[0] == "train: fox 1, cat 0, dog 1"
    with pytest.raises(DataError, match=r"has the classes fox, which are not in data\.classes"):
        list_splits(root, ("cat", "dog"))
    with pytest.raises(DataError, match="a class is listed twice"):
        list_splits(root, ("fox", "dog", "dog"))
