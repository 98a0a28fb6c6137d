"""A time limit for long computations: inner loops ask whether the time is up, and end the whole computation.

The limit belongs to the current thread, so that functions need no argument for it.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_DEADLINE = ContextVar("deadline", default=math.inf)


class OutOfTimeError(Exception):
    """The time limit has passed. Only code inside of ``time_limit`` sees this exception."""


@contextmanager
def time_limit(deadline: float) -> Iterator[None]:
    """Let ``check_time`` raise an error inside of the block after a deadline on the clock ``time.monotonic``.

    An outer limit still holds inside of the block.

    >>> with time_limit(time.monotonic() - 1):
    ...     check_time()
    Traceback (most recent call last):
    spearpp.linalg.time_limit.OutOfTimeError
    """
    token = _DEADLINE.set(min(deadline, _DEADLINE.get()))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def check_time() -> None:
    """Raise an error if the time limit of the surrounding ``time_limit`` has passed.

    Raises:
        OutOfTimeError: if the deadline has passed.
    """
    if time_is_up():
        raise OutOfTimeError


def time_is_up() -> bool:
    """Return whether the time limit of the surrounding ``time_limit`` has passed."""
    deadline = _DEADLINE.get()
    return deadline < math.inf and time.monotonic() >= deadline
