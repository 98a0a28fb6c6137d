"""First derivatives of the inputs and signals of a network's layers, for many directions at once.

In a chain of activations and Linear layers, y_l = φ(z_{l-1}) and z_l = W_l y_l, one pass forward and one pass backward
give the derivatives along a direction. With the signals d_l = dL/dz_l, and dots for these derivatives:

    ẏ_l = φ'(z_{l-1}) ż_{l-1},   ż_l = W_l ẏ_l,
    ḋ_{l-1} = φ'(z_{l-1}) W_lᵀ ḋ_l + φ''(z_{l-1}) (W_lᵀ d_l) ż_{l-1}.

This needs two products with matrices for each layer. Automatic differentiation gives the same derivatives for all other
networks, but with several times as many operations on large tensors.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.func import grad, jvp, vmap

from spearpp.inversion.network import Network, Span
from spearpp.types import Float, Int, Tensor

Tangents = Callable[[Float[Tensor, "k n m"]], list[Tensor]]
"""From n directions of every sample's pre-activations (or one set for all samples, with k = 1) to the derivatives of
each span's vectors, of shape [k, n, d]. The appended 1 of inputs is left out, because its derivative is zero."""


def linearised(
    network: Network,
    preactivations: Float[Tensor, "k m"],
    labels: Int[Tensor, "k"],
    spans: Sequence[Span],
    widths: Mapping[str, float] | None = None,
) -> tuple[list[Tensor], Tangents]:
    """Return the vector of every sample that must lie in each of the spans, and the derivatives of these vectors."""
    if network.rest.is_chain:
        return _chain(network, preactivations, labels, spans, widths)

    def vectors(z: Tensor) -> list[Tensor]:
        return network.vectors(z, labels, spans, widths)

    def tangents(directions: Tensor) -> list[Tensor]:
        def along(direction: Tensor) -> list[Tensor]:
            return jvp(vectors, (preactivations,), (direction,))[1]

        moved = vmap(along, in_dims=1, out_dims=1)(directions.expand(len(preactivations), -1, -1))
        return [each[:, :, :-1] if span.appended_one else each for each, span in zip(moved, spans, strict=True)]

    return vectors(preactivations), tangents


def _chain(
    network: Network, z: Tensor, labels: Tensor, spans: Sequence[Span], widths: Mapping[str, float] | None
) -> tuple[list[Tensor], Tangents]:
    """Apply the formulas above."""
    steps, inputs, outputs = network.rest.steps(z, widths)
    weights = [network.rest.weight(name, z.dtype) for name in network.rest.layers]
    deepest = min((span.layer for span in spans if span.signals), default=len(weights))
    if deepest == len(weights):  # the forward equations need no later layers
        steps = steps[: max(span.layer for span in spans)]
    first, second = zip(*(_derivatives(function, argument) for argument, function in steps), strict=True)
    signals, bends = _signals(network, outputs, labels, weights, first, second, deepest)

    def tangents(directions: Tensor) -> list[Tensor]:
        moved, into = [directions], []
        for weight, slope in zip(weights, first, strict=False):
            into.append(slope[:, None] * moved[-1])
            if len(into) < len(first) or bends:
                moved.append(into[-1] @ weight.T)
        back: dict[int, Tensor] = {}
        if bends and network.loss is not None:
            back[len(weights)] = network.loss.curvature(outputs, moved[-1])
            for layer in range(len(weights) - 1, deepest - 1, -1):
                through = (back[layer + 1] @ weights[layer]) * first[layer][:, None]
                back[layer] = torch.addcmul(through, bends[layer][:, None], moved[layer])
        return [back[span.layer] if span.signals else into[span.layer - 1] for span in spans]

    return network.of_spans(inputs, signals, spans), tangents


def _signals(
    network: Network,
    outputs: Tensor,
    labels: Tensor,
    weights: list[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    deepest: int,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return the signals of all layers, and φ''(z_l) (W_{l+1}ᵀ d_{l+1}) by layer, both down to the deepest layer."""
    loss = network.loss
    if loss is None or deepest == len(weights):
        return [], {}
    signals = [outputs] * len(weights) + [grad(lambda o: loss.total(o, labels))(outputs)]
    bends = {}
    for layer in range(len(weights) - 1, deepest - 1, -1):
        sent = signals[layer + 1] @ weights[layer]
        signals[layer], bends[layer] = first[layer] * sent, second[layer] * sent
    return signals, bends


def _derivatives(function: Callable[[Tensor], Tensor], argument: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second derivative of a function that acts on every entry on its own."""
    slope = grad(lambda each: function(each).sum())
    first, second, *_ = jvp(slope, (argument,), (torch.ones_like(argument),))
    return first, second
