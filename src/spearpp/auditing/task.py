"""What the caller of an audit asks for: the arguments of ``spearpp.audit`` except the update, and the time budget."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spearpp.auditing.vocabulary import Words
from spearpp.errors import OptionError
from spearpp.inversion.result import Progress
from spearpp.model import Layer
from spearpp.model.loss import Loss
from spearpp.search import Search

MIN_SECONDS = 0.5
"""Smallest share of the budget that a layer gets, in seconds: less would not finish one round of a search."""
SEARCH_SHARE = 0.9
"""Share of the budget that the searches may use. A design choice: the rest is for replaying what they found."""
MEMORY = 2**33
"""Default limit for the work on one layer, in bytes. A design choice: 8 GiB fit on most machines."""


@dataclass(frozen=True, eq=False)
class Task:
    """The arguments of ``spearpp.audit``, which describes them, except the update.

    Raises:
        OptionError: if a value has the wrong type or is out of range.
    """

    model: nn.Module | None = None
    budget: float | None = None
    memory: int | None = MEMORY
    search: Search | None = None
    batch_size: int | None = None
    loss: Loss | None = Loss.CROSS_ENTROPY
    """The loss of the client; None if it is unknown."""
    input_shape: tuple[int, ...] | None = None
    vocabulary: Words | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    progress: Callable[[Layer, Progress], None] | None = None

    def __post_init__(self) -> None:
        given: Any = self  # a caller can pass values of any type
        if not isinstance(given.generator, torch.Generator):
            raise OptionError(f"generator={given.generator!r}: pass a torch.Generator, or None for one with seed 0")
        if given.search is not None and (isinstance(given.search, type) or not isinstance(given.search, Search)):
            raise OptionError(f"search={given.search!r}: pass a search object, for example spearpp.search.Gated()")
        if given.budget is not None and (not isinstance(given.budget, int | float) or not given.budget > 0):
            raise OptionError(f"budget={given.budget!r}: expected a positive number of seconds, or None")
        if given.batch_size is not None and not _is_count(given.batch_size):
            raise OptionError(f"batch_size={given.batch_size!r}: the number of samples the client trained on, or None")
        if given.input_shape is not None and not _is_shape(given.input_shape):
            raise OptionError(
                f"input_shape={given.input_shape!r}: expected positive numbers such as (3, 32, 32), or None"
            )
        check_memory(given.memory)


def check_memory(memory: int | None) -> None:
    """Check the ``memory`` option.

    Raises:
        OptionError: if the value is neither None nor a positive integer.
    """
    if memory is not None and not _is_count(memory):
        raise OptionError(f"memory={memory!r}: expected a number of bytes for one layer, or None for no limit")


def _is_count(value: object) -> bool:
    """Return whether a value is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_shape(value: object) -> bool:
    """Return whether a value is a non-empty sequence of positive whole numbers."""
    return isinstance(value, tuple | list) and len(value) > 0 and all(_is_count(each) for each in value)


@dataclass(frozen=True)
class Budget:
    """A time budget that has started."""

    deadline: float
    """The end of the budget on the clock ``time.monotonic``; inf if there is no limit."""

    @classmethod
    def of(cls, seconds: float | None, share: float = 1.0) -> "Budget":
        """Start a budget of these seconds, or of a share of them; None for no limit."""
        return cls(math.inf if seconds is None else time.monotonic() + share * seconds)

    def share(self, parts: int) -> float:
        """Return the seconds for each of the remaining parts of the work; inf if there is no limit."""
        return max(MIN_SECONDS, (self.deadline - time.monotonic()) / parts)

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return time.monotonic() >= self.deadline
