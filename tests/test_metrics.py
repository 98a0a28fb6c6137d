"""Scores against scikit-image and by construction."""

import pytest
import skimage.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st

from spearpp import Normalisation, score
from spearpp.errors import NonFiniteError, ShapeError
from spearpp.metrics import BEST_PSNR


def images(b: int, n: int, seed: int) -> torch.Tensor:
    return torch.rand(b, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 8), st.integers(5, 40), st.integers(0, 10_000))
def test_psnr_is_scikit_images_after_the_right_assignment(b: int, n: int, seed: int) -> None:
    truth = images(b, n, seed)
    order = torch.randperm(b, generator=torch.Generator().manual_seed(seed))
    recovered = (truth + 1e-3 * images(b, n, seed + 1))[order]
    result = score(recovered, truth)
    assert torch.equal(order[result.assignment], torch.arange(b))
    for i in range(b):
        oracle = skimage.metrics.peak_signal_noise_ratio(
            truth[i].numpy(), recovered[result.assignment[i]].numpy(), data_range=1
        )
        assert float(result.psnr[i]) == pytest.approx(oracle)


def test_one_wild_input_does_not_take_an_exact_ones_place() -> None:
    truth = images(3, 10, 0)
    recovered = torch.stack([1e6 * torch.ones(10, dtype=torch.float64), truth[0], truth[1]])
    result = score(recovered, truth)
    assert result.assignment.tolist() == [1, 2, 0]
    assert result.recovered == 2


def test_normalisation_is_undone_before_comparing() -> None:
    truth = images(2, 6, 0)
    normalisation = Normalisation(torch.full((6,), 0.5), torch.full((6,), 0.25))
    noisy = truth + 0.01
    plain = score(noisy, truth)
    fed = score(normalisation.apply(noisy), normalisation.apply(truth), normalisation=normalisation)
    torch.testing.assert_close(fed.psnr, plain.psnr)
    assert fed.mean_psnr == pytest.approx(40.0)


def test_missing_inputs_score_nothing_and_copies_share() -> None:
    truth = images(4, 10, 0)
    truth[3] = truth[0]
    result = score(truth[[0, 1]], truth)
    assert result.assignment.tolist() == [0, 1, -1, 0]
    assert result.psnr.tolist() == [BEST_PSNR, BEST_PSNR, 0.0, BEST_PSNR]
    assert score(truth[:0], truth).recovered == 0


def test_the_papers_accuracy_is_of_the_mean_and_ours_of_each() -> None:
    truth = images(3, 10, 0)
    one_wrong = truth.clone()
    one_wrong[0] += 0.1
    result = score(one_wrong, truth)
    assert result.accurate
    assert not result.exact
    assert not score(truth + 0.1, truth).accurate
    assert score(truth + 0.01, truth, threshold=25).exact


def test_infinite_recoveries_score_nothing() -> None:
    truth = images(1, 4, 0)
    assert float(score(torch.full((1, 4), torch.nan), truth).psnr) < -100


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 3\) and truth \(2, 4\)"):
        score(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ShapeError, match="at least one"):
        score(torch.zeros(2, 3), torch.zeros(0, 3))
    with pytest.raises(NonFiniteError):
        score(torch.zeros(1, 1), torch.tensor([[torch.nan]]))
    with pytest.raises(ShapeError, match="normalisation of 2 columns for inputs of 3"):
        score(torch.ones(1, 3), torch.ones(1, 3), normalisation=Normalisation.identity(2))
