"""Rounding of approximate directions: it finds the sparse vector that was planted."""

from collections.abc import Callable

import pytest
import torch

from conftest import MakeClient
from spearpp.errors import OptionError
from spearpp.search import RiemannianAdam
from spearpp.search.losses import LogCosh
from spearpp.search.rounding import NoRounding, SamplingRounding


def near(q: torch.Tensor, distance: float, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed), dtype=q.dtype)
    return torch.nn.functional.normalize(q + distance * torch.nn.functional.normalize(noise))


def test_sampling_finds_planted_directions(make_client: MakeClient) -> None:
    client = make_client(8, 120, 60)
    problem = client.problem
    q = client.true_directions(problem)
    generator = torch.Generator().manual_seed(0)
    by_sampling = SamplingRounding(draws=40).round(problem, near(q, 0.05), generator)
    overlap = (by_sampling @ q.T).abs().amax(0)
    torch.testing.assert_close(overlap, torch.ones(8, dtype=torch.float64), atol=1e-9, rtol=0)


def test_sampling_rounds_what_a_smooth_loss_finds_to_the_true_directions(make_client: MakeClient) -> None:
    client = make_client(6, 100, 60)
    problem = client.problem
    search = RiemannianAdam(loss=LogCosh(1 / 50), rounding=NoRounding(), starts=60)
    generator = torch.Generator().manual_seed(1)
    (approximate,) = [proposals.directions for proposals in search.propose(problem, generator)]
    by_sampling = SamplingRounding(draws=30).round(problem, approximate, generator)
    q = client.true_directions(problem)
    assert float((by_sampling @ q.T).abs().amax(0).min()) > 1 - 1e-9
    assert float((approximate @ q.T).abs().amax(0).max()) < 1 - 1e-9  # rounding was needed


def test_sampling_returns_nothing_where_there_is_no_kernel(make_client: MakeClient) -> None:
    problem = make_client(8, 120, 60).problem
    random = near(torch.ones(20, 8, dtype=torch.float64), 10.0)
    dense = SamplingRounding(ratio=15.0).round(problem, random, torch.Generator().manual_seed(0))
    assert len(dense) == 0


def test_no_directions_in_none_out(make_client: MakeClient) -> None:
    problem = make_client(4, 60, 30).problem
    nothing = torch.zeros(0, 4, dtype=torch.float64)
    for rounding in (NoRounding(), SamplingRounding()):
        assert rounding.round(problem, nothing, torch.Generator()).shape == (0, 4)


@pytest.mark.parametrize("make", [lambda: SamplingRounding(ratio=0.5), lambda: SamplingRounding(draws=0)])
def test_options_out_of_range_are_refused(make: Callable[[], SamplingRounding]) -> None:
    with pytest.raises(OptionError, match="SamplingRounding"):
        make()
