"""The errors that this package raises on purpose. Each message states what was found and what the user can do."""


class SpearError(Exception):
    """Base class of all errors of this package."""


class ShapeError(SpearError):
    """The shapes of the tensors do not fit each other."""


class DtypeError(SpearError):
    """A value is not a floating-point tensor, or tensors are on different devices."""


class NonFiniteError(SpearError):
    """A tensor holds NaN or Inf."""


class RankError(SpearError):
    """The rank of a gradient does not allow inversion, or contradicts the given batch size."""


class OptionError(SpearError):
    """An option is outside of its range."""


class DataError(SpearError):
    """A file or data set cannot be read, or does not contain what is needed."""


class MissingExtraError(SpearError, ImportError):
    """An optional dependency is not installed. The message names the extra to install.

    Args:
        package: name of the missing package.
        extra: name of the extra of spearpp that installs the package.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'spearpp[{extra}]'")
