"""What a search is: a source of candidate directions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from spearpp.errors import OptionError
from spearpp.problem import Problem
from spearpp.shapes import Float, Tensor


@dataclass(frozen=True)
class Proposals:
    """Directions from one chunk of a search, and the work they took."""

    directions: Float[Tensor, "k b"]
    starts: int
    """Starting points (or submatrices) spent on this chunk."""
    steps: int
    """Gradient steps taken, summed over the starts."""


class Search(Protocol):
    """A frozen description of a search; ``propose`` runs it."""

    @property
    def sparsity(self) -> float | None:
        """τ: the least share of zeros that makes a direction a candidate; None for the default."""
        ...

    @property
    def starts(self) -> int:
        """How many starts (or submatrices) there will be if nothing stops the search."""
        ...

    def propose(self, problem: Problem, generator: torch.Generator) -> Iterator[Proposals]:
        """Directions, chunk by chunk; the caller stops iterating when it has what it needs."""
        ...


FIRST_CHUNK = 2048
CACHE_BYTES = 2**20
DEVICE_BYTES = 2**29


def chunk_sizes(starts: int, row_bytes: int, device: torch.device, chunk: int | None) -> Iterator[int]:
    """Cut ``starts`` into chunks whose working set (``row_bytes`` for each start) stays bounded.

    On a CPU a chunk fits the second-level cache. On a GPU chunks begin small, so that easy batches
    stop early, and double up to half a gigabyte.
    """
    if chunk is not None:
        size = limit = chunk
    elif device.type == "cpu":
        size = limit = max(64, CACHE_BYTES // row_bytes)
    else:
        limit = max(256, DEVICE_BYTES // row_bytes)
        size = min(FIRST_CHUNK, limit)
    while starts > 0:
        yield min(size, starts)
        starts -= size
        size = min(2 * size, limit)


def check_options(search: object, starts: int, sparsity: float | None, chunk: int | None) -> None:
    """Refuse options outside their range, naming the search."""
    name = type(search).__name__
    if starts < 1:
        raise OptionError(f"{name}(starts={starts}): at least one start is needed")
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise OptionError(f"{name}(sparsity={sparsity}): τ is a share of the neurons, between 0 and 1")
    if chunk is not None and chunk < 1:
        raise OptionError(f"{name}(chunk={chunk}): a chunk has at least one start")
