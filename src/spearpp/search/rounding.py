"""From the minimum of a smooth loss to the sparse direction next to it.

Smooth losses have their minima near the sparse directions, not at them. Each rounding takes
approximate directions and returns exact ones, which may be fewer (no kernel) or more (several
draws for each).
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy
import torch

from spearpp.errors import OptionError
from spearpp.inversion.problem import Problem
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import lines, random_subsets
from spearpp.types import Float, Tensor


@runtime_checkable
class Rounding(Protocol):
    """What a search needs of a rounding."""

    def round(
        self, problem: Problem, directions: Float[Tensor, "k b"], generator: torch.Generator
    ) -> Float[Tensor, "found b"]:
        """Sparse unit directions near the given ones."""
        ...


@dataclass(frozen=True)
class NoRounding:
    """Leaves directions as they are."""

    def round(
        self, problem: Problem, directions: Float[Tensor, "k b"], generator: torch.Generator
    ) -> Float[Tensor, "found b"]:
        """The directions themselves."""
        return directions


@dataclass(frozen=True)
class SamplingRounding:
    """The paper's: the kernel of b rows drawn from the r rows on which |L q̂| is least.

    A draw counts if the kernel has dimension one.
    """

    ratio: float | None = None
    """r / b; None takes the paper's choice, 3 for layers of up to 200 neurons and 1.5 for wider ones."""
    draws: int = 1
    """Independent draws for each direction."""

    def __post_init__(self) -> None:
        if self.ratio is not None and not 1 <= self.ratio < math.inf:
            raise OptionError(f"SamplingRounding(ratio={self.ratio}): r must be at least b, so ratio at least 1")
        if self.draws < 1:
            raise OptionError(f"SamplingRounding(draws={self.draws}): draw at least once")

    def round(
        self, problem: Problem, directions: Float[Tensor, "k b"], generator: torch.Generator
    ) -> Float[Tensor, "found b"]:
        """Kernel vectors of the sampled rows, ``draws`` for each direction, where there is a kernel."""
        rows = problem.live_rows
        m, b = rows.shape
        ratio = (3.0 if m <= 200 else 1.5) if self.ratio is None else self.ratio
        r = min(m, max(b, round(ratio * b)))
        found = []
        for part in directions.double().split(chunk_size(rows.device, 8 * (m + self.draws * b * b))):
            smallest = (part @ rows.T).abs().topk(r, dim=1, largest=False).indices
            smallest = smallest.repeat_interleave(self.draws, dim=0)
            chosen = random_subsets(len(smallest), r, b, generator).to(rows.device)
            found.append(lines(problem, rows[smallest.gather(1, chosen)]))
        return torch.cat(found) if found else directions.double()


@dataclass(frozen=True)
class LinearProgramRounding:
    """The classical way: minimise ‖L q‖₁ subject to q̂·q = 1, solved exactly with HiGHS.

    One linear program with m + b variables for each direction; the paper found it slow.
    """

    def round(
        self, problem: Problem, directions: Float[Tensor, "k b"], generator: torch.Generator
    ) -> Float[Tensor, "found b"]:
        """The minimiser for each direction, normalised; directions whose program fails are left out."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array, hstack, identity, vstack

        rows = problem.live_rows.cpu().numpy()
        m, b = rows.shape
        # Variables (q, t) with -t ≤ L q ≤ t; minimise Σ t.
        left, eye = csr_array(rows), identity(m, format="csr")
        inequalities = vstack([hstack([left, -eye]), hstack([-left, -eye])], format="csr")
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
