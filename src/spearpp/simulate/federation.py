"""Rounds of simulated clients: what one client sends in several rounds, and the layers that the server sees."""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from spearpp.errors import OptionError
from spearpp.simulate.batch import Batch
from spearpp.simulate.clients import Client, FedSGD
from spearpp.types import Float, Tensor
from spearpp.update import ClientUpdate


def play_rounds(
    model: nn.Module,
    client: Client,
    batches: Sequence[Batch],
    *,
    rate: float = 0.1,
    others: Sequence[Batch] = (),
    generator: torch.Generator | None = None,
) -> list[ClientUpdate]:
    """Let a client take part in several rounds, and return its updates, oldest first.

    After every round the server subtracts ``rate`` times the mean of the clients' gradients from the weights. A client
    that sends weights after local training contributes (before - after) / (lr · steps) as its gradient, so a server
    with ``rate`` = lr · steps takes the mean of the weights.

    Args:
        model: the network with the weights of the first round. It is not changed.
        client: the client.
        batches: what the client trains on in each round.
        rate: learning rate of the server.
        others: the batches of other clients, which train in the same way in every round.
        generator: source of randomness of the clients; None is a generator with seed 0.

    Raises:
        OptionError: if there is no batch.

    >>> from spearpp.simulate import FedSGD, mlp, random_batch
    >>> updates = play_rounds(mlp(8, [5], 10), FedSGD(), [random_batch(4, features=8)] * 3)
    >>> len(updates), bool((updates[0].weights["0.weight"] == updates[1].weights["0.weight"]).all())
    (3, False)
    """
    if not batches:
        raise OptionError("batches is empty: expected one batch for each round")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    model = copy.deepcopy(model)
    updates = []
    for batch in batches:
        sent = [client(model, each, generator) for each in (batch, *others)]
        updates.append(sent[0])
        shared = [name for name in sent[0].gradients if all(name in each.gradients for each in sent)]
        means = {name: torch.stack([each.gradients[name] for each in sent]).mean(0) for name in shared}
        server_step(model, means, rate)
    return updates


def server_step(model: nn.Module, gradients: Mapping[str, Tensor], rate: float) -> None:
    """Subtract ``rate`` times the gradients from the weights of a model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.sub_(gradients[name].to(parameter), alpha=rate)


class LayerGradient(NamedTuple):
    """What the server sees of one Linear layer, in the order of the arguments of ``spearpp.invert``."""

    grad_weight: Float[Tensor, "m n"]
    grad_bias: Float[Tensor, "m"] | None
    weight: Float[Tensor, "m n"]
    bias: Float[Tensor, "m"] | None

    def to(self, target: torch.dtype | torch.device | str) -> "LayerGradient":
        """Return the layer with another dtype or on another device."""
        return LayerGradient._make(None if each is None else each.to(target) for each in self)


def linear_layers(model: nn.Module, update: ClientUpdate) -> list[LayerGradient]:
    """Return gradient and parameters of every Linear layer of a model, in the order of definition."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            prefix = f"{name}." if name else ""
            bias = None if module.bias is None else f"{prefix}bias"
            layers.append(LayerGradient(*update.layer(f"{prefix}weight", bias)))
    return layers


def fedsgd(model: nn.Module, batch: Batch) -> list[LayerGradient]:
    """Simulate a FedSGD round and return every Linear layer: the gradient of the mean cross-entropy over the batch.

    >>> import torch
    >>> from spearpp.simulate import mlp, random_batch
    >>> fedsgd(mlp(8, [5], 10), random_batch(4, features=8))[0].grad_weight.shape
    torch.Size([5, 8])
    """
    return linear_layers(model, FedSGD()(model, batch))
