"""The network, what each client has, and its training: a step of SGD on the whole batch, as FedSGD clients take it."""

import torch
from torch import nn

from spearpp import simulate
from spearpp.simulate import Batch

SAMPLES = 8


class Net(nn.Module):
    """A ReLU network for pictures of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 100), nn.Linear(100, 100), nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


def data_of(partition: int) -> Batch:
    """The handwritten digits of one client."""
    return simulate.digits(SAMPLES, generator=torch.Generator().manual_seed(partition))


def train(net: nn.Module, batch: Batch, lr: float) -> float:
    """One step; the loss before it."""
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    loss = nn.functional.cross_entropy(net(batch.inputs), batch.labels)
    loss.backward()
    optimiser.step()
    return float(loss.detach())
