"""Files of tensors from strangers: safetensors, PyTorch and npz, read without running anything in them."""

import json
import os
import pickle
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spearpp.errors import DataError
from spearpp.npz import read_npz
from spearpp.shapes import Tensor
from spearpp.update.names import dense

LARGEST = 2**33
"""Bytes that the tensors of one file may take, unless the caller allows more."""
HEADER = "spearpp"
"""The entry of a safetensors file's metadata that is ours."""
WRAPPERS = ("state_dict", "model_state_dict", "model", "weights", "params", "gradients", "grads")
"""Under which names training scripts put a state dict into a checkpoint."""
FileName = str | os.PathLike[str]


def read_tensors(path: FileName, *, largest: int = LARGEST) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of a file by name, on the CPU, and our header if there is one.

    ``.safetensors``; ``.pt``, ``.pth``, ``.bin`` and ``.ckpt`` (tensors only: a pickle that calls anything is
    refused); ``.npz`` (no pickled objects). A list of tensors gets the names "0", "1", …

    Raises:
        DataError: if the file is missing, damaged, too large, of another kind, or holds code.
    """
    try:
        path = Path(path)
    except TypeError as error:
        raise DataError(f"{path!r} is no file name") from error
    suffix = path.suffix.lower()
    readers = {".safetensors": _safetensors, ".npz": _npz} | dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _torch)
    if suffix not in readers:
        raise DataError(f"{path.name}: expected a file ending in {', '.join(readers)}")
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    if size > largest:
        raise DataError(f"{path} has {size:,} bytes, more than the {largest:,} allowed")
    read, header = readers[suffix](path, largest)
    tensors = {name: dense(name, each) for name, each in read.items()}
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if claimed > largest:  # a tensor of one element can claim any shape by strides of zero
        raise DataError(f"{path} holds tensors of {claimed:,} bytes, more than the {largest:,} allowed")
    if not tensors:
        raise DataError(f"{path} holds no tensors")
    return tensors, header


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


def _safetensors(path: Path, _largest: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise DataError("safetensors is not installed: pip install safetensors") from error
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise DataError(f"{path} is not a readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise DataError(f"{path} has a header that is no JSON object")
    return tensors, header


def _npz(path: Path, largest: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    arrays = read_npz(path, largest=largest)
    try:
        native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in arrays.items()}
        return {name.removeprefix("arr_"): torch.from_numpy(array) for name, array in native.items()}, {}
    except (TypeError, ValueError) as error:
        raise DataError(f"{path} holds an array that is no numbers: {error}") from error


def _torch(path: Path, largest: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
                if unpacked > largest:
                    raise DataError(f"{path} unpacks to {unpacked:,} bytes, more than the {largest:,} allowed")
                pickles = b"".join(
                    archive.read(entry) for entry in archive.infolist() if entry.filename.endswith(".pkl")
                )
        else:
            pickles = path.read_bytes()
        if b"bytearray" in pickles:  # it is allowed to be called, with any size
            raise DataError(f"{path} holds more than tensors, and was not loaded")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} holds more than tensors, or is damaged, and was not loaded") from error
    except Exception as error:  # a hostile pickle can make the reader fail in any way
        raise DataError(f"{path} is not a readable PyTorch file: {type(error).__name__}") from error
    return _named(content, path), {}


def _named(content: object, path: Path) -> dict[str, Tensor]:
    """The tensors of what a checkpoint holds: a state dict, one wrapped in a dict, or a list."""
    if isinstance(content, list | tuple) and all(isinstance(each, Tensor) for each in content):
        return {str(index): each for index, each in enumerate(content)}
    if isinstance(content, Mapping):
        for inner in (*(content.get(name) for name in WRAPPERS), content):
            if isinstance(inner, Mapping):
                found = {str(name): each for name, each in inner.items() if isinstance(each, Tensor)}
                if found:
                    return found
            elif isinstance(inner, list | tuple) and inner and all(isinstance(each, Tensor) for each in inner):
                return {str(index): each for index, each in enumerate(inner)}
    raise DataError(
        f"{path} holds a {type(content).__name__} without tensors: expected a state dict or a list of tensors"
    )
