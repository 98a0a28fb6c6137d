"""Readers for safetensors and PyTorch files from strangers. No reader runs anything that a file contains.

Opening a file reads names, shapes and byte offsets only. A tensor's elements are read later, block by block. The
exceptions are unusual PyTorch files (the format before archives, sparse or quantised tensors, compressed archives,
another byte order): ``torch.load`` reads them whole.

``torch.load(mmap=True)`` and ``safetensors.safe_open(...).get_slice`` map the file into memory. If the file shrinks
while it is mapped, the next access ends the process with SIGBUS instead of raising an error. ``numpy.load`` ignores
``mmap_mode`` for npz files (``npz``). The readers therefore take only the layout from these libraries, and read the
elements with ordinary file reads.
"""

import json
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from spearpp.errors import DataError
from spearpp.types import Tensor
from spearpp.update.lazy import Stored, TensorSpec, row_blocks
from spearpp.update.names import dense
from spearpp.update.source import BinaryFile, Source, contiguous

HEADER = "spearpp"
"""Key of the metadata of a safetensors file under which this package stores its own header."""
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
"""Supported dtypes by their names in the safetensors format."""
STATE_DICT = "save only the state dict: torch.save(model.state_dict(), path). Check that the file is what its name says"
"""Hint for a pickle that contains code, or for a file that is no pickle."""
COPY_AGAIN = "copy or download the file again, and compare its size with the original"
"""Hint for a file that PyTorch cannot read."""
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "weights", "params", "gradients", "grads")
"""Keys under which training scripts store a state dict in a checkpoint."""
MAX_INDEX_BYTES = 2**26
"""Largest size of the index of a checkpoint in several files. A design choice: 64 MiB hold half a million names."""
ZIP_LOCAL_HEADER_BYTES = 30
"""Size of the fixed part of a local file header in a zip archive, from the zip specification."""


