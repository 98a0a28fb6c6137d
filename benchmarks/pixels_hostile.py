"""Counts pictures that an audit claims although they are not the client's, for clients that could mislead it.

    make bench NAME=pixels_hostile                                            # minutes on one CPU core
    make bench NAME=pixels_hostile ARGS="--families constant even --seeds 8"

The networks are small: one 5x5 convolution of 16 channels and one hidden layer of 80 neurons for pictures of 1x12x12.
Each batch has four pictures. The audit knows the batch size for odd seeds only. A claimed picture is wrong if it is
farther than its stated error from every picture of the client.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

import spearpp
from benchmarks import command
from spearpp import ClientUpdate
from spearpp.inversion import pixels
from spearpp.model import Sees
from spearpp.types import Tensor

SIDE, CLASSES, COUNT = 12, 6, 4
STEPS = 300
"""Steps of the search for pictures. Small pictures need fewer than photographs."""


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.function(x)


@dataclass(frozen=True)
class Client:
    """What the audit gets, and the truth."""

    model: nn.Module
    update: ClientUpdate
    pictures: Tensor
    shape: tuple[int, ...] = (1, SIDE, SIDE)


def network(seed: int, *front: nn.Module, features: int = 16 * 36) -> nn.Sequential:
    """Return a network with fresh weights."""
    torch.manual_seed(seed)
    for module in nn.Sequential(*front).modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(features, 80), nn.ReLU(), nn.Linear(80, CLASSES)).eval()


def pooled(seed: int, features: int = 16 * 36) -> nn.Sequential:
    """Return a network with ReLU and max-pooling."""
    return network(seed, nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), features=features)


def draw(seed: int) -> Tensor:
    """Draw smooth pictures."""
    noise = torch.randn(COUNT, 1, SIDE + 2, SIDE + 2, generator=torch.Generator().manual_seed(seed))
    return 2 * functional.avg_pool2d(noise, 3, 1)


def gradient(model: nn.Module, inputs: Tensor, labels: tuple[int, ...] = (0, 1, 2, 3)) -> list[Tensor]:
    """Return the gradient of the mean cross-entropy."""
    loss = functional.cross_entropy(model(inputs), torch.tensor(labels))
    return list(torch.autograd.grad(loss, list(model.parameters())))


def honest(model: nn.Module, inputs: Tensor, labels: tuple[int, ...] = (0, 1, 2, 3)) -> Client:
    """Return a client that uses the model as it is."""
    return Client(model, ClientUpdate.from_gradients(model, gradient(model, inputs, labels)), inputs)


def near(size: float) -> Callable[[int], Client]:
    """Two pictures with the same label differ by noise of this size."""

    def client(seed: int) -> Client:
        model, inputs = pooled(seed), draw(seed)
        inputs[1] = inputs[0] + size * torch.randn_like(inputs[0])
        return honest(model, inputs, (0, 0, 2, 3))

    return client


def constant(seed: int) -> Client:
    """Three pictures have one value everywhere."""
    inputs = draw(seed)
    inputs[0], inputs[1], inputs[2] = 0.0, 1.0, 0.5
    return honest(pooled(seed), inputs)


def contrast(seed: int) -> Client:
    """Three pictures are copies with different contrast."""
    inputs = draw(seed)
    inputs[1], inputs[2] = 1.3 * inputs[0], 0.7 * inputs[0]
    return honest(pooled(seed), inputs, (0, 0, 0, 1))


def padding(seed: int) -> Client:
    """The client pads by reflection, the model of the audit with zeros."""
    model, inputs = pooled(seed), draw(seed)
    other = nn.Sequential(nn.ReflectionPad2d(2), copy.deepcopy(model))
    for module in other.modules():
        if isinstance(module, nn.Conv2d):
            module.padding = (0, 0)
    return Client(model, ClientUpdate.from_gradients(model, gradient(other, inputs)), inputs)


def other_weights(size: float) -> Callable[[int], Client]:
    """The convolution of the client has weights that differ by this share."""

    def client(seed: int) -> Client:
        model, inputs = pooled(seed), draw(seed)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other[0].parameters():
                parameter.mul_(1 + size * torch.randn_like(parameter))
        return Client(model, ClientUpdate.from_gradients(model, gradient(other, inputs)), inputs)

    return client


def swapped(seed: int) -> Client:
    """The audit takes the height of the pictures for their width."""
    inputs = torch.cat([draw(seed), draw(seed + 9)], 2)
    client = honest(pooled(seed, 16 * 72), inputs)
    return Client(client.model, client.update, inputs, (1, SIDE, 2 * SIDE))


def even(seed: int) -> Client:
    """A picture and its negative have the same features."""
    front = nn.Conv2d(1, 16, 5, padding=2, bias=False), Function(lambda z: z.relu() + (-z).relu()), nn.AvgPool2d(2)
    return honest(network(seed, *front), draw(seed))


def absolute(seed: int) -> Client:
    """The same, with an operation that the audit does not know."""
    front = nn.Conv2d(1, 16, 5, padding=2, bias=False), Function(torch.abs), nn.MaxPool2d(2)
    return honest(network(seed, *front), draw(seed))


def mirrored(seed: int) -> Client:
    """A picture and its mirror image have the same features."""

    def parts(x: Tensor) -> Tensor:
        odd = x - x.flip(3)
        return torch.cat([x + x.flip(3), odd.relu() + (-odd).relu()], 1)

    front = Function(parts), nn.Conv2d(2, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    return honest(network(seed, *front), draw(seed))


class TwoViews(nn.Module):
    """One convolution of a picture and of the same picture turned by 180 degrees: the larger of both values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the larger value, for every entry."""
        return torch.stack([functional.relu(self.conv(each)) for each in (x, x.flip((2, 3)))]).amax(0)


def rotated(seed: int) -> Client:
    """A picture and the same picture turned by 180 degrees have the same features."""
    return honest(network(seed, TwoViews(), nn.MaxPool2d(2)), draw(seed))


FAMILIES: dict[str, Callable[[int], Client]] = {
    "honest": lambda seed: honest(pooled(seed), draw(seed)),
    **{f"near-{size:.0e}": near(size) for size in (1e-4, 1e-3, 1e-2)},
    **{f"weights-{size:.0e}": other_weights(size) for size in (1e-6, 1e-4, 1e-2)},
    **{each.__name__: each for each in (constant, contrast, padding, swapped, even, absolute, mirrored, rotated)},
}
"""Families of clients by name."""


@dataclass(frozen=True)
class Row:
    """What the audits of one family gave."""

    family: str
    audits: int
    claimed: int
    wrong: int


def measure(family: str, seeds: int) -> Row:
    """Audit the clients of one family."""
    claimed = wrong = 0
    for seed in range(seeds):
        client = FAMILIES[family](seed)
        known = COUNT if seed % 2 else None
        result = spearpp.audit(client.update, client.model, budget=300, input_shape=client.shape, batch_size=known)
        truth = client.pictures.flatten(1).double()
        for entry in (each for each in result.layers if each.layer.sees == Sees.INPUTS_FROM_FEATURES):
            found = entry.inputs.double()
            errors = torch.tensor([each.error for each in entry.claims if each.recovered], dtype=torch.float64)
            distance, nearest = torch.cdist(found, truth).min(1)
            claimed += len(found)
            wrong += int((distance > errors * torch.linalg.vector_norm(truth, dim=1)[nearest]).sum())
    return Row(family, seeds, claimed, wrong)


def main() -> int:
    """Measure the families that were asked for."""
    options = command.parser(__doc__)
    options.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    options.add_argument("--seeds", type=int, default=4, help="number of clients of each family")
    given = options.parse_args()
    with mock.patch.object(pixels, "STEPS", STEPS):
        rows = (measure(family, given.seeds) for family in given.families)
        return command.run(command.printed(rows), given.out)


if __name__ == "__main__":
    sys.exit(main())
