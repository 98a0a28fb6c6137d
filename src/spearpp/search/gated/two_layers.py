"""Rounds with a second witness: reflect, polish, accept, and shrink both spaces by what was found."""

from dataclasses import dataclass

import torch

from spearpp.inversion.matches import SIGMAS, Matches, confirm, forward_noise, no_sightings, outside, solve_inputs
from spearpp.inversion.next_layer import NextLayer
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import complement, independent, min_masked_residual
from spearpp.search.base import Proposals
from spearpp.search.gated.reflect import reflect
from spearpp.types import Float, Tensor, select_rows

PROMISING = 0.15
"""Share of relu(z) outside span(V) up to which an end point is polished."""
POLISHES = 8
"""How often an end point is solved for its mask, until that no longer changes."""
SHRUNK = 1e-4
"""What may be left over in shrunk spaces where noise is negligible: earlier finds are not exact either."""
LAST = 1e-3
"""The same for the last input, which all the others determine."""
DETERMINED = 1e-3
"""Least second norm of ``min_masked_residual`` for an input that its own equations determine, and the most that the
first may be of the second: a mask with one small neuron wrong has a solution that nearly fits."""
HOPELESS = 0.05
"""Noise beyond which the next layer tells nothing."""
MOST_STARTS = 2048
STEPS = (1600, 3200)
"""Reflections at most: at first, and once rounds have found little."""
DRY_ROUNDS = 3
ONE_WITNESS = 0.3
"""Samples a neuron up to which one witness can do without the second."""


@dataclass(frozen=True)
class _Spaces:
    """What is left of span(A) and span(V), with orthonormal bases."""

    preactivations: Float[Tensor, "m d"]
    activations: Float[Tensor, "m d"]
    to_p: Float[Tensor, "b d"]
    """From coordinates in the first basis to p."""


