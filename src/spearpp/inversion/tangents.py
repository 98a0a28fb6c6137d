"""First derivatives of the inputs and signals of a network's layers, for many directions at once.

In a chain of activations and Linear layers, y_l = φ(z_{l-1}) and z_l = W_l y_l, one pass forward and one pass backward
give the derivatives along a direction. With the signals d_l = dℒ/dz_l, and dots for these derivatives:

    ẏ_l = φ'(z_{l-1}) ż_{l-1},   ż_l = W_l ẏ_l,
    ḋ_{l-1} = φ'(z_{l-1}) W_lᵀ ḋ_l + φ''(z_{l-1}) (W_lᵀ d_l) ż_{l-1}.

This needs two products with matrices for each layer. Automatic differentiation gives the same derivatives for all other
networks, but with several times as many operations on large tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.func import jvp, vjp, vmap

from spearpp.inversion.chain import first_and_second_derivatives, first_derivatives, signals_of
from spearpp.inversion.network import Network
from spearpp.inversion.spans import Span
from spearpp.model.loss import Loss
from spearpp.model.rest import Rest
from spearpp.types import Float, Int, Tensor


class Linearised(NamedTuple):
    """Vectors of samples that must lie in spans, and their derivatives. The derivatives leave out appended ones."""

    vectors: list[Tensor]
    jvps: Callable[[Float[Tensor, "k n m"]], list[Tensor]]
    """Jacobian-vector products: from n directions of every sample's pre-activations (or one set for all samples, with
    k = 1) to the derivatives of each span's vectors, of shape [k, n, d]."""
    vjps: Callable[[list[Tensor]], Float[Tensor, "k n m"]]
    """Vector-Jacobian products, the transposed map."""


def linearised(
    network: Network,
    preactivations: Float[Tensor, "k m"],
    labels: Int[Tensor, "k"],
    spans: Sequence[Span],
    widths: Mapping[str, float] | None = None,
) -> Linearised:
    """Return the vector of every sample that must lie in each of the spans, and the derivatives of these vectors."""
    if all(rest.is_chain for rest in network.rests):
        return _rounds(network, preactivations, labels, spans, widths)

    def vectors(z: Tensor) -> list[Tensor]:
        found = network.vectors(z, labels, spans, widths)
        return [each[:, :-1] if span.appended_one else each for each, span in zip(found, spans, strict=True)]

    def jvps(directions: Tensor) -> list[Tensor]:
        def along(direction: Tensor) -> list[Tensor]:
            return jvp(vectors, (preactivations,), (direction,))[1]

        # vmap stacks a result that does not depend on the direction correctly only along the first dimension.
        moved = vmap(along, in_dims=1)(directions.expand(len(preactivations), -1, -1))
        return [each.movedim(0, 1) for each in moved]

    def vjps(images: list[Tensor]) -> Tensor:
        back = vjp(vectors, preactivations)[1]
        pulled: Tensor = vmap(lambda image: back(image)[0], in_dims=1)(images)
        return pulled.movedim(0, 1)

    return Linearised(network.vectors(preactivations, labels, spans, widths), jvps, vjps)


