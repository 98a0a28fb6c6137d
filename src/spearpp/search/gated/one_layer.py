"""Rounds of the gated search on one layer: what has been found, what is missing, and where to search next.

If samples have gradients of very different strength, the search finds the strongest first. The singular values of such
a gradient span many orders of magnitude (a graded spectrum). The direction of a strong sample lies in the leading
singular directions, except for a small part due to weaker samples. A round therefore only uses the singular directions
within its *reach*: those with a singular value of at least a hundredth of the strongest that remains. This problem has
fewer dimensions, and weak samples are noise in it. The directions found are refined in the whole space and must stay
within reach, because a vertex that needs faint directions for its zeros does not belong to a strong sample. If the
spectrum is not graded, the first round already reaches all singular directions.
"""

from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.inversion.solutions import Pairs
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import complement
from spearpp.search.base import Proposals
from spearpp.search.gated.accept import acceptable, new_directions
from spearpp.search.gated.descent import Effort, Ends, descend
from spearpp.search.gated.objective import Gates
from spearpp.search.gated.refine import inactive_neurons, promising, refine
from spearpp.types import Bool, Float, Tensor, to_device

MAX_EMPTY_ROUNDS = 4
"""Number of rounds without a new direction, at the highest effort, after which found directions are dropped. Design
choice: rounds use random starts, so one empty round says little."""
DROPPED_SHARES = (0.25, 0.5, 1.0, 1.0)
"""Share of the found directions that is dropped each time, with a higher effort afterwards. Measured: dropping a
quarter recovered 25 of 25 batches instead of 19 of 20 at b=200, m=1000, and the fourth time recovered the last inputs
of similar images under FedAvg (docs/lab/notebook.md)."""
MAX_GRADED_RATIO = 1e-4
"""Ratio of the smallest to the largest singular value below which a spectrum is graded. Measured: similar inputs alone
have a ratio of 4e-3. If all spectra counted as graded, one batch of twelve was lost (docs/lab/notebook.md, section
"Networks that have memorised their data")."""
REACHES = (1e-2, 1e-3, 0.0)
"""Smallest singular value within reach, relative to the largest that remains. Each round without a new direction moves
to the next value. Measured: 1e-2 found 41 of 52 true directions, 1e-3 found 33 (docs/lab/notebook.md, section "Networks
that have memorised their data")."""
MIN_SIGN_RATIO = 10.0
"""Minimum ratio of the last coordinate of an input to its noise for the coordinate to determine the sign of the input.
Design choice: ten standard deviations."""
MIN_LEADING_NORM = 0.99
"""Minimum norm of the part of a unit direction that is within reach. Measured: nearly all wrong directions had less,
and nearly all true ones more (docs/lab/notebook.md, section "Networks that have memorised their data")."""
MIN_YIELD = 0.1
"""Share of the missing directions, or of the starts if these are fewer, that a round must find to keep its effort.
Design choice: a more careful round takes longer, which pays only if the present effort finds little."""


@dataclass(frozen=True)
class RoundOptions:
    """Options of the rounds."""

    min_starts: int
    """Minimum number of starts of a round."""
    max_starts: int
    """Maximum number of starts of a round."""
    efforts: tuple[Effort, ...]
    """How carefully rounds descend, from the cheapest to the most careful."""
    rate: float
    """Initial learning rate."""
    dtype: torch.dtype
    """Precision of the descent."""
    devices: tuple[torch.device, ...]
    """Devices that share the starts of a round."""


