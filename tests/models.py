"""Models that several tests use."""

import torch
from torch import nn


class TwoInputs(nn.Module):
    """Two inputs, each with its own Linear+ReLU layer."""

    def __init__(self, left: int, right: int, width: int) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(left, width), nn.Linear(right, width), nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.cat([self.left(x).relu(), self.right(z).relu()], dim=1))
        return outputs
