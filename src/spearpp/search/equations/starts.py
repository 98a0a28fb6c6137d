"""Random starting points of the search that solves the equations of a network.

Starts that lie as far from the mean as the samples do, and in similar directions, reach a sample in most cases. Starts
that are spread wider reach more different samples, but fewer of them converge. So the spread is adapted to the share
that converges. With smoothed activations nearly all starts converge, and starts that are spread wider find fewer
samples.
"""

import math

import torch

from spearpp.inversion.problem import Problem
from spearpp.inversion.residuals import MAX_RECORDED_WORK, Residuals
from spearpp.inversion.solutions import Solutions
from spearpp.types import Float, Tensor

FIRST_STARTS = 16
"""Number of starts of the first round with a set of equations on a CPU."""
STARTS_PER_ROUND = 60
"""Number of starts of a round. Measured: larger rounds find the same samples more often. With b = 450 and m = 1000, 240
starts found 62 samples, the next 240 starts 21; with b = 400 and m = 4000, 960 starts found 62 and 240 starts 48."""
MAX_STARTS_ON_GPU = 600
"""Largest number of starts of a round on a GPU. Measured: a product with JᵀJ for 60 starts takes 2 ms to launch and
less than 1 ms to run (b = 1200, m = 4000). With b = 40 and m = 200, one round of 600 starts finds the whole batch."""
MAX_STARTS_PER_UNKNOWN, MAX_STARTS_PER_UNKNOWN_ON_GPU = 6, 30
"""Largest number of starts of a round for each unknown, on a CPU and on a GPU. Design choice: starts are cheap on a
GPU, and a further round is not."""
LARGEST_NORM = 4.0
"""Norm of the last start of a round with more than ``STARTS_PER_ROUND`` starts, relative to that of the first ones.
Measured with b = 40 and m = 200: 600 starts find 33 to 40 samples if all have the norm of a sample, and 39 or 40 with
norms of up to four times as much."""
MANY_REACHED, FEW_REACHED, SPREAD_FACTOR = 0.9, 0.6, 1.25
"""If at least the share ``MANY_REACHED`` of the starts reach a solution, but many reach the same one, the spread of the
next starts is multiplied by ``SPREAD_FACTOR``. If less than the share ``FEW_REACHED`` reach a solution, it is divided
by ``SPREAD_FACTOR``. Measured: with b = 200 and m = 500, 100 starts at 0.7, 1, 1.5 and 2 times the norm of a sample
find 40, 51, 59 and 62 samples. With one hidden layer, b = 90 and m = 200, of 60 starts at 0.5, 1 and 1.4 times this
norm 57, 53 and 33 reach a sample."""
MIN_NEW_SHARE = 0.7
"""Share of new samples among the solutions at which the starts are spread widely enough. Measured: with b = 600 and
m = 1000, 60 starts at three times the norm of a sample found 45 new samples. At ten times this norm they found as many,
with three times the steps."""
MIN_SPREAD = 0.5
"""Smallest spread, relative to the norm of a sample. Measured: at this spread most solutions are the same few samples
(``docs/lab/notebook.md``, section "Starting points of the equations")."""


class Starts:
    """Draws starting points."""

    def __init__(self, problem: Problem, generator: torch.Generator) -> None:
        self._generator, self._device = generator, problem.factors.left.device
        self._norm, self._sizes = typical_norm(problem), problem.factors.singular_values

    def number(self, equations: Residuals, unknowns: int, *, first: bool, matrices: bool) -> int:
        """Return the number of starts of the next round.

        ``first`` says whether it is the first round with these equations, ``matrices`` whether it computes the
        matrices JᵀJ.
        """
        if self._device.type != "cuda":
            return min(FIRST_STARTS if first else STARTS_PER_ROUND, MAX_STARTS_PER_UNKNOWN * unknowns + 10)
        most = self.with_matrices(equations, unknowns) if matrices else MAX_STARTS_ON_GPU
        return min(most, MAX_STARTS_PER_UNKNOWN_ON_GPU * unknowns + 10)

    def with_matrices(self, equations: Residuals, unknowns: int) -> int:
        """Return the largest number of starts of a round on a GPU that computes the matrices JᵀJ."""
        room = int(MAX_RECORDED_WORK / 2 / equations.multiplications(1, unknowns))
        return min(MAX_STARTS_ON_GPU, max(STARTS_PER_ROUND, room))

    def draw(
        self, count: int, basis: Float[Tensor, "b u"], found: Solutions, empty: int, spread: float
    ) -> Float[Tensor, "count u"]:
        """Draw points whose typical norm is that of the found samples, or else an estimate, times the spread.

        Samples are larger in the directions that have larger singular values, and so are the points: if the signals of
        different samples are unrelated, ĜᵀĜ is about a multiple of the sum of x̂ x̂ᵀ over the samples. After ``empty``
        rounds in a row without a new sample the norm is halved, doubled, divided by four, and so on.

        ``basis`` is the derivative of the coordinates of a sample with respect to the unknowns.
        """
        norms = torch.linalg.vector_norm(found.coordinates, dim=1)
        norm = spread * (float(norms.median()) if len(norms) else self._norm)
        norm *= 2.0 ** ((empty + 1) // 2 * (-1 if empty % 2 else 1))
        drawn = torch.randn(count, len(basis), generator=self._generator, device=self._generator.device)
        farther = max(0, count - STARTS_PER_ROUND)
        drawn[STARTS_PER_ROUND:] *= torch.linspace(1, LARGEST_NORM, farther, device=drawn.device)[:, None]
        shape = self._sizes[:, None] * basis
        return norm / torch.linalg.matrix_norm(shape) * (drawn.to(basis) @ shape)


def adapted(spread: float, reached: float, new: float) -> float:
    """Return the spread of the next starts.

    Args:
        spread: the spread of the last starts.
        reached: share of the last starts that reached a solution.
        new: share of new samples among these solutions, or among the missing samples if these are fewer.
    """
    if reached >= MANY_REACHED and new < MIN_NEW_SHARE:
        return spread * SPREAD_FACTOR
    return max(MIN_SPREAD, spread / SPREAD_FACTOR) if reached < FEW_REACHED else spread


def typical_norm(problem: Problem) -> float:
    """Return an estimate of the norm of an input.

    A row of the gradient is a sum of the inputs with some weights, and its bias gradient is the sum of these weights.
    If the weights have random signs, both squares are on average sums of squares: Σ d_i² ‖x_i‖² and Σ d_i².
    """
    if not problem.seen.has_bias:
        return float(problem.factors.left.shape[0]) ** 0.5
    weights, biases = problem.seen.gradient[:, :-1], problem.seen.gradient[:, -1]
    norm = float(torch.linalg.matrix_norm(weights) / torch.linalg.vector_norm(biases))
    return norm if math.isfinite(norm) else 1.0
