"""The search of SPEAR: kernels of random submatrices."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.linalg.nullspace import random_subsets
from spearpp.search.base import Proposals, Search, check_options, chunk_sizes, one_dimensional_kernels


@dataclass(frozen=True)
class KernelSampling(Search):
    """Sample b-1 rows of L at random. If one sample activates none of these neurons, its q is their kernel.

    If half of the entries of D are zero, a submatrix succeeds with probability about b·2^{1-b}. The work grows
    exponentially with the batch size: the probability is 0.06 at b = 8, 0.006 at b = 12 and 3e-6 at b = 24.

    >>> KernelSampling(starts=1000).starts
    1000
    """

    starts: int = 1_000_000
    """Maximum number of submatrices."""
    sparsity: float | None = None
    """τ, the minimum share of zeros of a candidate direction. None: the 1e-9 quantile of Bin(m, ½), divided by m."""
    chunk: int | None = None
    """Submatrices per chunk. None: as many as the cache or memory of the device allows."""

    def __post_init__(self) -> None:
        check_options(self, self.starts, self.sparsity, self.chunk)

    def propose(self, problem: Problem, generator: torch.Generator, deadline: float = math.inf) -> Iterator[Proposals]:
        """Yield the one-dimensional kernels, chunk by chunk."""
        del deadline  # chunks are short, and the caller checks the deadline after each
        rows = problem.live_rows
        m, b = rows.shape
        row_bytes = 8 * (3 * b * b + m)
        for size in chunk_sizes(self.starts, row_bytes, rows.device, self.chunk):
            chosen = random_subsets(size, m, b - 1, generator).to(rows.device)
            yield Proposals(one_dimensional_kernels(problem, rows[chosen]), starts=size, steps=0)
