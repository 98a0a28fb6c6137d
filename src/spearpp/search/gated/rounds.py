"""Rounds of the gated search: what has been found, what is left, and where to look next.

Samples of very different strength are found strongest first. The spectrum of their gradient is graded, and the
direction of a strong one lies in the leading singular directions but for the share that weaker samples have. So a round
looks only as far as the spectrum stays above a hundredth of what is strongest among the rest: a problem of fewer
dimensions, in which weak samples are noise. What it finds is refined in the whole space, and must stay within reach: a
vertex that needs faint directions for its zeros is none of the strong samples. A spectrum that is not graded is
within reach from the first round.
"""

from dataclasses import dataclass

import torch

from spearpp.inversion.pairs import Pairs
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import complement
from spearpp.search.gated.accept import acceptable, new_directions
from spearpp.search.gated.descent import Effort, Ends, descend
from spearpp.search.gated.objective import Gates
from spearpp.search.gated.refine import distinct, refine, silent_neurons
from spearpp.types import Bool, Float, Tensor, to_device

DRY_ROUNDS = 4
"""Rounds at the highest effort without a find before something found is doubted."""
DROPPED = (0.25, 0.5, 1.0, 1.0)
"""Which share of what was found is looked for again at each doubt, with more care every time."""
GRADED = 1e-4
"""Least over largest singular value below which a spectrum is graded: alike inputs alone have 4e-3."""
GRADES = (1e-2, 1e-3, 0.0)
"""Least singular value within reach, over the largest that is left: at first, and after rounds without a find."""
ABOVE = 10.0
"""How far above noise the end of an input must be to tell its sign."""
LEADING = 0.99
"""Least norm of the part of a direction that is within reach."""


@dataclass(frozen=True)
class Pace:
    """How a round looks."""

    least: int
    """Starts at least."""
    most: int
    """Starts at most."""
    efforts: tuple[Effort, ...]
    """How carefully it descends, from the first to the hardest."""
    rate: float
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    """Where it descends, each from its share of the starts."""


