"""Evidence from the equations of the whole network, for each input on its own.

At a sample every vector lies in its space up to noise, and the noise of each gradient is known
(``spearpp.inversion.network``). For every input:

- **holds**: the share of every vector outside its space is at most ``SIGMAS`` times what noise explains. A wrong point
  would have to satisfy all equations beyond the unknowns by chance: the probability that s equations hold to within a
  relative residual r is of the order of r^s;
- **determined**: the Jacobian J of the equations, each divided by its noise, has full rank: no other input close by
  satisfies the equations;
- **error**: the covariance (JᵀJ)⁻¹ gives the standard deviation of p, and the noise of the layer's row space adds
  σ √n ‖Σ⁻¹p‖. The stated error is ``SIGMAS`` standard deviations, multiplied by the largest ratio of a share to its
  level if this exceeds 1.

An input may stand for several samples that are too similar for the gradient to distinguish. Only a replay of each input
alone says how many (``spearpp.auditing.signals``).
"""

import math

import torch

from spearpp.inversion.evidence.evidence import WHOLE_NETWORK, Evidence
from spearpp.inversion.network import Network
from spearpp.inversion.problem import Problem
from spearpp.inversion.residuals import Residuals
from spearpp.inversion.solutions import Solutions, affine, coordinates_of
from spearpp.inversion.tolerance import RARE
from spearpp.linalg.chunks import chunk_size
from spearpp.types import Float, Tensor

SIGMAS = 5.0
"""Number of standard deviations that noise may reach, and that the stated error covers."""


def certify_network(problem: Problem, network: Network, found: Solutions) -> Evidence:
    """Collect the evidence for inputs that solve the equations of the network.

    Details of each input: ``share``, the largest share of a vector outside its space; ``excess``, the largest ratio of
    a share to its noise level; ``chance``, the bound on the probability of a wrong point.
    """
    preactivations, _ = coordinates_of(problem)
    z = found.coordinates @ preactivations.T
    spans = network.equations
    shares, levels = network.levels(z, found.labels)
    excess = (shares / levels).amax(0)
    spread = _spread(problem, network, found, levels)
    factors = problem.factors
    columns = factors.right.shape[1]
    noise = float(torch.linalg.vector_norm(factors.row_noise)) / len(factors.row_noise) ** 0.5
    rows = noise * columns**0.5 * torch.linalg.vector_norm(found.coordinates / factors.singular_values, dim=1)
    length = torch.linalg.vector_norm(found.coordinates, dim=1).clamp_min(torch.finfo(z.dtype).tiny)
    error = SIGMAS * torch.hypot(spread, rows) * excess.clamp_min(1) / length
    surplus = sum(span.equations for span in spans) - (problem.batch_size - 1)
    chance = (surplus * shares.amax(0).clamp_min(torch.finfo(z.dtype).tiny).log10()).clamp(max=0)
    product = (found.directions * found.coordinates / factors.singular_values).sum(1)
    signals = (found.directions / product[:, None]) @ factors.left.T
    whole = torch.linalg.norm(factors.row_norms)
    return Evidence(
        holds=(excess <= SIGMAS) & (chance <= math.log10(RARE)) & torch.isfinite(error) & (product != 0),
        determined=torch.isfinite(spread),
        error=error,
        share=torch.linalg.vector_norm(signals, dim=1) * length / whole,
        layers=WHOLE_NETWORK,
        details={"outside": shares.amax(0), "excess": excess, "chance": 10**chance},
        numbers={"equations": float(sum(span.equations for span in spans))},
    )


def _spread(problem: Problem, network: Network, found: Solutions, levels: Float[Tensor, "s k"]) -> Float[Tensor, "k"]:
    """Return the standard deviation of each point; inf if the equations do not determine it.

    The level of a span is the norm of the noise of all its equations, so one equation has the level over the square
    root of their number.
    """
    preactivations, one = coordinates_of(problem)
    equations = Residuals(network, network.equations, preactivations, torch.float64)
    origin, basis = affine(torch.eye(problem.batch_size, dtype=torch.float64, device=preactivations.device), one)
    equations.place(origin, basis)
    t = (found.coordinates - origin) @ basis
    sizes = torch.tensor([span.equations for span in network.equations], device=t.device)
    noise = (levels / sizes[:, None].sqrt()).T.repeat_interleave(sizes, dim=1)
    spreads = []
    for rows in torch.arange(len(t), device=t.device).split(chunk_size(t.device, 32 * t.shape[1] * int(sizes.sum()))):
        jacobian = equations.jacobian(t[rows], found.labels[rows]) / noise[rows, None]
        values = torch.linalg.eigvalsh(jacobian @ jacobian.mT)
        determined = values[:, 0] > torch.finfo(values.dtype).eps * values.shape[1] * values[:, -1]
        variance = (1 / values.clamp_min(torch.finfo(values.dtype).tiny)).sum(1)
        spreads.append(torch.where(determined, variance.sqrt(), torch.inf))
    return torch.cat(spreads) if spreads else levels.new_zeros(0)
