"""Compare the activation patterns of inputs with the zeros of their directions.

``compare`` makes five steps, and some neurons count neither for nor against an input:

- **drift**: a client that takes several local steps moves its weights along the update that it sends. The
  pre-activation of neuron k for input i changes by η Ĝ_k·x̂_i in total, and by at most about η ‖Ĝ_k‖ ‖x̂_i‖ on the way.
  η is one number for the batch, and neurons that may have moved do not count. A wrong input has conflicts at all sizes
  of z, so nothing is left that could count for it;
- **heavier noise**: with networks that fit their data, an inactive neuron may have a gradient of several times the
  bound, most likely because samples whose gradient is below the noise add an error of low rank;
- **Dropout** after the ReLU (``Problem.dropout``) sets further entries of a column to zero. Active neurons without a
  gradient do not count, and inactive ones count by how rarely as many lie among the zeros by chance;
- **several rounds** (``Problem.rounds``): a sample may be absent from a round, and its column is then zero in all rows
  of the round, which do not count. Of the b - 1 zeros that every vertex has by construction, as many fall into these
  rows as they have rank.
"""

from dataclasses import dataclass

import torch

from spearpp.inversion.evidence import chance_in_bits, chance_of_zeros, most_by_chance
from spearpp.inversion.evidence.mixing import mixing_error
from spearpp.inversion.problem import Problem
from spearpp.inversion.selection import fix_scale
from spearpp.inversion.tolerance import STATED_SIGMAS
from spearpp.types import Bool, Float, Int, Tensor

MAX_CLEAR_BOUND = 0.1
"""An entry of D is clear of noise if the noise bound is at most this share of the column's root mean square. A design
choice: a tenth of the typical entry."""
MAX_HEAVIER_NOISE = 4.0
"""Largest ratio of an entry to its noise bound at an inactive neuron that still counts as noise. Measured: 2.7 was the
largest ratio on networks that fit their data (``docs/lab/notebook.md``)."""
MAX_OFF_DRIFT = 3.0
"""A neuron may have been switched off by a drift of up to this many times the largest drift that switched a neuron on.

A design choice: neurons that were switched off are seen only in the steps before, so they may have moved further. A
larger value only leaves more neurons uncounted, which asks for more evidence from the others."""
MIN_SINGULAR_RATIO = 1e-4
"""Smallest singular value, relative to the largest, that counts for the rank of the rows of absent rounds. A design
choice: far above the noise of float32 gradients. A rank that is too small asks for more evidence than necessary."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Activation patterns compared with zeros: all evidence except how well each direction is determined."""

    zeros: Int[Tensor, "k"]
    """Neurons with a gradient where L q_i is zero."""
    chance: Float[Tensor, "k"]
    """Bound on the probability that a vertex, with b-1 zeros by construction, has as many zeros by chance."""
    agreeing: Int[Tensor, "k"]
    """Neurons where pattern and zeros are both clear and agree. Neurons without any gradient should be inactive for
    every input; in one round they count by how many more are inactive than active (pruned neurons may be active). Rows
    that repeat those of an earlier round do not count."""
    moved: Int[Tensor, "k"]
    """Neurons that x̂_i leaves inactive and that have a gradient nevertheless: only drift explains them."""
    hidden: Int[Tensor, "k"]
    """Neurons that are clearly active for x̂_i and whose gradient is zero."""
    allowed: Int[Tensor, "k"]
    """How many hidden neurons noise explains."""
    free: Int[Tensor, "k"]
    """How many neurons agree by construction: b-1, without those in rounds from which the sample is absent."""
    error: Float[Tensor, "k"]
    """The stated error of x_i, relative to its norm."""
    share: Float[Tensor, "k"]
    """‖d_i‖ ‖x̂_i‖, as a share of the sum over all inputs."""
    residual: Float[Tensor, ""]
    """‖Ĝ - D X̂ᵀ‖ / ‖Ĝ‖ with D set to zero where the recovered inputs leave the neuron inactive."""
    noise: Float[Tensor, ""]
    """‖E‖ / ‖Ĝ‖: what the residual would be if only noise remained."""
    heavier: Float[Tensor, ""]
    """ω: how many times its bound noise reaches at inactive neurons; 1 if noise stays within its bound."""
    drift: Float[Tensor, ""]
    """η, in units of the update: how far local steps must have moved the weights; 0 for one gradient."""
    inactive_zeros: Bool[Tensor, "k m"]
    """Neurons with a gradient where L q is zero and x̂ is clearly inactive."""


