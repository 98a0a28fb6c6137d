"""Every error this package raises on purpose. Each says what was seen, what it means and what to do."""


class SpearError(Exception):
    """Base of all errors of this package."""


class ShapeError(SpearError):
    """Tensors whose shapes do not belong to one layer."""


class DtypeError(SpearError):
    """Something that is not a floating-point tensor, or tensors on different devices."""


class NonFiniteError(SpearError):
    """NaN or Inf where numbers are needed."""


class RankError(SpearError):
    """A gradient whose rank does not allow inversion, or contradicts the batch size given."""


class OptionError(SpearError):
    """An option outside its range."""


class DataError(SpearError):
    """A data set that cannot be read or does not hold what was asked for."""


class MissingExtraError(SpearError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'spearpp[{extra}]'")
