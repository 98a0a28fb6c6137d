"""Random starting points of the search that solves the equations of a network.

Starts that lie as far from the mean as the samples do reach a sample in most cases. Starts that are spread wider reach
more different samples, but fewer of them converge. So the spread is adapted to the share that converges. With smoothed
activations nearly all starts converge, and starts that are spread wider find fewer samples.
"""

import math

import torch

from spearpp.inversion.problem import Problem
from spearpp.inversion.residuals import SMALL, Residuals
from spearpp.inversion.solutions import Solutions
from spearpp.types import Float, Tensor

TRIAL = 16
"""Number of starts of the first round with a set of equations on a CPU."""
STARTS = 60
"""Number of starts of a round. Measured: larger rounds find the same samples more often. With b = 450 and m = 1000, 240
starts found 62 samples, the next 240 starts 21; with b = 400 and m = 4000, 960 starts found 62 and 240 starts 48."""
MANY = 240
"""Number of starts of a round on a GPU, if it takes longer to launch the kernels of a step than to run them."""
MOST, FEW, WIDER = 0.9, 0.6, 1.25
"""If more starts than the first share reach a solution, the next ones are spread by the last factor more; if fewer than
the second share do, by this factor less. Measured: with b = 200 and m = 500, 100 starts at 0.7, 1, 1.5 and 2 times the
norm of a sample find 40, 51, 59 and 62 samples. With one hidden layer, b = 90 and m = 200, of 60 starts at 0.5, 1 and
1.4 times this norm 57, 53 and 33 reach a sample."""


class Starts:
    """Draws starting points, and adapts how far they are spread.

    Args:
        problem: the layer.
        generator: source of randomness.
    """

    def __init__(self, problem: Problem, generator: torch.Generator) -> None:
        self._generator, self._device = generator, problem.factors.left.device
        self._norm, self._reach = typical_norm(problem), 1.0

    def number(self, equations: Residuals, unknowns: int, *, first: bool) -> int:
        """Return the number of starts of the next round. ``first`` says whether it is the first with its equations."""
        most = TRIAL if first else STARTS
        if self._device.type == "cuda":
            most = max(STARTS, min(MANY, int(SMALL / equations.multiplications(1, unknowns))))
        return min(most, 6 * unknowns + 10)

    def draw(
        self, count: int, unknowns: int, found: Solutions, empty: int, *, smoothed: bool
    ) -> Float[Tensor, "count u"]:
        """Draw points whose typical norm is that of the found samples, or else an estimate, times the reach.

        After rounds without a new sample the norm is halved, doubled, divided by four, and so on.

        Args:
            count: number of points.
            unknowns: number of unknowns.
            found: the samples that are known.
            empty: number of rounds in a row without a new sample.
            smoothed: whether the activations are smoothed. The reach is not used then.
        """
        norms = torch.linalg.vector_norm(found.coordinates, dim=1)
        norm = (1.0 if smoothed else self._reach) * (float(norms.median()) if len(norms) else self._norm)
        norm *= 2.0 ** ((empty + 1) // 2 * (-1 if empty % 2 else 1))
        drawn = torch.randn(count, unknowns, generator=self._generator, device=self._generator.device)
        return norm / unknowns**0.5 * drawn.to(self._device)

    def adapt(self, converged: float) -> None:
        """Spread the next starts wider or less wide, given the share of starts that reached a solution."""
        if converged >= MOST:
            self._reach *= WIDER
        elif converged < FEW:
            self._reach /= WIDER


def typical_norm(problem: Problem) -> float:
    """Return about the norm of an input.

    A row of the gradient is a sum of the inputs with some weights, and its bias gradient is the sum of these weights.
    If the weights have random signs, both squares are on average sums of squares: Σ d_i² ‖x_i‖² and Σ d_i².
    """
    if not problem.seen.has_bias:
        return float(problem.factors.left.shape[0]) ** 0.5
    weights, biases = problem.seen.gradient[:, :-1], problem.seen.gradient[:, -1]
    norm = float(torch.linalg.matrix_norm(weights) / torch.linalg.vector_norm(biases))
    return norm if math.isfinite(norm) else 1.0
