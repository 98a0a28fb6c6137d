"""The training batch of one client with its file format, and data sets in memory, from which batches are drawn.

Recovered inputs are compared with the batch.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from spearpp.errors import DataError
from spearpp.normalisation import Normalisation
from spearpp.types import Float, Int, Tensor
from spearpp.update.files import FileName, read_tensors, write_tensors

FORMAT = 1
"""Version number in the header of the files that ``Batch.save`` writes."""
INPUTS, LABELS = ("inputs", "x", "0"), ("labels", "y", "1")
"""Names under which a file may hold the inputs and the labels. A file without names numbers its tensors from 0."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The training batch of one client."""

    inputs: Float[Tensor, "b n"]
    """The inputs as they are fed to the network, one sample per row."""
    labels: Int[Tensor, "b"]
    normalisation: Normalisation
    """The map from the [0, 1] scale to the inputs."""
    image_shape: tuple[int, int, int] | None = None
    """(channels, height, width) if a row is an image, else None."""
    feature_names: tuple[str, ...] | None = None
    """Column names if a row is a record of a table, else None."""

    def save(self, path: FileName) -> None:
        """Write the batch to a safetensors file. The file is written completely or not at all.

        Raises:
            DataError: if the name does not end in ``.safetensors``, or the file cannot be written.
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

    def pick(self, rows: Tensor | slice) -> "Batch":
        """Return the samples with these indices, or those that a mask or a slice selects, as a batch."""
        return replace(self, inputs=self.inputs[rows], labels=self.labels[rows])

    def as_rows(self, features: int) -> "Batch | None":
        """Return the batch with rows of this many numbers, as a Linear layer of this width receives it.

        A layer that acts on every token of a sequence has one row per token: inputs of shape (b, tokens, n) are split
        into b · tokens rows of n numbers, each with the label of its sequence. None if the inputs have another size.

        >>> batch = Batch(torch.rand(2, 12), torch.tensor([3, 1]), Normalisation.identity(12), image_shape=(1, 4, 3))
        >>> tokens = batch.as_rows(3)
        >>> tokens.inputs.shape, tokens.labels.tolist()
        (torch.Size([8, 3]), [3, 3, 3, 3, 1, 1, 1, 1])
        """
        if self.inputs.shape[1] == features:
            return self
        if self.image_shape is None or self.image_shape[-1] != features:
            return None
        mean, std = self.normalisation.mean.reshape(-1, features), self.normalisation.std.reshape(-1, features)
        if not bool((mean == mean[0]).all() and (std == std[0]).all()):
            return None
        rows = self.inputs.reshape(-1, features)
        labels = self.labels.repeat_interleave(len(rows) // len(self.labels))
        return Batch(rows, labels, Normalisation(mean[0], std[0]))

    @classmethod
    def load(cls, path: FileName) -> "Batch":
        """Load a batch that ``save`` wrote, or any file of tensors that contains ``inputs`` (or ``x``).

        A file that holds only one tensor, such as ``torch.save(x, path)`` writes, holds the inputs. The inputs are
        those that were fed to the network, with one row per sample. Rows with two or three dimensions are images,
        channels first. The tensors ``labels`` (or ``y``), ``mean`` and ``std`` are optional. ``mean`` and ``std`` hold
        one number, one number per channel, or one number per column.

        Raises:
            DataError: if the file does not hold a batch.
        """
        tensors, header = read_tensors(path)
        inputs, labels = (
            next((tensors[name] for name in names if name in tensors), None) for names in (INPUTS, LABELS)
        )
        if inputs is None or inputs.ndim < 2 or not inputs.numel():
            held = ", ".join(repr(name[:40]) for name in sorted(tensors)[:6])
            wanted = 'expected inputs with one row per sample, for example torch.save({"inputs": x}, path)'
            raise DataError(f"{path} holds the tensors {held}: {wanted}")
        if not inputs.is_floating_point():
            what = "save the floating-point numbers that the network receives"
            raise DataError(f"{path} holds inputs of type {str(inputs.dtype).removeprefix('torch.')}: {what}")
        if not bool(torch.isfinite(inputs).all()):
            raise DataError(f"{path} holds inputs that are NaN or Inf")
        b, n = len(inputs), inputs[0].numel()
        if labels is None:
            labels = torch.full((b,), -1)
        if labels.shape != (b,) or labels.is_floating_point():
            raise DataError(f"{path} holds {b} inputs and labels of shape {tuple(labels.shape)}: expected {b} integers")
        shape = _stored_shape(header.get("image_shape"), n) or _shape_of(inputs)
        names = header.get("feature_names")
        has_names = isinstance(names, list) and len(names) == n
        normalisation = Normalisation.identity(n)
        if "mean" in tensors and "std" in tensors:
            normalisation = normalisation_of(tensors["mean"], tensors["std"], n, shape)
        return cls(
            inputs.flatten(1).float(),
            labels.long(),
            normalisation,
            shape,
            tuple(str(name) for name in names) if has_names and names else None,
        )


def normalisation_of(mean: Tensor, std: Tensor, features: int, shape: tuple[int, int, int] | None) -> Normalisation:
    """Build a normalisation from one number, one number per channel, or one number per column.

    Args:
        mean: the means.
        std: the standard deviations.
        features: number of columns of the inputs.
        shape: (channels, height, width) of the images, or None if the inputs are not images.

    >>> normalisation_of(torch.tensor([0.5, 0.1]), torch.tensor([1.0, 2.0]), 8, (2, 2, 2)).mean
    tensor([0.5000, 0.5000, 0.5000, 0.5000, 0.1000, 0.1000, 0.1000, 0.1000])

    Raises:
        DataError: if the number of values does not fit, or a standard deviation is not positive.
    """
    mean, std = mean.flatten().float(), std.flatten().float()
    channels = shape[0] if shape else 1
    if len(mean) != len(std) or len(mean) not in (1, channels, features):
        raise DataError(f"{len(mean)} means and {len(std)} standard deviations: expected 1, {channels} or {features}")
    if not bool((std > 0).all()) or not bool(torch.isfinite(torch.cat([mean, std])).all()):
        raise DataError("means and standard deviations must be finite, and standard deviations positive")
    repeats = features // len(mean)
    return Normalisation(mean.repeat_interleave(repeats), std.repeat_interleave(repeats))


def _stored_shape(stored: Any, features: int) -> tuple[int, int, int] | None:
    """Return the image shape of a file's header, or None if it is missing or does not fit."""
    valid = isinstance(stored, list) and len(stored) == 3 and all(isinstance(size, int) and size > 0 for size in stored)
    return (stored[0], stored[1], stored[2]) if valid and math.prod(stored) == features else None


