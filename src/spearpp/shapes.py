"""Array types that carry their shape, written ``Float[Tensor, "m n"]``.

jaxtyping gives them their meaning: static checkers see a plain ``Tensor``, and the test
suite checks every call against the written shape. It is not needed to run the package;
without it the same annotations stand for ``Tensor``.
"""

from typing import TYPE_CHECKING, Any

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

__all__ = ["Bool", "Float", "Int", "Tensor"]
