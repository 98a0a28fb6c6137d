"""Derivatives of the network equations by hand, and what is computed from them, against PyTorch's own."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import jacrev
from torch.nn import functional

import spearpp
from conftest import present
from spearpp import simulate
from spearpp.inversion.network import Network
from spearpp.inversion.residuals import Residuals
from spearpp.inversion.spans import Span
from spearpp.linalg.least_squares import Options, levenberg_marquardt
from spearpp.linalg.spectrum import rank_above, trace_and_largest_of_inverse
from spearpp.model.following import Following
from spearpp.model.loss import Loss
from spearpp.model.rest import Rest
from spearpp.search.equations import descent

WIDTH, OUTPUTS, UNKNOWNS, POINTS = 9, 7, 4, 3


class Steep(nn.Module):
    """A chain of functions, one of which has an argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.leaky_relu(self.first(x), 0.3))


class Residual(nn.Module):
    """A network that is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(functional.silu(hidden + self.inner(hidden)))


class Constant(Residual):
    """A network with a layer whose input does not depend on the sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(functional.silu(hidden + self.inner(torch.ones_like(hidden))))


def chain(*activations: nn.Module) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(5, WIDTH)]
    for activation in activations[:-1]:
        layers += [activation, nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, activations[-1], nn.Linear(WIDTH, OUTPUTS))


def spans_of(rest: Rest, rounds: int) -> list[Span]:
    """Return random spaces of the inputs and the signals of every layer, in every round."""
    later = ([WIDTH] * (len(rest.layers) - 1) + [OUTPUTS]) * rounds
    kinds = [(layer, True, size) for layer, size in enumerate([WIDTH * rounds, *later])]
    kinds += [(layer, False, WIDTH + 1) for layer in range(1, len(later) + 1)]
    found = []
    for layer, signals, size in kinds:
        basis = torch.linalg.qr(torch.randn(size, UNKNOWNS, dtype=torch.float64))[0]
        found.append(Span(layer, signals, basis, torch.ones(UNKNOWNS).double(), 1e-9, 1e-9, appended_one=not signals))
    return found


def check(
    model: nn.Module,
    name: str,
    loss: Loss,
    kept: slice = slice(None),
    width: float = 0.0,
    *,
    is_chain: bool,
    rounds: int = 1,
) -> None:
    """Compare the derivatives of all points with those that PyTorch computes from the residuals of one point."""
    rests = []
    for _ in range(rounds):
        rests.append(Rest(model, name))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    rest = rests[0]
    assert rest.is_chain is is_chain
    spans = spans_of(rest, rounds)[kept]
    weights = {each: rest.weight(each) for each in rest.layers}
    a = torch.randn(WIDTH * rounds, UNKNOWNS, dtype=torch.float64)
    equations = Residuals(Network(tuple(rests), loss, OUTPUTS, tuple(spans), weights), spans, a, torch.float64)
    equations.place(torch.randn(UNKNOWNS).double(), torch.eye(UNKNOWNS).double())
    t, labels = torch.randn(POINTS, UNKNOWNS).double(), torch.arange(POINTS)
    scales: Mapping[str, float] = rest.scales(equations.preactivations(t)[:, :WIDTH]) if width else {}
    equations.widths = {each: width * scale for each, scale in scales.items()}
    importance = torch.rand(POINTS, len(spans)).double() + 0.5
    error, hessian, slope = equations.normal_equations(t, labels, importance)
    again, gradient, product = equations.products(t, labels, importance)
    values = equations(t, labels, importance)
    direction = torch.randn_like(t)
    for round_rest in rests:
        round_rest.is_chain = False  # so that torch.func computes the signals
    torch.testing.assert_close(values, equations(t, labels, importance))
    for row in range(POINTS):
        one = slice(row, row + 1)

        def residual(point: torch.Tensor, one: slice = one) -> torch.Tensor:
            return equations(point[None], labels[one], importance[one])[0]

        r, jacobian = residual(t[row]), jacrev(residual)(t[row])
        for square in (error, again):
            torch.testing.assert_close(square[row], r @ r)
        for computed in (slope, gradient):
            torch.testing.assert_close(computed[row], jacobian.T @ r)
        torch.testing.assert_close(hessian[row], jacobian.T @ jacobian)
        torch.testing.assert_close(product(direction)[row], jacobian.T @ jacobian @ direction[row])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("loss", Loss)
def test_a_chain(loss: Loss) -> None:
    check(chain(nn.GELU(), nn.Tanh()), "0", loss, is_chain=True)


@pytest.mark.parametrize("kept", [slice(1), slice(1, 2), slice(2, 3), slice(3, None), slice(3, 4), slice(4, None)])
def test_some_spans_of_a_chain(kept: slice) -> None:
    check(chain(nn.SiLU(), nn.GELU()), "0", Loss.CROSS_ENTROPY, kept, is_chain=True)


