"""The noise that a noisy row space adds to the equations of a network.

One sample is the point p with x̂ = V p, and the columns of V come from a noisy gradient. Noise of standard deviation σ
in its entries moves x̂ by about σ ‖Σ⁻¹p‖ in every direction outside the row space, where Σ holds the singular values.
The network therefore computes the vectors of a true sample from slightly wrong pre-activations. With DP noise this
exceeds the noise of the other layers' spaces, so it must be part of the level up to which a point counts as a solution.
"""

from dataclasses import replace

import torch

from spearpp.inversion.factors import Factors
from spearpp.inversion.network import Network
from spearpp.inversion.observation import Observation
from spearpp.types import Float, Tensor

POINTS = 32
"""Number of points at which noise or movement is measured. Design choice: a median needs a few."""
BEYOND_ROUNDING = 10.0
"""How many times the rounding of its dtype the noise of a gradient must be. Design choice: below, the noise is the
rounding itself, which ``Span.rounding`` covers."""


def with_input_noise(network: Network, own: Factors, seen: Observation) -> Network:
    """Add the noise of the row space to the levels of all spans, if the gradient is noisier than its rounding."""
    noise = float(torch.linalg.vector_norm(own.row_noise)) / max(1, len(own.row_noise)) ** 0.5
    size = float(torch.linalg.vector_norm(own.row_norms)) / seen.gradient.numel() ** 0.5
    if len(network.rests) > 1 or noise <= BEYOND_ROUNDING * seen.gradient_epsilon * size:
        return network
    inputs = typical_inputs(seen)
    labels = torch.arange(len(inputs), device=inputs.device) % max(1, network.labels)
    amplified = float((own.singular_values**-2).mean()) ** 0.5 * torch.linalg.vector_norm(inputs, dim=1, keepdim=True)
    draw = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(inputs)
    spans = network.equations
    z, moved = (each @ seen.weight.T for each in (inputs, inputs + noise * amplified * draw))
    pairs = zip(spans, network.vectors(z, labels, spans), network.vectors(moved, labels, spans), strict=True)
    levels = {}
    for span, vectors, changed in pairs:
        outside = (changed - vectors) - ((changed - vectors) @ span.basis) @ span.basis.T
        shares = torch.linalg.vector_norm(outside, dim=1) / torch.linalg.vector_norm(vectors, dim=1).clamp_min(1e-300)
        levels[span] = float(shares.median())
    noisy = tuple(replace(span, drift=levels.get(span, 0.0)) for span in network.spans)
    return replace(network, spans=noisy)


def typical_inputs(seen: Observation) -> Float[Tensor, "k columns"]:
    """Return inputs of about the size of the client's, with the appended 1.

    A row of the gradient over its bias gradient is a weighted sum of the inputs, with weights that sum to one. The rows
    with the smallest such sums serve as inputs. Without a bias, the rows serve as inputs of norm √n.
    """
    rows = seen.gradient
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    size = rows[:, -1:] if seen.has_bias else norms / rows.shape[1] ** 0.5
    inputs = rows / torch.where(size == 0, torch.nan, size)
    order = torch.nan_to_num(torch.linalg.vector_norm(inputs, dim=1), nan=torch.inf).argsort()
    return torch.nan_to_num(inputs[order[:POINTS]])
