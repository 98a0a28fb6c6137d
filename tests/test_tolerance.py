"""Entries count as zero exactly where the neurons of the client were inactive, with any noise."""

import pytest
import torch
from scipy.stats import binom

from conftest import MakeClient
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import pose
from spearpp.inversion.tolerance import default_sparsity


@pytest.mark.parametrize("neurons", [1, 10, 64, 200, 1000, 4096])
def test_default_sparsity_is_the_binomial_quantile(neurons: int) -> None:
    assert round(default_sparsity(neurons) * neurons) == int(binom.ppf(1e-9, neurons, 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("b", [2, 8, 16])
def test_zeros_of_the_true_directions_are_the_silent_neurons(
    make_client: MakeClient, dtype: torch.dtype, b: int
) -> None:
    for seed in range(5):
        client = make_client(b, 100, 60, seed=seed, dtype=dtype)
        problem = client.problem
        q = client.true_directions(problem)
        inactive = client.preactivations <= 0
        assert torch.equal(problem.tolerance.zeros(q @ problem.factors.left.T, q), inactive)


@pytest.mark.parametrize("noise", [1e-7, 1e-6, 1e-5])
def test_silent_neurons_stay_zero_under_noise(make_client: MakeClient, noise: float) -> None:
    """Planted Gaussian noise: of all inactive entries none may show, and few active ones may hide."""
    client = make_client(8, 200, 100, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    grad_weight, grad_bias = (
        gradient + noise * torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        for gradient in (client.seen.grad_weight, client.grad_bias)
    )
    problem = pose(observe(grad_weight, grad_bias, client.seen.weight, client.seen.bias))
    q = client.true_directions(problem)
    zeros = problem.tolerance.zeros(q @ problem.factors.left.T, q)
    inactive = client.preactivations <= 0
    assert bool(zeros[inactive].all())
    assert float(zeros[~inactive].double().mean()) < 0.02 + 2e3 * noise


def test_noise_widens_what_counts_as_the_same_direction(make_client: MakeClient) -> None:
    client = make_client(6, 200, 40, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    angles = []
    for level in (0.0, 1e-5, 1e-4):
        extra = level * torch.randn(client.seen.grad_weight.shape, generator=generator, dtype=torch.float64)
        seen = client.seen._replace(grad_weight=client.seen.grad_weight + extra)
        problem = pose(observe(*seen), batch_size=6)
        angles.append(float(problem.tolerance.angle(client.true_directions(problem)).mean()))
    assert angles[0] == pytest.approx(1e-6)
    assert angles[1] < angles[2]
    assert angles[1] > 1e-5
