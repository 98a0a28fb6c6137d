"""Reading npz files from strangers: no pickles, and no array larger than the file says it holds."""

import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy

from spearpp.errors import DataError

BinaryFile = IO[bytes] | zipfile.ZipExtFile
FileName = str | os.PathLike[str]
LARGEST = 2**31
"""Bytes that all arrays of a file may take, unless the caller allows more."""


@dataclass(frozen=True)
class Member:
    """What the header of one array says."""

    place: int
    """Its entry of the archive, counted from 0."""
    shape: tuple[int, ...]
    dtype: numpy.dtype
    fortran: bool
    """Whether the first index runs fastest."""


def read_npz(path: FileName, *, largest: int = LARGEST) -> dict[str, numpy.ndarray]:
    """All arrays of an npz file, by name.

    Sizes are checked before anything is allocated: what the archive unpacks to against ``largest``,
    and what each array's header claims against what the archive holds for it.

    Raises:
        DataError: if the file is not an npz file, is damaged, holds pickled objects or too much.
    """
    with _clearly(path):
        arrays = {}
        for name, member in members(path, path, largest=largest).items():
            with numbers_of(path, member, path) as file:
                values = numpy.frombuffer(file.read(math.prod(member.shape) * member.dtype.itemsize), member.dtype)
            arrays[name] = values.reshape(member.shape, order="F" if member.fortran else "C").copy()
        return arrays


def members(file: FileName | BinaryFile, path: FileName, *, largest: int = LARGEST) -> dict[str, Member]:
    """What an npz file holds, by name, without its numbers.

    Raises:
        DataError: as ``read_npz``.
    """
    with _clearly(path), zipfile.ZipFile(file) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > largest:
            raise DataError(f"{path} unpacks to {unpacked:,} bytes, more than the {largest:,} allowed")
        found = {}
        for place, entry in enumerate(archive.infolist()):
            if entry.filename.endswith(".npy"):
                with archive.open(entry) as content:
                    found[entry.filename.removesuffix(".npy")] = _member(content, place, entry.file_size, path)
        return found


@contextmanager
def numbers_of(file: FileName | BinaryFile, member: Member, path: FileName) -> Iterator[BinaryFile]:
    """One array of the file, from its first number on.

    Raises:
        DataError: if it is not the array that it was, or is damaged.
    """
    with _clearly(path), zipfile.ZipFile(file) as archive:
        entry = archive.infolist()[member.place]
        with archive.open(entry) as content:
            if _member(content, member.place, entry.file_size, path) != member:
                raise DataError(f"{path} was changed while it was in use")
            yield content


@contextmanager
def _clearly(path: FileName) -> Iterator[None]:
    """Whatever a damaged archive or header makes the readers fail with is one error."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} is not a readable npz file: {error}") from error


def _member(file: BinaryFile, place: int, held: int, path: FileName) -> Member:
    version = numpy.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise DataError(f"{path} holds an array in npy format {version}: expected 1.0 or 2.0")
    read_header = {
        (1, 0): numpy.lib.format.read_array_header_1_0,
        (2, 0): numpy.lib.format.read_array_header_2_0,
    }[version]
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise DataError(f"{path} holds pickled objects: they can run code and are not loaded")
    claimed = math.prod(shape) * dtype.itemsize
    if claimed > held:
        raise DataError(f"{path} claims an array {shape} of {claimed:,} bytes, but holds {held:,}")
    return Member(place, shape, dtype, fortran)
