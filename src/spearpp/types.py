"""Tensor types that carry their shape, written ``Float[Tensor, "m n"]``, and operations on dataclasses of tensors.

The types come from jaxtyping. A static type checker sees a plain ``Tensor``. During tests, the first calls of each
function are checked against these shapes. jaxtyping is not needed to run the package: without it, the annotations mean
``Tensor``.
"""

from collections.abc import Callable
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

__all__ = ["Bool", "Float", "Int", "LayerTensors", "Tensor", "join_rows", "replace_rows", "select_rows", "to_device"]

LayerTensors = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""The tensors grad_weight, grad_bias, weight and bias of a layer, in the order of the arguments of ``invert``."""


@runtime_checkable
class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Table = TypeVar("Table", bound=_Dataclass)
"""A dataclass whose tensors, also those in dictionaries, all have the same number of rows."""


def select_rows(table: Table, which: Tensor) -> Table:
    """Return a copy of a dataclass of tensors with some of the rows.

    Args:
        table: a dataclass whose tensors all have k rows.
        which: indices of the rows to keep, or a mask of shape (k,).
    """
    return _with_tensors(lambda column: column[which], table)


def replace_rows(table: Table, where: Tensor, rows: Table) -> Table:
    """Return a copy of a dataclass of tensors in which the rows with the indices ``where`` are replaced.

    Args:
        table: a dataclass whose tensors all have k rows.
        where: indices of the rows to replace, (j,).
        rows: a dataclass of the same type whose tensors have j rows.
    """
    return _with_tensors(lambda column, new: column.index_copy(0, where, new), table, rows)


def join_rows(*tables: Table) -> Table:
    """Return the rows of dataclasses of tensors, one below the other."""
    return _with_tensors(lambda *columns: torch.cat(columns), *tables)


def to_device(table: Table, device: torch.device) -> Table:
    """Return a copy of a dataclass with its tensors, and those of nested dataclasses, on another device."""
    values = {field.name: getattr(table, field.name) for field in fields(table)}
    tables = {name: to_device(value, device) for name, value in values.items() if isinstance(value, _Dataclass)}
    return replace(_with_tensors(lambda column: column.to(device), table), **tables)


def _with_tensors(change: Callable[..., Tensor], table: Table, *others: Table) -> Table:
    """Return a copy of a dataclass with its tensors changed. ``change`` also gets those of the other dataclasses."""
    changed: dict[str, Any] = {}
    for name in (field.name for field in fields(table)):
        value, *more = (getattr(each, name) for each in (table, *others))
        if isinstance(value, Tensor):
            changed[name] = change(value, *more)
        elif isinstance(value, dict) and all(isinstance(each, Tensor) for each in value.values()):
            changed[name] = {key: change(each, *(other[key] for other in more)) for key, each in value.items()}
    return replace(table, **changed)
