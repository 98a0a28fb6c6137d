"""Descent on the sphere from many random starts: the code that all descents share.

A descent minimises φ(L q) over unit vectors q. The Euclidean gradient is Lᵀ φ'(L q). The variants differ in how a step
uses the gradient.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from spearpp.errors import OptionError
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.search.base import Proposals, Search, check_options, chunk_sizes
from spearpp.search.losses import L1, SparsityLoss
from spearpp.search.rounding import NoRounding, Rounding, SamplingRounding
from spearpp.types import Float, Tensor

Step = Callable[[Tensor, Tensor, float], None]
"""Moves the points (first argument, in place) along their gradients (second) at a rate (third)."""


@dataclass(frozen=True)
class Descent(Search):
    """Options of a descent.

    A search stops as soon as every input is recovered, so ``starts`` is an upper bound.
    """

    loss: SparsityLoss = L1()
    """φ."""
    starts: int = 1_000_000
    """Maximum number of starts."""
    steps: int = 500
    """Steps per start."""
    rates: tuple[tuple[int, float], ...] = ((0, 1e-1),)
    """(first step, learning rate) pairs: ((0, 1e-1), (200, 1e-3)) drops the rate after 200 steps."""
    rounding: Rounding | None = None
    """How end points are rounded. None: by sampling for smooth losses, not at all for L1."""
    sparsity: float | None = None
    """τ, the minimum share of zeros of a candidate direction. None: the 1e-9 quantile of Bin(m, ½), divided by m."""
    chunk: int | None = None
    """Starts per chunk. None: as many as the cache or memory of the device allows."""
    dtype: torch.dtype = torch.float32
    """Precision of the search. Candidate directions are refined in float64."""

    def __post_init__(self) -> None:
        check_options(self, self.starts, self.sparsity, self.chunk)
        name = type(self).__name__
        if not isinstance(self.loss, SparsityLoss) or isinstance(self.loss, type):
            raise OptionError(f"{name}(loss={self.loss!r}): pass a loss object, for example spearpp.search.losses.L1()")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise OptionError(f"{name}(steps={self.steps}): at least one step is needed")
        if not self.rates or self.rates[0][0] != 0 or not all(0 < rate < math.inf for _, rate in self.rates):
            raise OptionError(
                f"{name}(rates={self.rates}): pass (first step, rate) pairs from step 0 on, all rates positive"
            )

    @abstractmethod
    def stepper(self, points: Float[Tensor, "starts b"]) -> Step:
        """Return a new step rule for these points, including its state."""

    def descend(self, rows: Float[Tensor, "m b"], points: Float[Tensor, "starts b"]) -> Float[Tensor, "starts b"]:
        """Take all steps from the given points, which change in place, and return them.

        A step costs two thin matrix products: 4·m·b operations per start.
        """
        step = self.stepper(points)
        transposed = rows.T.contiguous()
        y = rows.new_empty(points.shape[0], rows.shape[0])
        gradient = torch.empty_like(points)
        rates = dict(self.rates)
        rate = rates[0]
        for index in range(self.steps):
            rate = rates.get(index, rate)
            torch.mm(points, transposed, out=y)
            torch.mm(self.loss.gradient(y, out=y), rows, out=gradient)
            step(points, gradient, rate)
        return points

    def propose(self, problem: Problem, generator: torch.Generator, deadline: float = math.inf) -> Iterator[Proposals]:
        """Yield the end points of all starts, chunk by chunk, rounded if the loss needs rounding."""
        del deadline  # chunks are short, and the caller checks the deadline after each
        rounding = self.rounding or (NoRounding() if self.loss.sparse_minima else SamplingRounding())
        rows = problem.live_rows.to(self.dtype)
        row_bytes = rows.shape[0] * rows.element_size()
        for size in chunk_sizes(self.starts, row_bytes, rows.device, self.chunk):
            points = sphere.uniform(size, problem.batch_size, generator, dtype=self.dtype, device=rows.device)
            found = rounding.round(problem, self.descend(rows, points).double(), generator)
            yield Proposals(found, starts=size, steps=size * self.steps)
