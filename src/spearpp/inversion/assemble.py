"""From what a search left behind to inputs with their evidence."""

import math
from dataclasses import dataclass

import torch

from spearpp.inversion.evidence import (
    Certificates,
    WitnessCertificates,
    agreement,
    certify,
    certify_sighted,
    coins,
)
from spearpp.inversion.loop import SearchOutcome
from spearpp.inversion.matches import inputs_of, solve_inputs
from spearpp.inversion.pairs import Pairs, fits
from spearpp.inversion.problem import Problem
from spearpp.inversion.selection import Selection, fix_scale, inputs_at, polish, recover, select, steadiest_first
from spearpp.inversion.tolerance import RARE
from spearpp.linalg import sphere
from spearpp.types import Bool, Tensor, select_rows

NEAR_ZERO = 0.02
"""Pre-activations below this share of their root mean square have no sign where inputs are approximate."""
CONFLICTS = 0.01
"""Share of the neurons that an input may silence and that have a gradient from it all the same."""


@dataclass(frozen=True)
class Recovered:
    """Inputs with their evidence, row by row."""

    inputs: Tensor
    certified: Tensor
    directions: Tensor
    certificates: Certificates | WitnessCertificates | None
    score: float

    def fits(self, problem: Problem) -> Bool[Tensor, "k"]:
        """Which inputs fit the gradient: wherever they silence a neuron it has no gradient from them, beyond chance.

        It is weaker than a certificate. Dropout, noise and samples that were not found do not hide it.
        """
        found = torch.zeros(len(self.inputs), dtype=torch.bool, device=self.inputs.device)
        if not len(self.directions) or problem.batch_size == 1:
            return found
        weight, live = problem.seen.weight.to(self.inputs), problem.factors.live
        inputs = self.inputs[: len(self.directions)].double()
        if problem.seen.has_bias:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        z = inputs @ weight.T
        silent = live & (z < -NEAR_ZERO * z.square().mean(1, keepdim=True).sqrt())
        zeros = problem.tolerance.zeros(self.directions @ problem.factors.left.T, self.directions) & live
        bits = coins(live.sum(), zeros.sum(1), (silent & zeros).sum(1), problem.batch_size - 1)
        conflicts = (silent & ~zeros).sum(1) <= CONFLICTS * live.sum()
        found[: len(z)] = conflicts & (bits >= math.log2(problem.batch_size / RARE))
        return found


def assemble(problem: Problem, outcome: SearchOutcome) -> Recovered:
    """Inputs from all directions together if these hold; else those that two layers determine, one by one."""
    chosen = outcome.selection or polish(problem, select(problem, outcome.pool))
    best = _together(problem, chosen, outcome.certificates)
    whole = best.certificates is not None and bool(best.certificates.consistent.all())
    if whole and (bool(best.certified.all()) or not outcome.matches):
        return best
    if not whole:
        chosen = polish(problem, select(problem, outcome.pool, order=steadiest_first(problem, outcome.pool)))
        best = _most_certified(best, _together(problem, chosen))
        if outcome.pairs is not None and best.certificates is None:
            best = _peeled(problem, outcome.pairs, chosen.score) or best
    if problem.next_layer is None or not outcome.matches:
        return best
    seen = outcome.matches
    settled = solve_inputs(problem, problem.next_layer, seen.points, seen, own=True)
    evidence = certify_sighted(problem, problem.next_layer, seen, settled)
    # Where all are in the batch up to their error, only more exact ones are worth the others.
    held = int((evidence.exact if whole else evidence.consistent).sum())
    if held <= int(best.certified.sum()) or held < int(best.fits(problem).sum()):
        return best
    score = agreement(problem, seen, settled)
    return _certified_first(inputs_of(problem, settled.points), seen.directions, evidence, score)


def _together(problem: Problem, chosen: Selection, certificates: Certificates | None = None) -> Recovered:
    """The inputs that all directions give together; without a certificate if some were not found."""
    inputs = recover(problem, chosen)
    if chosen.full:
        certificates = certificates or certify(problem, chosen)
        return _certified_first(inputs, chosen.directions, certificates, chosen.score)
    none = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    return Recovered(inputs, none, chosen.directions[: chosen.found], None, chosen.score)


def _peeled(problem: Problem, pairs: Pairs, score: float) -> Recovered | None:
    """The inputs that single rows gave away, where others were not found; None if none of them holds by itself.

    They are not certified: that a faint sample hides in such a row cannot be ruled out.
    """
    units = sphere.retract(pairs.directions)
    zeros = problem.tolerance.zeros(units @ problem.factors.left.T, units)
    held = fits(problem, pairs.points, zeros) & (fix_scale(problem, pairs.points, zeros) > 0)
    if not bool(held.any()):
        return None
    none = torch.zeros(int(held.sum()), dtype=torch.bool, device=units.device)
    return Recovered(inputs_at(problem, pairs.points[held], zeros[held]), none, units[held], None, score)


def _most_certified(first: Recovered, other: Recovered) -> Recovered:
    """The other if it certifies more."""
    return first if int(other.certified.sum()) <= int(first.certified.sum()) else other


def _certified_first(
    inputs: Tensor, directions: Tensor, certificates: Certificates | WitnessCertificates, score: float
) -> Recovered:
    order = certificates.exact.int().argsort(descending=True, stable=True)
    certificates = select_rows(certificates, order)
    return Recovered(inputs[order], certificates.exact, directions[order], certificates, score)
