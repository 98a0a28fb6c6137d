"""Read and write files of tensors in the formats safetensors, PyTorch, npz and npy.

Files come from strangers: nothing in a file is executed, sizes are checked before memory is allocated, and a damaged
file leads to one ``DataError`` that names the file.
"""

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spearpp.errors import DataError
from spearpp.types import Tensor
from spearpp.update.lazy import Lazy, Stored, map_blocks
from spearpp.update.npz import open_npy, open_npz
from spearpp.update.readers import HEADER, open_index, open_safetensors, open_torch
from spearpp.update.source import Source, reading

LARGEST = 2**33
"""Largest size of a file and of its tensors, in bytes, unless the caller allows more. A design choice: 8 GiB holds two
billion float32 weights and still fits into the memory of a workstation."""
BLOCK_BYTES = 2**20
"""Bytes that are unpacked at once. A design choice: 1 MiB is small beside any file of tensors."""
FileName = str | os.PathLike[str]


def _open_gzip(source: Source, largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Open a file of tensors that was compressed with gzip, and read all of it into memory."""
    with tempfile.TemporaryDirectory() as folder:
        unpacked, size = Path(folder) / source.path.stem, 0
        if unpacked.suffix.lower() in ("", source.path.suffix.lower()):
            raise DataError(f"{source.path}: expected the name of a compressed file of tensors, such as update.pt.gz")
        try:
            with source.open() as raw, gzip.GzipFile(fileobj=raw) as packed, unpacked.open("wb") as file:
                while block := packed.read(BLOCK_BYTES):
                    size += len(block)
                    if size > largest:
                        raise DataError(f"{source.path} unpacks to more than the {largest:,} bytes allowed")
                    file.write(block)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{source.path} cannot be unpacked: {error}") from error
        try:
            tensors, header = open_tensors(unpacked, largest=largest)
            return {name: Stored.in_memory(each) for name, each in tensors.items()}, header
        except DataError as error:
            raise DataError(str(error).replace(str(unpacked), str(source.path))) from error


Reader = Callable[[Source, int], tuple[dict[str, Stored], dict[str, Any]]]
"""Opens one file format: from a file and the number of bytes allowed to the tensors by name and the file's header."""
READERS: dict[str, Reader] = {
    ".safetensors": open_safetensors,
    ".npz": open_npz,
    ".npy": open_npy,
    ".gz": _open_gzip,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), open_torch),
}
"""The reader of each file name suffix. To support another format, add its reader here."""
INDEX = ".index.json"
"""Ending of the file that lists the files of a checkpoint in several files."""


def open_tensors(path: FileName, *, largest: int = LARGEST) -> tuple[Lazy, dict[str, Any]]:
    """Open a file of tensors without reading their elements.

    Supported formats: ``.safetensors``; ``.pt``, ``.pth``, ``.bin`` and ``.ckpt`` (tensors only: a pickle that calls
    anything is rejected); ``.npz`` and ``.npy`` (no pickled objects); each of them compressed as ``.gz``; and a
    checkpoint in several files, by its ``.index.json`` or its folder. The tensors of a list are named "0", "1", …

    Args:
        path: the file, or a folder with one checkpoint.
        largest: number of bytes that the file, its unpacked content and its tensors may take.

    Returns:
        The tensors by name, on the CPU, each read whenever it is accessed; and the header that ``write_tensors``
        stored, which is empty for files of other programs.

    Raises:
        DataError: if the file is missing, damaged, too large, in another format, or holds code. Damaged elements, and a
            file that changes or disappears later, raise the error when a tensor is read.
    """
    try:
        path = Path(path)
    except TypeError as error:
        raise DataError(f"{path!r} is not a file name") from error
    if path.is_dir():
        path = _checkpoint_in(path)
    reader = open_index if path.name.lower().endswith(INDEX) else READERS.get(path.suffix.lower())
    if reader is None:
        why = f"{path.name}: expected a file ending in {', '.join(READERS)}"
        raise DataError(why, hint="save the update as .safetensors, .pt, .npz or .npy")
    source = Source.of(path)
    if source.size > largest:
        raise DataError(f"{path} has {source.size:,} bytes, more than the {largest:,} allowed")
    found, header = reader(source, largest)
    stored = {name: _as_dense(name, each) for name, each in found.items()}
    claimed = sum(each.spec.nbytes for each in stored.values())
    if claimed > largest:  # with strides of zero, a file with one element can state a tensor of any shape
        raise DataError(f"{path} holds tensors of {claimed:,} bytes, more than the {largest:,} allowed")
    if not stored:
        raise DataError(f"{path} holds no tensors")
    return Lazy(stored), header


def _checkpoint_in(folder: Path) -> Path:
    """Return the only checkpoint in a folder: an index of several files, or else the only file of tensors.

    Raises:
        DataError: if the folder holds no checkpoint, or several.
    """
    with reading(folder):
        names = sorted(each.name for each in folder.iterdir() if each.is_file())
    found = [name for name in names if name.lower().endswith(INDEX)]
    found = found or [name for name in names if Path(name).suffix.lower() in READERS]
    if len(found) != 1:
        some = f"several checkpoints ({', '.join(found[:4])})" if found else "no file of tensors"
        raise DataError(f"{folder} is a folder with {some}: name one file")
    return folder / found[0]


def read_tensors(path: FileName, *, largest: int = LARGEST) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read all tensors of a file into memory. Arguments and return values are those of ``open_tensors``.

    Raises:
        DataError: for the same reasons as ``open_tensors``, including damaged elements.
    """
    tensors, header = open_tensors(path, largest=largest)
    return dict(tensors), header


def _as_dense(name: str, stored: Stored) -> Stored:
    """Convert a stored tensor as ``names.dense`` converts a tensor in memory: float8 becomes float32."""
    dtype = stored.spec.dtype
    if dtype.is_complex:
        raise DataError(f"{name[:80]!r} is complex, but only floating-point tensors are supported")
    return map_blocks(Tensor.float, stored) if dtype.is_floating_point and dtype.itemsize == 1 else stored


def write_tensors(path: FileName, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a JSON header to a safetensors file. The file is written completely or not at all.

    Raises:
        DataError: if the file cannot be written.
    """
    from safetensors.torch import save

    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_whole(Path(path), save(own, {HEADER: json.dumps(header, sort_keys=True)}))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it, so that no other process sees a partial file.

    Raises:
        DataError: if the file cannot be written. The temporary file is removed.
    """
    scratch = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            scratch = Path(file.name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.chmod(0o666 & ~_umask())
        scratch.replace(path)
    except (OSError, ValueError) as error:
        if scratch is not None:
            scratch.unlink(missing_ok=True)
        why = f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
        raise DataError(why, hint="choose another --out folder") from error


def _umask() -> int:
    """Return the process's file mode creation mask, which can be read only by setting another one."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
