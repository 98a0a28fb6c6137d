"""Laws of the sphere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from checking import FIRST
from spearpp.linalg import sphere

shapes = st.tuples(st.integers(1, 20), st.integers(2, 30), st.integers(0, 10_000))


def test_the_shapes_of_first_calls_are_checked() -> None:
    """As all tests do, by the import hook of conftest."""
    right, wrong = torch.ones(2, 3), torch.ones(2, 1)
    for calls in range(FIRST + 1):
        if calls < FIRST:
            with pytest.raises(TypeCheckError, match="tangent"):
                sphere.tangent(right, wrong)
        else:
            assert sphere.tangent(right, wrong).shape == right.shape


def draw(points: int, dimension: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = sphere.uniform(points, dimension, generator, dtype=torch.float64)
    return q, torch.randn(points, dimension, generator=generator, dtype=torch.float64)


@given(shapes)
def test_points_have_unit_norm(shape: tuple[int, int, int]) -> None:
    q, _ = draw(*shape)
    torch.testing.assert_close(q.norm(dim=1), torch.ones(shape[0], dtype=torch.float64))


@given(shapes)
def test_tangent_is_an_orthogonal_projection(shape: tuple[int, int, int]) -> None:
    q, v = draw(*shape)
    t = sphere.tangent(q, v)
    torch.testing.assert_close((t * q).sum(1), torch.zeros(shape[0], dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(sphere.tangent(q, t), t)
    torch.testing.assert_close((t * (v - t)).sum(1), torch.zeros(shape[0], dtype=torch.float64), atol=1e-11, rtol=0)


@given(shapes)
def test_retraction_is_first_order_the_exponential_map(shape: tuple[int, int, int]) -> None:
    q, v = draw(*shape)
    t = sphere.tangent(q, v)
    step = 1e-4
    moved = sphere.retract(q + step * t)
    size = t.norm(dim=1, keepdim=True)
    geodesic = torch.cos(step * size) * q + torch.sin(step * size) * t / size.clamp_min(1e-300)
    # They agree to third order in the step.
    assert float((moved - geodesic).abs().max()) < (step * float(size.max())) ** 3 + 1e-15


def test_starts_are_uniform() -> None:
    q = sphere.uniform(200_000, 3, torch.Generator().manual_seed(0))
    # On the two-sphere each coordinate is uniform on [-1, 1] (Archimedes).
    quantiles = q.quantile(torch.tensor([0.1, 0.5, 0.9]), dim=0)
    torch.testing.assert_close(quantiles, torch.tensor([-0.8, 0.0, 0.8])[:, None].expand(3, 3), atol=0.01, rtol=0)


def test_the_zero_vector_stays() -> None:
    assert sphere.retract(torch.zeros(1, 4)).tolist() == [[0.0] * 4]
