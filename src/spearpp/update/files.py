"""Files of tensors from strangers: safetensors, PyTorch and npz, read without running anything in them."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spearpp.errors import DataError
from spearpp.types import Tensor
from spearpp.update.lazy import Lazy, Stored, changed
from spearpp.update.readers import HEADER, open_npz, open_safetensors, open_torch
from spearpp.update.source import Source

LARGEST = 2**33
"""Bytes that the tensors of one file may take, unless the caller allows more."""
FileName = str | os.PathLike[str]


def open_tensors(path: FileName, *, largest: int = LARGEST) -> tuple[Lazy, dict[str, Any]]:
    """The tensors of a file by name, read when they are asked for, on the CPU; and our header if there is one.

    ``.safetensors``; ``.pt``, ``.pth``, ``.bin`` and ``.ckpt`` (tensors only: a pickle that calls anything is
    refused); ``.npz`` (no pickled objects). A list of tensors gets the names "0", "1", …

    Raises:
        DataError: if the file is missing, damaged, too large, of another kind, or holds code. Damage to the numbers
            themselves, and a file that is changed or removed meanwhile, are found when they are read.
    """
    try:
        path = Path(path)
    except TypeError as error:
        raise DataError(f"{path!r} is no file name") from error
    suffix = path.suffix.lower()
    readers = {".safetensors": open_safetensors, ".npz": open_npz}
    readers |= dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), open_torch)
    if suffix not in readers:
        raise DataError(f"{path.name}: expected a file ending in {', '.join(readers)}")
    source = Source.of(path)
    if source.size > largest:
        raise DataError(f"{path} has {source.size:,} bytes, more than the {largest:,} allowed")
    found, header = readers[suffix](source, largest)
    stored = {name: _dense(name, each) for name, each in found.items()}
    claimed = sum(each.outline.nbytes for each in stored.values())
    if claimed > largest:  # a tensor of one element can claim any shape by strides of zero
        raise DataError(f"{path} holds tensors of {claimed:,} bytes, more than the {largest:,} allowed")
    if not stored:
        raise DataError(f"{path} holds no tensors")
    return Lazy(stored), header


def read_tensors(path: FileName, *, largest: int = LARGEST) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same, all of them read at once.

    Raises:
        DataError: as ``open_tensors``, and for damaged numbers too.
    """
    tensors, header = open_tensors(path, largest=largest)
    return dict(tensors), header


def _dense(name: str, stored: Stored) -> Stored:
    """As ``dense`` has it."""
    if stored.outline.dtype.is_complex:
        raise DataError(f"{name[:80]!r} is complex: send floating-point numbers")
    small = stored.outline.dtype.is_floating_point and stored.outline.dtype.itemsize == 1
    return changed(Tensor.float, stored) if small else stored


def write_tensors(path: FileName, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a safetensors file with our header, whole or not at all.

    Raises:
        DataError: if it cannot be written.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise DataError("safetensors is not installed: pip install safetensors") from error
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content = save(own, _metadata(header))
    write_whole(Path(path), content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there, so that nobody ever sees half of it.

    Raises:
        DataError: if it cannot be written; nothing is left behind.
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
        raise DataError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


def _metadata(header: Mapping[str, Any]) -> dict[str, str]:
    return {HEADER: json.dumps(header, sort_keys=True)}
