"""Compute the inputs from what a search found, and collect the evidence for each input."""

import math
from dataclasses import dataclass, replace

import torch

from spearpp.inversion.evidence import Evidence, Scope, chance_in_bits
from spearpp.inversion.evidence.joint import certify_together
from spearpp.inversion.evidence.one_layer import certify
from spearpp.inversion.evidence.two_layers import agreement, certify_two_layers
from spearpp.inversion.loop import SearchOutcome
from spearpp.inversion.matches import solve_inputs
from spearpp.inversion.network import Network
from spearpp.inversion.problem import Problem
from spearpp.inversion.selection import (
    Selection,
    fix_scale,
    inputs_at,
    least_noisy_first,
    refit_to_patterns,
    select,
)
from spearpp.inversion.solutions import MAX_CONFLICTS, Pairs, Solutions, pattern_agrees
from spearpp.inversion.tolerance import RARE
from spearpp.linalg import sphere
from spearpp.types import Bool, Tensor, select_rows

MAX_UNCLEAR_SIZE = 0.02
"""Pre-activations below this share of their root mean square have an unclear sign if the input is approximate: an input
that is off by 2 % changes a pre-activation by about as much."""
SAME_SAMPLE_COSINE = 0.9
"""Cosine above which two directions belong to the same sample. Design choice: the directions of different samples may
have large cosines too, but such an input is only left out of the inputs that are not proved."""


@dataclass(frozen=True)
class Recovered:
    """Recovered inputs and their evidence, one row for each input."""

    inputs: Tensor
    certified: Tensor
    directions: Tensor
    evidence: Evidence | None
    score: float

    def unproved(self) -> "Recovered":
        """Return the same inputs without a proof."""
        none = torch.zeros_like(self.certified)
        return replace(self, certified=none, evidence=self.evidence and replace(self.evidence, determined=none))

    def fits(self, problem: Problem) -> Bool[Tensor, "k"]:
        """Return which inputs fit the gradient. To fit is a weaker condition than to be certified.

        With the equations of the network, or for a single sample, an input fits if the evidence holds for it.
        Otherwise, L q must be zero at the neurons that the input leaves inactive, and at more of them than chance
        explains. Inputs can fit despite Dropout, noise and samples that were not found.
        """
        alone = problem.batch_size == 1  # the only input that the gradient allows
        if self.evidence is not None and (alone or self.evidence.scope is Scope.NETWORK):
            return self.evidence.holds
        found = torch.zeros(len(self.inputs), dtype=torch.bool, device=self.inputs.device)
        if alone or not len(self.directions):
            return found
        weight, live = problem.seen.weight.to(self.inputs), problem.factors.live
        inputs = self.inputs[: len(self.directions)].double()
        if problem.seen.has_bias:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        z = inputs @ weight.T
        inactive = live & (z < -MAX_UNCLEAR_SIZE * z.square().mean(1, keepdim=True).sqrt())
        zeros = problem.zeros(self.directions) & live
        bits = chance_in_bits(live.sum(), zeros.sum(1), (inactive & zeros).sum(1), problem.batch_size - 1)
        conflicts = (inactive & ~zeros).sum(1) <= MAX_CONFLICTS * live.sum()
        found[: len(z)] = conflicts & (bits >= math.log2(problem.batch_size / RARE))
        return found


