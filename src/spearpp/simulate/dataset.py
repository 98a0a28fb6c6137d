"""A data set in memory, from which batches are drawn."""

import hashlib
from dataclasses import dataclass

import torch

from spearpp.errors import DataError
from spearpp.normalisation import Normalisation
from spearpp.simulate.batch import Batch
from spearpp.types import Float, Int, Tensor


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
