"""Sparsity losses φ: what a search minimises instead of the number of non-zeros, with gradients in closed form.

The loss that a client trains with is something else: ``spearpp.model.loss``.

A loss takes y = L q, one vector per row. It is symmetric and separable: φ(y) = Σ_k h(y_k).

>>> import torch
>>> L1().value(torch.tensor([[3.0, -4.0]]))
tensor([7.])
>>> L1().gradient(torch.tensor([[3.0, -4.0]]))
tensor([[ 1., -1.]])
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

from spearpp.errors import OptionError
from spearpp.types import Float, Tensor


@runtime_checkable
class SparsityLoss(Protocol):
    """Interface between a search and the sparsity loss that it minimises."""

    sparse_minima: ClassVar[bool]
    """Whether local minima on the sphere are sparse. Otherwise they need rounding."""

    def value(self, y: Float[Tensor, "*points m"]) -> Float[Tensor, "*points"]:
        """Compute φ(y), one number for each vector."""
        ...

    def gradient(self, y: Float[Tensor, "*points m"], out: Tensor | None = None) -> Float[Tensor, "*points m"]:
        """Compute ∇φ(y), whose entries are h'(y_k). A given ``out``, which may be y, receives the result."""
        ...


@dataclass(frozen=True)
class L1:
    """φ(y) = ‖y‖₁, with the subgradient sign(y). Its minima are sparse, so they need no rounding."""

    sparse_minima: ClassVar[bool] = True

    def value(self, y: Float[Tensor, "*points m"]) -> Float[Tensor, "*points"]:
        """Compute Σ |y_k|."""
        return y.abs().sum(-1)

    def gradient(self, y: Float[Tensor, "*points m"], out: Tensor | None = None) -> Float[Tensor, "*points m"]:
        """Compute sign(y_k), which is 0 at 0."""
        return torch.sign(y, out=out)


@dataclass(frozen=True)
class LogCosh:
    """φ(y) = Σ μ log cosh(y_k / μ), which is |y| far from zero and quadratic within a distance of μ from zero.

    The columns of L have unit norm, so the entries of y are of order 1/√m. μ must be far smaller to measure sparsity.
    The values "μ = 300" (m = 200) and "μ = 500" of the paper only work as 1/300 and 1/500 in this formula.
    """

    mu: float = 1 / 300
    """μ, the width of the quadratic part. The default is the choice of the paper for m = 200."""
    sparse_minima: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.mu > 0:
            raise OptionError(f"LogCosh(mu={self.mu}): the width μ must be positive, for example 1/300")

    def value(self, y: Float[Tensor, "*points m"]) -> Float[Tensor, "*points"]:
        """Compute Σ |y| + μ log1p(exp(-2|y|/μ)) - μ log 2. This form does not overflow."""
        size = y.abs()
        return (size + self.mu * (torch.log1p(torch.exp(-2 * size / self.mu)) - math.log(2))).sum(-1)

    def gradient(self, y: Float[Tensor, "*points m"], out: Tensor | None = None) -> Float[Tensor, "*points m"]:
        """Compute tanh(y_k / μ)."""
        return torch.div(y, self.mu, out=out).tanh_()


@dataclass(frozen=True)
class NegativeL4:
    """φ(y) = -‖y‖₄⁴. Among vectors of equal norm, sparse ones have a large fourth moment."""

    sparse_minima: ClassVar[bool] = False

    def value(self, y: Float[Tensor, "*points m"]) -> Float[Tensor, "*points"]:
        """Compute -Σ y_k⁴."""
        return -y.pow(4).sum(-1)

    def gradient(self, y: Float[Tensor, "*points m"], out: Tensor | None = None) -> Float[Tensor, "*points m"]:
        """Compute -4 y_k³."""
        return torch.pow(y, 3, out=out).mul_(-4)
