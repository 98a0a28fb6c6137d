"""The network, the data of each client, and its training: one step of SGD on the whole batch (FedSGD)."""

import torch
from torch import nn

from spearpp import simulate
from spearpp.simulate import Batch

SAMPLES = 8
"""Number of samples of each client."""


class Net(nn.Module):
    """A ReLU network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 100), nn.Linear(100, 100), nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the class scores."""
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


def data_of(partition: int) -> Batch:
    """Return the handwritten digits of one client."""
    return simulate.digits(SAMPLES, generator=torch.Generator().manual_seed(partition))


def train(net: nn.Module, batch: Batch, lr: float) -> float:
    """Train for one step and return the loss before the step."""
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    loss = nn.functional.cross_entropy(net(batch.inputs), batch.labels)
    loss.backward()
    optimiser.step()
    return float(loss.detach())