class Rounds:
    """What has been found, and how hard to look next."""

    def __init__(self, problem: Problem, pace: Pace, known: Float[Tensor, "known b"], peeled: Pairs) -> None:
        self.problem = problem
        self.pace = pace
        self.found = known
        self.effort, self.more, self.dry, self.dropped, self.wider = 0, 1, 0, 0, 0
        scale = problem.preactivations.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        live = problem.factors.live
        self.rows, self.apart = problem.live_rows.to(pace.dtype), peeled.apart.to(pace.dtype)
        self.gates = problem.preactivations[live] / scale

    @property
    def stuck(self) -> bool:
        """Whether the last rounds found nothing although something had been found before."""
        last = self.problem.batch_size - len(self.found) == 1
        return len(self.found) > 0 and self.dry >= (1 if last else DRY_ROUNDS)

    def drop(self) -> bool:
        """Forget the least sparse quarter, then half, then all of what was found, and all pairs; the pool keeps it."""
        if self.dropped == len(DROPPED):
            return False
        zeros = self.problem.tolerance.zeros(self.found @ self.problem.factors.left.T, self.found).sum(1)
        kept = int(len(self.found) * (1 - DROPPED[self.dropped]))
        self.found = self.found[zeros.argsort(descending=True, stable=True)[:kept]]
        self._anywhere()
        self.more, self.dry, self.wider, self.dropped = 1, 0, 0, self.dropped + 1
        self.effort = min(self.effort + 1, len(self.pace.efforts) - 1)  # what was hasty may have been wrong
        return True

    @property
    def complete(self) -> bool:
        """Whether nothing is left to look for."""
        return len(self.found) >= self.problem.batch_size

    @property
    def size(self) -> int:
        """Starts of the next round: two where p is known up to sign."""
        missing = self.problem.batch_size - len(self.found)
        if missing == 1:
            return 2
        return min(max(self.pace.least, missing) * self.more, self.pace.most)

    @property
    def reach(self) -> int:
        """How many leading singular directions the next round looks in."""
        sizes = self.problem.factors.singular_values
        if sizes[-1] >= GRADED * sizes[0]:
            return len(sizes)
        strongest = sizes[min(len(self.found), len(sizes) - 1)]
        return int((sizes >= GRADES[self.wider] * strongest).sum())

    def run(self, size: int, generator: torch.Generator) -> tuple[Float[Tensor, "new b"], int]:
        """One round: the directions it adds, and the start-steps it took."""
        reach = self.reach
        basis = self._left(reach)
        dimension = basis.shape[1]
        if self.problem.batch_size - len(self.found) == 1:
            points = self._either_sign(basis.T)
            directions, steps = points, 0
            chosen = torch.arange(len(points), device=points.device)
        else:
            dtype, effort = self.pace.dtype, self.pace.efforts[self.effort]
            starts = sphere.uniform(size, dimension, generator, dtype=dtype)
            gates, apart = (self.gates @ basis).to(dtype), self.apart
            confined = Gates(self._rows(reach) @ apart, gates, apart.T @ basis.to(dtype))
            ends = self._descend(confined, starts, effort)
            points, directions, steps = ends.points @ basis.T, ends.directions @ apart.double().T, ends.steps
            chosen = distinct(self.problem, points, directions)
        refined = refine(self.problem, points[chosen], directions[chosen])
        kept = acceptable(self.problem, points[chosen], refined) & leads(refined, reach)
        new = new_directions(self.problem, self.found, refined[kept])[:dimension]
        self._adapt(len(new), dimension, size)
        self.found = torch.cat([self.found, new])
        return new, steps

    def _descend(self, gates: Gates, starts: Tensor, effort: Effort) -> Ends:
        """End points and directions in float64; every device has begun before the first is waited for."""
        devices = self.pace.devices
        parts = zip(devices, starts.chunk(len(devices)), strict=False)
        ended = [descend(to_device(gates, there), part.to(there), effort, self.pace.rate) for there, part in parts]
        here = self.problem.factors.left.device
        points, directions = (
            torch.cat([each.to(here) for each in all_]).double()
            for all_ in zip(*((each.points, each.directions) for each in ended), strict=True)
        )
        return Ends(points, directions, sum(each.steps for each in ended))

    def _either_sign(self, points: Float[Tensor, "k b"]) -> Float[Tensor, "n b"]:
        """Every p and -p, or only those of which x̂ = Rᵀp ends above zero, as it must, where all are above noise."""
        ends = points @ self.problem.factors.right[:, -1:]
        if self.problem.seen.has_bias and bool((ends.abs() > ABOVE * self.problem.tolerance.noise).all()):
            return points * ends.sign()
        return torch.cat([points, -points])

    def _left(self, reach: int) -> Float[Tensor, "b d"]:
        """An orthonormal basis of the p within reach that are orthogonal to what was found there."""
        known = self.found[leads(self.found, reach), :reach]
        return torch.nn.functional.pad(complement(known), (0, 0, 0, self.problem.batch_size - reach))

    def _anywhere(self) -> None:
        """Look for q in all directions: that of a faint sample in the point of another is not orthogonal to it."""
        self.apart = torch.eye(self.problem.batch_size, dtype=self.rows.dtype, device=self.rows.device)

    def _rows(self, reach: int) -> Float[Tensor, "live b"]:
        """ℓ_k within reach."""
        return torch.where(torch.arange(self.rows.shape[1], device=self.rows.device) < reach, self.rows, 0.0)

    def repair(self) -> Float[Tensor, "k b"]:
        """Refine the p that the inverse of all directions gives, of each input that has its zeros elsewhere.

        If one direction is wrong, all others are right, and so is its p; those of inputs mixed up with it are not.
        """
        inverse = sphere.retract(torch.linalg.pinv(self.found.T))
        points = self._either_sign(inverse)
        directions = self.found.repeat(len(points) // len(self.found), 1)
        zeros = self.problem.tolerance.zeros(directions @ self.problem.factors.left.T, directions)
        differ = ((zeros & self.problem.factors.live) != silent_neurons(self.problem, points)).any(1)
        refined = refine(self.problem, points[differ], directions[differ])
        return refined[acceptable(self.problem, points[differ], refined)]

    def _adapt(self, new: int, dimension: int, size: int) -> None:
        """Look harder if fewer came than a tenth of what is left, and of the starts."""
        self.dry = self.dry + 1 if new == 0 and self.effort + 1 == len(self.pace.efforts) else 0
        if self.problem.batch_size - len(self.found) == 1 and new == 0:
            self.dry = 1
        if not new:
            self.wider = min(self.wider + 1, len(GRADES) - 1)
            self._anywhere()
        if new >= 0.1 * min(dimension, size):
            self.more = 1
        elif self.effort + 1 < len(self.pace.efforts):
            self.effort += 1
        elif new == 0:
            self.more *= 2


def leads(directions: Float[Tensor, "k b"], reach: int) -> Bool[Tensor, "k"]:
    """Which unit directions lie within reach, but for a little."""
    return torch.linalg.vector_norm(directions[:, :reach], dim=1) >= LEADING
