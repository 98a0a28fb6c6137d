"""What small clients send, and how far recovered inputs are from their samples."""

import torch
from torch import Tensor, nn

from spearpp import ClientUpdate
from spearpp.simulate import Batch, LayerGradient


def gradient_of(loss: Tensor, model: nn.Module) -> ClientUpdate:
    """The update of a client that sends the gradient of a loss."""
    return ClientUpdate.from_gradients(model, list(torch.autograd.grad(loss, list(model.parameters()))))


def layers_of(loss: Tensor, model: nn.Module) -> list[LayerGradient]:
    """Gradients and weights of every Linear layer of a model."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    gradients = torch.autograd.grad(loss, [each for layer in linear for each in (layer.weight, layer.bias)])
    pairs = zip(gradients[::2], gradients[1::2], linear, strict=True)
    return [LayerGradient(g, c, layer.weight.detach(), layer.bias.detach()) for g, c, layer in pairs]


def weighted(model: nn.Module, batch: Batch, weights: Tensor) -> list[LayerGradient]:
    """Gradients and weights of every Linear layer, where samples count unequally."""
    outputs = model(batch.inputs.to(next(model.parameters())))
    losses = nn.functional.cross_entropy(outputs, batch.labels, reduction="none")
    return layers_of((losses * weights).mean(), model)


def train(
    model: nn.Module, inputs: Tensor, labels: Tensor, *, steps: int = 1, rate: float = 0.1, momentum: float = 0.0
) -> dict[str, Tensor]:
    """Train a model with SGD on a whole batch, and return its weights."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
    return dict(model.state_dict())


def distances(inputs: Tensor, batch: Batch) -> Tensor:
    """The relative distance of each input to the nearest sample. No two inputs may have the same sample."""
    truth = batch.inputs.double()
    nearest = (torch.cdist(inputs.double(), truth) / torch.linalg.vector_norm(truth, dim=1)).min(1)
    assert len(set(nearest.indices.tolist())) == len(inputs)
    return nearest.values
