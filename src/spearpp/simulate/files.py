"""Load your own data: folders of images, CSV and Parquet tables, and CIFAR-10 through torchvision.

Files may come from strangers. Sizes are checked before anything large is read, and every failure of a reader becomes
one ``DataError`` that names the file.
"""

import csv
import math
from functools import cache
from pathlib import Path

import numpy
import torch

from spearpp.errors import DataError, needs
from spearpp.simulate.batch import Dataset, normalisation_of
from spearpp.simulate.data import MAX_BYTES, cifar10_of, positive, records_of
from spearpp.update.files import FileName

MAX_PIXELS = 50_000_000
"""Largest number of pixels of an image before resizing. A design choice: cameras take such images, of 150 MB each."""
MAX_SIDE = 1024
"""Largest side of a resized image in pixels. A design choice: larger inputs make the first layer too large to audit."""
MAX_CLASSES = 1000
"""Largest number of classes of a table. A design choice: a column with more values is probably not a label."""
MAX_CATEGORIES = 100
"""Largest number of values of a text column. A design choice: such a column becomes one input column per value."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".webp")


@cache
def image_folder(path: FileName, *, size: int = 32) -> Dataset:
    """Load a folder that contains one folder of images per class.

    Args:
        path: the folder.
        size: the images are converted to RGB and resized to ``size`` x ``size`` pixels.

    Raises:
        DataError: if there is no such folder, or an image cannot be read.

    >>> image_folder("nowhere")
    Traceback (most recent call last):
    ...
    spearpp.errors.DataError: no folder at nowhere
    """
    with needs("Pillow", "data"):
        from PIL import Image
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"no folder at {root}")
    if not 1 <= size <= MAX_SIDE:
        raise DataError(f"size={size}: must be within 1 to {MAX_SIDE} pixels")
    classes = sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((root / name).iterdir())
        if file.suffix.lower() in IMAGE_SUFFIXES
    ]
    if not files:
        expected = f"expected one folder per class, with {', '.join(IMAGE_SUFFIXES)} files"
        raise DataError(f"{root} holds no images: {expected}")
    if len(files) * 12 * size * size > MAX_BYTES:  # three channels of four bytes
        raise DataError(f"{root} holds {len(files):,} images, more than {MAX_BYTES:,} bytes at size={size}")
    pixels = torch.empty(len(files), 3 * size * size)
    for row, (file, _) in enumerate(files):
        try:
            with Image.open(file) as image:
                if image.width * image.height > MAX_PIXELS:
                    pixel_count = f"{image.width} x {image.height} pixels, more than the {MAX_PIXELS:,} allowed"
                    raise DataError(f"{file} has {pixel_count}")
                small = image.convert("RGB").resize((size, size), Image.Resampling.BOX)
        except DataError:
            raise
        except Exception as error:  # a damaged image can make its reader raise any exception
            raise DataError(f"{file} is not a readable image: {error}") from error
        pixels[row] = torch.from_numpy(numpy.array(small)).permute(2, 0, 1).reshape(-1).float() / 255
    channels = pixels.reshape(len(files), 3, -1)
    shape = (3, size, size)
    normalisation = normalisation_of(channels.mean((0, 2)), positive(channels.std((0, 2))), pixels.shape[1], shape)
    return Dataset(pixels, torch.tensor([label for _, label in files]), normalisation, shape)


@cache
def table(path: FileName, *, label: str | None = None) -> Dataset:
    """Load a CSV file with a header line, or a Parquet file, with one record per row.

    A column of numbers stays one column. Any other column becomes one column of zeros and ones for each of its values.
    The [0, 1] scale is the range of each column.

    Args:
        path: the file. A name that ends in ``.parquet`` or ``.pq`` means Parquet, any other name means CSV.
        label: name of the column with the class. None means the last column.

    Raises:
        DataError: if the file cannot be read, or does not hold such a table.

    >>> table("nowhere.csv")
    Traceback (most recent call last):
    ...
    spearpp.errors.DataError: no table at nowhere.csv
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no table at {file}")
    if file.stat().st_size > MAX_BYTES:
        raise DataError(f"{file} has {file.stat().st_size:,} bytes, more than the {MAX_BYTES:,} allowed")
    columns = _parquet(file) if file.suffix.lower() in (".parquet", ".pq") else _csv(file)
    if len(columns) < 2 or not next(iter(columns.values())):
        raise DataError(
            f"{file} holds {len(columns)} columns: it needs a label, at least one more column, and a record"
        )
    chosen = list(columns)[-1] if label is None else label
    if chosen not in columns:
        raise DataError(f"{file} has no column {chosen!r}: it has {', '.join(list(columns)[:8])}")
    values = sorted(set(columns[chosen]))
    if len(values) > MAX_CLASSES:
        limit = f"a label has at most {MAX_CLASSES}"
        raise DataError(f"column {chosen!r} of {file} has {len(values):,} different values: {limit}")
    labels = torch.tensor([values.index(each) for each in columns.pop(chosen)])
    named: dict[str, list[float]] = {}
    for name, texts in columns.items():
        named |= _numbers(name, texts, file)
    return records_of(torch.tensor(list(named.values()), dtype=torch.float64).T, labels, named)


