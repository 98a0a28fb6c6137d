"""What a search is: a source of candidate directions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from spearpp.errors import OptionError
from spearpp.inversion.matches import Matches
from spearpp.inversion.pairs import Pairs
from spearpp.inversion.problem import Problem
from spearpp.types import Float, Tensor


@dataclass(frozen=True)
class Proposals:
    """Directions from one chunk of a search, and the work they took."""

    directions: Float[Tensor, "k b"]
    starts: int
    """Starting points (or submatrices) spent on this chunk."""
    steps: int
    """Gradient steps taken, summed over the starts."""
    matches: Matches | None = None
    """The same inputs with their points, where two witnesses gave them."""
    pairs: Pairs | None = None
    """The same inputs with their points, where single rows gave them."""
    solved: bool = False
    """Whether each was solved for its own zeros already (``candidates.refit``)."""


@runtime_checkable
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
CACHE_BYTES = 2**22
DEVICE_BYTES = 2**29


def chunk_sizes(starts: int, row_bytes: int, device: torch.device, chunk: int | None) -> Iterator[int]:
    """Cut ``starts`` into chunks whose working set (``row_bytes`` for each start) stays bounded.

    The first is small, so that easy batches stop early; the others are as large as a CPU's cache or
    half a gigabyte of a GPU allows. A given ``chunk`` is the size of all of them.
    """
    bound = CACHE_BYTES if device.type == "cpu" else DEVICE_BYTES
    limit = max(128, bound // row_bytes) if chunk is None else chunk
    size = min(FIRST_CHUNK, limit) if chunk is None else chunk
    while starts > 0:
        yield min(size, starts)
        starts -= size
        size = limit


def check_options(search: object, starts: int, sparsity: float | None, chunk: int | None) -> None:
    """Refuse options outside their range, naming the search."""
    name = type(search).__name__
    for option, value in (("starts", starts), ("chunk", chunk)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise OptionError(f"{name}({option}={value!r}): a whole number")
    if starts < 1:
        raise OptionError(f"{name}(starts={starts}): at least one start is needed")
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise OptionError(f"{name}(sparsity={sparsity}): τ is a share of the neurons, between 0 and 1")
    if chunk is not None and chunk < 1:
        raise OptionError(f"{name}(chunk={chunk}): a chunk has at least one start")
