"""Reading npz files from strangers: no pickles, and no array larger than the file says it holds."""

import math
import os
import zipfile
from typing import IO

import numpy

from spearpp.errors import DataError

BinaryFile = IO[bytes] | zipfile.ZipExtFile
LARGEST = 2**31
"""Bytes that all arrays of a file may take, unless the caller allows more."""


def read_npz(path: str | os.PathLike[str], *, largest: int = LARGEST) -> dict[str, numpy.ndarray]:
    """All arrays of an npz file, by name.

    Sizes are checked before anything is allocated: what the archive unpacks to against ``largest``,
    and what each array's header claims against what the archive holds for it.

    Raises:
        DataError: if the file is not an npz file, is damaged, holds pickled objects or too much.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > largest:
                raise DataError(f"{path} unpacks to {unpacked:,} bytes, more than the {largest:,} allowed")
            arrays = {}
            for entry in entries:
                with archive.open(entry) as file:
                    arrays[entry.filename.removesuffix(".npy")] = _read_array(file, entry.file_size, path)
            return arrays
    except DataError:
        raise
    except Exception as error:  # a damaged archive or header can make the readers fail in any way
        raise DataError(f"{path} is not a readable npz file: {error}") from error


def _read_array(file: BinaryFile, held: int, path: str | os.PathLike[str]) -> numpy.ndarray:
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
    values = numpy.frombuffer(file.read(claimed), dtype=dtype)
    return values.reshape(shape, order="F" if fortran else "C").copy()
