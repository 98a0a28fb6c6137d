"""Losses whose derivative at the outputs of a network is known for each label."""

from enum import StrEnum
from typing import Literal, get_args

import torch
from torch.nn import functional

from spearpp.errors import OptionError
from spearpp.types import Float, Int, Tensor

LossName = Literal["cross-entropy", "mse", "bce", "unknown"]
"""The names that ``Loss.named`` accepts."""
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)


class Loss(StrEnum):
    """A loss of classifiers. Every member equals its plain string.

    >>> Loss("cross-entropy").labels(10)
    10
    """

    CROSS_ENTROPY = "cross-entropy"
    MSE = "mse"
    """The mean squared error to one-hot targets."""
    BCE = "bce"
    """Binary cross-entropy of every output with one-hot targets. A single output has the targets 0 and 1."""
    ONE_OUTPUT = "any loss of one output"
    """Stands for every loss of a network with one output. Its signals are multiples of the derivative of the output,
    whatever the loss and the target are, and the equations use only their direction."""

    @classmethod
    def named(cls, name: str) -> "Loss | None":
        """Return the loss of a classifier with this name; None if the loss is "unknown".

        Raises:
            OptionError: if there is no such loss.

        >>> Loss.named("mse"), Loss.named("unknown")
        (<Loss.MSE: 'mse'>, None)
        """
        if name == "unknown":
            return None
        if name not in LOSS_NAMES:
            raise OptionError(f"loss={name!r}: expected {', '.join(LOSS_NAMES)}")
        return cls(name)

    def labels(self, outputs: int) -> int:
        """Return the number of labels of a network with this number of outputs."""
        return 2 if self is Loss.BCE and outputs == 1 else outputs

    def total(self, outputs: Float[Tensor, "k c"], labels: Int[Tensor, "k"]) -> Float[Tensor, ""]:
        """Return the sum of the losses of all samples."""
        return self.each(outputs, labels).sum()

    def each(self, outputs: Float[Tensor, "k c"], labels: Int[Tensor, "k"]) -> Float[Tensor, "k"]:
        """Return the loss of each sample.

        >>> Loss.MSE.each(torch.tensor([[1.0, 2.0]]), torch.tensor([0])).tolist()
        [2.0]
        """
        if self is Loss.CROSS_ENTROPY:
            return functional.cross_entropy(outputs, labels, reduction="none")
        if self is Loss.ONE_OUTPUT:
            return outputs[:, 0]
        if outputs.shape[1] == 1:
            targets = labels[:, None].to(outputs)
        else:
            targets = functional.one_hot(labels, outputs.shape[1]).to(outputs)
        if self is Loss.MSE:
            return (outputs - targets).square().mean(1)
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)

    def curvature(self, outputs: Float[Tensor, "k c"], tangents: Float[Tensor, "k n c"]) -> Float[Tensor, "k n c"]:
        """Return H · v for the second derivative H of each sample's loss at its outputs, and several vectors v.

        >>> Loss.MSE.curvature(torch.zeros(1, 2), torch.ones(1, 1, 2)).tolist()  # the loss is the mean of o²
        [[[1.0, 1.0]]]
        """
        if self is Loss.CROSS_ENTROPY:
            shares = functional.softmax(outputs, dim=1)[:, None]
            weighted = shares * tangents
            return weighted - shares * weighted.sum(2, keepdim=True)
        if self is Loss.MSE:
            return tangents * (2 / outputs.shape[1])
        if self is Loss.ONE_OUTPUT:
            return torch.zeros_like(tangents)
        chances = outputs.sigmoid()[:, None]
        return tangents * (chances * (1 - chances) / outputs.shape[1])