class WitnessedRounds:
    """What two witnesses have shown so far, and how hard to look next."""

    def __init__(self, problem: Problem, next_layer: NextLayer, least: int, dtype: torch.dtype) -> None:
        self.problem, self.next_layer, self.least, self.dtype = problem, next_layer, least, dtype
        self.found = no_sightings(problem)
        self.more, self.dry, self.hard = 1, 0, False

    @property
    def missing(self) -> int:
        """How many samples have not been seen."""
        return self.problem.batch_size - len(self.found)

    @property
    def over(self) -> bool:
        """Whether all was found, or nothing more will be.

        Where one witness is enough, a round that shows nothing ends it: local training moves the next layer's
        inputs, so that it may know the first mini-batch alone.
        """
        patience = DRY_ROUNDS if self.beyond_one_witness else 1
        return self.missing == 0 or self.dry >= patience

    @property
    def beyond_one_witness(self) -> bool:
        """Whether there are too many samples for the first layer alone."""
        return self.problem.batch_size > ONE_WITNESS * self.problem.factors.live_neurons

    @property
    def size(self) -> int:
        """Starts of the next round."""
        return min(MOST_STARTS, self.more * min(self.least, 4 * self.missing + 12))

    @property
    def known(self) -> Float[Tensor, "found b"]:
        """The directions found."""
        return self.found.directions

    def run(self, size: int, generator: torch.Generator) -> Proposals:
        """One round: what it adds."""
        spaces = self._spaces()
        dimension = spaces.preactivations.shape[1]
        if dimension == 1:
            ends, steps = spaces.preactivations.new_tensor([[1.0], [-1.0]]), 0
        else:
            starts = sphere.uniform(size, dimension, generator, dtype=self.dtype, device=spaces.to_p.device)
            bases = spaces.preactivations.to(self.dtype), spaces.activations.to(self.dtype)
            ends, steps = reflect(*bases, starts, STEPS[self.hard])
        new = self._accept(spaces, self._polish(spaces, ends.double()))
        self.found = self.found.join(new)
        self._adapt(len(new), size)
        return Proposals(new.directions, starts=size, steps=steps * size, matches=new)

    def _spaces(self) -> _Spaces:
        p = complement(self.found.directions)
        c = complement(sphere.retract(self.found.backs / self.next_layer.singular_values))
        basis, triangle = torch.linalg.qr(self.problem.preactivations @ p)
        return _Spaces(
            preactivations=basis, activations=self.next_layer.activations @ c, to_p=p @ torch.linalg.inv(triangle)
        )

    def _polish(self, spaces: _Spaces, ends: Float[Tensor, "k d"]) -> Float[Tensor, "kept d"]:
        """Solve each end point for its own mask, in float64; keep those that fit, each once."""
        left_over = outside(ends @ spaces.preactivations.T, spaces.activations)
        order = left_over.argsort(stable=True)
        x = _distinct(ends[order[left_over[order] < PROMISING]], 0.99)
        masks, norms = x @ spaces.preactivations.T > 0, x.new_zeros(len(x), 2)
        moving = torch.arange(len(x), device=x.device)
        for _ in range(POLISHES):
            block, norms[moving] = min_masked_residual(masks[moving], spaces.preactivations, spaces.activations)
            x[moving] = block[:, :, 0] * (block[:, :, 0] * x[moving]).sum(1, keepdim=True).sign()
            renewed = x @ spaces.preactivations.T > 0
            moving = torch.nonzero((renewed != masks).any(1))[:, 0]
            masks = renewed
            if not len(moving):
                break
        points = sphere.retract(x @ spaces.to_p.T)
        fits = outside(x @ spaces.preactivations.T, spaces.activations) <= self._allowed(points, self._inexact)
        return _distinct(x[fits & (norms[:, 1] >= DETERMINED)], 0.9999)

    def _allowed(self, points: Float[Tensor, "k b"], least: float = 0.0) -> Float[Tensor, "k"]:
        noise = SIGMAS * forward_noise(self.problem, self.next_layer, points)
        return torch.where(noise <= HOPELESS, noise.clamp_min(least), -1.0)

    @property
    def _inexact(self) -> float:
        if self.missing == 1:
            return LAST
        return SHRUNK if len(self.found) else 0.0

    def _accept(self, spaces: _Spaces, x: Float[Tensor, "k d"]) -> Matches:
        """Those that the whole space determines and the backward equations confirm, with all four vectors."""
        problem, next_layer = self.problem, self.next_layer
        settled = solve_inputs(problem, next_layer, sphere.retract(x @ spaces.to_p.T), self.found, own=False)
        z = settled.points @ problem.preactivations.T
        left_over = outside(z, next_layer.activations)
        good = (left_over <= self._allowed(settled.points)) & (settled.gap >= DETERMINED)
        good &= left_over <= DETERMINED * settled.gap
        back = confirm(problem, next_layer, settled, self.found)
        good &= back.fits & (back.gap >= DETERMINED)
        freedom = max(1, z.shape[1] - problem.batch_size) ** 0.5
        found = Matches(
            points=settled.points,
            directions=back.directions,
            coordinates=z.clamp_min(0) @ next_layer.activations,
            backs=back.backs,
            masks=back.masks,
            turned=torch.maximum(back.noise, back.left_over) / (freedom * back.gap.clamp(DETERMINED, 1.0)),
        )
        seen = select_rows(found, good)
        known = torch.cat([self.found.directions, seen.directions])
        apart = torch.full_like(known[:, 0], 1e-6)
        return select_rows(seen, independent(known, apart, always=len(self.found))[len(self.found) :] - len(self.found))

    def _adapt(self, new: int, size: int) -> None:
        """More starts, and more steps, while fewer than one in twenty is new."""
        if new >= 0.05 * size:
            self.more, self.dry = max(1, self.more // 2), 0
            return
        self.dry = self.dry + 1 if new == 0 else 0
        self.more, self.hard = 2 * self.more, True


def _distinct(vectors: Float[Tensor, "k d"], cosine: float) -> Float[Tensor, "fewer d"]:
    """The first of all vectors that point the same way."""
    alike = vectors @ vectors.T > cosine
    return vectors[~alike.tril(-1).any(1)]