def _shape_of(inputs: Tensor) -> tuple[int, int, int] | None:
    """Return the image shape of a tensor with one grey (2-D) or colour (3-D) image per row, else None."""
    if inputs.ndim == 3:
        return 1, inputs.shape[1], inputs.shape[2]
    return (inputs.shape[1], inputs.shape[2], inputs.shape[3]) if inputs.ndim == 4 else None


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set on the [0, 1] scale, one sample per row."""

    unit: Float[Tensor, "count n"]
    labels: Int[Tensor, "count"]
    normalisation: Normalisation
    image_shape: tuple[int, int, int] | None = None
    """(channels, height, width) if a row is an image, else None."""
    feature_names: tuple[str, ...] | None = None
    """Column names if a row is a record of a table, else None."""

    @property
    def classes(self) -> int:
        """Number of classes. Labels are 0 to classes - 1."""
        return int(self.labels.max()) + 1

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 hash of values and labels, to identify the data set."""
        content = hashlib.sha256(self.unit.contiguous().numpy().tobytes())
        content.update(self.labels.contiguous().numpy().tobytes())
        return content.hexdigest()[:16]

    def draw(self, samples: int, *, normalise: bool = True, generator: torch.Generator | None = None) -> Batch:
        """Draw a batch at random without replacement.

        Args:
            samples: number of samples.
            normalise: whether the network inputs are standardised. Otherwise they are on the [0, 1] scale.
            generator: random generator. None means a generator with seed 0.

        Raises:
            DataError: if the data set has fewer samples.
        """
        generator = generator or torch.Generator().manual_seed(0)
        if not 1 <= samples <= len(self.unit):
            raise DataError(f"samples={samples}: must be within 1 to {len(self.unit)}, the size of the data set")
        return self.pick(torch.randperm(len(self.unit), generator=generator)[:samples], normalise=normalise)

    def pick(self, rows: Int[Tensor, "b"], *, normalise: bool = True) -> Batch:
        """Return the batch of the rows with these indices."""
        normalisation = self.normalisation if normalise else Normalisation.identity(self.unit.shape[1])
        return Batch(
            inputs=normalisation.apply(self.unit[rows]),
            labels=self.labels[rows],
            normalisation=normalisation,
            image_shape=self.image_shape,
            feature_names=self.feature_names,
        )
