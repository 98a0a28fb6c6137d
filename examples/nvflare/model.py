"""The network, and the data of each site: one batch of handwritten digits."""

import torch
from torch import nn

from spearpp import simulate
from spearpp.simulate import Batch

SAMPLES = 8
"""Number of samples of each site."""


class Net(nn.Module):
    """A ReLU network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 100), nn.Linear(100, 100), nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the class scores."""
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


def data_of(site: str) -> Batch:
    """Return the images of one site."""
    return simulate.digits(SAMPLES, generator=torch.Generator().manual_seed(sum(site.encode())))
