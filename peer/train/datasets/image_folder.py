"""Any folder of images, a folder for each class, as Imagenette comes: decoded when first needed, by Pillow.

    ROOT/train/CLASS/*.jpeg     and     ROOT/val/CLASS/*.jpeg   (or test/)

Classes are numbered in the order of their names, or as `data.classes` lists them, and images are ordered by name: every
device sees the same set. Other files are left out, and counted. The shorter side is scaled to the size asked for and
the middle square kept. A decoded image stays in memory as bytes, so that a peer decodes its own shard once, and holds
no more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from peer.errors import DataError
from peer.files import instead_of
from peer.foreign_text import normal_name
from peer.train.data import Batch, ImageData

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Statistics of ImageNet's pixels in [0, 1], in common use."""
MAX_PIXELS = 2**26
"""Largest image: more than any camera's, and 200 MB decoded."""
_SERVICE_FOLDERS = frozenset({"@eaDir", "__MACOSX", "lost+found"})
"""Folders that storage devices and archivers add."""
_ENDINGS = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG": b"IEND\xaeB`\x82"}
"""Start of a file → bytes near its end unless it was cut short."""
_NEAR_END_BYTES = 4096
_MOST_NAMED = 5


@dataclass(frozen=True)
class ImageList:
    """The images of one split, without their pixels."""

    paths: tuple[Path, ...]
    labels: torch.Tensor
    """int64[m]."""
    found: tuple[str, ...] = ()
    """The images found and the entries left out, as sentences."""


def list_splits(directory: str | Path, names: Sequence[str] = ()) -> tuple[tuple[str, ...], ImageList, ImageList]:
    """Return the names of the classes, in Unicode's normal form C, and the images to train and to test with.

    `directory` is the folder that holds `train` and `val` or `test`, or holds one folder that does. `names` are the
    classes in their order, where all devices have one list; a folder may be missing then. Raises DataError if there is
    no such folder, a split has no images, two folders have the same name, or there is one that is no class.
    """
    root = _find_root(Path(directory).expanduser())
    test = next(root / name for name in ("val", "test") if (root / name).is_dir())
    folders = [_class_folders(split) for split in (root / "train", test)]
    classes = tuple(map(normal_name, names)) or tuple(sorted(folders[0]))
    unprintable = [name for name in classes if not name.isprintable()]
    if unprintable:
        raise DataError(f"data.directory: {root / 'train'} has a folder whose name is not text: {unprintable[0]!r}")
    if len({*classes}) < len(classes):
        raise DataError("data.classes: a class is listed twice")
    if len(classes) < 2:
        raise DataError(f"data.directory: {root / 'train'} needs one folder for each class, and at least two classes")
    for split, found in zip((root / "train", test), folders, strict=True):
        unknown = sorted({*found} - {*classes})
        if unknown:
            where = "data.classes" if names else "train"
            raise DataError(
                f"data.directory: {split} has the classes {', '.join(unknown[:5])}, which are not in {where}"
            )
    return classes, _list(root / "train", folders[0], classes), _list(test, folders[1], classes)


def former_classes(directory: str | Path) -> tuple[str, ...]:
    """Return the names of the classes in the order that releases before 0.3 gave them: as the file system writes the
    names of their folders. Raises DataError."""
    folders = _class_folders(_find_root(Path(directory).expanduser()) / "train")
    return tuple(sorted(folders, key=lambda name: folders[name].name))


class FolderData:
    """A split whose images are decoded when first asked for, float32[b, 3, size, size] normalised."""

    def __init__(self, images: ImageList, *, size: int) -> None:
        """Raises DataError, with the names, for files that are no images or were cut short: before the first round, not
        when one is first drawn."""
        _check(images.paths, size)
        # Memory that was never written costs nothing: only the pages of decoded images are there.
        self._pixels = torch.empty((len(images.paths), 3, size, size), dtype=torch.uint8)
        self._data = ImageData(self._pixels, images.labels, mean=MEAN, std=STD)
        self._decoded = np.zeros(len(images.paths), bool)
        self._paths, self._size, self.labels = images.paths, size, images.labels
        self.found = images.found
        """The images found and the entries left out, as sentences."""

    def __len__(self) -> int:
        return len(self._paths)

    def read_all(self) -> None:
        """Decode every image. Raises DataError, with its name, for a file that is none."""
        for path in self._paths:
            read_image(path, self._size)

    def batch(self, indices: torch.Tensor) -> Batch:
        """Return normalised images float32[b, 3, size, size] and labels int64[b]. Raises DataError, with its name, for
        a file that is no image."""
        for index in indices.tolist():
            if not self._decoded[index]:
                self._pixels[index] = read_image(self._paths[index], self._size)
                self._decoded[index] = True
        return self._data.batch(indices)


def read_image(path: Path, size: int) -> torch.Tensor:
    """Return the middle square of an image file as uint8[3, size, size]. Raises DataError if it cannot be decoded."""
    with _opened(path) as image:
        if image.width * image.height > MAX_PIXELS:
            raise DataError(f"{path} has {image.width}×{image.height} pixels; at most {MAX_PIXELS} pixels are allowed")
        # JPEGs are decoded at the smallest scale that is still large enough.
        image.draft("RGB", (size, size))
        square = _middle(_upright_colours(image), size)
    pixels = np.asarray(square)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


@contextmanager
def _opened(path: Path) -> Iterator[Image]:
    """Open an image file; errors while it is decoded become a DataError with its name."""
    from PIL import Image as images
    from PIL import PngImagePlugin

    # A PNG may have texts or a colour profile of more than 1 MB, as editors write them. All together still have at most
    # `MAX_TEXT_MEMORY` bytes.
    PngImagePlugin.MAX_TEXT_CHUNK = max(PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY)
    try:
        with images.open(path, formats=FORMATS) as image:
            yield image
    # Pillow lets the errors of its many decoders through.
    except (OSError, SyntaxError, ValueError, EOFError, images.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from None


def _upright_colours(image: Image) -> Image:
    """Return an image as a person sees it: upright, in RGB, on white where it is transparent."""
    from PIL import Image as images
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        # Pillow clips 16 bits to 8, which makes all but the darkest white.
        wide = np.asarray(upright).astype(np.int64).clip(0, 0xFFFF)
        upright = images.fromarray((wide >> 8).astype(np.uint8))
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        upright = upright.convert("RGBA")
        white = images.new("RGBA", upright.size, "white")
        upright = images.alpha_composite(white, upright)
    return upright.convert("RGB")


def _check(paths: Sequence[Path], size: int) -> None:
    """Raise DataError, with names and how many there are, for files that no image can be read from. Only files that
    look wrong at their beginning or end are decoded."""
    wrong = []
    for path in paths:
        try:
            with _opened(path) as image:
                has_ended = _has_ended(path) and image.width * image.height <= MAX_PIXELS
            if not has_ended:
                read_image(path, size)
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise DataError(
            f"data.directory: {len(wrong)} of {len(paths)} files cannot be read; replace or delete them:"
            f" {'; '.join(wrong[:_MOST_NAMED])}{more}"
        )


def _has_ended(path: Path) -> bool:
    """Whether the file of an image has the end that its beginning promises, as far as that is known of its format."""
    with open(path, "rb") as file:
        begins = file.read(4)
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _NEAR_END_BYTES))
        tail = file.read()
    return any(begins.startswith(start) and end in tail for start, end in _ENDINGS.items())


def require_pillow() -> None:
    """Raise DataError, with what to install, where Pillow is missing."""
    try:
        import PIL  # noqa: F401 - only to see whether it is there
    except ImportError:
        raise DataError(
            "decoding images needs Pillow, which is not installed: pip install 'sottovoce[images]'"
        ) from None


def _find_root(directory: Path) -> Path:
    if not directory.is_dir():
        raise DataError(f"data.directory: the folder {directory} does not exist{instead_of(directory)}")
    for root in (directory, *sorted(entry for entry in directory.iterdir() if entry.is_dir())):
        if (root / "train").is_dir() and any((root / name).is_dir() for name in ("val", "test")):
            return root
    raise DataError(f"data.directory: {directory} does not contain the folders train and val (or test)")


def _class_folders(split: Path) -> dict[str, Path]:
    """Return the folders that stand for classes, by their names in normal form C. Raises DataError for two of one
    name, which a person could not tell apart."""
    found: dict[str, Path] = {}
    for entry in sorted(split.iterdir()):
        if not entry.is_dir() or entry.name.startswith(".") or entry.name in _SERVICE_FOLDERS:
            continue
        name = normal_name(entry.name)
        if found.setdefault(name, entry) != entry:
            raise DataError(
                f"data.directory: {split} has two folders with the name {name!r}, written in two ways (Unicode NFC and"
                " NFD); move the images into one of them"
            )
    return found


def _list(split: Path, folders: Mapping[str, Path], classes: Sequence[str]) -> ImageList:
    paths: list[Path] = []
    labels: list[int] = []
    left_out = Counter(
        f"folder {entry.name}" for entry in split.iterdir() if entry.is_dir() and entry not in folders.values()
    )
    for label, name in enumerate(classes):
        found = []
        for path in folders[name].iterdir() if name in folders else ():
            why = _why_left_out(path)
            if why is None:
                found.append(path)
            else:
                left_out[why] += 1
        paths += sorted(found)
        labels += [label] * len(found)
    if not paths:
        raise DataError(f"data.directory: {split} contains no images ({', '.join(SUFFIXES)}) in class folders")
    counts = np.bincount(labels, minlength=len(classes))
    found_here = [f"{split.name}: " + ", ".join(f"{name} {count}" for name, count in zip(classes, counts, strict=True))]
    if left_out:
        parts = ", ".join(f"{count} {why}" if count > 1 else why for why, count in sorted(left_out.items()))
        found_here.append(f"{split.name}: left out: {parts}")
    return ImageList(tuple(paths), torch.tensor(labels, dtype=torch.int64), tuple(found_here))


def _why_left_out(path: Path) -> str | None:
    """Return the kind of an entry that is no image of a class; None for an image."""
    if path.name.startswith("."):
        return "hidden files"
    if path.is_dir():
        return "folders in class folders"
    return None if path.suffix.lower() in SUFFIXES else f"{path.suffix.lower() or 'files without an ending'}"


def _middle(image: Image, size: int) -> Image:
    side = min(image.width, image.height)
    left, upper = (image.width - side) // 2, (image.height - side) // 2
    return image.resize((size, size), box=(left, upper, left + side, upper + side))
