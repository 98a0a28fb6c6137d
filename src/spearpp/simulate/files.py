"""Data of one's own: folders of images, CSV and Parquet tables, CIFAR-10 through torchvision.

Files may come from strangers: sizes are checked before anything large is read, and whatever a reader
trips over ends in one ``DataError`` that names the file.
"""

import csv
import math
import os
from functools import cache
from pathlib import Path

import numpy
import torch

from spearpp.errors import DataError, MissingExtraError
from spearpp.normalisation import Normalisation
from spearpp.simulate.data import cifar10_of
from spearpp.simulate.dataset import Dataset, by_channel

FileName = str | os.PathLike[str]
LARGEST_BYTES = 2**31
"""Of a table's file, or of all images of a folder once they are resized."""
LARGEST_PIXELS = 50_000_000
"""Of one image before it is resized."""
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".webp")


@cache
def image_folder(path: FileName, *, size: int = 32) -> Dataset:
    """A folder with one folder of images for each class, in colour, resized to ``size`` x ``size`` pixels.

    Raises:
        DataError: if there is no such folder or an image in it cannot be read.

    >>> image_folder("nowhere")
    Traceback (most recent call last):
    ...
    spearpp.errors.DataError: no folder at nowhere
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", "data") from error
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"no folder at {root}")
    if not 1 <= size <= 1024:
        raise DataError(f"size={size}: images are resized to 1 to 1024 pixels")
    classes = sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((root / name).iterdir())
        if file.suffix.lower() in IMAGES
    ]
    if not files:
        raise DataError(f"{root} holds no images: expected one folder for each class, with {', '.join(IMAGES)} files")
    if len(files) * 12 * size * size > LARGEST_BYTES:
        raise DataError(f"{root} holds {len(files):,} images, more than {LARGEST_BYTES:,} bytes at {size} pixels")
    pixels = torch.empty(len(files), 3 * size * size)
    for row, (file, _) in enumerate(files):
        try:
            with Image.open(file) as image:
                if image.width * image.height > LARGEST_PIXELS:
                    raise DataError(f"{file} has {image.width} x {image.height} pixels, over {LARGEST_PIXELS:,}")
                small = image.convert("RGB").resize((size, size), Image.Resampling.BOX)
        except DataError:
            raise
        except Exception as error:  # a damaged image can make its reader fail in any way
            raise DataError(f"{file} is not a readable image: {error}") from error
        pixels[row] = torch.from_numpy(numpy.array(small)).permute(2, 0, 1).reshape(-1).float() / 255
    channels = pixels.reshape(len(files), 3, -1)
    normalisation = by_channel(channels.mean((0, 2)), _positive(channels.std((0, 2))), size * size)
    return Dataset(pixels, torch.tensor([label for _, label in files]), normalisation, (3, size, size))


@cache
def table(path: FileName, *, label: str | None = None) -> Dataset:
    """A CSV file with a header line, or a Parquet file, one record a row.

    Columns of numbers stay one column, others become one for each value they take. The [0, 1] scale is each
    column's own range. ``label`` names the column with the class; None takes the last.

    Raises:
        DataError: if the file cannot be read, or holds no such table.

    >>> table("nowhere.csv")
    Traceback (most recent call last):
    ...
    spearpp.errors.DataError: no table at nowhere.csv
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no table at {file}")
    if file.stat().st_size > LARGEST_BYTES:
        raise DataError(f"{file} has {file.stat().st_size:,} bytes, more than the {LARGEST_BYTES:,} allowed")
    columns = _parquet(file) if file.suffix.lower() in (".parquet", ".pq") else _csv(file)
    if len(columns) < 2 or not next(iter(columns.values())):
        raise DataError(f"{file} holds {len(columns)} columns: expected a label and at least one more, and a record")
    chosen = list(columns)[-1] if label is None else label
    if chosen not in columns:
        raise DataError(f"{file} has no column {chosen!r}: it has {', '.join(list(columns)[:8])}")
    values = sorted(set(columns[chosen]))
    if len(values) > 1000:
        raise DataError(f"column {chosen!r} of {file} takes {len(values):,} values: a label takes at most 1000")
    labels = torch.tensor([values.index(each) for each in columns.pop(chosen)])
    named: dict[str, list[float]] = {}
    for name, texts in columns.items():
        named |= _numbers(name, texts, file)
    records = torch.tensor(list(named.values()), dtype=torch.float64).T
    least, most = records.amin(0), records.amax(0)
    unit = ((records - least) / torch.where(most > least, most - least, torch.ones_like(most))).float()
    return Dataset(unit, labels, Normalisation(unit.mean(0), _positive(unit.std(0))), feature_names=tuple(named))


@cache
def torchvision_cifar10(root: FileName | None = None) -> Dataset:
    """CIFAR-10's test images through torchvision, downloaded to ``root`` if they are not there.

    ``root`` None is ``~/.cache/spearpp``. Images and order are those of the npz file that ``cifar10`` reads.
    """
    try:
        from torchvision.datasets import CIFAR10
    except ImportError as error:
        raise DataError(
            "no CIFAR-10: set SPEARPP_DATA to the npz file or its folder, or pip install torchvision to download it"
        ) from error
    place = Path.home() / ".cache" / "spearpp" if root is None else Path(root)
    try:
        loaded = CIFAR10(str(place), train=False, download=True)
    except Exception as error:  # whatever the network or the disk does
        raise DataError(f"torchvision could not get CIFAR-10 into {place}: {error}") from error
    return cifar10_of(numpy.ascontiguousarray(loaded.data.transpose(0, 3, 1, 2)), numpy.array(loaded.targets))


def _positive(std: torch.Tensor) -> torch.Tensor:
    """Deviations to divide by: what never varies is left as it is."""
    return torch.where(torch.isfinite(std) & (std > 0), std, torch.ones_like(std))


def _csv(file: Path) -> dict[str, list[str]]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            header, *records = list(csv.reader(lines, strict=True)) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{file} is not a readable CSV file: {error}") from error
    records = [record for record in records if record]
    for line, record in enumerate(records, 2):
        if len(record) != len(header):
            raise DataError(f"record {line} of {file} has {len(record)} fields, the header {len(header)}")
    if len(set(header)) < len(header):
        raise DataError(f"{file} has two columns of one name: {', '.join(header[:8])}")
    return {name: [record[place] for record in records] for place, name in enumerate(header)}


def _parquet(file: Path) -> dict[str, list[str]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{file}: reading Parquet needs pyarrow (pip install pyarrow), or save it as CSV") from error
    try:
        columns = pyarrow.parquet.read_table(file).to_pydict()
    except Exception as error:  # a damaged file can make its reader fail in any way
        raise DataError(f"{file} is not a readable Parquet file: {error}") from error
    return {str(name): ["" if each is None else str(each) for each in values] for name, values in columns.items()}


def _numbers(name: str, texts: list[str], file: Path) -> dict[str, list[float]]:
    """A column as numbers, or as one column of zeros and ones for each value it takes."""
    try:
        numbers = [float(text) for text in texts]
        if all(math.isfinite(number) for number in numbers):
            return {name: numbers}
    except ValueError:
        pass
    values = sorted(set(texts))
    if len(values) > 100:
        raise DataError(f"column {name!r} of {file} is no number and takes {len(values):,} values: at most 100")
    return {f"{name}={value}": [float(text == value) for text in texts] for value in values}
