"""Factors, rank and noise, on matrices whose answer is known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakeClient
from spearpp.errors import RankError
from spearpp.inversion.factors import decompose
from spearpp.inversion.factors.rank import numerical_rank
from spearpp.inversion.factors.triplets import by_gram, by_sketch
from spearpp.inversion.observation import Observation, observe


def planted(m: int, n: int, b: int, seed: int, noise: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(m, b, generator=generator, dtype=torch.float64)
    right = torch.randn(b, n, generator=generator, dtype=torch.float64)
    return left @ right + noise * torch.randn(m, n, generator=generator, dtype=torch.float64)


def seen(gradient: torch.Tensor) -> Observation:
    return observe(gradient, None, torch.zeros_like(gradient), None)


@given(st.integers(6, 40), st.integers(6, 60), st.data())
def test_factors_multiply_back_and_the_rank_is_the_batch(m: int, n: int, data: st.DataObject) -> None:
    b = data.draw(st.integers(1, min(m, n) - 4))
    gradient = planted(m, n, b, seed=data.draw(st.integers(0, 10_000)))
    factors = decompose(seen(gradient))
    assert factors.batch_size == b
    torch.testing.assert_close(factors.left @ factors.right, gradient, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(factors.left.T @ factors.left, torch.eye(b, dtype=torch.float64), atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("b", [1, 5, 20])
def test_the_batch_size_is_read_in_every_wire_format(make_client: MakeClient, dtype: torch.dtype, b: int) -> None:
    client = make_client(b, 100, 200, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    assert decompose(observe(*client.seen.to(dtype))).batch_size == b


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.1])
def test_noise_is_measured(noise: float) -> None:
    factors = decompose(seen(planted(120, 200, 10, seed=3, noise=noise)))
    assert factors.batch_size == 10
    torch.testing.assert_close(factors.row_noise, torch.full((120,), noise, dtype=torch.float64), rtol=0.4, atol=0)
    assert float(factors.row_noise.mean()) == pytest.approx(noise, rel=0.05)


def test_noise_is_measured_row_by_row() -> None:
    quiet = planted(100, 300, 5, seed=0)
    loud = torch.linspace(1, 30, 100, dtype=torch.float64)[:, None] * 1e-4
    noise = loud * torch.randn(100, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    measured = decompose(seen(quiet + noise)).row_noise
    # Loud rows leak into quiet ones through the fit, by their share of it; never the other way.
    assert bool((measured >= 0.5 * loud[:, 0]).all())
    assert bool((measured <= 1.5 * loud[:, 0] + 0.2 * loud.max()).all())


def test_strong_noise_still_shows_the_rank() -> None:
    spectrum = torch.linalg.svdvals(planted(100, 400, 7, seed=0, noise=4.0))
    assert float(spectrum[6] / spectrum[7]) < 3
    assert numerical_rank(spectrum, (100, 400), 1e-16) == 7


def test_a_full_rank_gradient_is_refused_with_the_reason() -> None:
    with pytest.raises(RankError, match=r"rank 20 fills the \(20, 30\) gradient"):
        decompose(seen(planted(20, 30, 20, seed=0)))


@given(st.integers(10, 80), st.integers(10, 200), st.integers(1, 60), st.integers(0, 10_000))
def test_no_rank_is_read_into_a_full_one(m: int, n: int, more: int, seed: int) -> None:
    gradient = planted(m, n, min(m, n) + more, seed)
    rank = numerical_rank(torch.linalg.svdvals(gradient), (m, n), 1e-16)
    assert rank is None


@pytest.mark.parametrize(("given_size", "message"), [(0, "at least one"), (100, "at most 99")])
def test_a_batch_size_that_cannot_be_is_refused(given_size: int, message: str) -> None:
    with pytest.raises(RankError, match=message):
        decompose(seen(planted(100, 400, 7, seed=0, noise=1.0)), given_size)


def test_a_clear_rank_is_used_whatever_batch_size_is_given() -> None:
    assert decompose(seen(planted(20, 30, 5, seed=0)), 9).batch_size == 5


def test_a_given_batch_size_is_used() -> None:
    gradient = planted(100, 400, 7, seed=0, noise=1.0)
    assert decompose(seen(gradient), 9).batch_size == 9


def test_dead_neurons_and_unused_inputs_change_nothing() -> None:
    small = planted(30, 40, 4, seed=5)
    large = torch.zeros(50, 70, dtype=torch.float64)
    large[10:40, 20:60] = small
    alone, among = decompose(seen(small)), decompose(seen(large))
    assert among.batch_size == 4
    assert among.live.tolist() == [10 <= k < 40 for k in range(50)]
    torch.testing.assert_close(among.singular_values, alone.singular_values)
    torch.testing.assert_close(among.left @ among.right, large, atol=1e-12, rtol=0)


def test_copied_columns_are_not_taken_for_rank() -> None:
    """Digits have pixels that are always equal; their copies take singular values down to zero."""
    gradient = planted(60, 20, 5, seed=0).float()
    factors = decompose(observe(torch.cat([gradient, gradient], dim=1), None, torch.zeros(60, 40), None))
    assert factors.batch_size == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("b", [3, 60, 140])
def test_a_sketch_of_a_large_gradient_gives_what_the_whole_decomposition_gives(b: int, dtype: torch.dtype) -> None:
    gradient = planted(600, 700, b, seed=b).to(dtype).double()
    epsilon = torch.finfo(dtype).eps
    sketched, whole = by_sketch(gradient, epsilon), torch.linalg.svd(gradient, full_matrices=False)
    assert sketched is not None
    assert numerical_rank(sketched[1], (600, 700), epsilon) == b
    torch.testing.assert_close(sketched[1][:b], whole[1][:b], rtol=1e-9, atol=0)
    assert float(torch.linalg.norm(sketched[1][b:]) / torch.linalg.norm(whole[1][b:])) == pytest.approx(1, rel=1e-6)
    inside = sketched[0][:, :b].T @ whole[0][:, :b]
    torch.testing.assert_close(inside @ inside.T, torch.eye(b, dtype=torch.float64), rtol=0, atol=1e-8)


def test_a_sketch_does_not_decide_where_more_than_rounding_is_left() -> None:
    """Weak samples beyond the sketch, noise, and a full rank all need the whole spectrum."""
    epsilon = torch.finfo(torch.float32).eps
    strong, weak = planted(400, 500, 20, seed=0), 1e-3 * planted(400, 500, 180, seed=1)
    assert by_sketch(strong + weak, epsilon) is None
    assert by_sketch(planted(400, 500, 20, seed=0, noise=1e-4), epsilon) is None
    assert by_sketch(planted(400, 500, 400, seed=0), epsilon) is None
    assert decompose(seen((strong + weak).float())).batch_size == 200


@pytest.mark.parametrize("shape", [(60, 700), (700, 60), (600, 700)])
@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_a_gram_matrix_gives_the_subspace_to_the_error_it_promises(shape: tuple[int, int], noise: float) -> None:
    gradient = planted(*shape, 12, seed=0, noise=noise).float().double()
    epsilon = torch.finfo(torch.float32).eps
    fast, whole = by_gram(gradient, epsilon), torch.linalg.svd(gradient, full_matrices=False)
    assert fast is not None
    u, s, vt, _ = fast
    steepness = float(whole[1][0] / whole[1][11]) ** 2
    outside = u[:, :12] - whole[0][:, :12] @ (whole[0][:, :12].T @ u[:, :12])
    assert float(torch.linalg.matrix_norm(outside, 2)) <= 1000 * torch.finfo(torch.float64).eps * steepness
    torch.testing.assert_close(s[:12], whole[1][:12], rtol=1e-12, atol=0)
    torch.testing.assert_close(u[:, :12].T @ u[:, :12], torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close(s[:12, None] * vt[:12], u[:, :12].T @ gradient, rtol=0, atol=1e-10)
    assert float(torch.linalg.vector_norm(s[12:]) / torch.linalg.vector_norm(whole[1][12:])) == pytest.approx(
        1, rel=1e-6
    )


def test_a_gram_matrix_does_not_decide_where_squaring_would_cost_digits() -> None:
    epsilon = torch.finfo(torch.float32).eps
    steep = planted(60, 700, 12, seed=0) + 1e-6 * planted(60, 700, 8, seed=1)
    assert by_gram(steep, epsilon, 20) is None
    assert by_gram(planted(60, 700, 12, seed=0), torch.finfo(torch.float64).eps) is None
    assert by_gram(torch.zeros(60, 700, dtype=torch.float64), epsilon) is None


def test_a_sketched_gram_matrix_keeps_its_promise_where_singular_values_fall() -> None:
    generator = torch.Generator().manual_seed(0)
    sides = [torch.linalg.qr(torch.randn(400, 30, generator=generator, dtype=torch.float64))[0] for _ in range(2)]
    gradient = ((sides[0] * torch.logspace(0, -3, 30, dtype=torch.float64)) @ sides[1].T).float().double()
    fast, whole = by_gram(gradient, torch.finfo(torch.float32).eps), torch.linalg.svd(gradient)[0][:, :30]
    assert fast is not None
    outside = fast[0][:, :30] - whole @ (whole.T @ fast[0][:, :30])
    assert float(torch.linalg.matrix_norm(outside, 2)) <= 1000 * torch.finfo(torch.float64).eps * 1e6
