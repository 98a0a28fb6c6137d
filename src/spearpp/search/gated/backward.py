"""Search with a next layer of few outputs: its weights say what the columns of D look like where they are not zero.

With r outputs, d_i = S_i ∘ (W₂ᵀ d₂,i) where d₂,i has only r entries. So every column is a pair
e = B t, d = L q, B of r columns, with d = e or d = 0 at every neuron: m equations for b + r unknowns, and
the mask needs no p. Reflections find such pairs (``reflect`` has the idea); what they leave, the gated
descent looks for, orthogonal to what was found.
"""

import torch

from spearpp.inversion.next_layer import FewOutputs
from spearpp.inversion.pairs import Pairs
from spearpp.inversion.pool import refit
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import independent, min_masked_residual
from spearpp.search.base import Proposals
from spearpp.search.gated.recording import repeat
from spearpp.types import Bool, Float, Tensor

BETA = 1.0
ALPHA = 2.0
BETWEEN = 0.75
"""Share of the starts that begin at one output taken for another."""
REFLECTIONS = 600
POLISHES = 3
LEFT_OVER = 1e-4
"""Share of S ∘ (B t) outside span(L) up to which a column is one; noise allows more where it is larger."""
SIGMAS = 5.0
LEAST = 0.02
"""Share of a round's starts that must be new for another round to follow."""


class BackwardRounds:
    """Columns found from the next layer's weights."""

    def __init__(self, problem: Problem, outputs: FewOutputs, size: int, dtype: torch.dtype, peeled: Pairs) -> None:
        self.problem, self.back, self.dtype = problem, outputs.span, dtype
        self.between = outputs.between()
        self.size = 2 * size
        self.known = sphere.retract(peeled.directions)
        self.apart = peeled.apart
        self.left = problem.factors.left @ self.apart
        self.over = len(self.known) == problem.batch_size

    def run(self, size: int, generator: torch.Generator) -> Proposals:
        """One round: what it adds."""
        new = self._accept(self._reflect(size, generator))
        self.known = torch.cat([self.known, new])
        self.over = len(new) < LEAST * size or len(self.known) == self.problem.batch_size
        return Proposals(new, starts=size, steps=size * REFLECTIONS)

    def _reflect(self, size: int, generator: torch.Generator) -> Bool[Tensor, "size m"]:
        """The masks that random starts arrive at."""
        left, back = self.left.to(self.dtype), self.back.to(self.dtype)
        e = sphere.uniform(size, back.shape[1], generator, dtype=self.dtype, device=back.device) @ back.T
        # From random starts only some of the columns are ever reached; most are near one output against another.
        pairs = torch.randperm(len(self.between), generator=generator, device=generator.device).to(back.device)
        pairs = pairs.repeat(-(-size // max(1, len(pairs))))[: int(BETWEEN * size)]
        e[: len(pairs)] = self.between[pairs].to(self.dtype)
        half = torch.rand(size, len(back), generator=generator, device=generator.device) < 0.5
        d = ALPHA * e * half.to(back.device)

        def step() -> None:
            inner_d, inner_e = (d @ left) @ left.T, (e @ back) @ back.T
            far_d, far_e = 2 * inner_d - d, 2 * inner_e - e
            both = (far_e + ALPHA * far_d) / (1 + ALPHA**2)
            fires = (far_e - both).square() + (far_d - ALPHA * both).square() < far_d.square()
            d.add_(BETA * (torch.where(fires, ALPHA * both, 0.0) - inner_d))
            e.add_(BETA * (torch.where(fires, both, far_e) - inner_e))
            norm = (d.square().sum(1, keepdim=True) + e.square().sum(1, keepdim=True)).sqrt_()
            d.div_(norm)
            e.div_(norm)

        repeat(step, REFLECTIONS, back.device)
        return ((d @ left) @ left.T).abs() > 0.5 * ALPHA * ((e @ back) @ back.T).abs()

    def _accept(self, masks: Bool[Tensor, "k m"]) -> Float[Tensor, "new b"]:
        """Solve t for each mask, and keep the columns that fit, solved again for their zeros."""
        left, live = self.left, self.problem.factors.live
        masks = masks & live
        q, share = left.new_zeros(0, left.shape[1]), left.new_zeros(0)
        for _ in range(POLISHES):
            block, norms = min_masked_residual(masks, self.back, left)
            e = block[:, :, 0] @ self.back.T
            q = (e * masks) @ left
            share = norms[:, 0] / torch.linalg.vector_norm(e * masks, dim=1).clamp_min(1e-300)
            masks = ((q @ left.T).abs() > 0.5 * e.abs()) & live
        q = sphere.retract(q) @ self.apart.T
        noise = self.problem.tolerance.noise * self.problem.tolerance.amplification(q) * len(left) ** 0.5
        q = q[share <= (SIGMAS * noise).clamp_min(LEFT_OVER)]
        alike = (q @ q.T).abs() > 0.9999
        q = refit(self.problem, q[~alike.tril(-1).any(1)])
        zeros = (self.problem.tolerance.zeros(q @ self.problem.factors.left.T, q) & live).sum(1)
        q = q[zeros >= self.problem.tolerance.least_zeros]
        all_of_them = torch.cat([self.known, q])
        kept = independent(all_of_them, torch.full_like(all_of_them[:, 0], 1e-6), always=len(self.known))
        return all_of_them[kept[len(self.known) :]]
