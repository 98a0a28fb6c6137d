"""A file that is read in parts and must not change between the reads.

The file is opened for every read and closed again, and is never memory-mapped. There are two reasons. Windows cannot
replace a file that is open or mapped. A mapped file that another process truncates ends this process with SIGBUS, which
Python cannot catch.
"""

import hashlib
import zipfile
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

BinaryFile = IO[bytes] | zipfile.ZipExtFile


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside this context into a ``DataError`` that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True)
class Source:
    """A file with the size and modification time that it had when it was first opened."""

    path: Path
    size: int
    modified_ns: int
    """Time of the last modification, in nanoseconds."""

    @classmethod
    def of(cls, path: Path) -> "Source":
        """Record the current state of a file.

        Raises:
            DataError: if there is no file at this path.
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
        """Open the file, and check before and after its use that it is unchanged.

        Raises:
            DataError: if the file was removed or modified.
        """
        with reading(self.path):
            self._check_unchanged()
            with self.path.open("rb") as file:
                yield file
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        state = self.path.stat()
        if (state.st_size, state.st_mtime_ns) != (self.size, self.modified_ns):
            raise DataError(f"{self.path} was changed while it was in use: do not modify the file during the audit")


def read_file(path: Path, largest: int) -> bytes:
    """Return the content of a small file.

    Raises:
        DataError: if the file cannot be read, or has more bytes than ``largest``.
    """
    with reading(path), path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise DataError(f"{path} is larger than the {largest:,} bytes allowed")
    return content


def sha256_of(path: Path) -> str:
    """Return the SHA-256 hash of a file as hexadecimal digits.

    Raises:
        DataError: if the file cannot be read.
    """
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fill(file: BinaryFile, tensor: Tensor, path: Path) -> None:
    """Read the elements of a new, contiguous tensor from a file.

    Raises:
        DataError: if the file ends too early.
    """
    if not tensor.numel():
        return
    unread: numpy.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    while len(unread):
        part = file.read(min(len(unread), 2**20))  # bounds the memory of this second copy to 1 MiB
        if not part:
            raise DataError(f"{path} ends before its tensors do: the file is damaged")
        unread[: len(part)] = numpy.frombuffer(part, numpy.uint8)
        unread = unread[len(part) :]


def contiguous(source: Source, offset: int, spec: TensorSpec) -> Stored:
    """Return a tensor whose elements lie in row-major order in a file, starting at a byte offset."""

    def read() -> Iterator[Tensor]:
        with source.open() as file:
            file.seek(offset)
            for start, stop in row_blocks(spec.shape):
                block = torch.empty((stop - start, *spec.shape[1:]), dtype=spec.dtype)
                fill(file, block, source.path)
                yield block

    return Stored(spec, read)