class OneLayerRounds:
    """State of the search: the directions found, and how hard to search next.

    ``known`` and ``peeled`` are the directions and the pairs (p, q) that were found before.
    """

    def __init__(self, problem: Problem, options: RoundOptions, known: Float[Tensor, "known b"], peeled: Pairs) -> None:
        self.problem = problem
        self.options = options
        self.found = known
        self.effort, self.start_factor, self.empty_rounds, self.drops, self.reach_level = 0, 1, 0, 0, 0
        scale = problem.preactivations.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        live = problem.factors.live
        self.rows, self.q_basis = problem.live_rows.to(options.dtype), peeled.apart.to(options.dtype)
        self.gates = problem.preactivations[live] / scale

    @property
    def stuck(self) -> bool:
        """Whether the last rounds found nothing although earlier rounds found something."""
        return len(self.found) > 0 and self.empty_rounds >= (1 if self._missing == 1 else MAX_EMPTY_ROUNDS)

    def drop(self) -> bool:
        """Drop the least sparse quarter, then half, then all of the found directions.

        The pool of candidates keeps the dropped directions. The peeled pairs no longer restrict the search.

        Returns:
            False if nothing more can be dropped.
        """
        if self.drops == len(DROPPED_SHARES):
            return False
        zeros = self.problem.zeros(self.found).sum(1)
        kept = int(len(self.found) * (1 - DROPPED_SHARES[self.drops]))
        self.found = self.found[zeros.argsort(descending=True, stable=True)[:kept]]
        self._search_all_q()
        self.start_factor, self.empty_rounds, self.reach_level, self.drops = 1, 0, 0, self.drops + 1
        # A low effort may have found wrong directions.
        self.effort = min(self.effort + 1, len(self.options.efforts) - 1)
        return True

    @property
    def complete(self) -> bool:
        """Whether as many directions as samples have been found."""
        return len(self.found) >= self.problem.batch_size

    @property
    def size(self) -> int:
        """Number of starts of the next round. The last missing p is known up to its sign, so two starts are enough."""
        if self._missing == 1:
            return 2
        return min(max(self.options.min_starts, self._missing) * self.start_factor, self.options.max_starts)

    @property
    def _missing(self) -> int:
        return self.problem.batch_size - len(self.found)

    @property
    def reach(self) -> int:
        """Number of leading singular directions that the next round uses."""
        sizes = self.problem.factors.singular_values
        if sizes[-1] >= MAX_GRADED_RATIO * sizes[0]:
            return len(sizes)
        strongest = sizes[min(len(self.found), len(sizes) - 1)]
        return int((sizes >= REACHES[self.reach_level] * strongest).sum())

    def run(self, size: int, generator: torch.Generator) -> Proposals:
        """Run one round and return the new directions."""
        reach = self.reach
        basis = self._p_basis(reach)
        dimension = basis.shape[1]
        if self._missing == 1:
            points = self._with_signs(basis.T)
            directions, steps = points, 0
            chosen = torch.arange(len(points), device=points.device)
        else:
            dtype, effort = self.options.dtype, self.options.efforts[self.effort]
            starts = sphere.uniform(size, dimension, generator, dtype=dtype)
            gates, q_basis = (self.gates @ basis).to(dtype), self.q_basis
            within = torch.arange(self.rows.shape[1], device=self.rows.device) < reach
            rows = torch.where(within, self.rows, 0.0) @ q_basis
            restricted = Gates(rows, gates, q_basis.T @ basis.to(dtype))
            ends = self._descend(restricted, starts, effort)
            points, directions, steps = ends.points @ basis.T, ends.directions @ q_basis.double().T, ends.steps
            chosen = promising(self.problem, points, directions)
        refined = refine(self.problem, points[chosen], directions[chosen])
        kept = acceptable(self.problem, points[chosen], refined) & within_reach(refined, reach)
        new = new_directions(self.problem, self.found, refined[kept])[:dimension]
        self._adapt(len(new), dimension, size)
        self.found = torch.cat([self.found, new])
        return Proposals(new, starts=size, steps=steps, solved=True)

    def _descend(self, gates: Gates, starts: Tensor, effort: Effort) -> Ends:
        """Descend on all devices. Return end points and directions in float64.

        All devices start before the function waits for the first one.
        """
        devices = self.options.devices
        parts = zip(devices, starts.chunk(len(devices)), strict=False)
        ends = [descend(to_device(gates, device), part.to(device), effort, self.options.rate) for device, part in parts]
        here = self.problem.factors.left.device
        points = torch.cat([each.points.to(here) for each in ends]).double()
        directions = torch.cat([each.directions.to(here) for each in ends]).double()
        return Ends(points, directions, sum(each.steps for each in ends))

    def _with_signs(self, points: Float[Tensor, "k b"]) -> Float[Tensor, "n b"]:
        """Return every p with its correct sign, or p and -p if noise hides the sign.

        With a bias, the last coordinate of x̂ = Rᵀp is positive.
        """
        last = points @ self.problem.factors.right[:, -1:]
        if self.problem.seen.has_bias and bool((last.abs() > MIN_SIGN_RATIO * self.problem.tolerance.noise).all()):
            return points * last.sign()
        return torch.cat([points, -points])

    def _p_basis(self, reach: int) -> Float[Tensor, "b d"]:
        """Return an orthonormal basis of the p within reach that are orthogonal to the directions found there."""
        known = self.found[within_reach(self.found, reach), :reach]
        return torch.nn.functional.pad(complement(known), (0, 0, 0, self.problem.batch_size - reach))

    def _search_all_q(self) -> None:
        """Search for q in all directions, and not only orthogonal to the peeled p.

        A peeled p may contain a faint sample, whose q is then not orthogonal to p.
        """
        self.q_basis = torch.eye(self.problem.batch_size, dtype=self.rows.dtype, device=self.rows.device)

    def repair(self) -> Float[Tensor, "k b"]:
        """Refine the p of every direction whose zeros disagree with p, and return the accepted directions.

        The inverse of the matrix of all directions yields one p per direction. If exactly one direction is wrong, the p
        computed for it is still correct, because it depends only on the others. The p of inputs that are mixed into the
        wrong direction are wrong.
        """
        inverse = sphere.retract(torch.linalg.pinv(self.found.T))
        points = self._with_signs(inverse)
        directions = self.found.repeat(len(points) // len(self.found), 1)
        zeros = self.problem.zeros(directions)
        differ = ((zeros & self.problem.factors.live) != inactive_neurons(self.problem, points)).any(1)
        refined = refine(self.problem, points[differ], directions[differ])
        return refined[acceptable(self.problem, points[differ], refined)]

    def _adapt(self, new: int, dimension: int, size: int) -> None:
        """Search harder if the round found few new directions."""
        self.empty_rounds = self.empty_rounds + 1 if new == 0 and self.effort + 1 == len(self.options.efforts) else 0
        if self._missing == 1 and new == 0:
            self.empty_rounds = 1
        if not new:
            self.reach_level = min(self.reach_level + 1, len(REACHES) - 1)
            self._search_all_q()
        if new >= MIN_YIELD * min(dimension, size):
            self.start_factor = 1
        elif self.effort + 1 < len(self.options.efforts):
            self.effort += 1
        elif new == 0:
            self.start_factor *= 2


def within_reach(directions: Float[Tensor, "k b"], reach: int) -> Bool[Tensor, "k"]:
    """Return which unit directions lie within reach, up to a small part."""
    return torch.linalg.vector_norm(directions[:, :reach], dim=1) >= MIN_LEADING_NORM
