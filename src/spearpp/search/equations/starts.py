"""Random starting points of the search that solves the equations of a network.

Starts that lie as far from the mean as the samples do, and in similar directions, reach a sample in most cases. Starts
that are spread wider reach more different samples, but fewer of them converge. So the spread is adapted to the share
that converges. With smoothed activations nearly all starts converge, and starts that are spread wider find fewer
samples.
"""

import math

import torch

from spearpp.inversion.problem import Problem
from spearpp.inversion.residuals import RECORDED, Residuals
from spearpp.inversion.solutions import Solutions
from spearpp.types import Float, Tensor

TRIAL = 16
"""Number of starts of the first round with a set of equations on a CPU."""
STARTS = 60
"""Number of starts of a round. Measured: larger rounds find the same samples more often. With b = 450 and m = 1000, 240
starts found 62 samples, the next 240 starts 21; with b = 400 and m = 4000, 960 starts found 62 and 240 starts 48."""
MANY = 600
"""Largest number of starts of a round on a GPU. Measured: a product with JᵀJ for 60 starts takes 2 ms to launch and
less than 1 ms to run (b = 1200, m = 4000). With b = 40 and m = 200, one round of 600 starts finds the whole batch."""
PER_UNKNOWN, PER_UNKNOWN_ON_GPU = 6, 30
"""Largest number of starts for each unknown. Design choice: starts are cheap on a GPU, and a further round is not."""
FARTHEST = 4.0
"""Norm of the last start of a round with more than ``STARTS`` starts, relative to that of the first ones. Measured with
b = 40 and m = 200: 600 starts find 33 to 40 samples if all have the norm of a sample, and 39 or 40 with norms of up to
four times as much."""
MOST, FEW, WIDER = 0.9, 0.6, 1.25
"""If at least the share ``MOST`` of the starts reach a solution, but many reach the same one, the spread of the next
starts is multiplied by ``WIDER``. If less than the share ``FEW`` reach a solution, it is divided by ``WIDER``.
Measured: with b = 200 and m = 500, 100 starts at 0.7, 1, 1.5 and 2 times the norm of a sample find 40, 51, 59 and 62
samples. With one hidden layer, b = 90 and m = 200, of 60 starts at 0.5, 1 and 1.4 times this norm 57, 53 and 33 reach a
sample."""
DIFFERENT = 0.7
"""Share of new samples among the solutions at which the starts are spread widely enough. Measured: with b = 600 and
m = 1000, 60 starts at three times the norm of a sample found 45 new samples. At ten times this norm they found as many,
with three times the steps."""
NEAREST = 0.5
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
            return min(TRIAL if first else STARTS, PER_UNKNOWN * unknowns + 10)
        most = self.with_matrices(equations, unknowns) if matrices else MANY
        return min(most, PER_UNKNOWN_ON_GPU * unknowns + 10)

    def with_matrices(self, equations: Residuals, unknowns: int) -> int:
        """Return the largest number of starts of a round on a GPU that computes the matrices JᵀJ."""
        room = int(RECORDED / 2 / equations.multiplications(1, unknowns))
        return min(MANY, max(STARTS, room))

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
        drawn[STARTS:] *= torch.linspace(1, FARTHEST, max(0, count - STARTS), device=drawn.device)[:, None]
        shape = self._sizes[:, None] * basis
        return norm / torch.linalg.matrix_norm(shape) * (drawn.to(basis) @ shape)


def adapted(spread: float, reached: float, new: float) -> float:
    """Return the spread of the next starts.

    Args:
        spread: the spread of the last starts.
        reached: share of the last starts that reached a solution.
        new: share of new samples among these solutions, or among the missing samples if these are fewer.
    """
    if reached >= MOST and new < DIFFERENT:
        return spread * WIDER
    return max(NEAREST, spread / WIDER) if reached < FEW else spread


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
