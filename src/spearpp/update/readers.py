"""Three formats of tensors from strangers, each read without running anything, a tensor at a time.

Opening a file reads names, shapes and places alone. What is odd in a PyTorch file (an old format without an archive,
sparse or quantised tensors, another byte order) is read whole instead.
"""

import json
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

from spearpp.errors import DataError
from spearpp.types import Tensor
from spearpp.update.lazy import Stored, TensorSpec, row_blocks
from spearpp.update.names import dense
from spearpp.update.npz import BinaryFile, Member, members, numbers_of
from spearpp.update.source import Source, fill, plain_numbers

HEADER = "spearpp"
"""The entry of a safetensors file's metadata that is ours."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""By the names that safetensors has for them."""
WRAPPERS = ("state_dict", "model_state_dict", "model", "weights", "params", "gradients", "grads")
"""Under which names training scripts put a state dict into a checkpoint."""
LOCAL_HEADER = 30
"""Bytes before the name of a file in an archive."""


def open_safetensors(source: Source, _largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of a safetensors file, and our header."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise DataError("safetensors is not installed: pip install safetensors") from error
    try:
        with safe_open(source.path, framework="pt") as checked:  # it vouches for sizes and places
            names, header = list(checked.keys()), json.loads((checked.metadata() or {}).get(HEADER, "{}"))
        with source.open() as file:
            (length,) = struct.unpack("<Q", file.read(8))
            described = json.loads(file.read(length))
        stored = {name: _described(described[name], source, 8 + length) for name in names}
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise DataError(f"{source.path} is not a readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise DataError(f"{source.path} has a header that is no JSON object")
    return stored, header


def _described(entry: Mapping[str, Any], source: Source, base: int) -> Stored:
    """One tensor as the header of a safetensors file has it."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"it holds numbers of the kind {str(entry['dtype'])[:20]}")
    outline = TensorSpec(torch.Size(entry["shape"]), DTYPES[entry["dtype"]])
    start, stop = entry["data_offsets"]
    if stop - start != outline.nbytes or not 0 <= start <= stop <= source.size - base:
        raise ValueError("a tensor lies outside of it")
    return plain_numbers(source, base + start, outline)


def open_npz(source: Source, largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The arrays of an npz file."""
    with source.open() as file:
        found = members(file, source.path, largest=largest)
    try:
        return {name.removeprefix("arr_"): _array(source, member) for name, member in found.items()}, {}
    except (TypeError, ValueError) as error:
        raise DataError(f"{source.path} holds an array that is no numbers: {error}") from error


def _array(source: Source, member: Member) -> Stored:
    native = member.dtype.newbyteorder("=")
    dtype = torch.from_numpy(numpy.empty(0, native)).dtype
    outline = TensorSpec(torch.Size(member.shape), dtype)

    def numbers(file: BinaryFile, shape: tuple[int, ...]) -> Tensor:
        block = torch.empty(shape, dtype=dtype)
        fill(file, block, source.path)
        if member.dtype != native:
            block.numpy().byteswap(inplace=True)
        return block

    def read() -> Iterator[Tensor]:
        with source.open() as raw, numbers_of(raw, member, source.path) as file:
            whole = (
                numbers(file, member.shape[::-1]).permute(*range(len(member.shape))[::-1]) if member.fortran else None
            )
            for start, stop in row_blocks(outline.shape):
                shape = (stop - start, *member.shape[1:])
                yield numbers(file, shape) if whole is None else whole[start:stop]
            file.read(1)  # at its end the archive's checksum is compared

    return Stored(outline, read)


def open_torch(source: Source, largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of a PyTorch file; a pickle that calls anything is refused."""
    path = source.path
    try:
        with source.open() as file:
            archived = zipfile.is_zipfile(file)
            pickles = _pickles(file, source, largest) if archived else path.read_bytes()
        if b"bytearray" in pickles:  # it is allowed to be called, with any size
            raise DataError(f"{path} holds more than tensors, and was not loaded")
        stored = _in_places(source) if archived else None
        if stored is None:
            content = torch.load(path, map_location="cpu", weights_only=True)
            stored = {name: Stored.holding(dense(name, each)) for name, each in _named(content, source).items()}
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} holds more than tensors, or is damaged, and was not loaded") from error
    except Exception as error:  # a hostile pickle can make the reader fail in any way
        raise DataError(f"{path} is not a readable PyTorch file: {type(error).__name__}") from error
    return stored, {}


def _pickles(file: BinaryFile, source: Source, largest: int) -> bytes:
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > largest:
            raise DataError(f"{source.path} unpacks to {unpacked:,} bytes, more than the {largest:,} allowed")
        return b"".join(archive.read(entry) for entry in archive.infolist() if entry.filename.endswith(".pkl"))


def _in_places(source: Source) -> dict[str, Stored] | None:
    """The tensors of an archive by where their numbers lie in the file; None if that cannot be told of each."""
    with source.open() as file:
        room = _rooms(file)
        file.seek(0)
        try:  # without its numbers: PyTorch says where in the file these are
            content = torch.load(file, map_location="meta", weights_only=True)
        except pickle.UnpicklingError:
            raise
        except Exception:  # what cannot be described may still be read
            return None
    if room is None:
        return None
    stored = {name: _placed(each, source, room) for name, each in _named(content, source).items()}
    whole = {name: each for name, each in stored.items() if each is not None}
    return whole if len(whole) == len(stored) else None


def _rooms(file: BinaryFile) -> dict[int, int] | None:
    """Where the content of each entry of an archive begins, and its bytes; None if it is not there as it was written.

    PyTorch may count places up instead of looking, so tensors have to be in their order.
    """
    found = {}
    with zipfile.ZipFile(file) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        order = [entry.filename.rpartition("/")[2] for entry in entries if "/data/" in entry.filename]
        if order != sorted(order, key=lambda each: int(each) if each.isdecimal() else -1):
            return None
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                return None
            if entry.filename.endswith("byteorder") and archive.read(entry) != sys.byteorder.encode():
                return None
            file.seek(entry.header_offset)
            head = file.read(LOCAL_HEADER)
            name, extra = struct.unpack("<HH", head[26:])
            found[entry.header_offset + LOCAL_HEADER + name + extra] = entry.file_size
    return found


def _placed(tensor: Tensor, source: Source, room: Mapping[int, int]) -> Stored | None:
    """A tensor that was loaded without its numbers, where they lie in the file; None if that is not clear."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    storage = tensor.untyped_storage()
    base = getattr(storage, "_checkpoint_offset", None)
    if not isinstance(base, int) or tensor.is_neg() or storage.nbytes() > room.get(base, -1):
        return None
    outline = TensorSpec(tensor.shape, tensor.dtype)
    strides, start, size = tensor.stride(), int(tensor.storage_offset()), tensor.dtype.itemsize
    span = sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True)) + 1 if tensor.numel() else 0
    if min(start, *strides, 0) < 0 or (start + span) * size > storage.nbytes():
        return None
    if tensor.is_contiguous():
        return plain_numbers(source, base + start * size, outline)
    flat = plain_numbers(source, base + start * size, TensorSpec(torch.Size([span]), tensor.dtype))

    def read() -> Iterator[Tensor]:
        whole = flat.read().as_strided(outline.shape, strides)
        return (whole[slice(*each)] for each in row_blocks(outline.shape))

    return Stored(outline, read)


def _named(content: object, source: Source) -> dict[str, Tensor]:
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
    what = type(content).__name__
    raise DataError(f"{source.path} holds a {what} without tensors: expected a state dict or a list of tensors")
