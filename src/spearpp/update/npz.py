"""Read npz and npy files from strangers: no pickled objects, and no array larger than the file holds."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy

from spearpp.errors import DataError

BinaryFile = IO[bytes] | zipfile.ZipExtFile


@dataclass(frozen=True)
class ArrayHeader:
    """What the header of one array states."""

    index: int
    """Position of the array's entry in the archive, counted from 0."""
    shape: tuple[int, ...]
    dtype: numpy.dtype
    fortran: bool
    """Whether the elements are stored in column-major (Fortran) order."""


def read_headers(file: Path | BinaryFile, path: Path, *, largest: int) -> dict[str, ArrayHeader]:
    """Return the header of every array of an npz file, by name, without reading any array.

    Sizes are checked before anything is allocated: the unpacked size of the archive against ``largest``, and the size
    that each array's header states against the size of its entry in the archive.

    Raises:
        DataError: if the file is not an npz file, is damaged, is too large or holds pickled objects.
    """
    with _one_error(path), zipfile.ZipFile(file) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > largest:
            raise DataError(f"{path} unpacks to {unpacked:,} bytes, more than the {largest:,} allowed")
        headers = {}
        for index, entry in enumerate(archive.infolist()):
            if entry.filename.endswith(".npy"):
                with archive.open(entry) as content:
                    headers[entry.filename.removesuffix(".npy")] = _header(content, index, entry.file_size, path)
        return headers


def read_header(file: BinaryFile, path: Path, size: int) -> ArrayHeader:
    """Return the header of an npy file, which holds one array. ``size`` is the size of the file in bytes.

    Raises:
        DataError: if the file is not an npy file, is damaged or holds pickled objects.
    """
    with _one_error(path, "npy"):
        return _header(file, 0, size, path)


@contextmanager
def open_array(file: BinaryFile, header: ArrayHeader, path: Path) -> Iterator[BinaryFile]:
    """Open one array of an npz file at its first element.

    Raises:
        DataError: if the array's header has changed, or the file is damaged.
    """
    with _one_error(path), zipfile.ZipFile(file) as archive:
        entry = archive.infolist()[header.index]
        with archive.open(entry) as content:
            if _header(content, header.index, entry.file_size, path) != header:
                raise DataError(f"{path} was changed while it was in use")
            yield content


@contextmanager
def _one_error(path: Path, kind: str = "npz") -> Iterator[None]:
    """Turn every exception that a damaged file can cause into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} is not a readable {kind} file: {error}") from error


def _header(file: BinaryFile, index: int, entry_size: int, path: Path) -> ArrayHeader:
    version = numpy.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = numpy.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = numpy.lib.format.read_array_header_2_0(file)
    else:
        raise DataError(f"{path} holds an array in npy format {version}: expected 1.0 or 2.0")
    if dtype.hasobject:
        raise DataError(f"{path} holds pickled objects: they can run code and are not loaded")
    claimed = math.prod(shape) * dtype.itemsize
    if claimed > entry_size:
        raise DataError(f"{path} claims an array {shape} of {claimed:,} bytes, but holds {entry_size:,}")
    return ArrayHeader(index, shape, dtype, fortran)
