"""Search with a next layer of few outputs, whose weights determine the non-zero entries of the columns of D.

With r outputs, d_i = S_i ∘ (W₂ᵀ d₂,i), where d₂,i has only r entries. Every column is therefore a pair e = B t,
d = L q, where B has r columns, and d = e or d = 0 at every neuron. These are m equations for b + r unknowns, and the
mask does not depend on p. Reflections find such pairs (``two_layers`` explains the method). The gated descent searches
for the remaining inputs, orthogonal to those found here.
"""

import torch

from spearpp.inversion.matches import SIGMAS
from spearpp.inversion.next_layer import FewOutputs
from spearpp.inversion.pool import refit
from spearpp.inversion.problem import Problem
from spearpp.inversion.solutions import Pairs
from spearpp.inversion.tolerance import SAME_DIRECTION
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import complement, independent, min_masked_residual
from spearpp.linalg.recording import repeat
from spearpp.search.base import Proposals
from spearpp.search.gated.accept import sent_back
from spearpp.search.gated.refine import concentrated
from spearpp.search.gated.signals import signals_of
from spearpp.search.gated.two_layers import SOLVED_COSINE
from spearpp.types import Bool, Float, Tensor

BETA = 1.0
"""β of the reflections: no relaxation. Measured with β = 1 (docs/lab/notebook.md, section "The weights of an output
layer"); other values were not compared."""
ALPHA = 2.0
"""α: weight of d relative to e in the metric. Design choice."""
POLISHES, POLISHES_OF_ROUNDS = 3, 6
"""How often each column is solved for its mask, and its mask updated, in one round and in several. The first is a
design choice. Measured for the second: with four rounds, b=150, m=200, the first 256 starts gave 58 columns instead of
47 with three polishes."""
RESIDUAL = 1e-4
"""Largest share of S ∘ (B t) outside span(L) of an accepted column, unless noise allows more. Design choice."""
NEARLY = 0.1
"""The same share over several rounds. Design choice: the same number as ``accept.UNEXPLAINED``. Local steps turn a
column out of the span, and its mask may still have errors, so the zeros of the column are solved afterwards.
Measured: with ``RESIDUAL`` instead, four rounds, b=150, m=200 gave 2 columns instead of 47."""
MISMATCH = 0.28
"""Largest relative difference between d and the masked e of an end point over several rounds that is solved further.
Measured on three clients: 0.08 to 0.28 for all but four of 138 end points near a true column, 0.25 and more for others.
"""
ALIKE = 0.9
"""Cosine above which two end points over several rounds count as the same direction. Design choice: the same number as
``refine.DUPLICATE_COSINE``."""
MIN_NEW = 0.02
"""Share of the starts of a round that must yield new directions for another round to follow. Design choice."""

ENOUGH_KNOWN = 0.5
"""Share of the samples of several rounds that must be known before a low yield ends these rounds. Measured: the gated
descent finds the second half of 120 samples in seconds, and the first half in a minute."""


