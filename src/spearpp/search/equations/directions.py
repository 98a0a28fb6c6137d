"""Directions of samples that were found by the equations of a network.

The direction q of a sample satisfies d = L q, where d is the signal of the sample at the layer. With a known loss the
network computes d. Otherwise d = Jᵀ d₂, where J is the derivative of the next layer's outputs and d₂ lies in the column
space of the next layer's gradient: the two spaces span(L) and span(Jᵀ L₂) have one direction in common.
"""

import torch
from torch.func import vjp, vmap

from spearpp.inversion.network import Network
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.types import Bool, Float, Int, Tensor

MAX_COMMON_SINE = 1e-3
"""Largest sine of the angle between the two spaces along the direction that they share."""
MIN_SECOND_SINE = 1e-2
"""Smallest sine of the second angle: with a smaller one the direction is not determined."""


def directions_of(
    problem: Problem, network: Network, preactivations: Float[Tensor, "k m"], labels: Int[Tensor, "k"]
) -> tuple[Float[Tensor, "k b"], Bool[Tensor, "k"]]:
    """Return the unit direction q of each sample, and whether it is determined."""
    left = problem.factors.left
    if network.loss is not None:
        _, signals = network.replay(preactivations, labels)
        directions = signals[0] @ left
        known = torch.linalg.vector_norm(directions, dim=1) > 0
        return sphere.retract(directions), known & torch.isfinite(directions).all(1)
    following = next((span for span in network.spans if span.signals and span.layer == 1), None)
    found, known = left.new_zeros(len(preactivations), left.shape[1]), torch.zeros_like(labels, dtype=torch.bool)
    if following is None:
        return found, known
    for row, z in enumerate(preactivations):
        common = torch.linalg.qr(_sent_back(network, z, following.basis))[0].T @ left
        _, cosines, right = torch.linalg.svd(common)
        sines = (1 - cosines.clamp(max=1).square()).sqrt()
        found[row], known[row] = right[0], sines[0] <= MAX_COMMON_SINE
        known[row] &= len(sines) < 2 or bool(sines[1] >= MIN_SECOND_SINE)
    return found, known


def _sent_back(
    network: Network, preactivations: Float[Tensor, "m"], signals: Float[Tensor, "m2 b"]
) -> Float[Tensor, "m b"]:
    """Return Jᵀ L₂: what signals of the next layer become at the layer, for one sample."""
    rest = network.rests[0]
    name = rest.layers[0]
    back = vjp(lambda z: rest(z[None], {})[0][0][0], preactivations)[1]
    return vmap(lambda signal: back(signal)[0], in_dims=1)(network.weights[name].T @ signals).T
