"""Array types that carry their shape, written ``Float[Tensor, "m n"]``.

jaxtyping gives them their meaning: static checkers see a plain ``Tensor``, and the test
suite checks every call against the written shape. It is not needed to run the package;
without it the same annotations stand for ``Tensor``.
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

__all__ = ["Bool", "Float", "Int", "Tensor", "replace_rows", "select_rows", "to_device"]


@runtime_checkable
class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Table = TypeVar("Table", bound=_Dataclass)


def replace_rows(table: Table, where: Tensor, rows: Table) -> Table:
    """The same dataclass with other rows at the indices ``where``."""
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    tensors = {name: each for name, each in columns.items() if isinstance(each, Tensor)}
    return replace(table, **{n: each.index_copy(0, where, getattr(rows, n)) for n, each in tensors.items()})


def select_rows(table: Table, which: Tensor) -> Table:
    """A dataclass whose tensors have one row for each of k things, with some of the rows, by index or mask."""
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    return replace(table, **{name: each[which] for name, each in columns.items() if isinstance(each, Tensor)})


def to_device(table: Table, device: torch.device) -> Table:
    """The same dataclass with its tensors, and those of dataclasses in it, on another device."""
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    tensors = {name: each.to(device) for name, each in columns.items() if isinstance(each, Tensor)}
    tables = {name: to_device(each, device) for name, each in columns.items() if isinstance(each, _Dataclass)}
    return replace(table, **tensors, **tables)
