"""How good a recovery is, given the truth. Nothing on the recovering side imports this."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from spearpp.errors import DtypeError, NonFiniteError, ShapeError
from spearpp.normalisation import Normalisation
from spearpp.types import Float, Int, Tensor

EXACT_PSNR = 90.0
"""The paper's mark for an exact batch, in dB; its DP and FedAvg tables use 25."""
BEST_PSNR = 300.0
"""What bit-identical inputs score, in dB: beyond the precision of float64."""


@dataclass(frozen=True, eq=False)
class Score:
    """A recovery compared with the truth, sample by sample."""

    psnr: Float[Tensor, "b"]
    """For each true sample, the PSNR of the recovered one assigned to it in dB; 0 where none was left."""
    assignment: Int[Tensor, "b"]
    """For each true sample, the row of the recovered inputs; -1 where none was left."""
    threshold: float
    """What counts as exact, in dB."""

    @property
    def mean_psnr(self) -> float:
        """Mean over the true samples, in dB."""
        return float(self.psnr.mean())

    @property
    def accurate(self) -> bool:
        """Whether the batch counts as recovered, as the paper defines it: mean PSNR over the threshold."""
        return self.mean_psnr > self.threshold

    @property
    def recovered(self) -> int:
        """How many samples are over the threshold themselves."""
        return int((self.psnr > self.threshold).sum())

    @property
    def exact(self) -> bool:
        """Whether every sample is over the threshold.

        Stricter than ``accurate``: with exact inputs at 160 dB the mean passes 90 with a third of
        the batch wrong.
        """
        return self.recovered == len(self.psnr)

    def __repr__(self) -> str:
        return (
            f"Score({self.recovered} of {len(self.psnr)} inputs over {self.threshold:g} dB, "
            f"PSNR mean {self.mean_psnr:.1f}, least {float(self.psnr.min()):.1f})"
        )


def psnr(mean_squared_error: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """-10 log₁₀(MSE) in dB for values on the [0, 1] scale, at most 300.

    >>> import torch
    >>> psnr(torch.tensor([0.01]))
    tensor([20.])
    """
    return -10 * mean_squared_error.clamp_min(10 ** (-BEST_PSNR / 10)).log10()


def score(
    recovered: Tensor,
    truth: Tensor,
    *,
    normalisation: Normalisation | None = None,
    threshold: float = EXACT_PSNR,
) -> Score:
    """Assign recovered inputs to true ones so that the PSNRs sum to the most, and report them.

    PSNR is summed rather than squared error, so that one wild input cannot take the place of an
    exact one. Samples that are in the batch more than once can be recovered only once; each copy
    gets that one's PSNR.

    Args:
        recovered: (k, n), what ``spearpp.invert`` returned.
        truth: (b, n), the batch as the network was fed it.
        normalisation: how the network's inputs came from the [0, 1] scale; PSNR is measured there.
        threshold: PSNR in dB over which a sample, or a batch on average, counts as exact.

    >>> import torch
    >>> truth = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    >>> score(truth.flip(0), truth).assignment
    tensor([2, 1, 0])
    """
    from scipy.optimize import linear_sum_assignment

    if not isinstance(recovered, Tensor) or not isinstance(truth, Tensor):
        raise DtypeError(f"recovered is a {type(recovered).__name__}, truth a {type(truth).__name__}: pass tensors")
    if recovered.ndim != 2 or truth.ndim != 2 or recovered.shape[1] != truth.shape[1] or not truth.numel():
        raise ShapeError(
            f"recovered {tuple(recovered.shape)} and truth {tuple(truth.shape)}: "
            "expected (k, n) and (b, n) with the same n, and at least one true sample"
        )
    if not bool(torch.isfinite(truth).all()):
        raise NonFiniteError("the truth holds NaN or Inf")
    true = truth.detach().double().cpu()
    guess = recovered.detach().double().cpu()
    if normalisation is not None:
        if len(normalisation.mean) != true.shape[1]:
            raise ShapeError(f"a normalisation of {len(normalisation.mean)} columns for inputs of {true.shape[1]}")
        true, guess = normalisation.undo(true), normalisation.undo(guess)
    distinct, copy_of = torch.unique(true, dim=0, return_inverse=True)
    errors = torch.cdist(distinct, guess, compute_mode="donot_use_mm_for_euclid_dist").square() / true.shape[1]
    quality = psnr(torch.nan_to_num(errors, nan=1e30, posinf=1e30))
    rows, columns = (torch.from_numpy(index) for index in linear_sum_assignment(quality.numpy(), maximize=True))
    best = torch.zeros(len(distinct), dtype=torch.float64)
    assigned = torch.full((len(distinct),), -1)
    best[rows], assigned[rows] = quality[rows, columns], columns
    return Score(psnr=best[copy_of], assignment=assigned[copy_of], threshold=threshold)


def accuracy(scores: Iterable[Score]) -> float:
    """The share of batches with mean PSNR over their threshold, as the paper's tables report it."""
    accurate = [each.accurate for each in scores]
    if not accurate:
        raise ShapeError("no scores: the accuracy of no batches is not defined")
    return sum(accurate) / len(accurate)