@cache
def torchvision_cifar10(root: FileName | None = None) -> Dataset:
    """Load CIFAR-10's test images with torchvision, which downloads them if necessary.

    Images and order are those of the npz file that ``cifar10`` reads.

    Args:
        root: folder for the downloaded files. None means ``~/.cache/spearpp``.

    Raises:
        DataError: if torchvision is not installed, or cannot load the images.
    """
    try:
        from torchvision.datasets import CIFAR10
    except ImportError as error:
        raise DataError(
            "no CIFAR-10: set SPEARPP_DATA to the npz file or its folder, or pip install torchvision to download it",
            hint="spearpp simulate --data photographs needs no file",
        ) from error
    folder = Path.home() / ".cache" / "spearpp" if root is None else Path(root)
    try:
        loaded = CIFAR10(str(folder), train=False, download=True)
    except Exception as error:  # network and disk can fail in many ways
        raise DataError(f"torchvision could not load CIFAR-10 into {folder}: {error}") from error
    return cifar10_of(torch.from_numpy(loaded.data).permute(0, 3, 1, 2), torch.tensor(loaded.targets))


def _csv(file: Path) -> dict[str, list[str]]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            header, *records = list(csv.reader(lines, strict=True)) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{file} is not a readable CSV file: {error}") from error
    records = [record for record in records if record]
    for line, record in enumerate(records, 2):
        if len(record) != len(header):
            raise DataError(f"record {line} of {file} has {len(record)} fields, the header has {len(header)}")
    if len(set(header)) < len(header):
        raise DataError(f"{file} has two columns with the same name: {', '.join(header[:8])}")
    return {name: [record[index] for record in records] for index, name in enumerate(header)}


def _parquet(file: Path) -> dict[str, list[str]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{file}: Parquet needs pyarrow: pip install pyarrow, or save the table as CSV") from error
    try:
        columns = pyarrow.parquet.read_table(file).to_pydict()
    except Exception as error:  # a damaged file can make its reader raise any exception
        raise DataError(f"{file} is not a readable Parquet file: {error}") from error
    return {str(name): ["" if each is None else str(each) for each in values] for name, values in columns.items()}


def _numbers(name: str, texts: list[str], file: Path) -> dict[str, list[float]]:
    """Return a column as numbers, or as one column of zeros and ones for each of its values (one-hot encoding)."""
    try:
        numbers = [float(text) for text in texts]
        if all(math.isfinite(number) for number in numbers):
            return {name: numbers}
    except ValueError:
        pass
    values = sorted(set(texts))
    if len(values) > MAX_CATEGORIES:
        limit = f"a column of text has at most {MAX_CATEGORIES}"
        raise DataError(f"column {name!r} of {file} has {len(values):,} different values: {limit}")
    return {f"{name}={value}": [float(text == value) for text in texts] for value in values}
