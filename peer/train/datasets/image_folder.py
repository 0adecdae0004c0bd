"""Any folder of images, a folder for each class, as Imagenette comes: decoded when first needed, by Pillow.

    ROOT/train/CLASS/*.jpeg     and     ROOT/val/CLASS/*.jpeg   (or test/)

Classes are numbered in the order of their names, images ordered by name: every device sees the same set. The shorter
side is scaled to the size asked for and the middle square kept. A decoded image stays in memory as bytes, so that a
peer decodes its own shard once, and holds no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from peer.errors import DataError
from peer.train.data import Batch, ImageData

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the pixels of ImageNet in [0, 1], as everyone uses them."""
MAX_PIXELS = 2**26
"""Of one file: more than any camera's image, and 200 MB decoded."""


@dataclass(frozen=True)
class ImageList:
    """The images of one split, without their pixels."""

    paths: tuple[Path, ...]
    labels: torch.Tensor
    """int64[m]."""


def list_splits(directory: str | Path) -> tuple[tuple[str, ...], ImageList, ImageList]:
    """Return the names of the classes, and the images to train and to test with.

    `directory` is the folder that holds `train` and `val` or `test`, or holds one folder that does. Raises DataError if
    there is none, a split has no images, or the test set has classes that the training set lacks.
    """
    root = _find_root(Path(directory).expanduser())
    test = next(root / name for name in ("val", "test") if (root / name).is_dir())
    classes = tuple(sorted(entry.name for entry in (root / "train").iterdir() if entry.is_dir()))
    if len(classes) < 2:
        raise DataError(f"data.directory: {root / 'train'} needs one folder for each class, and at least two classes")
    unknown = sorted({entry.name for entry in test.iterdir() if entry.is_dir()} - set(classes))
    if unknown:
        raise DataError(f"data.directory: {test} has the classes {', '.join(unknown[:5])}, which are not in train")
    return classes, _list(root / "train", classes), _list(test, classes)


class FolderData:
    """A split whose images are decoded when first asked for, float32[b, 3, size, size] normalised."""

    def __init__(self, images: ImageList, *, size: int) -> None:
        # Memory that was never written costs nothing: only the pages of decoded images are there.
        self._pixels = torch.empty((len(images.paths), 3, size, size), dtype=torch.uint8)
        self._data = ImageData(self._pixels, images.labels, mean=MEAN, std=STD)
        self._decoded = np.zeros(len(images.paths), bool)
        self._paths, self._size = images.paths, size

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def labels(self) -> torch.Tensor:
        """int64[m]."""
        return self._data.labels

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
    from PIL import Image as images

    try:
        with images.open(path, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(
                    f"{path} has {image.width}×{image.height} pixels; at most {MAX_PIXELS} pixels are allowed"
                )
            # JPEGs are decoded at the smallest scale that is still large enough.
            image.draft("RGB", (size, size))
            square = _middle(image.convert("RGB"), size)
    # Pillow lets the errors of its many decoders through.
    except (OSError, SyntaxError, ValueError, EOFError, images.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from None
    pixels = np.asarray(square)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


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
        raise DataError(f"data.directory: the folder {directory} does not exist")
    for root in (directory, *sorted(entry for entry in directory.iterdir() if entry.is_dir())):
        if (root / "train").is_dir() and any((root / name).is_dir() for name in ("val", "test")):
            return root
    raise DataError(f"data.directory: {directory} does not contain the folders train and val (or test)")


def _list(split: Path, classes: Sequence[str]) -> ImageList:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        folder = split / name
        found = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES] if folder.is_dir() else []
        paths += sorted(found)
        labels += [label] * len(found)
    if not paths:
        raise DataError(f"data.directory: {split} contains no images ({', '.join(SUFFIXES)}) in class folders")
    return ImageList(tuple(paths), torch.tensor(labels, dtype=torch.int64))


def _middle(image: Image, size: int) -> Image:
    side = min(image.width, image.height)
    left, upper = (image.width - side) // 2, (image.height - side) // 2
    return image.resize((size, size), box=(left, upper, left + side, upper + side))