def assemble(problem: Problem, outcome: SearchOutcome) -> Recovered:
    """Return the inputs that all directions give together, or those that two layers determine if they certify more.

    Inputs that two layers determine are followed by all others that fit the gradient.
    """
    if outcome.solutions is not None and problem.network is not None:
        return _solved(problem, problem.network, outcome.solutions)
    chosen = outcome.selection or refit_to_patterns(problem, select(problem, outcome.pool))
    best = _together(problem, chosen, outcome.evidence)
    if problem.batch_size == 1 and problem.network is not None:
        return best.unproved()  # later layers contradict the only input
    whole = best.evidence is not None and bool(best.evidence.consistent.all())
    if whole and (bool(best.certified.all()) or not outcome.matches):
        return best
    if not whole:
        order = least_noisy_first(problem, outcome.pool)
        chosen = refit_to_patterns(problem, select(problem, outcome.pool, order=order))
        best = max(best, _together(problem, chosen), key=lambda each: int(each.certified.sum()))
        if outcome.pairs is not None and best.evidence is None:
            best = _peeled(problem, outcome.pairs, chosen.score) or best
    if problem.next_layer is None or not outcome.matches:
        return best
    seen = outcome.matches
    solved = solve_inputs(problem, problem.next_layer, seen.points, seen, own=True)
    evidence = certify_two_layers(problem, problem.next_layer, seen, solved)
    # If all inputs are consistent, the inputs of two layers replace them only if more of these are exact.
    certified = int((evidence.exact if whole else evidence.consistent).sum())
    if certified <= int(best.certified.sum()):
        return best
    score = agreement(problem, seen, solved)
    proved = _certified_first(inputs_at(problem, solved.points, ~seen.masks), seen.directions, evidence, score)
    return _with_unproved(problem, proved, best)


def no_inputs(problem: Problem) -> Recovered:
    """Return a result without inputs."""
    left, columns = problem.factors.left, problem.factors.right.shape[1] - problem.seen.has_bias
    none = torch.zeros(0, dtype=torch.bool, device=left.device)
    return Recovered(left.new_zeros(0, columns), none, left.new_zeros(0, left.shape[1]), None, 0.0)


def _solved(problem: Problem, network: Network, found: Solutions) -> Recovered:
    """Return the inputs that satisfy the equations of the network; λ is the share of the batch that was found."""
    if not len(found):
        return no_inputs(problem)
    found, evidence = certify_together(problem, network, found)
    rows = problem.factors.rows
    inputs = (found.coordinates @ rows)[:, : rows.shape[1] - problem.seen.has_bias]
    return _certified_first(inputs, found.directions, evidence, len(found) / problem.batch_size)


def _together(problem: Problem, chosen: Selection, evidence: Evidence | None = None) -> Recovered:
    """Return the inputs that all directions give together, without evidence if some directions were not found."""
    inputs = inputs_at(problem, chosen.points, chosen.zeros)
    if chosen.full:
        evidence = evidence or certify(problem, chosen)
        return _certified_first(inputs, chosen.directions, evidence, chosen.score)
    none = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    return Recovered(inputs, none, chosen.directions[: chosen.found], None, chosen.score)


def _peeled(problem: Problem, pairs: Pairs, score: float) -> Recovered | None:
    """Return the inputs that single rows of the gradient revealed; None if none of them fits the gradient.

    These inputs are not certified, because a faint sample may be hidden in such a row.
    """
    units = sphere.retract(pairs.directions)
    zeros = problem.zeros(units)
    fitting = pattern_agrees(problem, pairs.points, zeros) & (fix_scale(problem, pairs.points, zeros) > 0)
    if not bool(fitting.any()):
        return None
    none = torch.zeros(int(fitting.sum()), dtype=torch.bool, device=units.device)
    return Recovered(inputs_at(problem, pairs.points[fitting], zeros[fitting]), none, units[fitting], None, score)


def _with_unproved(problem: Problem, proved: Recovered, others: Recovered) -> Recovered:
    """Return proved inputs, followed by those of other inputs that fit the gradient and have other directions."""
    cosines = (others.directions @ proved.directions.T).abs().amax(1)
    fits = others.fits(problem)[: len(cosines)] & (cosines < SAME_SAMPLE_COSINE)
    more = torch.nonzero(fits)[: problem.batch_size - len(proved.inputs), 0]
    return Recovered(
        inputs=torch.cat([proved.inputs, others.inputs[more]]),
        certified=torch.nn.functional.pad(proved.certified, (0, len(more))),
        directions=torch.cat([proved.directions, others.directions[more]]),
        evidence=proved.evidence and proved.evidence.with_unproved(len(more)),
        score=proved.score,
    )


def _certified_first(inputs: Tensor, directions: Tensor, evidence: Evidence, score: float) -> Recovered:
    order = evidence.exact.int().argsort(descending=True, stable=True)
    evidence = select_rows(evidence, order)
    return Recovered(inputs[order], evidence.exact, directions[order], evidence, score)
