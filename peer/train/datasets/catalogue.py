"""The data sets that `sotto data fetch` knows: the places of their files, and checksums to verify them.

Checksums are those of the published files. Where nobody publishes one, the first fetch records it in SHA256SUMS beside
the files, and later fetches are checked against it.
"""

from __future__ import annotations

import shutil
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from peer.errors import ConfigError, DataError
from peer.files import write_whole
from peer.train.datasets.download import Downloaded, download

RECORD = "SHA256SUMS"


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set."""

    name: str
    url: str
    """URL of the folder; the name is appended."""
    sha256: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set as the lists show it."""

    summary: str
    task: str
    """The task that reads it."""
    files: tuple[RemoteFile, ...]
    unpacks: bool = False
    """Whether the task reads the contents of the archive from a folder."""


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_TORONTO = "https://www.cs.toronto.edu/~kriz"
_AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"
_SST = "https://raw.githubusercontent.com/PrincetonML/SIF/master/data"

DATA_SETS: Mapping[str, DataSet] = {
    "mnist": DataSet(
        "60,000 and 10,000 handwritten digits, 28×28 pixels; 12 MB.",
        "mnist",
        (
            RemoteFile(
                "train-images-idx3-ubyte.gz",
                _MNIST,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                9_912_422,
            ),
            RemoteFile(
                "train-labels-idx1-ubyte.gz",
                _MNIST,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                28_881,
            ),
            RemoteFile(
                "t10k-images-idx3-ubyte.gz",
                _MNIST,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                1_648_877,
            ),
            RemoteFile(
                "t10k-labels-idx1-ubyte.gz",
                _MNIST,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                4_542,
            ),
        ),
    ),
    "cifar10": DataSet(
        "50,000 and 10,000 colour images in 10 classes, 32×32 pixels; 170 MB.",
        "cifar10",
        (
            RemoteFile(
                "cifar-10-binary.tar.gz",
                _TORONTO,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                170_052_171,
            ),
        ),
    ),
    "cifar100": DataSet(
        "50,000 and 10,000 colour images in 100 classes, 32×32 pixels; 169 MB.",
        "cifar100",
        (
            RemoteFile(
                "cifar-100-binary.tar.gz",
                _TORONTO,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
    ),
    "imagenette": DataSet(
        "9,469 and 3,925 photographs in 10 classes, shorter side 160 pixels; 99 MB.",
        "imagenette",
        (
            RemoteFile(
                "imagenette2-160.tgz",
                "https://s3.amazonaws.com/fast-ai-imageclas",
                "64d0c4859f35a461889e0147755a999a48b49bf38a7e0f9bd27003f10db02fe5",
                99_003_388,
            ),
        ),
        unpacks=True,
    ),
    "ag-news": DataSet(
        "120,000 and 7,600 news items in 4 classes; 31 MB. For research, not for commercial use.",
        "ag-news",
        (
            RemoteFile("train.csv", _AG_NEWS, "76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e"),
            RemoteFile(
                "test.csv",
                _AG_NEWS,
                "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
                1_857_427,
            ),
        ),
    ),
    "sst2": DataSet(
        "Sentences of film reviews, positive or negative, as SentEval has them; 4 MB.",
        "sst2",
        tuple(RemoteFile(f"sentiment-{split}", _SST) for split in ("train", "dev", "test")),
    ),
    "senteval-length": DataSet(
        "100,000 and 10,000 sentences in 6 classes by length, a probing task of SentEval; 10 MB.",
        "senteval-length",
        (
            RemoteFile(
                "sentence_length.txt", "https://raw.githubusercontent.com/facebookresearch/SentEval/main/data/probing"
            ),
        ),
    ),
    "bert-vocabulary": DataSet(
        "The 30,522 tokens of BERT for uncased English, which all text tasks need.",
        "ag-news",
        (
            RemoteFile(
                "vocab.txt",
                "https://huggingface.co/google-bert/bert-base-uncased/resolve/main",
                "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
                231_508,
            ),
        ),
    ),
}


@dataclass(frozen=True)
class Fetched:
    """The files that `fetch` left on disk."""

    directory: Path
    files: tuple[Downloaded, ...]
    recorded: tuple[str, ...]
    """Names of files that nobody publishes a checksum of, recorded by this fetch."""


def fetch(
    name: str,
    directory: Path,
    *,
    mirror: str | None = None,
    on_progress: Callable[[str, int, int | None], None] = lambda file, done, total: None,
    pause: Callable[[float], None] = time.sleep,
) -> Fetched:
    """Fetch the files of a data set into a folder, those that are not there yet, and unpack them where need be.

    `mirror` is the address of another folder that holds files of the same names. `on_progress` gets name, bytes so far
    and bytes in all where known. Raises ConfigError for an unknown name, DataError for errors of `download`.
    """
    if name not in DATA_SETS:
        raise ConfigError("unknown data set", key="NAME", value=name, valid=", ".join(DATA_SETS))
    data_set, record = DATA_SETS[name], read_record(directory)
    files, recorded = [], []
    for file in data_set.files:
        known = file.sha256 or record.get(file.name)
        done = download(
            f"{(mirror or file.url).rstrip('/')}/{file.name}",
            directory / file.name,
            sha256=known,
            size=file.size,
            on_progress=partial(on_progress, file.name),
            pause=pause,
        )
        if known is None:
            write_record(directory, {**record, file.name: done.sha256})
            record = read_record(directory)
            recorded.append(file.name)
        files.append(done)
        if data_set.unpacks:
            unpack(done.path)
    return Fetched(directory, tuple(files), tuple(recorded))


def unpack(archive: Path) -> Path:
    """Unpack a tar archive beside itself, into the folder that it holds, unless that is there; return the folder.

    Only plain files below one folder come out. Raises DataError for a damaged archive or a full disk.
    """
    aside = archive.with_name(f"{archive.name}.unpacking")
    try:
        with tarfile.open(archive, "r:*") as members:
            first = members.next()
            if first is None:
                raise DataError(f"{archive} is empty")
            folder = archive.parent / first.name.strip("/").partition("/")[0]
            if folder.exists():
                return folder
            shutil.rmtree(aside, ignore_errors=True)
            members.extractall(aside, filter="data")
        unpacked = list(aside.iterdir())
        if len(unpacked) != 1 or not unpacked[0].is_dir():
            raise DataError(f"{archive} does not contain exactly one folder")
        (aside / folder.name).replace(folder)
    except (tarfile.TarError, EOFError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{archive} cannot be unpacked: {reason}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def read_record(directory: Path) -> dict[str, str]:
    """Return file → SHA-256 as the folder's SHA256SUMS says; none where there is no such file."""
    path = directory / RECORD
    if not path.exists():
        return {}
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return {fields[1].lstrip("*"): fields[0].lower() for fields in lines if len(fields) == 2}


def write_record(directory: Path, record: Mapping[str, str]) -> None:
    """Write a SHA256SUMS that `sha256sum -c` reads."""
    write_whole(directory / RECORD, "".join(f"{digest}  {name}\n" for name, digest in record.items()))
