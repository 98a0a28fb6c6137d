"""Tensors that stay in their file until they are used, and are then read in blocks of rows.

A single layer of a large model fits into memory where the whole update may not. For this reason nothing in this
module caches the numbers it reads. Elementwise operations (a difference, a change of dtype) are applied to one block
at a time. The result has the same bits as the operation on the whole tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spearpp.types import Tensor

if TYPE_CHECKING:
    Named = Mapping[str, Tensor]
else:
    Named = Mapping  # a run-time type checker would inspect a value of the mapping, and so read it from its file
NUMBERS_PER_BLOCK = 2**20
"""Largest number of elements per block, unless a single row has more elements. A design choice: a block takes 4 MiB in
float32, which is small beside any layer and large enough to read efficiently."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor, known without reading the tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the specification of a tensor in memory."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Number of bytes that the tensor takes in memory."""
        return self.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor that can be read any number of times."""

    spec: TensorSpec
    blocks: Callable[[], Iterator[Tensor]]
    """Return the rows in order, in the blocks that ``row_blocks`` lists."""
    tensor: Tensor | None = None
    """The tensor itself if it is in memory, else None."""

    @classmethod
    def in_memory(cls, tensor: Tensor) -> "Stored":
        """Wrap a tensor that is in memory."""
        rows = tensor if tensor.ndim else tensor[None]
        return cls(TensorSpec.of(tensor), lambda: (rows[slice(*block)] for block in row_blocks(tensor.shape)), tensor)

    def read(self) -> Tensor:
        """Return the whole tensor."""
        if self.tensor is not None:
            return self.tensor
        whole = torch.empty(self.spec.shape, dtype=self.spec.dtype, device=self.spec.device)
        flat, position = whole.view(-1), 0
        for block in self.blocks():
            flat[position : position + block.numel()] = block.reshape(-1)
            position += block.numel()
        return whole


class Lazy(Named):
    """Mapping from names to tensors that reads a tensor from its file at every access.

    The mapping keeps no tensor. A caller that needs a tensor twice should keep it.
    """

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = dict(stored)
        self._nonzero: dict[str, bool] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __or__(self, other: Named) -> dict[str, Tensor]:
        return {**self, **other}

    def __ror__(self, other: Named) -> dict[str, Tensor]:
        return {**other, **self}

    def __repr__(self) -> str:
        return f"Lazy({len(self)} tensors)"

    def __reduce__(self) -> tuple[Callable[..., dict[str, Tensor]], tuple[dict[str, Tensor]]]:
        return dict, (dict(self),)  # the process that unpickles a copy may not have the files

    def nonzero(self, name: str) -> bool:
        """Return whether a tensor has any nonzero element.

        The first call reads the whole tensor, block by block. Later calls return the remembered answer.
        """
        if name not in self._nonzero:
            found = [bool(block.any()) for block in self.stored[name].blocks()]  # reads to the end to detect damage
            self._nonzero[name] = any(found)
        return self._nonzero[name]


def row_blocks(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Return the (first row, last row + 1) of every block. A tensor without dimensions counts as one row.

    >>> list(row_blocks(torch.Size([5, 2**19])))
    [(0, 2), (2, 4), (4, 5)]
    """
    rows = shape[0] if shape else 1
    step = max(1, NUMBERS_PER_BLOCK // max(1, shape[1:].numel()))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def tensor_specs(tensors: Named) -> dict[str, TensorSpec]:
    """Return the specification of every tensor, by name, without reading any tensor."""
    if isinstance(tensors, Lazy):
        return {name: stored.spec for name, stored in tensors.stored.items()}
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


def blocks(tensors: Named, name: str) -> Iterator[Tensor]:
    """Return the rows of one tensor in order, in the blocks that ``row_blocks`` lists."""
    return _stored(tensors, name).blocks()


def nonzero(tensors: Named, name: str) -> bool:
    """Return whether one tensor has any nonzero element."""
    return tensors.nonzero(name) if isinstance(tensors, Lazy) else bool(tensors[name].any())


def pick(tensors: Named, names: Mapping[str, str]) -> Named:
    """Select and rename tensors. ``names`` maps every new name to the old one."""
    if isinstance(tensors, Lazy):
        return Lazy({new: tensors.stored[old] for new, old in names.items()})
    return {new: tensors[old] for new, old in names.items()}


def elementwise(change: Callable[..., Tensor], tensors: Named, *others: Named) -> Named:
    """Apply ``change(tensor, *others)`` to every tensor and to the tensors of the same name in ``others``.

    If all tensors are in memory, ``change`` runs now. Otherwise it runs whenever a result is read. ``change`` receives
    blocks of rows, so it must treat every element alike.
    """
    operands = (tensors, *others)
    if not any(isinstance(operand, Lazy) for operand in operands):
        return {name: change(*(operand[name] for operand in operands)) for name in tensors}
    return Lazy({name: map_blocks(change, *(_stored(each, name) for each in operands)) for name in tensors})


def map_blocks(change: Callable[..., Tensor], *operands: Stored) -> Stored:
    """Apply an elementwise function to stored tensors of one shape, block by block, whenever the result is read."""
    empty = change(*(torch.empty(0, dtype=each.spec.dtype, device=each.spec.device) for each in operands))
    spec = TensorSpec(operands[0].spec.shape, empty.dtype, empty.device)

    def mapped() -> Iterator[Tensor]:
        return (change(*parts) for parts in zip(*(operand.blocks() for operand in operands), strict=True))

    return Stored(spec, mapped)


def _stored(tensors: Named, name: str) -> Stored:
    return tensors.stored[name] if isinstance(tensors, Lazy) else Stored.in_memory(tensors[name])
