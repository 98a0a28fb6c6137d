"""The protocol of a search, and helpers that searches share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from spearpp.errors import OptionError
from spearpp.inversion.matches import Matches
from spearpp.inversion.problem import Problem
from spearpp.inversion.solutions import Pairs, Solutions
from spearpp.linalg.chunks import small_chunk_size
from spearpp.linalg.nullspace import kernel_vectors
from spearpp.types import Float, Tensor


@dataclass(frozen=True)
class Proposals:
    """What one pass of a search found, and the work it took.

    A search for sparse directions fills the first three fields and leaves the others at their defaults. The other
    fields belong to searches that find more than a direction: ``matches`` and ``pairs`` to the gated search,
    ``solutions`` to ``Equations``.

    A *round* of a search, in names and docstrings of searches, is one such pass: starts, descent, candidates. It has
    nothing to do with a round of federated learning, which ``Problem.rounds`` and ``over_rounds`` count.
    """

    directions: Float[Tensor, "k b"]
    """Candidate directions q, one unit vector in each row. Shape (0, b) if there are only ``solutions``."""
    starts: int
    """Starting points, or submatrices, used in this round."""
    steps: int
    """Gradient steps, summed over the starts."""
    matches: Matches | None = None
    """The inputs of ``directions`` with their points, if they match the equations of two layers."""
    pairs: Pairs | None = None
    """The inputs of ``directions`` with their points, if single rows of the gradient revealed them."""
    solutions: Solutions | None = None
    """New samples that satisfy the equations of the whole network."""
    solved: bool = False
    """Whether each direction has already been solved for its own zeros (``spearpp.inversion.pool.refit``)."""


@runtime_checkable
class Search(Protocol):
    """A search for the samples of one layer. A frozen dataclass describes it, and ``propose`` runs it.

    Most searches propose sparse directions, from which the caller selects b. ``Equations`` proposes samples that
    satisfy the equations of the whole network. A search may inherit from this class, but need not.
    """

    @property
    def sparsity(self) -> float | None:
        """τ: the smallest share of zeros that makes a direction a candidate; None for the default."""
        ...

    @property
    def starts(self) -> int:
        """The number of starts, or submatrices, if nothing stops the search earlier."""
        ...

    def place(self, problem: Problem) -> Problem:
        """Return the problem on the device where the proposals of this search are to be selected and checked.

        Most searches return the problem unchanged.
        """
        return problem

    def propose(self, problem: Problem, generator: torch.Generator, deadline: float) -> Iterator[Proposals]:
        """Propose candidates, round by round. The caller stops iterating when the whole batch is found.

        Args:
            problem: the layer.
            generator: source of randomness.
            deadline: time on ``time.monotonic()``'s clock after which no further round should begin; inf for none. The
                caller checks the deadline after every round, so a search may ignore it if its rounds are short.
        """
        ...


FIRST_CHUNK = 2048
"""Starts of the first chunk. A design choice: easy batches are found within this number of starts, which ends the
search."""


def chunk_sizes(starts: int, row_bytes: int, device: torch.device, chunk: int | None) -> Iterator[int]:
    """Split ``starts`` into chunks whose working set (``row_bytes`` for each start) stays bounded.

    The first chunk is small, so that easy batches stop early. The others are as large as a CPU's cache, or half a
    gigabyte of a GPU, allows. If ``chunk`` is given, all chunks have this size.
    """
    limit = max(128, small_chunk_size(device, row_bytes)) if chunk is None else chunk
    size = min(FIRST_CHUNK, limit) if chunk is None else chunk
    while starts > 0:
        yield min(size, starts)
        starts -= size
        size = limit


def check_options(search: object, starts: int, sparsity: float | None, chunk: int | None) -> None:
    """Reject options outside their range with an error that names the search."""
    name = type(search).__name__
    for option, value in (("starts", starts), ("chunk", chunk)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise OptionError(f"{name}({option}={value!r}): expected a whole number")
    if starts < 1:
        raise OptionError(f"{name}(starts={starts}): at least one start is needed")
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise OptionError(f"{name}(sparsity={sparsity}): τ is a share of the neurons, between 0 and 1")
    if chunk is not None and chunk < 1:
        raise OptionError(f"{name}(chunk={chunk}): a chunk has at least one start")


def one_dimensional_kernels(problem: Problem, rows: Float[Tensor, "sets r b"]) -> Float[Tensor, "found b"]:
    """Return the kernel vectors of those sets of rows of L whose kernel has dimension one, up to the gradient noise."""
    q, values = kernel_vectors(rows)
    allowed = problem.tolerance.kernel(rows.shape[1], q)
    return q[(values[:, 0] <= allowed) & (values[:, 1] > allowed)]
