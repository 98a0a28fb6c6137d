"""Rounds that use the gradient of the next layer.

An input is a pair z = A p, y = V c with y = relu(z). The pair satisfies two constraints. Projecting onto either
constraint alone is easy:

- *subspaces*: z lies in span(A) and y in span(V); the projection is orthogonal;
- *masks*: for every neuron, either y = z ≥ 0 or y = 0 ≥ z; the projection takes the nearer case.

Descent on the distance gets stuck in local minima. The relaxed reflections (difference map, RRR)

    x ← x + θ (P_mask(2 P_sub x - x) - P_sub x)

do not stop at a point that is not a solution. Both sets are cones, so x is kept at unit norm. The metric weights y by
α = m/d, clipped to ``ALPHAS``, where d is the number of dimensions that remain.
"""

from dataclasses import dataclass

import torch

from spearpp.inversion.matches import SIGMAS, Matches, confirm, forward_noise, no_matches, outside, solve_inputs
from spearpp.inversion.next_layer import NextLayer
from spearpp.inversion.problem import Problem
from spearpp.inversion.tolerance import SAME_DIRECTION
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import complement, independent, min_masked_residual
from spearpp.linalg.recording import repeat
from spearpp.search.base import Proposals
from spearpp.search.gated.accept import SOLVED_COSINE
from spearpp.types import Float, Tensor, join_rows, select_rows

MAX_PROMISING_SHARE = 0.15
"""Largest share of relu(z) outside span(V) for which an end point is solved exactly. Design choice: such an end point
has most of its mask right."""
MAX_SOLVES = 8
"""Maximum number of times an end point is solved for its mask, until the mask no longer changes. Design choice."""
REMAINING_RESIDUAL = 1e-4
"""Smallest allowed residual in subspaces from which earlier inputs were removed, even without noise. Design choice:
earlier inputs are not exact, so neither are the remaining subspaces."""
LAST_RESIDUAL = 1e-3
"""The same limit for the last input. Design choice: all other inputs together determine the last one."""
DETERMINED = 1e-3
"""Minimum second norm of ``min_masked_residual`` for an input that its own equations determine, and maximum ratio of
the first norm to the second. Design choice: if one small neuron of a mask is wrong, the solution nearly fits, so the
first norm must be far smaller."""
MAX_NOISE = 0.05
"""Relative noise above which the next layer carries no usable information. Design choice."""
MAX_STARTS = 2048
"""Maximum number of starts of a round. Design choice: it bounds the memory."""
MAX_REFLECTIONS = (1600, 3200)
"""Maximum number of reflections: at first, and after a round that found little. Measured: up to b=90, m=200, enough
starts converge within 1600 (docs/lab/notebook.md, section "Reflections against descent")."""
MAX_EMPTY_ROUNDS = 3
"""Number of successive rounds without a new input after which the search ends. Design choice."""
MAX_ONE_LAYER_SHARE = 0.3
"""Largest ratio of samples to neurons for which the first layer alone may be enough. Measured: the first layer alone
recovers at most 0.25 m samples (docs/lab/notebook.md, section "The next layer")."""
END_COSINE = 0.99
"""Cosine above which two end points are the same input, before they are solved exactly. Design choice."""
MIN_YIELD = 0.05
"""Minimum share of the starts of a round that yield new inputs, without more starts next time. Design choice."""
THETA = 1.4
"""θ. Measured: more starts succeed than with θ = 1 at b=90, m=200 and at b=400, m=1000 (same table of the notebook)."""
ALPHAS = 2.0, 8.0
"""Smallest and largest α. Measured: with smaller values fewer starts succeed, and with α = 1 none at b=90, m=200 (same
table). Larger values were not tried."""
REFLECTIONS_PER_CHECK = 200
"""Reflections between two checks of how many starts have converged. Design choice: a check makes a GPU wait."""
MAX_CONVERGED_SHARE = 0.02
"""Largest share of relu(z) outside span(V) for which a start counts as converged. Design choice: far below the share at
a random point, and far above rounding in float32."""


@dataclass(frozen=True)
class _Spaces:
    """Orthonormal bases of the parts of span(A) and span(V) that remain after removing the inputs found."""

    preactivations: Float[Tensor, "m d"]
    activations: Float[Tensor, "m d"]
    to_p: Float[Tensor, "b d"]
    """Maps coordinates in the first basis to p."""


