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
STEP = 1e-3
"""Noise in the entries of an input, over their root mean square, with which the effect of noise is measured. Design
choice: small enough that the effect is proportional to the noise."""
WHITE = 1.3
"""Largest singular value beyond the batch size, over that of white noise. Derived: σ(√m + √n) for white noise of an
(m, n) matrix. The rest that local steps leave is not white, and exceeds it many times."""


def with_input_noise(network: Network, own: Factors, seen: Observation) -> Network:
    """Add the noise of the row space to the levels of all spans, if the gradient has white noise beyond rounding."""
    noise = float(torch.linalg.vector_norm(own.row_noise)) / max(1, len(own.row_noise)) ** 0.5
    size = float(torch.linalg.vector_norm(own.row_norms)) / seen.gradient.numel() ** 0.5
    edge = noise * sum(length**0.5 for length in seen.gradient.shape)
    white = bool((own.spectrum[own.batch_size :] <= WHITE * edge).all())
    if len(network.rests) > 1 or not white or noise <= BEYOND_ROUNDING * seen.gradient_epsilon * size:
        return network
    inputs = typical_inputs(seen)
    labels = torch.arange(len(inputs), device=inputs.device) % max(1, network.labels)
    draw = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(inputs)
    step = STEP * float(inputs.square().mean().sqrt())
    if not step:  # no row has a bias gradient, as before BatchNorm in training mode
        return network
    spans = network.equations
    z, moved = (each @ seen.weight.T for each in (inputs, inputs + step * draw))
    pairs = zip(spans, network.vectors(z, labels, spans), network.vectors(moved, labels, spans), strict=True)
    found = {}
    for span, vectors, changed in pairs:
        outside = (changed - vectors) - ((changed - vectors) @ span.basis) @ span.basis.T
        shares = torch.linalg.vector_norm(outside, dim=1) / torch.linalg.vector_norm(vectors, dim=1).clamp_min(1e-300)
        found[span] = float(shares.median()) / step
    preactivations = seen.weight @ (own.right / own.singular_values[:, None]).T
    amplified = noise * torch.linalg.pinv(preactivations) / own.singular_values[:, None]
    sensitive = tuple(replace(span, sensitivity=found.get(span, 0.0)) for span in network.spans)
    return replace(network, spans=sensitive, input_noise=amplified)


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
