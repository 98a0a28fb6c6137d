"""The affine map between the [0, 1] scale of a data set and the inputs of a network."""

from dataclasses import dataclass

import torch

from spearpp.types import Float, Tensor


@dataclass(frozen=True, eq=False)
class Normalisation:
    """Standardise every coordinate: x = (u - mean) / std, with u on the [0, 1] scale.

    >>> import torch
    >>> halves = Normalisation(torch.tensor([0.5]), torch.tensor([0.25]))
    >>> halves.apply(torch.tensor([[1.0]]))
    tensor([[2.]])
    >>> halves.undo(torch.tensor([[2.0]]))
    tensor([[1.]])
    """

    mean: Float[Tensor, "n"]
    std: Float[Tensor, "n"]

    def apply(self, unit: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """Convert values on the [0, 1] scale to network inputs."""
        return (unit - self.mean.to(unit)) / self.std.to(unit)

    def undo(self, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """Convert network inputs to values on the [0, 1] scale."""
        return inputs * self.std.to(inputs) + self.mean.to(inputs)

    @classmethod
    def identity(cls, features: int) -> "Normalisation":
        """Return the normalisation of a network whose inputs are on the [0, 1] scale already."""
        return cls(torch.zeros(features), torch.ones(features))