def _rounds(
    network: Network, z: Tensor, labels: Tensor, spans: Sequence[Span], widths: Mapping[str, float] | None
) -> Linearised:
    """Apply the formulas above to each round. The signals of the layer itself are those of all rounds side by side."""
    count, rounds = len(network.rests[0].layers), len(network.rests)
    if rounds == 1:
        return _chain(network.rests[0], network.loss, z, labels, spans, widths)
    of_round = [
        [index for index, span in enumerate(spans) if span.layer == 0 or (span.layer - 1) // count == number]
        for number in range(rounds)
    ]
    used = [number for number in range(rounds) if of_round[number]]
    chains = {
        number: _chain(
            network.rests[number],
            network.loss,
            z.chunk(rounds, dim=1)[number],
            labels,
            [replace(spans[index], layer=_in_round(spans[index].layer, count)) for index in of_round[number]],
            widths,
        )
        for number in used
    }

    def gathered(parts: dict[int, list[Tensor]]) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in spans]
        for number, part in parts.items():
            for index, each in zip(of_round[number], part, strict=True):
                found[index].append(each)
        return [each[0] if len(each) == 1 else torch.cat(each, dim=-1) for each in found]

    def jvps(directions: Tensor) -> list[Tensor]:
        pieces = directions.chunk(rounds, dim=-1)
        return gathered({number: chain.jvps(pieces[number]) for number, chain in chains.items()})

    def vjps(images: list[Tensor]) -> Tensor:
        pulled = []
        for number, piece in enumerate(z.chunk(rounds, dim=1)):
            if number not in chains:
                pulled.append(torch.zeros_like(piece)[:, None].expand(-1, images[0].shape[1], -1))
                continue
            own = [
                images[index].chunk(rounds, dim=-1)[number] if spans[index].layer == 0 else images[index]
                for index in of_round[number]
            ]
            pulled.append(chains[number].vjps(own))
        return torch.cat(pulled, dim=-1)

    return Linearised(gathered({number: chain.vectors for number, chain in chains.items()}), jvps, vjps)


def _in_round(layer: int, count: int) -> int:
    """Return the number of a layer within its round."""
    return 0 if layer == 0 else (layer - 1) % count + 1


def _chain(
    rest: Rest,
    loss: Loss | None,
    z: Tensor,
    labels: Tensor,
    spans: Sequence[Span],
    widths: Mapping[str, float] | None,
) -> Linearised:
    """Apply the formulas above."""
    activations, inputs, weights, outputs = rest.steps(z, widths)
    count = len(weights)
    earliest = min((span.layer for span in spans if span.signals), default=-1)
    if earliest < 0:  # the forward equations need no later layers
        loss, count = None, max(span.layer for span in spans)
    first, second = first_and_second_derivatives(activations[:count])
    signals: list[Tensor] = []
    bends: dict[int, Tensor] = {}
    if loss is not None:
        last = first_derivatives([(outputs, lambda each: loss.each(each, labels))])[0]
        signals, sent = signals_of(last, weights, first, earliest)
        bends = {layer: (second[layer] * each)[:, None] for layer, each in sent.items()}
    lifted = [each[:, None] for each in first]

    def jvps(directions: Tensor) -> list[Tensor]:
        moved, into = [directions], []
        for layer in range(count):
            into.append(lifted[layer] * moved[layer])
            if layer < count - 1 or loss is not None:
                moved.append(into[layer] @ weights[layer].T)
        back: dict[int, Tensor] = {}
        if loss is not None:
            back[count] = loss.curvature(outputs, moved[count])
            for layer in range(count - 1, earliest - 1, -1):
                through = (back[layer + 1] @ weights[layer]) * lifted[layer]
                back[layer] = torch.addcmul(through, bends[layer], moved[layer])
        return [back[span.layer] if span.signals else into[span.layer - 1] for span in spans]

    def vjps(images: list[Tensor]) -> Tensor:
        own: dict[tuple[bool, int], Tensor] = {}
        for span, image in zip(spans, images, strict=True):
            own[span.signals, span.layer] = image
        sums: dict[int, Tensor] = {}
        if loss is not None:
            total = own[True, earliest]
            for layer in range(earliest, count):
                sums[layer] = bends[layer] * total
                total = (lifted[layer] * total) @ weights[layer].T
                if (True, layer + 1) in own:
                    total = total + own[True, layer + 1]
            sums[count] = loss.curvature(outputs, total)
        for layer in range(count - 1, -1, -1):
            into = own.get((False, layer + 1))
            if layer + 1 in sums:
                sent = sums[layer + 1] @ weights[layer]
                into = sent if into is None else into + sent
            if into is not None:
                through = lifted[layer] * into
                sums[layer] = sums[layer] + through if layer in sums else through
        return sums[0]

    return Linearised(Network.of_spans(inputs, signals, spans), jvps, vjps)
