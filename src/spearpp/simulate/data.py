"""Batches of data that need no download: random numbers, photographs, digits, a medical table, and CIFAR-10 files.

Every data set has its own [0, 1] scale. By default, network inputs are standardised: with mean and standard deviation
of every colour channel for images, and of every column for tables.
"""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy
import torch

from spearpp.errors import DataError, needs
from spearpp.normalisation import Normalisation
from spearpp.simulate.batch import Batch, Dataset, normalisation_of
from spearpp.types import Tensor
from spearpp.update.files import FileName, read_tensors

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Mean and standard deviation of the colour channels of CIFAR-10's training images, as training scripts use them."""
MAX_BYTES = 2**31
"""Largest size of a CIFAR-10 file, of a table's file, and of all resized images of a folder. A design choice: 2 GiB fit
into memory, and CIFAR-10 takes 0.2 GiB."""
NO_FILE_NEEDED = "the photographs need no file: --data photographs"
"""Hint if the file of CIFAR-10 is missing."""
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket", "immunohistochemistry", "stereo_motorcycle")


def random_batch(
    samples: int,
    *,
    features: int = 64,
    classes: int = 10,
    normalise: bool = True,
    generator: torch.Generator | None = None,
) -> Batch:
    """Return independent inputs, uniform in [0, 1], with random labels.

    Args:
        samples: number of samples.
        features: number of values per sample.
        classes: number of classes.
        normalise: whether the network inputs are standardised. Otherwise they are on the [0, 1] scale.
        generator: random generator. None means a generator with seed 0.

    >>> random_batch(5, features=3).inputs.shape
    torch.Size([5, 3])
    """
    generator = generator or torch.Generator().manual_seed(0)
    if samples < 1 or features < 1 or classes < 1:
        raise DataError(f"samples={samples}, features={features}, classes={classes}: each must be at least 1")
    unit = torch.rand(samples, features, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    uniform = Normalisation(torch.full((features,), 0.5), torch.full((features,), 12**-0.5))
    return Dataset(unit, labels, uniform).pick(torch.arange(samples), normalise=normalise)


def photographs(
    samples: int, *, size: int = 32, normalise: bool = True, generator: torch.Generator | None = None
) -> Batch:
    """Return square colour tiles, cut at random from scikit-image's photographs after shrinking them by four.

    The label of a tile is the index of its photograph.

    Args:
        samples: number of tiles.
        size: height and width of a tile in pixels.
        normalise: whether the network inputs are standardised. Otherwise they are on the [0, 1] scale.
        generator: random generator. None means a generator with seed 0.

    >>> photographs(4).image_shape
    (3, 32, 32)
    """
    generator = generator or torch.Generator().manual_seed(0)
    pictures = _photographs()
    largest = min(min(picture.shape[1:]) for picture in pictures)
    if samples < 1 or not 1 <= size <= largest:
        raise DataError(f"samples={samples}, size={size}: draw at least one tile, of 1 to {largest} pixels")
    tiles, labels = [], torch.randint(len(pictures), (samples,), generator=generator)
    for label in labels.tolist():
        picture = pictures[label]
        top, left = (int(torch.randint(extent - size + 1, (), generator=generator)) for extent in picture.shape[1:])
        tiles.append(picture[:, top : top + size, left : left + size].reshape(-1))
    channels = torch.cat([picture.reshape(3, -1) for picture in pictures], dim=1)
    shape = (3, size, size)
    normalisation = normalisation_of(channels.mean(1), channels.std(1), 3 * size * size, shape)
    tiled = Dataset(torch.stack(tiles), labels, normalisation, shape)
    return tiled.pick(torch.arange(samples), normalise=normalise)


def digits(samples: int, *, normalise: bool = True, generator: torch.Generator | None = None) -> Batch:
    """Draw handwritten digits of 8 x 8 grey pixels from scikit-learn's data set, without replacement.

    The arguments are those of ``Dataset.draw``.

    >>> digits(3).inputs.shape
    torch.Size([3, 64])
    """
    return _digits().draw(samples, normalise=normalise, generator=generator)


def breast_cancer(samples: int, *, normalise: bool = True, generator: torch.Generator | None = None) -> Batch:
    """Draw medical records with 30 measurements and a diagnosis from scikit-learn's data set, without replacement.

    The [0, 1] scale is the range of each column. The arguments are those of ``Dataset.draw``.

    >>> breast_cancer(3).feature_names[0]
    'mean radius'
    """
    return _breast_cancer().draw(samples, normalise=normalise, generator=generator)


def cifar10(
    samples: int,
    *,
    path: FileName | None = None,
    normalise: bool = True,
    generator: torch.Generator | None = None,
) -> Batch:
    """Draw CIFAR-10 images from an npz file, without replacement.

    Args:
        samples: number of images.
        path: a file with ``x`` uint8 (count, 3, 32, 32) and ``y`` (count,), or a folder with a file
            ``cifar10_test.npz``. None means the value of the environment variable SPEARPP_DATA.
        normalise: whether the network inputs are standardised by the usual channel means and standard deviations.
            Otherwise they are on the [0, 1] scale.
        generator: random generator. None means a generator with seed 0.

    >>> cifar10(8, path="nowhere.npz")
    Traceback (most recent call last):
    ...
    spearpp.errors.DataError: no CIFAR-10 file at nowhere.npz
    """
    return cifar10_set(path).draw(samples, normalise=normalise, generator=generator)


def cifar10_set(path: FileName | None = None) -> Dataset:
    """Load all images of a CIFAR-10 file. ``path`` has the same meaning as for ``cifar10``."""
    given = path if path is not None else os.environ.get("SPEARPP_DATA")
    if not given:
        why = "no CIFAR-10 file: pass path=, or set SPEARPP_DATA to the npz file or its folder"
        raise DataError(why, hint=NO_FILE_NEEDED)
    file = Path(given)
    return _cifar10(file / "cifar10_test.npz" if file.is_dir() else file)


@cache
def _photographs() -> tuple[Tensor, ...]:
    """Return the photographs on the [0, 1] scale, (3, height, width), after averaging blocks of 4 x 4 pixels."""
    with needs("scikit-image", "data"):
        import skimage.data
    shrunk = []
    for name in PHOTOGRAPHS:
        loaded = getattr(skimage.data, name)()
        picture = torch.from_numpy(numpy.array(loaded[0] if isinstance(loaded, tuple) else loaded))
        image = picture.permute(2, 0, 1).float()[None] / 255
        shrunk.append(torch.nn.functional.avg_pool2d(image, 4)[0])
    return tuple(shrunk)


@cache
def _digits() -> Dataset:
    with needs("scikit-learn", "data"):
        from sklearn.datasets import load_digits
    pixels, labels = load_digits(return_X_y=True)
    unit = torch.from_numpy(pixels).float() / 16
    normalisation = normalisation_of(unit.mean(), unit.std(), 64, (1, 8, 8))
    return Dataset(unit, torch.from_numpy(labels).long(), normalisation, (1, 8, 8))


@cache
def _breast_cancer() -> Dataset:
    with needs("scikit-learn", "data"):
        from sklearn.datasets import load_breast_cancer
    loaded = load_breast_cancer()
    return records_of(torch.from_numpy(loaded.data), torch.from_numpy(loaded.target).long(), loaded.feature_names)


def records_of(records: Tensor, labels: Tensor, names: Iterable[str]) -> Dataset:
    """Return a data set of records, (count, n), with the range of each column as its [0, 1] scale."""
    low, high = records.amin(0), records.amax(0)
    unit = ((records - low) / torch.where(high > low, high - low, torch.ones_like(high))).float()
    normalisation = Normalisation(unit.mean(0), positive(unit.std(0)))
    return Dataset(unit, labels, normalisation, feature_names=tuple(str(name) for name in names))


def positive(std: Tensor) -> Tensor:
    """Replace standard deviations of zero by one, so that constant columns can be divided by them."""
    return torch.where(torch.isfinite(std) & (std > 0), std, torch.ones_like(std))


@cache
def _cifar10(file: Path) -> Dataset:
    if not file.is_file():
        raise DataError(f"no CIFAR-10 file at {file}", hint=NO_FILE_NEEDED)
    arrays, _ = read_tensors(file, largest=MAX_BYTES)
    if not {"x", "y"} <= arrays.keys():
        raise DataError(f"{file} holds {sorted(arrays)}: expected arrays x and y")
    pixels, labels = arrays["x"], arrays["y"]
    if pixels.dtype != torch.uint8 or pixels.shape[1:] != (3, 32, 32) or labels.shape != pixels.shape[:1]:
        shapes = f"x {pixels.dtype} {tuple(pixels.shape)} and y {tuple(labels.shape)}"
        raise DataError(f"{file} holds {shapes}: expected uint8 (count, 3, 32, 32) and (count,)")
    return cifar10_of(pixels, labels)


def cifar10_of(pixels: Tensor, labels: Tensor) -> Dataset:
    """Return CIFAR-10 with its usual normalisation, from pixels, uint8 (count, 3, 32, 32), and labels, (count,)."""
    shape = (3, 32, 32)
    normalisation = normalisation_of(torch.tensor(CIFAR10_MEAN), torch.tensor(CIFAR10_STD), 3072, shape)
    return Dataset(pixels.flatten(1).float() / 255, labels.long(), normalisation, shape)
