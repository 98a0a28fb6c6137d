"""Rounding: from the minimum of a smooth loss to the sparse direction next to it.

The minima of smooth losses are near the sparse directions, but not exactly there. A rounding takes approximate
directions and returns exact ones. It may return fewer directions (if there is no kernel) or more (several draws per
direction). The usual rounding by linear programming is not here: the paper found that it does not scale.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from spearpp.errors import OptionError
from spearpp.inversion.problem import Problem
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import random_subsets
from spearpp.search.base import one_dimensional_kernels
from spearpp.types import Float, Tensor


@runtime_checkable
class Rounding(Protocol):
    """Interface between a search and a rounding."""

    def round(
        self, problem: Problem, directions: Float[Tensor, "k b"], generator: torch.Generator
    ) -> Float[Tensor, "found b"]:
        """Return sparse unit directions near the given ones."""
        ...


@dataclass(frozen=True)
class NoRounding:
    """Return directions unchanged."""

    def round(
        self, problem: Problem, directions: Float[Tensor, "k b"], generator: torch.Generator
    ) -> Float[Tensor, "found b"]:
        """Return the given directions."""
        return directions


@dataclass(frozen=True)
class SamplingRounding:
    """The rounding of the paper: the kernel of b rows sampled from the r rows with the smallest |L q̂|.

    Draws whose kernel does not have dimension one are discarded.
    """

    ratio: float | None = None
    """r / b. None: the choice of the paper, which is 3 for layers of at most 200 neurons and 1.5 for wider layers."""
    draws: int = 1
    """Number of independent draws per direction."""

    def __post_init__(self) -> None:
        if self.ratio is not None and not 1 <= self.ratio < math.inf:
            raise OptionError(f"SamplingRounding(ratio={self.ratio}): the ratio r/b must be finite and at least 1")
        if self.draws < 1:
            raise OptionError(f"SamplingRounding(draws={self.draws}): at least one draw is needed")

    def round(
        self, problem: Problem, directions: Float[Tensor, "k b"], generator: torch.Generator
    ) -> Float[Tensor, "found b"]:
        """Return the kernel vectors of sampled rows, at most ``draws`` for each direction."""
        rows = problem.live_rows
        m, b = rows.shape
        ratio = (3.0 if m <= 200 else 1.5) if self.ratio is None else self.ratio
        r = min(m, max(b, round(ratio * b)))
        found = []
        for part in directions.double().split(chunk_size(rows.device, 8 * (m + self.draws * b * b))):
            smallest = (part @ rows.T).abs().topk(r, dim=1, largest=False).indices
            smallest = smallest.repeat_interleave(self.draws, dim=0)
            chosen = random_subsets(len(smallest), r, b, generator).to(rows.device)
            found.append(one_dimensional_kernels(problem, rows[smallest.gather(1, chosen)]))
        return torch.cat(found) if found else directions.double()
