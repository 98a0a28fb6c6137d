"""Measure how long each stage of an inversion takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")


class Clock:
    """Wall-clock seconds of each stage, including GPU kernels that the stage launched.

    >>> clock = Clock()
    >>> with clock("search"):
    ...     pass
    >>> list(clock.seconds)
    ['search']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time that the ``with`` block takes to the stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began

    def each(self, stage: str, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items, and add the time that the iterator needs for each item to the stage."""
        while True:
            with self(stage):
                item = next(items, None)
            if item is None:
                return
            yield item