@pytest.mark.parametrize("kept", [slice(None), slice(1), slice(2, 3), slice(1, 4), slice(5, 6), slice(5, None)])
def test_several_rounds_of_a_chain(kept: slice) -> None:
    check(chain(nn.SiLU(), nn.GELU()), "0", Loss.CROSS_ENTROPY, kept, is_chain=True, rounds=2)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.3), nn.Tanh(), nn.PReLU()], ids=str)
def test_smoothed_activations(activation: nn.Module) -> None:
    check(chain(activation, activation), "0", Loss.CROSS_ENTROPY, width=0.5, is_chain=True)


@pytest.mark.parametrize("model", [Steep, Residual, Constant])
def test_other_networks(model: type[nn.Module]) -> None:
    check(model(), "first", Loss.CROSS_ENTROPY, is_chain=False)


def test_conjugate_gradients_find_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "MIN_UNKNOWNS_FOR_PRODUCTS", 4)
    model = nn.Sequential(nn.Linear(40, 60), nn.GELU(), nn.Linear(60, 60), nn.GELU(), nn.Linear(60, 10))
    batch = simulate.random_batch(15, features=40, generator=torch.Generator().manual_seed(1))
    first, *later = simulate.fedsgd(model, batch)
    result = spearpp.invert(*first, following=Following.of_layers("gelu", later))
    assert int(result.certified.sum()) == 15
    distance, nearest = torch.cdist(result.inputs.double(), batch.inputs.double()).min(1)
    assert len(set(nearest.tolist())) == 15
    lengths = torch.linalg.vector_norm(batch.inputs[nearest].double(), dim=1)
    assert bool((distance <= present(result.evidence).error * lengths).all())


def descent_of(points: torch.Tensor, floor: float, *, recorded: bool, **options: Any) -> tuple[torch.Tensor, int]:
    """Minimise (x² - 2)² + floor² from each point, and return the squared residuals and the number of steps."""

    def squared(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (x.square() - 2).square().sum(1) + floor**2

    def normal(x: torch.Tensor, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return squared(x, which), torch.diag_embed(4 * x.square()), 2 * x * (x.square() - 2)

    _, error, steps = levenberg_marquardt(
        squared, normal, points, Options(40, patience=40, **options), recorded=recorded
    )
    return error, steps


@pytest.mark.parametrize("recorded", [False, True])
def test_a_descent_ends_at_a_residual_that_no_step_lowers(recorded: bool) -> None:
    points = torch.linspace(1, 3, 30)[:, None]
    patient, more = descent_of(points, 1e-4, recorded=recorded)
    quick, fewer = descent_of(points, 1e-4, close=1e-3, recorded=recorded)
    assert fewer < 0.8 * more
    torch.testing.assert_close(quick, patient, rtol=0.01, atol=0.0)


@pytest.mark.parametrize("recorded", [False, True])
def test_slow_starts_are_replaced_by_others(recorded: bool) -> None:
    near, far = torch.linspace(1, 3, 30)[:, None], torch.logspace(3, 5, 30)[:, None]
    error, fewer = descent_of(torch.cat([near, far]), 0.0, tolerance=1e-4, replaceable=True, recorded=recorded)
    assert bool((error[:30] <= 1e-8).all())
    whole, more = descent_of(torch.cat([near, far]), 0.0, tolerance=1e-4, recorded=recorded)
    assert bool((whole <= 1e-8).all())
    assert fewer < 0.8 * more


@pytest.mark.parametrize("threshold", [1e-12, 0.5, 30.0])
def test_the_rank_above_a_threshold(threshold: float) -> None:
    for rank in (3, 8):
        matrix = torch.randn(20, rank).double() @ torch.randn(rank, 8).double()
        assert rank_above(matrix, threshold) == int((torch.linalg.svdvals(matrix) > threshold).sum())


def test_trace_and_largest_eigenvalue_of_an_inverse() -> None:
    factors = torch.randn(3, 6, 6).double()
    factors[1, :, 0] = factors[1, :, 1]
    products = factors.mT @ factors
    products[2, 0, 0] = torch.nan
    trace, largest = trace_and_largest_of_inverse(products)
    inverse = torch.linalg.inv(products[0])
    torch.testing.assert_close(trace[0], inverse.trace())
    value = float(torch.linalg.eigvalsh(inverse)[-1])
    assert (1 - 1e-9) * value <= float(largest[0]) <= 6 ** (1 / 64) * value
    assert trace[1:].tolist() == largest[1:].tolist() == [torch.inf, torch.inf]
