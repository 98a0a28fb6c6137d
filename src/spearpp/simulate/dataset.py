"""A whole data set in memory, and batches drawn from it."""

import hashlib
from dataclasses import dataclass

import torch

from spearpp.errors import DataError
from spearpp.normalisation import Normalisation
from spearpp.simulate.batch import Batch
from spearpp.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Dataset:
    """A whole data set on its [0, 1] scale."""

    unit: Float[Tensor, "count n"]
    labels: Int[Tensor, "count"]
    normalisation: Normalisation
    image_shape: tuple[int, int, int] | None = None
    """(channels, height, width) where a row is an image."""
    feature_names: tuple[str, ...] | None = None
    """Column names where a row is a record."""

    @property
    def classes(self) -> int:
        """Labels run from 0 to one less."""
        return int(self.labels.max()) + 1

    @property
    def digest(self) -> str:
        """Sixteen hex digits that two data sets share only if their values and labels are the same."""
        content = hashlib.sha256(self.unit.contiguous().numpy().tobytes())
        content.update(self.labels.contiguous().numpy().tobytes())
        return content.hexdigest()[:16]

    def draw(self, samples: int, *, normalise: bool = True, generator: torch.Generator | None = None) -> Batch:
        """A batch, drawn without replacement; ``generator`` None is one with seed 0."""
        generator = generator or torch.Generator().manual_seed(0)
        if not 1 <= samples <= len(self.unit):
            raise DataError(f"samples={samples}: the data set has {len(self.unit)}")
        return self.pick(torch.randperm(len(self.unit), generator=generator)[:samples], normalise=normalise)

    def pick(self, rows: Int[Tensor, "b"], *, normalise: bool = True) -> Batch:
        """The batch of these rows."""
        normalisation = self.normalisation if normalise else Normalisation.identity(self.unit.shape[1])
        return Batch(
            inputs=normalisation.apply(self.unit[rows]),
            labels=self.labels[rows],
            normalisation=normalisation,
            image_shape=self.image_shape,
            feature_names=self.feature_names,
        )


def by_channel(mean: Float[Tensor, "channels"], std: Float[Tensor, "channels"], pixels: int) -> Normalisation:
    """One mean and deviation for all pixels of a channel."""
    return Normalisation(mean.repeat_interleave(pixels), std.repeat_interleave(pixels))
