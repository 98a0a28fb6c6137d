"""Data sets that an experiment samples from."""

import os
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from spearpp import simulate
from spearpp.errors import DataError
from spearpp.experiments.cell import register
from spearpp.simulate import Batch, Dataset
from spearpp.simulate.data import cifar10_set

Kind = Literal["photographs", "digits", "breast_cancer", "cifar10", "folder", "table"]
NAMED: tuple[Kind, ...] = ("photographs", "digits", "breast_cancer", "cifar10")
"""Data sets that the command line accepts by name."""
OFFLINE = {"photographs": simulate.photographs, "digits": simulate.digits, "breast_cancer": simulate.breast_cancer}
"""Data sets that need no file and no network."""


@register
@dataclass(frozen=True)
class Source:
    """A data set, identified by its kind and, for files, by a digest of its content.

    The path of a file is not part of the identity of an experiment, so a file may be moved.

    >>> Source("digits").draw(4, torch.Generator().manual_seed(0)).inputs.shape
    torch.Size([4, 64])
    """

    kind: Kind = "photographs"
    digest: str = ""
    """Digest of values and labels, for files (``Dataset.digest``)."""
    label: str | None = None
    """Column of a table that holds the class; None takes the last column."""
    path: str | None = field(default=None, metadata={"place": True})
    """File or folder, for data sets that are read from files."""

    def draw(self, samples: int, generator: torch.Generator, *, normalise: bool = True) -> Batch:
        """Sample a batch. Samples of a file, whose content must match ``digest``, are drawn without replacement."""
        if self.kind in OFFLINE:
            return OFFLINE[self.kind](samples, normalise=normalise, generator=generator)
        loaded = self._loaded()
        if self.digest and _digest(self) != self.digest:
            raise DataError(
                f"{self.path or 'CIFAR-10'} is not the data this experiment was planned with: "
                f"its digest is {_digest(self)}, expected {self.digest}"
            )
        return loaded.draw(samples, normalise=normalise, generator=generator)

    @property
    def classes(self) -> int:
        """Number of outputs of a network for this data set: at least ten, as in the paper."""
        return 10 if self.kind in OFFLINE else max(10, self._loaded().classes)

    def checked(self) -> "Source":
        """Check that the data can be read, and return the source with its digest filled in."""
        if self.kind in OFFLINE:
            self.draw(1, torch.Generator().manual_seed(0))
            return self
        return replace(self, digest=_digest(self))

    def _loaded(self) -> Dataset:
        if self.kind == "folder":
            return simulate.image_folder(self.path or "")
        if self.kind == "table":
            return simulate.table(self.path or "", label=self.label)
        return _cifar10(self.path)

    @classmethod
    def parse(cls, text: str, *, label: str | None = None) -> "Source":
        """Parse a command-line argument: the name of a data set, or a path. The data is checked (``checked``).

        >>> Source.parse("photographs")
        Source(kind='photographs', digest='', label=None, path=None)
        """
        named: Kind | None = next((kind for kind in NAMED if kind == text.replace("-", "_")), None)
        if named is not None:
            return cls(named).checked()
        path = Path(text).expanduser().resolve()
        if path.suffix.lower() in (".csv", ".parquet", ".pq"):
            return cls("table", label=label, path=str(path)).checked()
        if path.suffix.lower() == ".npz" or (path / "cifar10_test.npz").is_file():
            return cls("cifar10", path=str(path)).checked()
        if path.is_dir():
            return cls("folder", path=str(path)).checked()
        names = ", ".join(NAMED)
        raise DataError(f"--data {text}: expected {names}, a CIFAR-10 npz, a folder of images, a CSV or Parquet file")


@cache
def _cifar10(path: str | None) -> Dataset:
    """Load CIFAR-10 from a file, else from the path in SPEARPP_DATA, else with torchvision."""
    if path is None and not os.environ.get("SPEARPP_DATA"):
        return simulate.torchvision_cifar10()
    return cifar10_set(path)


@cache
def _digest(source: Source) -> str:
    return source._loaded().digest