def compare(
    problem: Problem,
    directions: Float[Tensor, "b b"],
    inverse: Float[Tensor, "b b"],
    zeros: Bool[Tensor, "b m"],
) -> Comparison:
    """Compare the activation patterns of inputs with the zeros of their directions q_i.

    ``inverse`` has the points p_i, the rows of the inverse of the matrix whose columns are the directions. ``zeros``
    are the entries of each L q_i that the selection takes for zero. Without a bias they determine the sign of p_i.
    """
    sides = _both_sides(problem, directions, inverse, zeros)
    conflicts, heavier = _find_conflicts(sides)
    reach = sides.norms[:, None] * problem.factors.row_norms
    drift = _estimate_drift(problem, sides, conflicts, reach)
    slack = widened(sides.slack, drift, reach)
    agreeing, hidden, allowed = _count_agreements(problem, sides, conflicts, slack)
    error, share, residual, noise = _rebuild(problem, sides, directions, inverse, slack, heavier)
    zero_rows = sides.zeros & problem.factors.live
    new_rows = problem.factors.live & ~problem.repeated_rows
    new_zeros = (sides.zeros & new_rows).sum(1)
    return Comparison(
        zeros=zero_rows.sum(1),
        chance=chance_of_zeros(new_zeros, sides.bound / sides.level, new_rows, problem.batch_size),
        agreeing=agreeing,
        moved=conflicts.sum(1),
        hidden=hidden,
        allowed=allowed,
        free=sides.free,
        error=error,
        share=share,
        residual=residual,
        noise=noise,
        heavier=heavier,
        drift=drift,
        inactive_zeros=zero_rows & (sides.z < -sides.slack),
    )


@dataclass(frozen=True, eq=False)
class _Sides:
    """Both sides of the comparison: pre-activations on one side, entries of L q on the other."""

    scale: Float[Tensor, "b"]
    """s_i, for which x̂_i = Rᵀp_i / s_i."""
    points: Float[Tensor, "b b"]
    """p_i with the sign of s_i."""
    norms: Float[Tensor, "b"]
    """‖Rᵀp_i‖, the norm of x̂_i before the division by |s_i|."""
    z: Float[Tensor, "b m"]
    """Pre-activations of Rᵀp_i, with the sign of s_i."""
    slack: Float[Tensor, "b m"]
    """Largest |z| at which noise may have changed the sign."""
    active: Bool[Tensor, "b m"]
    """Whether z is positive."""
    values: Float[Tensor, "b m"]
    """L q_i."""
    bound: Float[Tensor, "b m"]
    """Largest entry of L q_i that noise explains where the true entry is zero."""
    level: Float[Tensor, ""]
    """Root mean square of L q_i over the neurons with a gradient: 1/√m, because the columns of L are orthonormal."""
    zeros: Bool[Tensor, "b m"]
    """Whether the entry of L q_i is within its bound."""
    clear: Bool[Tensor, "b m"]
    """Neurons with a gradient whose bound is far below ``level``, in rounds to which the sample contributes."""
    free: Int[Tensor, "b"]
    """How many neurons agree by construction."""


