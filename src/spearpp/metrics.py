"""Compare recovered inputs with the true inputs. The attack itself never imports this module."""

from dataclasses import dataclass
from typing import Any

import torch

from spearpp.errors import DtypeError, NonFiniteError, ShapeError
from spearpp.normalisation import Normalisation
from spearpp.types import Float, Int, Tensor

PAPER_PSNR = 90.0
"""PSNR in dB above which the SPEAR++ paper counts a batch as recovered. The mark serves comparisons with the paper and
with the truth. A certificate does not use it: its definition of an exact input is ``spearpp.inversion.evidence.EXACT``
(docs/method.md, "What exact means")."""
PAPER_NOISY_PSNR = 25.0
"""The same mark in the paper's tables on DP-SGD and FedAvg, where the inputs can only be recognised."""
BEST_PSNR = 300.0
"""Largest PSNR in dB, reported for identical inputs. Derived from float64: if every value is wrong by one rounding unit
(2.2e-16), the PSNR is 313 dB."""


@dataclass(frozen=True, eq=False)
class Score:
    """PSNR of recovered inputs, for every true sample."""

    psnr: Float[Tensor, "b"]
    """PSNR in dB of the recovered input that is assigned to each true sample; 0 if no input is assigned."""
    assignment: Int[Tensor, "b"]
    """Row of the recovered input that is assigned to each true sample; -1 if no input is assigned."""
    threshold: float
    """PSNR in dB above which a sample counts as exact in this comparison. The claims of an audit do not use it, but the
    stated error (``spearpp.inversion.evidence.EXACT``)."""

    @property
    def mean_psnr(self) -> float:
        """Mean PSNR over the true samples, in dB."""
        return float(self.psnr.mean())

    @property
    def accurate(self) -> bool:
        """Whether the batch counts as recovered by the paper's definition: the mean PSNR exceeds the threshold."""
        return self.mean_psnr > self.threshold

    @property
    def recovered(self) -> int:
        """Number of samples whose PSNR exceeds the threshold."""
        return int((self.psnr > self.threshold).sum())

    @property
    def exact(self) -> bool:
        """Whether the PSNR of every sample exceeds the threshold.

        This property is stricter than ``accurate``. If exact inputs reach 160 dB, the mean exceeds 90 dB even if a
        third of the batch is wrong.
        """
        return self.recovered == len(self.psnr)

    @property
    def summary(self) -> str:
        """The score in words.

        >>> score(torch.eye(2), torch.eye(2)).summary
        '2 of 2 samples above 90 dB (PSNR: mean 300.0 dB, lowest 300.0 dB)'
        """
        count = f"{self.recovered} of {len(self.psnr)} samples above {self.threshold:g} dB"
        return f"{count} (PSNR: mean {self.mean_psnr:.1f} dB, lowest {float(self.psnr.min()):.1f} dB)"

    def to_dict(self) -> dict[str, Any]:
        """Return the score as JSON values, as ``report.json`` and ``spearpp score --json`` show it."""
        return {
            "samples": len(self.psnr),
            "exact": self.recovered,
            "threshold_db": self.threshold,
            "mean_psnr_db": self.mean_psnr,
            "least_psnr_db": float(self.psnr.min()),
            "psnr_db": self.psnr.tolist(),
            "recovered_row": self.assignment.tolist(),
        }

    def __repr__(self) -> str:
        return f"Score({self.summary})"


def psnr(mean_squared_error: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return -10 log₁₀(MSE) in dB for values on the [0, 1] scale, at most 300 dB.

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
    threshold: float = PAPER_PSNR,
) -> Score:
    """Assign recovered inputs to true inputs such that the sum of the PSNRs is largest, and report the PSNRs.

    The assignment uses PSNR and not squared error, because one very wrong input would dominate the squared error and
    could displace an exact input. An attack can recover repeated samples only once. Each copy of a repeated sample
    therefore gets the PSNR of the same recovered input.

    Args:
        recovered: (k, n), the inputs that ``spearpp.invert`` returned.
        truth: (b, n), the batch as it was fed to the network.
        normalisation: the map from the [0, 1] scale to network inputs. PSNR is measured on the [0, 1] scale. If it is
            None, the network inputs are on this scale already.
        threshold: PSNR in dB above which a sample, or the mean of a batch, counts as exact in this comparison.

    Raises:
        SpearError: if an argument is not a tensor, shapes do not fit, or the truth holds NaN or Inf.

    >>> import torch
    >>> truth = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    >>> score(truth.flip(0), truth).assignment
    tensor([2, 1, 0])
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

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
    found = recovered.detach().double().cpu()
    if normalisation is not None:
        if len(normalisation.mean) != true.shape[1]:
            raise ShapeError(f"a normalisation of {len(normalisation.mean)} columns for inputs of {true.shape[1]}")
        true, found = normalisation.undo(true), normalisation.undo(found)
    distinct, copy_of = torch.unique(true, dim=0, return_inverse=True)
    errors = torch.cdist(distinct, found, compute_mode="donot_use_mm_for_euclid_dist").square() / true.shape[1]
    quality = psnr(torch.nan_to_num(errors, nan=1e30, posinf=1e30))
    rows, columns = (torch.from_numpy(index) for index in linear_sum_assignment(quality.numpy(), maximize=True))
    best = torch.zeros(len(distinct), dtype=torch.float64)
    assigned = torch.full((len(distinct),), -1)
    best[rows], assigned[rows] = quality[rows, columns], columns
    return Score(psnr=best[copy_of], assignment=assigned[copy_of], threshold=threshold)
