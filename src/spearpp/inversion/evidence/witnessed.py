"""Evidence from two layers that an input is in the batch, for each input on its own.

A p that is no input still has some mask S. Given S, the forward equations (relu(A p) in span(V)) are
m - b linear equations for b - 1 unknowns, so p would have to solve m - 2b + 1 equations by chance. For
equations in general position that leaves no more than r outside with probability of the order of
(r √b)^(m - 2b + 1), and the same holds for the backward equations (S ∘ B t in span(L)) and their own r.
There are at most 2^m masks. The product of the three bounds the expected number of inputs that are none:
``chance``. It reaches 1 where b nears m/2: that is the counting limit of two witnesses.
"""

import math
from dataclasses import dataclass

import torch

from spearpp.inversion.evidence.masks import EXACT
from spearpp.inversion.matches import (
    SIGMAS,
    SPREAD,
    Matches,
    SolvedInputs,
    backward_noise,
    forward_noise,
    outside,
    unclear,
)
from spearpp.inversion.next_layer import NextLayer
from spearpp.inversion.problem import Problem
from spearpp.inversion.tolerance import RARE
from spearpp.types import Bool, Float, Int, Tensor

INEXACT = 1e-4
"""What may be left over where noise is negligible: the vectors are solved to finite precision."""
TWINS = 2
"""Neurons up to which two masks are one: all mixtures of two samples with one mask solve the same equations."""
NARROW, NEAREST = 64, 3
"""Layers with up to this many neurons must determine an input without its neurons nearest to zero, this many."""
DETERMINED = 10.0
"""How far above noise the next best solution must be."""


@dataclass(frozen=True, eq=False)
class WitnessCertificates:
    """One row of evidence for each of the k inputs that two witnesses have seen."""

    forward: Float[Tensor, "k"]
    """Share of relu(z) outside the span of the next layer's inputs."""
    forward_noise: Float[Tensor, "k"]
    """What noise explains of it."""
    backward: Float[Tensor, "k"]
    """Share of S ∘ (W₂ᵀ d₂) outside the span of this layer's gradients."""
    backward_noise: Float[Tensor, "k"]
    """What noise explains of it."""
    gap: Float[Tensor, "k"]
    """The forward share of the next best solution: how well the equations determine the input."""
    chance: Float[Tensor, "k"]
    """Bound on the expected number of inputs with such evidence that are none."""
    twin: Int[Tensor, "k"]
    """Neurons in which the mask of the input most like it differs; m if it is alone."""
    error: Float[Tensor, "k"]
    """Bound on the error of the input over the input's norm."""
    share: Float[Tensor, "k"]
    """‖d_i‖ ‖x̂_i‖ / ‖Ĝ‖: the size of what this input explains of the gradient."""
    residual: float
    """‖Ĝ - Σ d_i x̂_iᵀ‖ / ‖Ĝ‖ over the inputs seen."""

    @property
    def consistent(self) -> Bool[Tensor, "k"]:
        """Which inputs are in the batch, up to their error."""
        forward = self.forward <= (SIGMAS * self.forward_noise).clamp_min(INEXACT)
        backward = self.backward <= (SIGMAS * self.backward_noise).clamp_min(INEXACT)
        determined = self.gap >= DETERMINED * torch.maximum(self.forward, self.forward_noise)
        own = self.twin > TWINS
        return forward & backward & determined & own & torch.isfinite(self.error) & (self.chance <= RARE)

    @property
    def exact(self) -> Bool[Tensor, "k"]:
        """Which inputs are certified: consistent, with a negligible error. Nothing is asked of the others."""
        return self.consistent & (self.error <= EXACT)


