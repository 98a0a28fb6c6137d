"""Rounding: from the minimum of a smooth loss to the sparse direction next to it.

The minima of smooth losses are near the sparse directions, but not exactly there. A rounding takes approximate
directions and returns exact ones. It may return fewer directions (if there is no kernel) or more (several draws per
direction).
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy
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


@dataclass(frozen=True)
class LinearProgramRounding:
    """Minimise ‖L q‖₁ subject to q̂·q = 1, exactly, with the solver HiGHS.

    This classical method solves one linear program with m + b variables per direction. The paper found it slow.
    """

    def round(
        self, problem: Problem, directions: Float[Tensor, "k b"], generator: torch.Generator
    ) -> Float[Tensor, "found b"]:
        """Return the normalised minimiser for each direction. Directions whose linear program fails are skipped."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array, hstack, identity, vstack

        rows = problem.live_rows.cpu().numpy()
        m, b = rows.shape
        # The variables are (q, t) with -t ≤ L q ≤ t. The program minimises Σ t.
        matrix, eye = csr_array(rows), identity(m, format="csr")
        inequalities = vstack([hstack([matrix, -eye]), hstack([-matrix, -eye])], format="csr")
        cost = numpy.concatenate([numpy.zeros(b), numpy.ones(m)])
        bounds = [(None, None)] * b + [(0, None)] * m
        found = []
        for direction in directions.double().cpu().numpy():
            equality = numpy.concatenate([direction, numpy.zeros(m)])[None]
            solved = linprog(
                cost,
                A_ub=inequalities,
                b_ub=numpy.zeros(2 * m),
                A_eq=equality,
                b_eq=[1.0],
                bounds=bounds,
                method="highs",
            )
            if solved.status == 0 and solved.x is not None:
                found.append(solved.x[:b] / numpy.linalg.norm(solved.x[:b]))
        return torch.tensor(numpy.array(found).reshape(-1, b), dtype=torch.float64, device=directions.device)
