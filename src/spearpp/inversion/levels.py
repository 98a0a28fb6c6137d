"""How far the vectors of a true sample may lie outside their spaces, beyond the noise of these spaces.

``Network.levels`` decides which points count as solutions. Two causes of larger levels are measured here, at inputs of
typical size (``docs/method.md``, sections "Levels" and "Local training"):

**Noise of the row space.** Noise of standard deviation σ in the gradient moves x̂ = V p̄ by about σ ‖Σ⁻¹p̄‖ in every
direction outside the row space, because the columns of V come from this gradient. The network then computes the vectors
of a true sample from slightly wrong pre-activations. With DP noise this exceeds the noise of the other layers' spaces.

**Weights that moved during local training.** To first order in the movement, a sample that is visited several times
contributes to the gradients as if it were visited with the mean of the weights of its visits, which lies about halfway
between the weights before and after the training. How far a vector lies outside its space with the weights halfway
grows with the change of the vector by the whole movement. A share of this change is the level.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from spearpp.inversion.factors import Factors
from spearpp.inversion.network import CLIENT_ROUNDING, Network
from spearpp.inversion.observation import Observation, observe
from spearpp.inversion.spans import Span
from spearpp.linalg import sphere
from spearpp.model.following import Following
from spearpp.types import Float, Int, Tensor

MEASURED_POINTS = 32
"""Number of points at which noise or movement is measured. Design choice: a median needs a few."""
MIN_NOISE_OVER_ROUNDING = 10.0
"""How many times the rounding of its dtype the noise of a gradient must be. Design choice: below, the noise is the
rounding itself, which ``Span.rounding`` covers."""
NOISE_STEP = 1e-3
"""Noise in the entries of an input, over their root mean square, with which the effect of noise is measured. Design
choice: small enough that the effect is proportional to the noise."""
MAX_WHITE_NOISE_RATIO = 1.3
"""Largest singular value beyond the batch size, over that of white noise. Derived: σ(√m + √n) for white noise of an
(m, n) matrix. The rest that local steps leave is not white, and exceeds it many times."""
MOVEMENT_OUTSIDE = 0.2
"""Share of a vector outside its space because of the movement, over the change of the vector by the whole movement.
Measured: with 0.1, one of three batches lacked samples; with 0.2, none of five
(``docs/lab/notebook.md``, "Local training with any activation")."""


def with_input_noise(network: Network, own: Factors, seen: Observation) -> Network:
    """Add the noise of the row space to the levels of all spans, if the gradient has white noise beyond rounding."""
    noise = own.entry_noise
    size = float(torch.linalg.vector_norm(own.row_norms)) / seen.gradient.numel() ** 0.5
    edge = noise * sum(length**0.5 for length in seen.gradient.shape)
    white = bool((own.spectrum[own.batch_size :] <= MAX_WHITE_NOISE_RATIO * edge).all())
    if len(network.rests) > 1 or not white or noise <= MIN_NOISE_OVER_ROUNDING * seen.gradient_epsilon * size:
        return network
    inputs, labels = _typical_samples(seen, network.label_count)
    draw = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0)).to(inputs)
    step = NOISE_STEP * float(inputs.square().mean().sqrt())
    if not step:  # no row has a bias gradient, as before BatchNorm in training mode
        return network
    spans = network.usable_spans
    z, moved = (each @ seen.weight.T for each in (inputs, inputs + step * draw))
    pairs = zip(spans, network.vectors(z, labels, spans), network.vectors(moved, labels, spans), strict=True)
    found = {}
    for span, vectors, changed in pairs:
        outside = (changed - vectors) - ((changed - vectors) @ span.basis) @ span.basis.T
        found[span] = float((sphere.norm(outside) / sphere.norm(vectors)).median()) / step
    preactivations = seen.weight @ own.rows.T
    amplified = noise * torch.linalg.pinv(preactivations) / own.singular_values[:, None]
    sensitive = tuple(replace(span, sensitivity=found.get(span, 0.0)) for span in network.spans)
    return replace(network, spans=sensitive, input_noise=amplified)


def _typical_samples(seen: Observation, labels: int) -> tuple[Float[Tensor, "k columns"], Int[Tensor, "k"]]:
    """Return inputs of about the size of the client's, with the appended 1, and labels for them.

    A row of the gradient over its bias gradient is a weighted sum of the inputs, with weights that sum to one. The rows
    with the smallest such sums serve as inputs. Without a bias, the rows serve as inputs of norm √n.
    """
    rows = seen.gradient
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    size = rows[:, -1:] if seen.has_bias else norms / rows.shape[1] ** 0.5
    inputs = rows / torch.where(size == 0, torch.nan, size)
    order = torch.nan_to_num(torch.linalg.vector_norm(inputs, dim=1), nan=torch.inf).argsort()
    inputs = torch.nan_to_num(inputs[order[:MEASURED_POINTS]])
    return inputs, torch.arange(len(inputs), device=inputs.device) % max(1, labels)


def halfway_network(path: Sequence[tuple[Observation, Following]], own: Factors) -> Network | None:
    """Return the equations with the weights halfway; None if no later layer has more neurons than there are samples.

    ``path`` has the layer and the rest of the network with the weights before, halfway and after the training.
    """
    seen, halfway = path[1]
    b, rest = own.batch_size, halfway.rest
    spans = []
    if own.left.shape[0] > b:
        spans.append(Span(0, True, own.left, own.singular_values, 0.0, CLIENT_ROUNDING * seen.gradient_epsilon))
    gradient_of_outputs = None
    for index, name in enumerate(rest.layers, start=1):
        later = observe(*halfway.layers[name], prefix=f"{name}: ")
        rounding = CLIENT_ROUNDING * later.gradient_epsilon
        left, values, right = torch.linalg.svd(later.gradient, full_matrices=False)
        if later.has_bias and index == len(rest.layers):
            gradient_of_outputs = later.gradient[:, -1]
        if len(values) > b:
            rows = right[:b].T.contiguous()
            signals = left[:, :b].contiguous()
            spans.append(Span(index, False, rows, values[:b], 0.0, rounding, signals, later.has_bias))
            spans.append(Span(index, True, signals, values[:b], 0.0, rounding, rows))
    if not any(span.layer for span in spans):
        return None
    networks = []
    for _, each in path:
        each.rest.prepare(seen.device, torch.float64)
        weights = {name: each.rest.weight(name) for name in rest.layers}
        networks.append(Network((each.rest,), each.loss, each.outputs, tuple(spans), weights, gradient_of_outputs))
    changes = _changes(networks, [each for each, _ in path])
    moved = tuple(replace(span, drift=MOVEMENT_OUTSIDE * each) for span, each in zip(spans, changes, strict=True))
    return replace(networks[1], spans=moved)


def _changes(networks: list[Network], layers: list[Observation]) -> list[float]:
    """Return the relative change of the vector of each span by the whole movement of the weights."""
    inputs, labels = _typical_samples(layers[0], networks[0].label_count)

    def vectors(number: int) -> list[Tensor]:
        network = networks[number]
        return network.vectors(inputs @ layers[number].weight.T, labels, network.spans)

    parts = zip(vectors(0), vectors(1), vectors(2), strict=True)
    return [float((sphere.norm(after - before) / sphere.norm(halfway)).median()) for before, halfway, after in parts]
