"""Kernels against a full singular value decomposition."""

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakeClient
from spearpp.linalg.nullspace import _inverse, _largest, _starts, kernel_vectors, random_subsets
from spearpp.search.base import one_dimensional_kernels


@given(st.integers(2, 25), st.integers(-1, 12), st.integers(0, 10_000))
def test_kernel_of_rows_orthogonal_to_a_planted_vector(b: int, extra: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.nn.functional.normalize(torch.randn(3, b, generator=generator, dtype=torch.float64))
    rows = torch.randn(3, b + extra, b, generator=generator, dtype=torch.float64)
    rows = rows - (rows @ q[:, :, None]) * q[:, None, :]
    found, values = kernel_vectors(rows)
    oracle = torch.from_numpy(numpy.linalg.svd(rows.numpy(), full_matrices=True)[2][:, -1])
    torch.testing.assert_close((found * q).sum(1).abs(), torch.ones(3, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close((found * oracle).sum(1).abs(), torch.ones(3, dtype=torch.float64), atol=1e-9, rtol=0)
    assert float(values[:, 0].max()) < 1e-9 < float(values[:, 1].min())


@given(st.integers(2, 40), st.integers(-1, 12), st.integers(0, 10_000))
def test_powers_of_the_inverse_as_a_gpu_takes_them_end_at_the_kernel_too(b: int, extra: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.nn.functional.normalize(torch.randn(3, b, generator=generator, dtype=torch.float64))
    rows = torch.randn(3, b + extra, b, generator=generator, dtype=torch.float64)
    rows = rows - (rows @ q[:, :, None]) * q[:, None, :]
    here = torch.device("cpu")
    for dtype, far in ((torch.float64, 1e-9), (torch.float32, 1e-2)):
        gram = (rows.mT @ rows).to(dtype)
        found = _largest(_inverse(gram), _starts(b, dtype, here)[:, :1])
        torch.testing.assert_close((found * q).sum(1).abs(), torch.ones(3, dtype=torch.float64), atol=far, rtol=0)


def test_two_dimensional_kernels_show() -> None:
    rows = torch.zeros(1, 4, 5, dtype=torch.float64)
    rows[0, :3, :3] = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(kernel_vectors(rows)[1].max()) < 1e-9


def test_no_kernel_shows() -> None:
    rows = torch.eye(4, dtype=torch.float64)[None]
    assert float(kernel_vectors(rows)[1][0, 0]) > 0.9


def test_lines_keeps_just_the_lines(make_client: MakeClient) -> None:
    client = make_client(6, 80, 40)
    problem = client.problem
    q = client.true_directions(problem)
    zeros = problem.tolerance.zeros(q @ problem.factors.left.T, q)
    one = problem.factors.left[zeros[0]][:6]
    both = problem.factors.left[zeros[0] & zeros[1]][:6]
    none = problem.factors.left[:6]
    found = one_dimensional_kernels(problem, torch.stack([one, both, none]))
    assert len(found) == 1
    assert float((found[0] @ q[0]).abs()) > 1 - 1e-9


@given(st.integers(1, 30), st.data())
def test_subsets_have_no_repetition(of: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, of))
    subsets = random_subsets(5, of, size, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == size for row in subsets.tolist())
    assert bool(((subsets >= 0) & (subsets < of)).all())
