"""Where the samples of an experiment come from."""

import os
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from spearpp import simulate
from spearpp.errors import DataError
from spearpp.experiments.codec import register
from spearpp.simulate import Batch, Dataset
from spearpp.simulate.data import cifar10_set

Kind = Literal["photographs", "digits", "breast_cancer", "cifar10", "folder", "table"]
NAMED: tuple[Kind, ...] = ("photographs", "digits", "breast_cancer", "cifar10")
OFFLINE = {"photographs": simulate.photographs, "digits": simulate.digits, "breast_cancer": simulate.breast_cancer}


@register
@dataclass(frozen=True)
class Source:
    """A data set by its kind and, for files, by what is in them; where the file lies is no part of a result.

    >>> Source("digits").draw(4, torch.Generator().manual_seed(0)).inputs.shape
    torch.Size([4, 64])
    """

    kind: Kind = "photographs"
    digest: str = ""
    """Of values and labels, for files; see ``Dataset.digest``."""
    size: int = 32
    """Pixels a side of photographs and images of a folder."""
    label: str | None = None
    """The column of a table that holds the class; None for its last."""
    path: str | None = field(default=None, metadata={"place": True})

    def draw(self, samples: int, generator: torch.Generator, *, normalise: bool = True) -> Batch:
        """A batch; samples of a file are drawn without replacement."""
        if self.kind == "photographs":
            return simulate.photographs(samples, size=self.size, normalise=normalise, generator=generator)
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
        """Outputs that a network for it has: ten at least, as the paper's."""
        return 10 if self.kind in OFFLINE else max(10, self._loaded().classes)

    def checked(self) -> "Source":
        """The same after a look: the file is there and readable, and its digest is known."""
        if self.kind in OFFLINE:
            self.draw(1, torch.Generator().manual_seed(0))
            return self
        return replace(self, digest=_digest(self))

    def _loaded(self) -> Dataset:
        if self.kind == "folder":
            return simulate.image_folder(self.path or "", size=self.size)
        if self.kind == "table":
            return simulate.table(self.path or "", label=self.label)
        return _cifar10(self.path)

    @classmethod
    def parse(cls, text: str, *, label: str | None = None, size: int = 32) -> "Source":
        """From a word of the command line: the name of a data set, or a path; looked at before it is returned.

        >>> Source.parse("photographs")
        Source(kind='photographs', digest='', size=32, label=None, path=None)
        """
        named: Kind | None = next((kind for kind in NAMED if kind == text), None)
        if named is not None:
            return cls(named, size=size).checked()
        path = Path(text).expanduser().resolve()
        if path.suffix.lower() in (".csv", ".parquet", ".pq"):
            return cls("table", label=label, path=str(path)).checked()
        if path.suffix.lower() == ".npz" or (path / "cifar10_test.npz").is_file():
            return cls("cifar10", path=str(path)).checked()
        if path.is_dir():
            return cls("folder", size=size, path=str(path)).checked()
        names = ", ".join(NAMED)
        raise DataError(
            f"--data {text}: expected {names}, a CIFAR-10 npz, a folder of images, or a CSV or Parquet file"
        )


@cache
def _cifar10(path: str | None) -> Dataset:
    """From the file, else from SPEARPP_DATA, else through torchvision."""
    if path is None and not os.environ.get("SPEARPP_DATA"):
        return simulate.torchvision_cifar10()
    return cifar10_set(path)


@cache
def _digest(source: Source) -> str:
    return source._loaded().digest
