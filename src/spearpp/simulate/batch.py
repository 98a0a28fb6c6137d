"""What one client trains on, and the file it is kept in: the truth that a recovery is compared with."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from spearpp.errors import DataError
from spearpp.normalisation import Normalisation
from spearpp.types import Float, Int, Tensor
from spearpp.update.files import FileName, read_tensors, write_tensors

FORMAT = 1
INPUTS, LABELS = ("inputs", "x"), ("labels", "y")
"""Under which names a file may hold them."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What one client trains on."""

    inputs: Float[Tensor, "b n"]
    """As the network is fed them."""
    labels: Int[Tensor, "b"]
    normalisation: Normalisation
    """How the inputs came from the [0, 1] scale."""
    image_shape: tuple[int, int, int] | None = None
    """(channels, height, width) where a row is an image."""
    feature_names: tuple[str, ...] | None = None
    """Column names where a row is a record."""

    def save(self, path: FileName) -> None:
        """Write it as safetensors, whole or not at all.

        Raises:
            DataError: if it cannot be written.
        """
        tensors = {
            "inputs": self.inputs,
            "labels": self.labels,
            "mean": self.normalisation.mean,
            "std": self.normalisation.std,
        }
        header = {"truth": FORMAT, "image_shape": self.image_shape, "feature_names": self.feature_names}
        if not str(path).endswith(".safetensors"):
            raise DataError(f"{path}: a batch is written as .safetensors")
        write_tensors(path, tensors, header)

    @classmethod
    def load(cls, path: FileName) -> "Batch":
        """Read a batch that ``save`` wrote, or any file of tensors with ``inputs`` (or ``x``), one row a sample.

        Inputs are those the network was fed. Rows of more than one dimension are images, channels first. ``labels``
        (or ``y``), ``mean`` and ``std`` may be there: one number, one a channel, or one a column.

        Raises:
            DataError: if it holds no batch.
        """
        tensors, header = read_tensors(path)
        inputs, labels = (
            next((tensors[name] for name in names if name in tensors), None) for names in (INPUTS, LABELS)
        )
        if inputs is None or inputs.ndim < 2 or not inputs.numel():
            raise DataError(f"{path} holds {sorted(tensors)[:6]}: expected inputs (or x) with one row for each sample")
        if not inputs.is_floating_point() or not bool(torch.isfinite(inputs).all()):
            raise DataError(
                f"{path} holds inputs that are not finite floats: expected them as the network was fed them"
            )
        b, n = len(inputs), inputs[0].numel()
        if labels is None:
            labels = torch.full((b,), -1)
        if labels.shape != (b,) or labels.is_floating_point():
            raise DataError(f"{path} holds {b} inputs and labels of shape {tuple(labels.shape)}: one whole number each")
        shape = _shape(header.get("image_shape"), n) or _image(inputs)
        names = header.get("feature_names")
        given = isinstance(names, list) and len(names) == n
        normalisation = Normalisation.identity(n)
        if "mean" in tensors and "std" in tensors:
            normalisation = normalisation_of(tensors["mean"], tensors["std"], n, shape)
        return cls(
            inputs.flatten(1).float(),
            labels.long(),
            normalisation,
            shape,
            tuple(str(name) for name in names) if given and names else None,
        )


def normalisation_of(mean: Tensor, std: Tensor, features: int, shape: tuple[int, int, int] | None) -> Normalisation:
    """A normalisation of so many columns from one number, one a channel, or one a column.

    >>> normalisation_of(torch.tensor([0.5, 0.1]), torch.tensor([1.0, 2.0]), 8, (2, 2, 2)).mean
    tensor([0.5000, 0.5000, 0.5000, 0.5000, 0.1000, 0.1000, 0.1000, 0.1000])

    Raises:
        DataError: if there is another number of them, or a deviation is not positive.
    """
    mean, std = mean.flatten().float(), std.flatten().float()
    channels = shape[0] if shape else 1
    if len(mean) != len(std) or len(mean) not in (1, channels, features):
        raise DataError(f"{len(mean)} means and {len(std)} deviations: expected 1, {channels} or {features} of each")
    if not bool((std > 0).all()) or not bool(torch.isfinite(torch.cat([mean, std])).all()):
        raise DataError("means and deviations must be finite, deviations positive")
    each = features // len(mean)
    return Normalisation(mean.repeat_interleave(each), std.repeat_interleave(each))


def _shape(given: Any, features: int) -> tuple[int, int, int] | None:
    sound = isinstance(given, list) and len(given) == 3 and all(isinstance(size, int) and size > 0 for size in given)
    return (given[0], given[1], given[2]) if sound and math.prod(given) == features else None


def _image(inputs: Tensor) -> tuple[int, int, int] | None:
    if inputs.ndim == 3:
        return 1, inputs.shape[1], inputs.shape[2]
    return (inputs.shape[1], inputs.shape[2], inputs.shape[3]) if inputs.ndim == 4 else None
