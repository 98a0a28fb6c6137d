"""Readers for npz and npy files from strangers: no pickled objects, and no array larger than the file holds."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy
import torch

from spearpp.errors import DataError
from spearpp.types import Tensor
from spearpp.update.lazy import Stored, TensorSpec, row_blocks
from spearpp.update.source import BinaryFile, Source, fill


class _Header(NamedTuple):
    """What the header of one array states."""

    shape: tuple[int, ...]
    fortran: bool
    """Whether the elements are stored in column-major (Fortran) order."""
    dtype: numpy.dtype


def open_npz(source: Source, largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Open an npz file. Return its arrays by name, and an empty header.

    Sizes are checked before anything is allocated: the unpacked size of the archive against ``largest``, and the size
    that each array's header states against the size of its entry in the archive.
    """
    headers = {}
    with _one_error(source), source.open() as file, zipfile.ZipFile(file) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > largest:
            raise DataError(f"{source.path} unpacks to {unpacked:,} bytes, more than the {largest:,} allowed")
        for index, entry in enumerate(archive.infolist()):
            if entry.filename.endswith(".npy"):
                with archive.open(entry) as content:
                    name = entry.filename.removesuffix(".npy").removeprefix("arr_")
                    headers[name] = index, _header(content, entry.file_size, source)
    return {name: _array(source, *each) for name, each in headers.items()}, {}


def open_npy(source: Source, _largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Open an npy file. Return its only array under the name "0", and an empty header."""
    with _one_error(source), source.open() as file:
        header = _header(file, source.size, source)
    return {"0": _array(source, None, header)}, {}


def _array(source: Source, index: int | None, header: _Header) -> Stored:
    """Return one array. ``index`` is the position of its entry in an npz archive, or None for an npy file."""
    native = header.dtype.newbyteorder("=")
    try:
        spec = TensorSpec(torch.Size(header.shape), torch.from_numpy(numpy.empty(0, native)).dtype)
    except (TypeError, ValueError) as error:
        raise DataError(f"{source.path} holds an array whose elements are not numbers: {error}") from error

    def elements(file: BinaryFile, shape: tuple[int, ...]) -> Tensor:
        block = torch.empty(shape, dtype=spec.dtype)
        fill(file, block, source.path)
        if header.dtype != native:
            block.numpy().byteswap(inplace=True)
        return block

    def read() -> Iterator[Tensor]:
        with _one_error(source), _opened(source, index, header) as file:
            whole = elements(file, header.shape[::-1]).permute(*range(spec.ndim)[::-1]) if header.fortran else None
            for start, stop in row_blocks(spec.shape):
                yield elements(file, (stop - start, *header.shape[1:])) if whole is None else whole[start:stop]
            file.read(1)  # in an archive, zipfile compares the checksum when it reaches the end of the entry

    return Stored(spec, read)


@contextmanager
def _opened(source: Source, index: int | None, header: _Header) -> Iterator[BinaryFile]:
    """Open one array at its first element. Raise an error if its header has changed."""
    with ExitStack() as stack:
        file: BinaryFile = stack.enter_context(source.open())
        size = source.size
        if index is not None:
            archive = stack.enter_context(zipfile.ZipFile(file))
            entry = archive.infolist()[index]
            file, size = stack.enter_context(archive.open(entry)), entry.file_size
        if _header(file, size, source) != header:
            raise DataError(f"{source.path} was changed while it was in use")
        yield file


def _header(file: BinaryFile, size: int, source: Source) -> _Header:
    """Read the header of an array, whose file or entry in an archive has ``size`` bytes."""
    version = numpy.lib.format.read_magic(file)
    if version == (1, 0):
        header = _Header(*numpy.lib.format.read_array_header_1_0(file))
    elif version == (2, 0):
        header = _Header(*numpy.lib.format.read_array_header_2_0(file))
    else:
        raise DataError(f"{source.path} holds an array in npy format {version}: expected 1.0 or 2.0")
    if header.dtype.hasobject:
        raise DataError(f"{source.path} holds pickled objects: they can run code and are not loaded")
    claimed = math.prod(header.shape) * header.dtype.itemsize
    if claimed > size:
        raise DataError(f"{source.path} claims an array {header.shape} of {claimed:,} bytes, but holds {size:,}")
    return header


@contextmanager
def _one_error(source: Source) -> Iterator[None]:
    """Turn every exception that a damaged file can cause into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        kind = source.path.suffix.lower().removeprefix(".")
        raise DataError(f"{source.path} is not a readable {kind} file: {error}") from error
