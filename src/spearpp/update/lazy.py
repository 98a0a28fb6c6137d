"""Tensors that stay where they are until someone looks, and then come a block of rows at a time.

One layer of a large model fits into memory where the whole update does not, so nothing here keeps what it has read.
What is done to every number alike (a difference, another dtype) is done to blocks, with the same bits as to a whole.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spearpp.types import Tensor

if TYPE_CHECKING:
    Named = Mapping[str, Tensor]
else:
    Named = Mapping  # what checks types at run time looks at a value, and would have it read
NUMBERS = 2**20
"""Numbers in a block, unless a single row has more."""


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor without reading it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """The outline of a tensor that is there."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def numel(self) -> int:
        """How many numbers it holds."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when it is read."""
        return self.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor that can be read, again and again."""

    outline: TensorSpec
    blocks: Callable[[], Iterator[Tensor]]
    """Its rows in order, so many at a time as ``row_blocks`` says."""
    held: Tensor | None = None
    """Itself, where it is in memory."""

    @classmethod
    def holding(cls, tensor: Tensor) -> "Stored":
        """A tensor that is in memory."""
        rows = tensor if tensor.ndim else tensor[None]
        return cls(TensorSpec.of(tensor), lambda: (rows[slice(*each)] for each in row_blocks(tensor.shape)), tensor)

    def read(self) -> Tensor:
        """All of it."""
        if self.held is not None:
            return self.held
        whole = torch.empty(self.outline.shape, dtype=self.outline.dtype, device=self.outline.device)
        flat, place = whole.view(-1), 0
        for block in self.blocks():
            flat[place : place + block.numel()] = block.reshape(-1)
            place += block.numel()
        return whole


class Lazy(Named):
    """Tensors by name, each read anew when it is asked for: whoever needs one twice keeps it, or pays twice."""

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
        return dict, (dict(self),)  # whoever gets a copy may not have the files

    def nonzero(self, name: str) -> bool:
        """Whether any of its numbers is not zero. All of it is read for that, once."""
        if name not in self._nonzero:
            found = [bool(block.any()) for block in self.stored[name].blocks()]
            self._nonzero[name] = any(found)
        return self._nonzero[name]


def row_blocks(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """The first row of each block, and the first of the next; a single number is one row.

    >>> list(heights(torch.Size([5, 2**19])))
    [(0, 2), (2, 4), (4, 5)]
    """
    rows = shape[0] if shape else 1
    step = max(1, NUMBERS // max(1, shape[1:].numel()))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def tensor_specs(tensors: Named) -> dict[str, TensorSpec]:
    """What is known of each without reading any."""
    if isinstance(tensors, Lazy):
        return {name: each.outline for name, each in tensors.stored.items()}
    return {name: TensorSpec.of(each) for name, each in tensors.items()}


def blocks(tensors: Named, name: str) -> Iterator[Tensor]:
    """The rows of one of them in order, some at a time."""
    return _stored(tensors, name).blocks()


def nonzero(tensors: Named, name: str) -> bool:
    """Whether any number of one of them is not zero."""
    return tensors.nonzero(name) if isinstance(tensors, Lazy) else bool(tensors[name].any())


def pick(tensors: Named, names: Mapping[str, str]) -> Named:
    """Some of them under other names: new name, old name."""
    if isinstance(tensors, Lazy):
        return Lazy({new: tensors.stored[old] for new, old in names.items()})
    return {new: tensors[old] for new, old in names.items()}


def elementwise(change: Callable[..., Tensor], tensors: Named, *others: Named) -> Named:
    """``change(tensor, …)`` for every one, with those of the same name: now if all are in memory, else when read.

    It is called with blocks, so it must do the same to every number.
    """
    given = (tensors, *others)
    if not any(isinstance(each, Lazy) for each in given):
        return {name: change(*(each[name] for each in given)) for name in tensors}
    return Lazy({name: changed(change, *(_stored(each, name) for each in given)) for name in tensors})


def changed(change: Callable[..., Tensor], *parts: Stored) -> Stored:
    """The same of one tensor."""
    empty = (torch.empty(0, dtype=each.outline.dtype, device=each.outline.device) for each in parts)
    kind: Any = change(*empty)
    outline = TensorSpec(parts[0].outline.shape, kind.dtype, kind.device)

    def made() -> Iterator[Tensor]:
        return (change(*each) for each in zip(*(part.blocks() for part in parts), strict=True))

    return Stored(outline, made)


def _stored(tensors: Named, name: str) -> Stored:
    return tensors.stored[name] if isinstance(tensors, Lazy) else Stored.holding(tensors[name])
