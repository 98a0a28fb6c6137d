"""Losses against automatic differentiation and their limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spearpp.errors import OptionError
from spearpp.search.losses import L1, LogCosh, NegativeL4, SparsityLoss

LOSSES: list[SparsityLoss] = [L1(), LogCosh(1 / 300), LogCosh(2.0), NegativeL4()]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 50), points=st.integers(1, 5))
def test_gradient_is_the_derivative_of_the_value(loss: SparsityLoss, seed: int, m: int, points: int) -> None:
    y = torch.randn(points, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * m**-0.5
    y.requires_grad_()
    (expected,) = torch.autograd.grad(loss.value(y).sum(), y)
    torch.testing.assert_close(loss.gradient(y.detach()), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_gradient_can_be_written_in_place_and_leaves_y_alone_otherwise(loss: SparsityLoss) -> None:
    y = torch.linspace(-1, 1, 7)[None]
    before = y.clone()
    expected = loss.gradient(y)
    assert torch.equal(y, before)
    assert loss.gradient(y, out=y) is y
    assert torch.equal(y, expected)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_losses_are_even_and_count_every_entry(loss: SparsityLoss) -> None:
    y = torch.randn(3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(loss.value(-y), loss.value(y))
    torch.testing.assert_close(loss.value(torch.cat([y, y], dim=1)), 2 * loss.value(y))


def test_logcosh_tends_to_l1_and_does_not_overflow() -> None:
    y = torch.tensor([[1e4, -3.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(LogCosh(1e-6).value(y), L1().value(y), rtol=1e-6, atol=0)
    assert torch.isfinite(LogCosh(1e-6).value(y)).all()


def test_only_l1_needs_no_rounding() -> None:
    assert [loss.sparse_minima for loss in LOSSES] == [True, False, False, False]


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(OptionError, match="must be positive"):
        LogCosh(0.0)