def certify_sighted(
    problem: Problem, next_layer: NextLayer, seen: Matches, settled: SolvedInputs
) -> WitnessCertificates:
    """Collect the evidence for inputs that two witnesses have seen."""
    z = settled.points @ problem.preactivations.T
    fires = torch.where(unclear(problem, next_layer, settled), seen.masks, z > 0)
    gradients = (seen.backs @ next_layer.back.T) * fires
    left = problem.factors.left
    size = torch.linalg.vector_norm(gradients, dim=1).clamp_min(torch.finfo(z.dtype).tiny)
    backward = torch.linalg.vector_norm(gradients - (gradients @ left) @ left.T, dim=1) / size
    forward = outside(z, next_layer.activations)
    noise = forward_noise(problem, next_layer, settled.points)
    right = problem.factors.right
    inputs = settled.points @ right
    length = torch.linalg.vector_norm(inputs, dim=1).clamp_min(torch.finfo(z.dtype).tiny)
    # The forward equations are off by no more than what is left over, whatever the reason.
    turned = settled.turned * (forward / noise).clamp_min(1)
    if problem.seen.has_bias:  # x̂ ends in 1, so a p that needs a negative scale has the wrong mask
        turned = torch.where(inputs[:, -1] > 0, turned, torch.inf)
    columns = (seen.directions / (seen.directions * settled.points).sum(1, keepdim=True)) @ left.T
    whole = torch.linalg.norm(problem.factors.row_norms)
    return WitnessCertificates(
        forward=forward,
        forward_noise=noise,
        backward=backward,
        backward_noise=backward_noise(problem, next_layer, seen.directions, seen.backs / size[:, None]),
        gap=torch.minimum(settled.gap, _gap_without_nearest(problem, next_layer, z)),
        chance=chance_of_another(problem, forward, backward),
        twin=_twins(fires),
        error=SIGMAS * SPREAD * turned * torch.linalg.vector_norm(settled.loose @ right, dim=1) / length,
        share=torch.linalg.vector_norm(columns, dim=1) * length / whole,
        residual=float(problem.factors.distance(columns.T, settled.points) / whole),
    )


def _gap_without_nearest(problem: Problem, next_layer: NextLayer, z: Float[Tensor, "k m"]) -> Float[Tensor, "k"]:
    """The second least norm of the forward equations without those of the neurons nearest to zero; inf for wide layers.

    Samples of a narrow layer may have patterns that differ in two or three neurons. Some mixture of them solves the
    equations of these neurons too, and lies near z = 0 for them. Without them it is one solution of many.
    """
    if problem.factors.live_neurons > NARROW or not len(z):
        return torch.full_like(z[:, 0], torch.inf)
    span = torch.linalg.qr(problem.preactivations)[0]
    outside_span = (
        torch.eye(len(span), dtype=z.dtype, device=z.device) - next_layer.activations @ next_layer.activations.T
    )
    equations = outside_span @ ((z > 0)[:, :, None] * span)
    live = torch.where(problem.factors.live, z.abs(), torch.inf)
    nearest = outside_span[live.argsort(dim=1)[:, :NEAREST]].mT
    basis = torch.linalg.qr(nearest)[0]
    rest = torch.linalg.svdvals(equations - basis @ (basis.mT @ equations))
    size = torch.linalg.vector_norm(z.clamp_min(0), dim=1) / torch.linalg.vector_norm(z, dim=1)
    return rest[:, -2] / size


def _twins(fires: Bool[Tensor, "k m"]) -> Int[Tensor, "k"]:
    """The least number of neurons in which another mask differs from each."""
    masks = fires.double()
    apart = masks @ (1 - masks).T + (1 - masks) @ masks.T
    apart.fill_diagonal_(fires.shape[1])
    return apart.amin(1).round().long() if len(fires) else torch.zeros(0, dtype=torch.long, device=fires.device)


def chance_of_another(
    problem: Problem, forward: Float[Tensor, "k"], backward: Float[Tensor, "k"]
) -> Float[Tensor, "k"]:
    """2^m (r_f √b · r_b √b)^(m - 2b + 1) for each input; 1 where there are no equations to spare."""
    m, b = problem.factors.live_neurons, problem.batch_size
    surplus = m - 2 * b + 1
    if surplus < 1:
        return torch.ones_like(forward)
    precision = torch.finfo(forward.dtype).eps
    worst = forward.clamp_min(precision) * backward.clamp_min(precision) * b
    return (m * math.log(2) + surplus * worst.log()).clamp_max(0).exp()


def agreement(problem: Problem, seen: Matches, settled: SolvedInputs) -> float:
    """λ over the inputs seen: the share of entries of D that are zero just where the neuron is silent."""
    values = seen.directions @ problem.factors.left.T
    reach = seen.turned[:, None] * torch.linalg.vector_norm(problem.factors.left, dim=1)
    zeros = values.abs() <= torch.maximum(problem.tolerance.entry(seen.directions), SIGMAS * reach)
    return float(((settled.points @ problem.preactivations.T > 0) != zeros).double().mean()) if len(seen) else 0.0