def _both_sides(problem: Problem, directions: Tensor, inverse: Tensor, zeros: Tensor) -> _Sides:
    """Step 1: compute both sides, their noise, and which neurons are clear."""
    tolerance, factors, live = problem.tolerance, problem.factors, problem.factors.live
    scale = fix_scale(problem, inverse, zeros)
    points = inverse * scale.sign()[:, None]
    z = points @ problem.preactivations.T
    uncertainty = torch.linalg.vector_norm(inverse * tolerance.preactivation, dim=1)
    values = directions @ factors.left.T
    bound = tolerance.entry(directions)
    level = live.sum().clamp_min(1).to(z).rsqrt()
    within = values.abs() <= bound
    clear = live & (bound <= MAX_CLEAR_BOUND * level)
    free = torch.full_like(within.sum(1), problem.batch_size - 1)
    if problem.rounds > 1 and not problem.dropout:
        absent = (within | ~live).reshape(len(within), problem.rounds, -1).all(2)  # the whole column is zero there
        clear &= ~absent.repeat_interleave(within.shape[1] // problem.rounds, dim=1)
        free -= _ranks_of_rounds(factors.left, absent)
    return _Sides(
        scale=scale,
        points=points,
        norms=torch.linalg.vector_norm(points * factors.singular_values, dim=1),
        z=z,
        slack=uncertainty[:, None] * tolerance.weight_norms,
        active=z > 0,
        values=values,
        bound=bound,
        level=level,
        zeros=within,
        clear=clear,
        free=free,
    )


def _find_conflicts(sides: _Sides) -> tuple[Bool[Tensor, "b m"], Float[Tensor, ""]]:
    """Step 2: return the inactive neurons with a gradient that noise does not explain, and ω."""
    inactive = sides.clear & (sides.z.abs() > sides.slack) & ~sides.active
    excess = torch.where(inactive, sides.values.abs() / sides.bound, 1.0)
    noise = (excess <= MAX_HEAVIER_NOISE) & (sides.values.abs() <= MAX_CLEAR_BOUND * sides.level)
    heavier = torch.where(noise, excess, 1.0).clamp_min(1).max()
    return (excess > 1) & ~noise, heavier


def _estimate_drift(
    problem: Problem, sides: _Sides, conflicts: Bool[Tensor, "b m"], reach: Float[Tensor, "b m"]
) -> Float[Tensor, ""]:
    """Step 3: return η, the smallest drift that explains all conflicts; 0 if the update is one gradient.

    ``reach`` is ‖Ĝ_k‖ ‖x̂_i‖, how far a drift of 1 moves a pre-activation at most.
    """
    needed = (sides.z.abs() - sides.slack) / reach
    drift = torch.where(conflicts, needed, 0.0).max() * (not problem.one_step)
    # Local steps that switched neurons on switched others off, before the only step that their sample took part in.
    # One such neuron of an input may be a small gradient by chance.
    without_gradient = sides.clear & (sides.z.abs() > sides.slack) & sides.active & sides.zeros
    off = torch.where(without_gradient & (needed <= MAX_OFF_DRIFT * drift), needed, 0.0)
    if off.shape[1] > 1:
        drift = torch.maximum(drift, off.topk(2, dim=1).values[:, 1].max())
    return drift


def _count_agreements(
    problem: Problem, sides: _Sides, conflicts: Bool[Tensor, "b m"], slack: Float[Tensor, "b m"]
) -> tuple[Int[Tensor, "b"], Int[Tensor, "b"], Int[Tensor, "b"]]:
    """Step 4: return ``agreeing``, ``hidden`` and ``allowed``. ``slack`` includes what drift may have moved."""
    live = problem.factors.live
    counted = sides.clear & (sides.z.abs() > slack) & ~problem.repeated_rows
    agreeing = (counted & (sides.active != sides.zeros)).sum(1)
    hidden = (counted & sides.active & sides.zeros).sum(1)
    expected = torch.where(counted & sides.active, sides.bound / sides.level, 0.0).sum(1)
    if problem.dropout:
        free = problem.batch_size - 1
        inactive = (counted & ~sides.active & sides.zeros).sum(1)
        agreeing = chance_in_bits(live.sum(), (sides.zeros & live).sum(1), inactive, free).long() + free
        hidden = torch.zeros_like(hidden)
    if problem.one_step:  # no drift explains a conflict of a single gradient
        agreeing = torch.where(conflicts.any(1), 0, agreeing)
    without_gradient = ~live & (sides.z.abs() > slack) & (problem.rounds == 1)  # over rounds they are the same neurons
    more = ((without_gradient & (sides.z < 0)).sum(1) - (without_gradient & (sides.z > 0)).sum(1)).clamp_min(0)
    return agreeing + more, hidden, most_by_chance(expected)


def _rebuild(
    problem: Problem,
    sides: _Sides,
    directions: Float[Tensor, "b b"],
    inverse: Float[Tensor, "b b"],
    slack: Float[Tensor, "b m"],
    heavier: Float[Tensor, ""],
) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"], Float[Tensor, ""], Float[Tensor, ""]]:
    """Step 5: rebuild the gradient, with D zero at inactive neurons.

    Returns:
        ``error``, ``share``, ``residual`` and ``noise`` of ``Comparison``.
    """
    factors, tiny = problem.factors, torch.finfo(sides.z.dtype).tiny
    signals = sides.values * sides.scale[:, None]
    if problem.batch_size > 1:
        signals = torch.where(sides.active | (sides.z.abs() <= slack), signals, 0.0)
    length = sides.scale.abs().clamp_min(tiny)
    norms, columns = sides.norms / length, max(1, factors.right.shape[1])
    features = columns - problem.seen.has_bias
    scale = torch.where(sides.scale == 0, tiny, sides.scale)
    inputs = (inverse @ factors.right[:, :features]) / scale[:, None]
    size = torch.linalg.vector_norm(inputs, dim=1)
    spread = torch.linalg.vector_norm(inverse, dim=1) / sides.scale.abs()
    alone = problem.tolerance.input_error(spread, size, features)
    mixed = mixing_error(problem, directions, inverse, sides.zeros & factors.live, scale, size)
    error = STATED_SIGMAS * heavier * torch.hypot(alone, mixed)
    weight = torch.linalg.vector_norm(signals, dim=1) * norms
    whole = torch.linalg.vector_norm(factors.row_norms)
    noise = torch.linalg.vector_norm(factors.row_noise) * columns**0.5
    share = weight / weight.sum().clamp_min(tiny)
    residual = factors.distance(signals.T, sides.points / length[:, None]) / whole
    return error, share, residual, noise / whole


def _ranks_of_rounds(left: Float[Tensor, "m b"], absent: Bool[Tensor, "k T"]) -> Int[Tensor, "k"]:
    """Return for each sample the rank of the rows of L in the rounds from which it is absent."""
    parts = left.reshape(absent.shape[1], -1, left.shape[1])
    patterns, which = absent.unique(dim=0, return_inverse=True)
    ranks = [
        int(torch.linalg.matrix_rank(parts[each].flatten(0, 1), rtol=MIN_SINGULAR_RATIO)) if each.any() else 0
        for each in patterns
    ]
    return torch.tensor(ranks, device=left.device)[which]


def widened(slack: Tensor, drift: Tensor | float, reach: Tensor) -> Float[Tensor, "b m"]:
    """Return slack + η reach, slightly enlarged: it includes the neuron that defined η = (|z| - slack) / reach."""
    return slack + (1 + 1e-9) * drift * reach