class BackwardRounds:
    """Rounds that find columns of D from the weights of the next layer.

    Args:
        problem: the layer.
        outputs: the weights of the next layer.
        size: half of the number of starts of a round.
        dtype: precision of the reflections.
        peeled: inputs that single rows revealed before.
    """

    def __init__(self, problem: Problem, outputs: FewOutputs, size: int, dtype: torch.dtype, peeled: Pairs) -> None:
        self.problem, self.outputs, self.back, self.dtype = problem, outputs, outputs.span, dtype
        self.signals = signals_of(outputs, dtype)
        self.size = 2 * size
        """Starts of a round."""
        self.known = sphere.retract(peeled.directions)
        """Directions found so far."""
        self.basis = peeled.apart
        self.rows = problem.factors.left @ self.basis
        self.over = len(self.known) == problem.batch_size
        """Whether no further round should follow."""

    def run(self, size: int, generator: torch.Generator) -> Proposals:
        """Run one round and return the new directions."""
        new = self._accept(*self._reflect(size, generator))
        self.known = torch.cat([self.known, new])
        b, enough = self.problem.batch_size, len(new) >= MIN_NEW * size
        if self.problem.rounds > 1 and len(self.known) < ENOUGH_KNOWN * b:
            enough = len(new) > 0
        self.over = not enough or len(self.known) == b
        return Proposals(new, starts=size, steps=size * self.signals.reflections)

    def _reflect(self, size: int, generator: torch.Generator) -> tuple[Bool[Tensor, "ends m"], Float[Tensor, "ends d"]]:
        """Reflect random starts and return masks and directions at the end. Over several rounds, only good ones."""
        rows, signals = self.rows.to(self.dtype), self.signals
        e = signals.starts(size, generator, self.dtype)
        mask = torch.rand(size, len(rows), generator=generator, device=generator.device) < 0.5
        if self.problem.rounds > 1:
            mask = self._masks_of_others(size, generator)
        d = ALPHA * e * mask.to(rows.device)

        def step() -> None:
            projected_d, projected_e = (d @ rows) @ rows.T, signals.project(e)
            reflected_d, reflected_e = 2 * projected_d - d, 2 * projected_e - e
            both = (reflected_e + ALPHA * reflected_d) / (1 + ALPHA**2)
            fires = (reflected_e - both).square() + (reflected_d - ALPHA * both).square() < reflected_d.square()
            d.add_(BETA * (torch.where(fires, ALPHA * both, 0.0) - projected_d))
            e.add_(BETA * (torch.where(fires, both, reflected_e) - projected_e))
            norm = (d.square().sum(1, keepdim=True) + e.square().sum(1, keepdim=True)).sqrt_()
            d.div_(norm)
            e.div_(norm)

        repeat(step, signals.reflections, rows.device)
        q = d @ rows
        d, e = q @ rows.T, ALPHA * signals.project(e)
        mask = d.abs() > 0.5 * e.abs()
        if self.problem.rounds == 1:
            return mask, q
        good = torch.linalg.vector_norm(d - mask * e, dim=1) <= MISMATCH * torch.linalg.vector_norm(d, dim=1)
        return mask[good], q[good]

    def _accept(self, masks: Bool[Tensor, "k m"], ends: Float[Tensor, "k d"]) -> Float[Tensor, "new b"]:
        """Solve t for each mask, keep the columns that fit, and solve them again for their zeros."""
        rows, live, problem = self.rows, self.problem.factors.live, self.problem
        masks = masks & live
        if problem.rounds > 1:
            masks = masks[self._different(ends.double())]
        q, share = rows.new_zeros(0, rows.shape[1]), rows.new_zeros(0)
        for _ in range(POLISHES if problem.rounds == 1 else POLISHES_OF_ROUNDS):
            block, norms = min_masked_residual(masks, self.back, rows)
            e = block[:, :, 0] @ self.back.T
            q = (e * masks) @ rows
            share = norms[:, 0] / torch.linalg.vector_norm(e * masks, dim=1).clamp_min(1e-300)
            masks = ((q @ rows.T).abs() > 0.5 * e.abs()) & live
        q, silent = sphere.retract(q) @ self.basis.T, ~masks & live
        noise = problem.tolerance.noise * problem.tolerance.amplification(q) * len(rows) ** 0.5
        most = RESIDUAL if problem.rounds == 1 else NEARLY
        fits = share <= (SIGMAS * noise).clamp_min(most)
        q, silent = q[fits], silent[fits]
        if problem.rounds > 1 and len(q):
            q = concentrated(problem, silent, q)[0]
        duplicates = (q @ q.T).abs() > SOLVED_COSINE
        q = refit(problem, q[~duplicates.tril(-1).any(1)])
        zeros = (problem.tolerance.zeros(q @ problem.factors.left.T, q) & live).sum(1)
        q = q[zeros >= problem.tolerance.least_zeros]
        if problem.rounds > 1:  # the zeros of absent rounds prove nothing
            q = q[sent_back(problem, self.outputs, q)]
        directions = torch.cat([self.known, q])
        kept = independent(directions, torch.full_like(directions[:, 0], SAME_DIRECTION), always=len(self.known))
        return directions[kept[len(self.known) :]]

    def _masks_of_others(self, size: int, generator: torch.Generator) -> Bool[Tensor, "size m"]:
        """Return the activation patterns of random p that are orthogonal to the known directions."""
        basis = complement(self.known)
        points = sphere.uniform(size, basis.shape[1], generator, dtype=basis.dtype, device=basis.device) @ basis.T
        last = points @ self.problem.factors.right[:, -1:]
        return (points * last.sign()) @ self.problem.preactivations.T > 0

    def _different(self, ends: Float[Tensor, "k d"]) -> Bool[Tensor, "k"]:
        """Return which end points are near no earlier one and near no known direction."""
        units = sphere.retract(ends)
        known = ((units @ self.basis.T @ self.known.T).abs() > ALIKE).any(1)
        return ~known & ~((units @ units.T).abs() > ALIKE).tril(-1).any(1)
