"""Several rounds of one simulated client: what it sends while the server goes on training."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from spearpp.errors import OptionError
from spearpp.simulate.batch import Batch
from spearpp.simulate.clients import Client
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
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if all(name in each.gradients for each in sent):
                    mean = torch.stack([each.gradients[name] for each in sent]).mean(0)
                    parameter.sub_(mean.to(parameter), alpha=rate)
    return updates
