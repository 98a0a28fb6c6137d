"""Search with a next layer of few outputs, whose weights determine the non-zero entries of the columns of D.

With r outputs, d_i = S_i ∘ (W₂ᵀ d₂,i), where d₂,i has only r entries. Every column is therefore a pair e = B t,
d = L q, where B has r columns, and d = e or d = 0 at every neuron. These are m equations for b + r unknowns, and the
mask does not depend on p. Reflections find such pairs (``two_layers`` explains the method; β is 1 here). The gated
descent searches for the remaining inputs, orthogonal to those found here.
"""

import torch

from spearpp.inversion.matches import SIGMAS
from spearpp.inversion.next_layer import FewOutputs
from spearpp.inversion.problem import Problem
from spearpp.inversion.solutions import Pairs
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import min_masked_residual
from spearpp.linalg.recording import repeat
from spearpp.search.base import Proposals
from spearpp.search.gated.accept import new_columns
from spearpp.search.gated.signals import SignalsOfRound, SignalsOfRounds
from spearpp.types import Bool, Float, Tensor

REFLECTIONS = 600
"""Reflections per start. Design choice."""
ALPHA = 2.0
"""α: weight of d relative to e in the metric. Design choice."""
SOLVES = 3
"""How often each column is solved for its mask, and its mask updated. Design choice."""
MAX_SHARE_OUTSIDE = 1e-4
"""Largest share of S ∘ (B t) outside span(L) of an accepted column, unless noise allows more. Design choice."""
MIN_NEW = 0.02
"""Share of the starts of a round that must yield new directions for another round to follow. Design choice."""


class BackwardRounds:
    """Rounds of reflections that find columns of D from the weights of the next layer.

    A round has twice as many starts as ``size``. ``peeled`` are the inputs that single rows revealed before.
    """

    min_new = MIN_NEW
    """Share of the starts that a round must turn into new directions; at least one direction."""

    def __init__(self, problem: Problem, outputs: FewOutputs, size: int, dtype: torch.dtype, peeled: Pairs) -> None:
        self.problem, self.outputs, self.dtype = problem, outputs, dtype
        self.signals = (SignalsOfRounds if outputs.rounds > 1 else SignalsOfRound)(outputs, dtype)
        self.size = 2 * size
        """Starts of a round."""
        self.known = sphere.retract(peeled.directions)
        """Directions found so far."""
        self.basis = peeled.apart
        self.rows = problem.factors.left @ self.basis
        self.poor_rounds = 0
        """Number of successive rounds that found too little."""

    @property
    def over(self) -> bool:
        """Whether no further round should follow."""
        return len(self.known) == self.problem.batch_size or self.poor_rounds > 0

    def run(self, size: int, generator: torch.Generator) -> Proposals:
        """Run one round and return the new directions."""
        columns, reflections = self._columns(size, generator)
        new = new_columns(self.problem, self.outputs, self.known, columns)
        self.known = torch.cat([self.known, new])
        self.poor_rounds = 0 if len(new) >= max(1, self.min_new * size) else self.poor_rounds + 1
        return Proposals(new, starts=size, steps=size * reflections)

    def _columns(self, size: int, generator: torch.Generator) -> tuple[Float[Tensor, "k b"], int]:
        """Return candidate directions, and the number of reflections per start."""
        return self._solve(self._masks(size, generator)), REFLECTIONS

    def _masks(self, size: int, generator: torch.Generator) -> Bool[Tensor, "size m"]:
        """Reflect random starts and return the masks at the end."""
        rows, signals = self.rows.to(self.dtype), self.signals
        e = signals.starts(size, generator, self.dtype)
        mask = torch.rand(size, len(rows), generator=generator, device=generator.device) < 0.5
        d = ALPHA * e * mask.to(rows.device)

        def step() -> None:
            projected_d, projected_e = (d @ rows) @ rows.T, signals.project(e)
            reflected_d, reflected_e = 2 * projected_d - d, 2 * projected_e - e
            both = (reflected_e + ALPHA * reflected_d) / (1 + ALPHA**2)
            active = (reflected_e - both).square() + (reflected_d - ALPHA * both).square() < reflected_d.square()
            d.add_(torch.where(active, ALPHA * both, 0.0) - projected_d)
            e.add_(torch.where(active, both, reflected_e) - projected_e)
            norm = (d.square().sum(1, keepdim=True) + e.square().sum(1, keepdim=True)).sqrt_()
            d.div_(norm)
            e.div_(norm)

        repeat(step, REFLECTIONS, rows.device)
        return ((d @ rows) @ rows.T).abs() > 0.5 * (ALPHA * signals.project(e)).abs()

    def _solve(self, masks: Bool[Tensor, "k m"]) -> Float[Tensor, "kept b"]:
        """Solve t for each mask, and keep the columns that fit."""
        rows, live, problem = self.rows, self.problem.factors.live, self.problem
        masks = masks & live
        q, share = rows.new_zeros(0, rows.shape[1]), rows.new_zeros(0)
        for _ in range(SOLVES):
            block, norms = min_masked_residual(masks, self.outputs.span, rows)
            e = block[:, :, 0] @ self.outputs.span.T
            q = (e * masks) @ rows
            share = norms[:, 0] / torch.linalg.vector_norm(e * masks, dim=1).clamp_min(1e-300)
            masks = ((q @ rows.T).abs() > 0.5 * e.abs()) & live
        q = sphere.retract(q) @ self.basis.T
        noise = problem.tolerance.noise * problem.tolerance.amplification(q) * len(rows) ** 0.5
        return q[share <= (SIGMAS * noise).clamp_min(MAX_SHARE_OUTSIDE)]
