"""The errors that this package raises on purpose. Each message states what was found and what the user can do."""

from collections.abc import Iterator
from contextlib import contextmanager

CHECK_MODEL = "check --model, or omit it: every 2-D weight is then tried"
"""Hint for an update that does not belong to the given model."""


class SpearError(Exception):
    """Base class of all errors of this package.

    Args:
        message: what was found and what the user can do.
        hint: what a user of the command line can try next, or an empty string. The command prints it below the message.
    """

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ShapeError(SpearError):
    """The shapes of the tensors do not fit each other."""


class DtypeError(SpearError):
    """A tensor has the wrong dtype or device: it is no floating-point tensor, or the others are on another device."""


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


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Import an optional dependency inside this context. If it is missing, the error says what to install.

    >>> with needs("nowhere", "text"):
    ...     import nowhere
    Traceback (most recent call last):
    ...
    spearpp.errors.MissingExtraError: nowhere is not installed: pip install 'spearpp[text]'
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra) from error
