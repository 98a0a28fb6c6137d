"""A file that is read in parts, and must be the same file each time.

It is opened for every look and closed again: an open or mapped file could not be replaced on Windows, and one that is
cut while it is mapped ends the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy
import torch

from spearpp.errors import DataError
from spearpp.types import Tensor
from spearpp.update.lazy import Stored, TensorSpec, row_blocks
from spearpp.update.npz import BinaryFile


@dataclass(frozen=True)
class Source:
    """A file as it was when it was first looked at."""

    path: Path
    size: int
    changed: int
    """When it was last written to, in nanoseconds."""

    @classmethod
    def of(cls, path: Path) -> "Source":
        """The file as it is now.

        Raises:
            DataError: if there is none.
        """
        try:
            state = path.stat()
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if not path.is_file():
            raise DataError(f"{path} is not a file")
        return cls(path, state.st_size, state.st_mtime_ns)

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The file, for as long as it is needed.

        Raises:
            DataError: if it is gone, or was written to since.
        """
        try:
            self._same()
            with self.path.open("rb") as file:
                yield file
            self._same()
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _same(self) -> None:
        state = self.path.stat()
        if (state.st_size, state.st_mtime_ns) != (self.size, self.changed):
            raise DataError(f"{self.path} was changed while it was in use: leave it as it is until the work is done")


def fill(file: BinaryFile, tensor: Tensor, path: Path) -> None:
    """Read as many bytes as a new tensor takes into it.

    Raises:
        DataError: if there are fewer.
    """
    if not tensor.numel():
        return
    rest: numpy.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    while len(rest):
        part = file.read(min(len(rest), 2**20))
        if not part:
            raise DataError(f"{path} ends before its tensors do: it is damaged")
        rest[: len(part)] = numpy.frombuffer(part, numpy.uint8)
        rest = rest[len(part) :]


def plain_numbers(source: Source, place: int, outline: TensorSpec) -> Stored:
    """A tensor whose numbers lie one after another in a file, from one byte on."""

    def read() -> Iterator[Tensor]:
        with source.open() as file:
            file.seek(place)
            for start, stop in row_blocks(outline.shape):
                block = torch.empty((stop - start, *outline.shape[1:]), dtype=outline.dtype)
                fill(file, block, source.path)
                yield block

    return Stored(outline, read)
