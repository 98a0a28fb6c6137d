"""Searches and audits on a CUDA device. Run these tests on a machine that has one: ``pytest -m gpu``."""

import pytest
import torch

import spearpp
from conftest import MakeClient, batch_and_model
from spearpp import simulate
from spearpp.search import KernelSampling, ProjectedGradient, RiemannianAdam, Search
from spearpp.search.losses import LogCosh

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "search",
    [
        RiemannianAdam(starts=8192),
        RiemannianAdam(loss=LogCosh(1 / 300), starts=8192),
        ProjectedGradient(starts=8192),
        KernelSampling(starts=50_000),
    ],
    ids=["l1", "logcosh", "projected gradient", "kernels"],
)
def test_a_planted_batch_comes_back_on_the_device(make_client: MakeClient, cuda: torch.device, search: Search) -> None:
    client = make_client(8, 200, 100)
    seen = client.seen.to(cuda)
    result = spearpp.invert(*seen, search=search)
    assert result.inputs.device.type == "cuda"
    assert bool(result.certified.all())
    assert client.score(result).exact


def test_one_seed_gives_one_result_on_the_device(make_client: MakeClient, cuda: torch.device) -> None:
    seen = make_client(8, 200, 100).seen.to(cuda)
    first, second = (spearpp.invert(*seen, search=RiemannianAdam(starts=4096)) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)


def test_the_generator_may_live_on_either_device(make_client: MakeClient, cuda: torch.device) -> None:
    client = make_client(8, 200, 100)
    seen = client.seen.to(cuda)
    for device in ("cpu", "cuda"):
        generator = torch.Generator(device).manual_seed(0)
        assert client.score(spearpp.invert(*seen, search=RiemannianAdam(starts=4096), generator=generator)).exact


def test_memory_does_not_grow_with_the_number_of_starts(make_client: MakeClient, cuda: torch.device) -> None:
    client = make_client(12, 200, 100)
    seen = client.seen.to(cuda)
    peaks = []
    for starts in (1_000_000, 4_000_000):
        torch.cuda.reset_peak_memory_stats()
        search = RiemannianAdam(starts=starts, steps=2)
        spearpp.invert(*seen, search=search)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] <= 3 * 2**30
    assert peaks[1] < 1.6 * peaks[0]  # a full chunk, and no more, however many starts follow


def test_two_layers_bring_a_large_batch_back_on_the_device(cuda: torch.device) -> None:
    batch, model = batch_and_model(70, 120, [200, 200])
    first, following, _ = simulate.fedsgd(model.to(cuda), batch)
    result = spearpp.invert(*first, next_grad_weight=following.grad_weight, next_weight=following.weight)
    assert result.missing == 0
    assert bool(result.certified.all())
    assert spearpp.score(result.inputs, batch.inputs).exact
