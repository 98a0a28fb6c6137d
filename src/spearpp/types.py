"""Tensor types that carry their shape, written ``Float[Tensor, "m n"]``, and operations on dataclasses of tensors.

The types come from jaxtyping. A static type checker sees a plain ``Tensor``. The test suite checks the shapes in every
call. jaxtyping is not needed to run the package: without it, the annotations mean ``Tensor``.
"""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int", "LayerTensors", "Tensor", "replace_rows", "select_rows", "to_device"]

LayerTensors = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""The tensors grad_weight, grad_bias, weight and bias of a layer, in the order of the arguments of ``invert``."""


@runtime_checkable
class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Table = TypeVar("Table", bound=_Dataclass)
"""A dataclass whose tensors all have the same number of rows."""


def replace_rows(table: Table, where: Tensor, rows: Table) -> Table:
    """Return a copy of a dataclass of tensors in which the rows with the indices ``where`` are replaced.

    Args:
        table: a dataclass whose tensors all have k rows.
        where: indices of the rows to replace, (j,).
        rows: a dataclass of the same type whose tensors have j rows.
    """
    columns = _tensors(table).items()
    return replace(table, **{name: column.index_copy(0, where, getattr(rows, name)) for name, column in columns})


def select_rows(table: Table, which: Tensor) -> Table:
    """Return a copy of a dataclass of tensors with some of the rows.

    Args:
        table: a dataclass whose tensors all have k rows.
        which: indices of the rows to keep, or a mask of shape (k,).
    """
    return replace(table, **{name: column[which] for name, column in _tensors(table).items()})


def to_device(table: Table, device: torch.device) -> Table:
    """Return a copy of a dataclass with its tensors, and those of nested dataclasses, on another device."""
    tensors = {name: column.to(device) for name, column in _tensors(table).items()}
    values = {field.name: getattr(table, field.name) for field in fields(table)}
    tables = {name: to_device(value, device) for name, value in values.items() if isinstance(value, _Dataclass)}
    return replace(table, **tensors, **tables)


def _tensors(table: _Dataclass) -> dict[str, Tensor]:
    values = {field.name: getattr(table, field.name) for field in fields(table)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