class TwoLayerRounds:
    """State of the search with the next layer: the inputs found, and how hard to search next.

    Each round reflects random starts (``reflect``), solves their end points exactly, accepts those that satisfy the
    equations of both layers, and removes what was found from both subspaces. A round begins with ``least`` starts.
    """

    def __init__(self, problem: Problem, next_layer: NextLayer, least: int, dtype: torch.dtype) -> None:
        self.problem, self.next_layer, self.least, self.dtype = problem, next_layer, least, dtype
        self.found = no_matches(problem)
        self.start_factor, self.empty_rounds, self.more_reflections = 1, 0, False

    @property
    def missing(self) -> int:
        """Number of samples that have not been found."""
        return self.problem.batch_size - len(self.found)

    @property
    def over(self) -> bool:
        """Whether all inputs were found, or further rounds are unlikely to find more.

        If the first layer alone may be enough, a single round without a new input ends the search. Local training
        changes the inputs of the next layer, so its gradient may only contain the first mini-batch.
        """
        patience = MAX_EMPTY_ROUNDS if self.beyond_one_layer else 1
        return self.missing == 0 or self.empty_rounds >= patience

    @property
    def beyond_one_layer(self) -> bool:
        """Whether the first layer alone cannot recover this number of samples."""
        return self.problem.batch_size > MAX_ONE_LAYER_SHARE * self.problem.factors.live_neurons

    @property
    def size(self) -> int:
        """Number of starts of the next round."""
        return min(MAX_STARTS, self.start_factor * min(self.least, 4 * self.missing + 12))

    @property
    def known(self) -> Float[Tensor, "found b"]:
        """Directions found so far."""
        return self.found.directions

    def run(self, size: int, generator: torch.Generator) -> Proposals:
        """Run one round and return the new inputs."""
        spaces = self._spaces()
        dimension = spaces.preactivations.shape[1]
        if dimension == 1:
            ends, steps = spaces.preactivations.new_tensor([[1.0], [-1.0]]), 0
        else:
            starts = sphere.uniform(size, dimension, generator, dtype=self.dtype, device=spaces.to_p.device)
            bases = spaces.preactivations.to(self.dtype), spaces.activations.to(self.dtype)
            ends, steps = reflect(*bases, starts, MAX_REFLECTIONS[self.more_reflections])
        new = self._accept(spaces, self._solve_for_masks(spaces, ends.double()))
        self.found = join_rows(self.found, new)
        self._adapt(len(new), size)
        return Proposals(new.directions, starts=size, steps=steps * size, matches=new)

    def _spaces(self) -> _Spaces:
        """Return the subspaces without the inputs found so far."""
        p = complement(self.found.directions)
        c = complement(sphere.retract(self.found.backs / self.next_layer.singular_values))
        basis, triangle = torch.linalg.qr(self.problem.preactivations @ p)
        return _Spaces(
            preactivations=basis, activations=self.next_layer.activations @ c, to_p=p @ torch.linalg.inv(triangle)
        )

    def _solve_for_masks(self, spaces: _Spaces, ends: Float[Tensor, "k d"]) -> Float[Tensor, "kept d"]:
        """Solve each end point for its own mask, in float64. Keep the solutions that fit, each once."""
        residual = outside(ends @ spaces.preactivations.T, spaces.activations)
        order = residual.argsort(stable=True)
        x = ends[order[residual[order] < MAX_PROMISING_SHARE]]
        x = x[sphere.first_of_each(x, END_COSINE, signed=True)]
        masks, norms = x @ spaces.preactivations.T > 0, x.new_zeros(len(x), 2)
        changed = torch.arange(len(x), device=x.device)
        for _ in range(MAX_SOLVES):
            block, norms[changed] = min_masked_residual(masks[changed], spaces.preactivations, spaces.activations)
            x[changed] = block[:, :, 0] * (block[:, :, 0] * x[changed]).sum(1, keepdim=True).sign()
            new_masks = x @ spaces.preactivations.T > 0
            changed = torch.nonzero((new_masks != masks).any(1))[:, 0]
            masks = new_masks
            if not len(changed):
                break
        points = sphere.retract(x @ spaces.to_p.T)
        fits = outside(x @ spaces.preactivations.T, spaces.activations) <= self._allowed(points, self._min_allowed)
        x = x[fits & (norms[:, 1] >= DETERMINED)]
        return x[sphere.first_of_each(x, SOLVED_COSINE, signed=True)]

    def _allowed(self, points: Float[Tensor, "k b"], least: float = 0.0) -> Float[Tensor, "k"]:
        """Return the largest residual that noise explains, at least ``least``; -1 if the noise is too large."""
        noise = SIGMAS * forward_noise(self.problem, self.next_layer, points)
        return torch.where(noise <= MAX_NOISE, noise.clamp_min(least), -1.0)

    @property
    def _min_allowed(self) -> float:
        """Residual that is always allowed, because the remaining subspaces are not exact."""
        if self.missing == 1:
            return LAST_RESIDUAL
        return REMAINING_RESIDUAL if len(self.found) else 0.0

    def _accept(self, spaces: _Spaces, x: Float[Tensor, "k d"]) -> Matches:
        """Accept the inputs that the whole space determines and the backward equations confirm."""
        problem, next_layer = self.problem, self.next_layer
        solved = solve_inputs(problem, next_layer, sphere.retract(x @ spaces.to_p.T), self.found, own=False)
        z = solved.points @ problem.preactivations.T
        residual = outside(z, next_layer.activations)
        accepted = (residual <= self._allowed(solved.points)) & (solved.gap >= DETERMINED)
        accepted &= residual <= DETERMINED * solved.gap
        back = confirm(problem, next_layer, solved, self.found)
        accepted &= back.fits & (back.gap >= DETERMINED)
        freedom = max(1, z.shape[1] - problem.batch_size) ** 0.5
        found = Matches(
            points=solved.points,
            directions=back.directions,
            coordinates=z.clamp_min(0) @ next_layer.activations,
            backs=back.backs,
            masks=back.masks,
            turned=torch.maximum(back.noise, back.left_over) / (freedom * back.gap.clamp(DETERMINED, 1.0)),
        )
        new = select_rows(found, accepted)
        return select_rows(new, independent(new.directions, SAME_DIRECTION, self.found.directions))

    def _adapt(self, new: int, size: int) -> None:
        """Use more starts and more reflections after a round that found few new inputs."""
        if new >= MIN_YIELD * size:
            self.start_factor, self.empty_rounds = max(1, self.start_factor // 2), 0
            return
        self.empty_rounds = self.empty_rounds + 1 if new == 0 else 0
        self.start_factor, self.more_reflections = 2 * self.start_factor, True


def reflect(
    span: Float[Tensor, "m d"],
    activations: Float[Tensor, "m e"],
    starts: Float[Tensor, "starts d"],
    most: int,
    *,
    alpha: float | None = None,
    theta: float = THETA,
) -> tuple[Float[Tensor, "starts d"], int]:
    """Reflect all starts until half of them have converged, or until the maximum number of reflections.

    ``span`` and ``activations`` are orthonormal bases of the z and the y that remain, and ``starts`` are unit vectors
    of coordinates of z. The result has the coordinates at the end, and the number of reflections.
    """
    alpha = min(max(span.shape[0] / span.shape[1], ALPHAS[0]), ALPHAS[1]) if alpha is None else alpha
    z = starts @ span.T
    y = alpha * z.clamp_min(0)

    def step() -> None:
        projected_z, projected_y = (z @ span) @ span.T, (y @ activations) @ activations.T
        reflected_z, reflected_y = 2 * projected_z - z, 2 * projected_y - y
        if_active = ((reflected_z + alpha * reflected_y) / (1 + alpha**2)).clamp_min(0)
        if_inactive = reflected_z.clamp_max(0)
        to_active = (reflected_z - if_active).square() + (reflected_y - alpha * if_active).square()
        active = to_active < (reflected_z - if_inactive).square() + reflected_y**2
        z.add_(theta * (torch.where(active, if_active, if_inactive) - projected_z))
        y.add_(theta * (torch.where(active, alpha * if_active, 0.0) - projected_y))
        size = (z.square().sum(1, keepdim=True) + y.square().sum(1, keepdim=True)).sqrt_()
        z.div_(size)
        y.div_(size)

    done = 0
    while done < most:
        repeat(step, REFLECTIONS_PER_CHECK, z.device)
        done += REFLECTIONS_PER_CHECK
        ends = z @ span
        if bool((outside(ends @ span.T, activations) < MAX_CONVERGED_SHARE).float().mean() >= 0.5):
            break
    return sphere.retract(ends), done
