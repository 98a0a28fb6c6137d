"""The equations of a network whose weights moved during local training, with the weights halfway.

A sample that is visited several times during the training contributes Σ_e d(w_e) y(w_e)ᵀ to the gradient of a layer,
with the weights w_e of its visits. To first order in the movement this is the contribution with the mean of these
weights, which lies about halfway between the weights before and after the training. The equations of the network
therefore hold approximately with the weights halfway. How far a vector lies outside its space grows with the change of
the vector from the weights before the training to those after it. This change is measured, and a share of it is the
level up to which a point counts as a solution.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from spearpp.inversion.factors import Factors
from spearpp.inversion.input_noise import typical_inputs
from spearpp.inversion.network import ROUNDING, Network
from spearpp.inversion.observation import Observation, observe
from spearpp.inversion.spans import Span
from spearpp.model.following import Following
from spearpp.types import Tensor

OUTSIDE = 0.2
"""Share of a vector outside its space because of the movement, over the change of the vector by the whole movement.
Measured: with 0.1, one of three batches lacked samples; with 0.2, none of five
(``docs/lab/notebook.md``, "Local training with any activation")."""


def halfway_network(path: Sequence[tuple[Observation, Following]], own: Factors) -> Network | None:
    """Return the equations with the weights halfway; None if no later layer has more neurons than there are samples.

    Args:
        path: the layer and the rest of the network, with the weights before, halfway and after the training.
        own: the factors of the layer.
    """
    seen, halfway = path[1]
    b, rest = own.batch_size, halfway.rest
    spans = []
    if own.left.shape[0] > b:
        spans.append(Span(0, True, own.left, own.singular_values, 0.0, ROUNDING * seen.gradient_epsilon))
    gradient_of_outputs = None
    for index, name in enumerate(rest.layers, start=1):
        later = observe(*halfway.layers[name], prefix=f"{name}: ")
        rounding = ROUNDING * later.gradient_epsilon
        left, values, right = torch.linalg.svd(later.gradient, full_matrices=False)
        if later.has_bias and index == len(rest.layers):
            gradient_of_outputs = later.gradient[:, -1]
        if len(values) > b:
            rows = right[:b].T.contiguous()
            spans.append(Span(index, False, rows, values[:b], 0.0, rounding, appended_one=later.has_bias))
            spans.append(Span(index, True, left[:, :b].contiguous(), values[:b], 0.0, rounding))
    if not any(span.layer for span in spans):
        return None
    networks = []
    for _, each in path:
        each.rest.prepare(seen.device, torch.float64)
        weights = {name: each.rest.weight(name) for name in rest.layers}
        networks.append(Network((each.rest,), each.loss, each.outputs, tuple(spans), weights, gradient_of_outputs))
    changes = _changes(networks, [each for each, _ in path])
    moved = tuple(replace(span, drift=OUTSIDE * each) for span, each in zip(spans, changes, strict=True))
    return replace(networks[1], spans=moved)


def _changes(networks: list[Network], layers: list[Observation]) -> list[float]:
    """Return the relative change of the vector of each span by the whole movement of the weights."""
    inputs = typical_inputs(layers[0])
    labels = torch.arange(len(inputs), device=inputs.device) % max(1, networks[0].labels)

    def vectors(number: int) -> list[Tensor]:
        network = networks[number]
        return network.vectors(inputs @ layers[number].weight.T, labels, network.spans)

    return [
        float((torch.linalg.vector_norm(b - a, dim=1) / torch.linalg.vector_norm(m, dim=1).clamp_min(1e-300)).median())
        for a, m, b in zip(vectors(0), vectors(1), vectors(2), strict=True)
    ]
