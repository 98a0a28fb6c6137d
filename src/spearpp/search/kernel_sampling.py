"""SPEAR's own search: kernels of random submatrices."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.linalg.nullspace import lines, random_subsets
from spearpp.search.base import Proposals, check_options, chunk_sizes


@dataclass(frozen=True)
class KernelSampling:
    """Draw b-1 rows of L at random; if one sample is silent in all of them, their kernel is its q.

    With half of D zero a draw succeeds with probability about b·2^{1-b}, so the work grows
    exponentially with the batch: 0.06 a draw at b = 8, 0.006 at b = 12, 3e-6 at b = 24.

    >>> KernelSampling(starts=1000).starts
    1000
    """

    starts: int = 1_000_000
    """Submatrices drawn."""
    sparsity: float | None = None
    """τ; None: the 1e-9 quantile of Bin(m, ½) over m."""
    chunk: int | None = None
    """Submatrices at a time; None: from the cache or memory of the device."""

    def __post_init__(self) -> None:
        check_options(self, self.starts, self.sparsity, self.chunk)

    def propose(self, problem: Problem, generator: torch.Generator) -> Iterator[Proposals]:
        """The one-dimensional kernels, chunk by chunk."""
        rows = problem.live_rows
        m, b = rows.shape
        row_bytes = 8 * (3 * b * b + m)
        for size in chunk_sizes(self.starts, row_bytes, rows.device, self.chunk):
            chosen = random_subsets(size, m, b - 1, generator).to(rows.device)
            yield Proposals(lines(problem, rows[chosen]), starts=size, steps=0)
