"""Surrogates φ of the number of non-zeros, each with its value and its gradient in closed form.

A loss takes y = L q, one vector a row, and is symmetric and separable: φ(y) = Σ_k h(y_k).

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
class Loss(Protocol):
    """What a search needs of a loss."""

    sparse_minima: ClassVar[bool]
    """Whether local minima on the sphere are sparse as they are; otherwise they need rounding."""

    def value(self, y: Float[Tensor, "*points m"]) -> Float[Tensor, "*points"]:
        """φ(y), one number for each vector."""
        ...

    def gradient(self, y: Float[Tensor, "*points m"], out: Tensor | None = None) -> Float[Tensor, "*points m"]:
        """∇φ(y), entry by entry h'(y_k); written into ``out`` (which may be y itself) where given."""
        ...


@dataclass(frozen=True)
class L1:
    """φ(y) = ‖y‖₁, with subgradient sign(y). Its minima are sparse, so it needs no rounding."""

    sparse_minima: ClassVar[bool] = True

    def value(self, y: Float[Tensor, "*points m"]) -> Float[Tensor, "*points"]:
        """Σ |y_k|."""
        return y.abs().sum(-1)

    def gradient(self, y: Float[Tensor, "*points m"], out: Tensor | None = None) -> Float[Tensor, "*points m"]:
        """sign(y_k), 0 at 0."""
        return torch.sign(y, out=out)


@dataclass(frozen=True)
class LogCosh:
    """φ(y) = Σ μ log cosh(y_k / μ): |y| far from zero, quadratic within μ of it.

    The columns of L have unit norm, so entries of y are of order 1/√m and μ must be far smaller
    to see sparsity. The paper's "μ = 300" (m = 200) and "μ = 500" only work read as 1/300 and
    1/500, which is what this formula takes.
    """

    mu: float = 1 / 300
    sparse_minima: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.mu > 0:
            raise OptionError(f"LogCosh(mu={self.mu}): the width μ must be positive, for example 1/300")

    def value(self, y: Float[Tensor, "*points m"]) -> Float[Tensor, "*points"]:
        """Computed as |y| + μ log1p(exp(-2|y|/μ)) - μ log 2, which does not overflow."""
        size = y.abs()
        return (size + self.mu * (torch.log1p(torch.exp(-2 * size / self.mu)) - math.log(2))).sum(-1)

    def gradient(self, y: Float[Tensor, "*points m"], out: Tensor | None = None) -> Float[Tensor, "*points m"]:
        """tanh(y_k / μ)."""
        return torch.div(y, self.mu, out=out).tanh_()


@dataclass(frozen=True)
class NegativeL4:
    """φ(y) = -‖y‖₄⁴: on the sphere, spiky vectors have a large fourth moment."""

    sparse_minima: ClassVar[bool] = False

    def value(self, y: Float[Tensor, "*points m"]) -> Float[Tensor, "*points"]:
        """-Σ y_k⁴."""
        return -y.pow(4).sum(-1)

    def gradient(self, y: Float[Tensor, "*points m"], out: Tensor | None = None) -> Float[Tensor, "*points m"]:
        """-4 y_k³."""
        return torch.pow(y, 3, out=out).mul_(-4)