def open_safetensors(source: Source, _largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Open a safetensors file. Return its tensors by name, and the header that this package stored, if any."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(source.path, framework="pt") as checked:  # validates the file's sizes and offsets
            names, header = list(checked.keys()), json.loads((checked.metadata() or {}).get(HEADER, "{}"))
        with source.open() as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length))
        stored = {name: _safetensors_entry(entries[name], source, 8 + length) for name in names}
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise DataError(f"{source.path} is not a readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise DataError(f"{source.path} has a spearpp header that is not a JSON object")
    return stored, header


def _safetensors_entry(entry: Mapping[str, Any], source: Source, data_start: int) -> Stored:
    """Return one tensor from its entry in the JSON header of a safetensors file."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the dtype {str(entry['dtype'])[:20]} is not supported")
    spec = TensorSpec(torch.Size(entry["shape"]), DTYPES[entry["dtype"]])
    start, stop = entry["data_offsets"]
    if stop - start != spec.nbytes or not 0 <= start <= stop <= source.size - data_start:
        raise ValueError("a tensor lies outside of the file")
    return contiguous(source, data_start + start, spec)


def open_index(source: Source, largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Open the index of a checkpoint in several files, as Hugging Face libraries write it (``….index.json``).

    Every file that the index names must be in the folder of the index. Return the tensors by name, and an empty header.
    """
    if source.size > MAX_INDEX_BYTES:
        raise DataError(
            f"{source.path} has {source.size:,} bytes, more than the {MAX_INDEX_BYTES:,} allowed for an index"
        )
    try:
        with source.open() as file:
            places = json.loads(file.read())["weight_map"]
        if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
            raise TypeError("weight_map must map names to files")
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{source.path} is not the index of a checkpoint: {error}") from error
    readers = {".safetensors": open_safetensors, ".bin": open_torch}
    parts = {}
    for name in dict.fromkeys(places.values()):
        if Path(name).name != name or "\\" in name or Path(name).suffix not in readers:
            raise DataError(f"{source.path} names {name[:80]!r}, which is not a file of tensors in the same folder")
        parts[name] = Source.of(source.path.parent / name)
    size = sum(part.size for part in parts.values())
    if size > largest:
        raise DataError(f"the files of {source.path} have {size:,} bytes, more than the {largest:,} allowed")
    found = {name: readers[Path(name).suffix](part, largest)[0] for name, part in parts.items()}
    missing = next((name for name, place in places.items() if name not in found[place]), None)
    if missing is not None:
        raise DataError(f"{source.path} says that {places[missing]} holds {missing[:80]!r}, but it does not")
    return {name: found[place][name] for name, place in places.items()}, {}


def open_torch(source: Source, largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Open a PyTorch file. Return its tensors by name, and an empty header. Reject a pickle that calls anything."""
    path = source.path
    try:
        with source.open() as file:
            is_archive = zipfile.is_zipfile(file)
            pickles = _read_pickles(file, source, largest) if is_archive else path.read_bytes()
        if b"bytearray" in pickles:  # weights_only allows this call, and with it an allocation of any size
            raise DataError(f"{path} holds more than tensors, and was not loaded", hint=STATE_DICT)
        stored = _tensors_by_offset(source) if is_archive else None
        if stored is None:
            content = torch.load(path, map_location="cpu", weights_only=True)
            named = _named_tensors(content, source)
            stored = {name: Stored.in_memory(dense(name, tensor)) for name, tensor in named.items()}
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        why = f"{path} holds more than tensors, or is damaged, and was not loaded"
        raise DataError(why, hint=STATE_DICT) from error
    except Exception as error:  # a hostile pickle can make torch.load raise any exception
        why = f"{path} is not a PyTorch file, or it is incomplete or damaged ({type(error).__name__})"
        raise DataError(why, hint=COPY_AGAIN) from error
    return stored, {}


def _read_pickles(file: BinaryFile, source: Source, largest: int) -> bytes:
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > largest:
            raise DataError(f"{source.path} unpacks to {unpacked:,} bytes, more than the {largest:,} allowed")
        return b"".join(archive.read(entry) for entry in archive.infolist() if entry.filename.endswith(".pkl"))


def _tensors_by_offset(source: Source) -> dict[str, Stored] | None:
    """Locate every tensor of a PyTorch archive in the file. Return None if any tensor cannot be located."""
    with source.open() as file:
        entry_sizes = _entry_sizes(file)
        file.seek(0)
        try:  # on the meta device, PyTorch reads no elements and records the offset of every storage
            content = torch.load(file, map_location="meta", weights_only=True)
        except pickle.UnpicklingError:
            raise
        except Exception:  # the meta device does not support all tensors: read the file whole instead
            return None
    if entry_sizes is None:
        return None
    found = {name: _locate(tensor, source, entry_sizes) for name, tensor in _named_tensors(content, source).items()}
    located = {name: stored for name, stored in found.items() if stored is not None}
    return located if len(located) == len(found) else None


def _entry_sizes(file: BinaryFile) -> dict[int, int] | None:
    """Return the size in bytes of every entry of an archive, by the offset at which its content begins.

    Return None if the content is compressed, encrypted or in another byte order. Return None also if the tensors are
    not in the order in which PyTorch writes them, because PyTorch may compute offsets from this order.
    """
    sizes = {}
    with zipfile.ZipFile(file) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        order = [entry.filename.rpartition("/")[2] for entry in entries if "/data/" in entry.filename]
        if order != sorted(order, key=lambda name: int(name) if name.isdecimal() else -1):
            return None
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                return None
            if entry.filename.endswith("byteorder") and archive.read(entry) != sys.byteorder.encode():
                return None
            file.seek(entry.header_offset)
            name_length, extra_length = struct.unpack("<HH", file.read(ZIP_LOCAL_HEADER_BYTES)[26:])
            sizes[entry.header_offset + ZIP_LOCAL_HEADER_BYTES + name_length + extra_length] = entry.file_size
    return sizes


def _locate(tensor: Tensor, source: Source, entry_sizes: Mapping[int, int]) -> Stored | None:
    """Locate the elements of a tensor that was loaded on the meta device. Return None if this is not possible."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    storage = tensor.untyped_storage()
    base = getattr(storage, "_checkpoint_offset", None)
    if not isinstance(base, int) or tensor.is_neg() or storage.nbytes() > entry_sizes.get(base, -1):
        return None
    spec = TensorSpec(tensor.shape, tensor.dtype)
    strides, start, size = tensor.stride(), int(tensor.storage_offset()), tensor.dtype.itemsize
    span = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True)) + 1 if tensor.numel() else 0
    if min(start, *strides, 0) < 0 or (start + span) * size > storage.nbytes():
        return None
    if tensor.is_contiguous():
        return contiguous(source, base + start * size, spec)
    flat = contiguous(source, base + start * size, TensorSpec(torch.Size([span]), tensor.dtype))

    def read() -> Iterator[Tensor]:
        whole = flat.read().as_strided(spec.shape, strides)
        return (whole[slice(*block)] for block in row_blocks(spec.shape))

    return Stored(spec, read)


def _named_tensors(content: object, source: Source) -> dict[str, Tensor]:
    """Return the tensors of a loaded file: a state dict, a state dict inside of a dict, a list, or one tensor."""
    if isinstance(content, Tensor):
        return {"0": content}
    if isinstance(content, list | tuple) and all(isinstance(each, Tensor) for each in content):
        return {str(index): each for index, each in enumerate(content)}
    if isinstance(content, Mapping):
        for inner in (*(content.get(key) for key in STATE_DICT_KEYS), content):
            if isinstance(inner, Mapping):
                found = {str(name): each for name, each in inner.items() if isinstance(each, Tensor)}
                if found:
                    return found
            elif isinstance(inner, list | tuple) and inner and all(isinstance(each, Tensor) for each in inner):
                return {str(index): each for index, each in enumerate(inner)}
    kind = type(content).__name__
    raise DataError(f"{source.path} holds a {kind} without tensors: expected a state dict or a list of tensors")
