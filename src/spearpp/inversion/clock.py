"""How long each stage takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")


class Clock:
    """Seconds by stage, of the host and of whatever the stage left running on a GPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count what happens inside for the stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began

    def each(self, stage: str, items: Iterator[Item]) -> Iterator[Item]:
        """The same items, with the time each takes to arrive counted for the stage."""
        while True:
            with self(stage):
                item = next(items, None)
            if item is None:
                return
            yield item
