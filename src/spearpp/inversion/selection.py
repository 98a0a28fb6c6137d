"""From candidates to the batch: choose b of them, fix their scale, score the choice.

Names follow the paper's appendix. For a choice Q̄ of b unit directions (columns) with inverse P̄,
input i is x̂_i = Rᵀp̄_i / s_i, where s = P̄ R[:, bias] makes its last coordinate 1; its
pre-activations are z_i = A p̄_i / s_i and the zeros of column i of D are those of L q̄_i.
Only the sign of z matters for the score, so s enters only through its sign.
"""

from dataclasses import dataclass

import torch

from spearpp.inversion.pool import Pool
from spearpp.inversion.problem import Problem
from spearpp.inversion.tolerance import INDEPENDENT
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import complement, gather_weighted, independent, smallest_eigenvector
from spearpp.types import Bool, Float, Int, Tensor

AGAIN = 4
"""Candidates, over the batch size, that are tried more than once."""
_CACHE_BYTES, _DEVICE_BYTES = 2**21, 2**28
"""Working set of the swaps that are scored at a time, on a CPU and on a GPU."""


@dataclass(frozen=True, eq=False)
class Selection:
    """b directions chosen as the columns of Q̄."""

    directions: Float[Tensor, "b b"]
    """Q̄ᵀ: one unit direction a row. Those found come first, then the orthogonal complement."""
    zeros: Bool[Tensor, "b m"]
    """The zero pattern of each column of D."""
    found: int
    """How many of the directions were found; the rest complete the basis."""
    score: float
    """λ."""
    points: Float[Tensor, "b b"]
    """P̄: p̄_i, one a row."""

    @classmethod
    def of(
        cls, problem: Problem, directions: Float[Tensor, "b b"], zeros: Bool[Tensor, "b m"], found: int | None = None
    ) -> "Selection":
        """With its inverse and its score; all directions were found unless it is said how many."""
        inverse = Inverse.of(problem, directions)
        score = compute_score(problem, inverse, zeros)
        return cls(directions, zeros, len(directions) if found is None else found, score, inverse.rows)

    @property
    def full(self) -> bool:
        """Whether all b directions were found."""
        return self.found == self.directions.shape[0]


def init_filt(pool: Pool, order: Int[Tensor, "candidates"] | None = None) -> Int[Tensor, "chosen"]:
    """initFilt: the first candidates that are linearly independent, at most b of them.

    Returns their indices in the pool, in order: sparsest first unless another is given.
    """
    order = pool.sparsest_first() if order is None else order
    least = torch.full_like(pool.directions[:, 0], INDEPENDENT)
    return order[independent(pool.directions[order], least)]


def complete_basis(directions: Float[Tensor, "k b"]) -> Float[Tensor, "b b"]:
    """The directions, followed by an orthonormal basis of their orthogonal complement."""
    k, b = directions.shape
    return directions if k == b else torch.cat([directions, complement(directions).T])


def fix_scale(
    problem: Problem, inverse: Float[Tensor, "*u k b"], zeros: Bool[Tensor, "*u k m"]
) -> Float[Tensor, "*u k"]:
    """fixScale: s = Q̄⁻¹ L⁺ g, so that D = L Q̄ diag(s) sums to the bias gradient.

    Without a bias the scale is not in the gradient: s is then the sign, ±1, that agrees better with
    the zero pattern.
    """
    if problem.seen.has_bias:
        return (inverse @ problem.factors.right[..., -1:])[..., 0]
    fires = inverse @ problem.preactivations.mT > 0
    straight = (fires != zeros).sum(-1)
    return torch.where(2 * straight >= zeros.shape[-1], 1.0, -1.0).to(inverse)


def compute_score(problem: Problem, inverse: "Inverse", zeros: Bool[Tensor, "b m"]) -> float:
    """computeScore: λ, the share of entries where D is zero just where the neuron is silent."""
    return int(agreeing(problem, inverse, zeros)) / zeros.numel()


def agreeing(problem: Problem, inverse: "Inverse", zeros: Bool[Tensor, "*u b m"]) -> Int[Tensor, "*u"]:
    """m·b·λ: how many entries of D are zero just where the neuron is silent."""
    return _agreement(problem, inverse.unscaled, inverse.scale, zeros).sum(-1)


def greedy_filt(
    problem: Problem, chosen: Selection, pool: Pool, held: Int[Tensor, "b"], order: Int[Tensor, "candidates"]
) -> Selection:
    """GreedyFilt: swap candidates in, each where it improves the choice most, until λ = 1 or no swap improves it.

    What improves is λ with every zero counted once more (``merit``): a gradient where a neuron fires is nothing
    special, and where drift or noise keeps λ below 1, mixtures of samples alike can agree better than the samples,
    but are less sparse. All b places for one candidate are scored in one batch (``swap_scores``), so the best place
    costs no more than the first that improves, which is what the paper takes. After a pass that changed something
    the sparsest candidates are tried again, those swapped out among them: beside other wrong directions a right one
    can look no better than they do.

    Args:
        problem: the layer.
        chosen: b directions to begin with.
        pool: where they are from.
        held: the place in the pool of each, -1 for one that completes the basis.
        order: the candidates to try, in this order.
    """
    directions, zeros = chosen.directions.clone(), chosen.zeros.clone()
    b, m = zeros.shape
    best, score, before = merit(chosen), chosen.score, -1
    inverse, taken = Inverse.at(problem, chosen.points), held.tolist()
    tried = order.tolist()
    most = max(1, (_CACHE_BYTES if directions.device.type == "cpu" else _DEVICE_BYTES) // (8 * b * b * m))
    while before < best and score < 1:
        before, tried = best, tried if before < 0 else tried[: AGAIN * b]
        at, ahead = 0, 1
        while at < len(tried) and score < 1:
            these = [index for index in tried[at : at + ahead] if index not in taken]
            scores = swap_scores(problem, inverse, zeros, pool.directions[these], pool.zeros[these])
            improving = (scores.amax(1) > best).nonzero()[:, 0]
            if not len(improving):
                # Most candidates improve nothing: the longer none did, the more are scored at a time.
                at, ahead = at + ahead, min(2 * ahead, most)
                continue
            first = int(improving[0])
            place, index = int(scores[first].argmax()), these[first]
            best, taken[place] = int(scores[first, place]), index
            directions[place], zeros[place] = pool.directions[index], pool.zeros[index]
            inverse = Inverse.of(problem, directions)
            score = compute_score(problem, inverse, zeros)
            at, ahead = tried.index(index, at) + 1, 1
    return Selection(directions, zeros, chosen.found, score, inverse.rows)


def merit(chosen: Selection) -> int:
    """What GreedyFilt improves: the number of agreeing entries of D, m·b·λ, and of zeros."""
    return round(chosen.score * chosen.zeros.numel()) + int(chosen.zeros.sum())


def steadiest_first(problem: Problem, pool: Pool) -> Int[Tensor, "candidates"]:
    """Indices by rising ‖Σ⁻¹q‖, the noise of L q: strong samples before weak ones, and before what is made of noise."""
    return problem.tolerance.amplification(pool.directions).argsort(stable=True)


def initial(
    problem: Problem, pool: Pool, order: Int[Tensor, "candidates"] | None = None
) -> tuple[Selection, Int[Tensor, "b"]]:
    """The choice of initFilt, completed to a basis if it is short, and the place in the pool of each, -1 for none."""
    first = init_filt(pool, order)
    directions = complete_basis(pool.directions[first])
    short = len(directions) - len(first)
    zeros = torch.cat([pool.zeros[first], pool.zeros.new_zeros(short, pool.zeros.shape[1])])
    zeros[len(first) :, ~problem.factors.live] = True
    chosen = Selection.of(problem, directions, zeros, len(first))
    return chosen, torch.cat([first, first.new_full((short,), -1)])


def select(
    problem: Problem,
    pool: Pool,
    before: Selection | None = None,
    *,
    order: Int[Tensor, "candidates"] | None = None,
) -> Selection:
    """Both stages: initFilt, completed to a basis if it is short, then GreedyFilt.

    Args:
        problem: the layer.
        pool: the candidates.
        before: a choice of an earlier pool. What was added to the pool since may be wrong, so GreedyFilt begins with
            that choice too, and the better end counts.
        order: which candidates come first; None is the sparsest.
    """
    order = pool.sparsest_first() if order is None else order
    start, held = initial(problem, pool, order)
    fresh = greedy_filt(problem, start, pool, held, order)
    if before is None or fresh.score == 1.0:
        return fresh
    again = greedy_filt(problem, before, pool, torch.full_like(held, -1), order[: AGAIN * len(held)])
    return again if merit(again) > merit(fresh) else fresh


def polish(problem: Problem, chosen: Selection) -> Selection:
    """Solve every direction again for the zeros that its input confirms.

    Under noise a small gradient passes for a zero and pulls its direction off. Once all b directions
    are there, the inputs tell which neurons are silent; only rows that are zero and silent count.
    Without noise the two are the same rows and nothing changes.
    """
    if not chosen.full or problem.batch_size == 1:
        return chosen
    live, rows = problem.factors.live, problem.certain_rows
    size = chunk_size(rows.device, 8 * rows.numel())
    for _ in range(2):
        signed = chosen.points * fix_scale(problem, chosen.points, chosen.zeros).sign()[:, None]
        zeros = chosen.zeros & live
        confirmed = zeros & (signed @ problem.preactivations.T <= 0)
        usable = (confirmed != zeros).any(1) & (confirmed.sum(1) >= problem.batch_size)
        if not bool(usable.any()):
            return chosen
        directions = chosen.directions.clone()
        parts = (gather_weighted(rows, part.to(rows)) for part in confirmed[usable].split(size))
        directions[usable] = torch.cat([smallest_eigenvector(part.mT @ part) for part in parts])
        if int(torch.linalg.matrix_rank(directions.cpu(), rtol=INDEPENDENT)) < len(directions):
            return chosen
        zeros = problem.tolerance.zeros(directions @ problem.factors.left.T, directions)
        chosen = Selection.of(problem, directions, zeros)
    return chosen


def recover(problem: Problem, chosen: Selection) -> Float[Tensor, "b n"]:
    """X = (Q⁻¹ R)ᵀ without the bias coordinate, one input a row.

    A layer without bias has no scale: inputs then have unit norm. Neither has a sample whose bias
    gradient vanishes: its input is left at the scale of Q̄.
    """
    return inputs_at(problem, chosen.points, chosen.zeros)


def inputs_at(
    problem: Problem, points: Float[Tensor, "*u k b"], zeros: Bool[Tensor, "*u k m"]
) -> Float[Tensor, "*u k n"]:
    """x from x̂ = Rᵀp up to scale, of points whose columns of D have these zeros."""
    scale = fix_scale(problem, points, zeros)
    inputs = points @ problem.factors.right
    if problem.seen.has_bias:
        return inputs[..., :-1] / torch.where(scale == 0, 1.0, scale)[..., None]
    return inputs * scale[..., None] / torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)


@dataclass(frozen=True)
class Inverse:
    """P̄ = Q̄⁻¹ and what swapping a column of Q̄ needs of it."""

    rows: Float[Tensor, "*u b b"]
    """p̄_i."""
    scale: Float[Tensor, "*u b"]
    """s = P̄ R[:, bias]; not used without a bias."""
    unscaled: Float[Tensor, "*u b m"]
    """P̄ Aᵀ: pre-activations before scaling."""

    @classmethod
    def of(cls, problem: Problem, directions: Tensor) -> "Inverse":
        """Invert Q̄, given as its columns one a row."""
        return cls.at(problem, torch.linalg.inv(directions.mT))

    @classmethod
    def at(cls, problem: Problem, rows: Tensor) -> "Inverse":
        """With the rows as they are."""
        return cls(rows, (rows @ problem.factors.right[..., -1:])[..., 0], rows @ problem.preactivations.mT)


def swap_scores(
    problem: Problem,
    inverse: Inverse,
    zeros: Bool[Tensor, "b m"],
    candidates: Float[Tensor, "k b"],
    patterns: Bool[Tensor, "k m"],
) -> Int[Tensor, "k b"]:
    """``merit`` with each candidate in each of the b places; -1 where it would be in the span of the others.

    With u = P̄ s, putting s in place j turns the inverse's rows into p_j / u_j and
    p_i - (u_i / u_j) p_j, so nothing is inverted again.
    """
    b, m = zeros.shape
    u = candidates @ inverse.rows.T
    scores = torch.full(u.shape, -1, dtype=torch.long, device=u.device)
    away = u.abs() / torch.linalg.vector_norm(inverse.rows, dim=1)
    swaps = torch.nonzero(away > problem.tolerance.angle(candidates)[:, None])
    for which, place in (part.unbind(1) for part in swaps.split(chunk_size(u.device, 8 * b * m))):
        ratio = u[which] / u[which, place, None]  # (swaps, b)
        own = torch.nn.functional.one_hot(place, b).bool()
        keep = torch.where(own, 0.0, 1.0)
        ratio = torch.where(own, -1 / u[which, place, None], ratio)
        # Row i becomes keep_i p_i - ratio_i p_j.
        unscaled = keep[:, :, None] * inverse.unscaled - ratio[:, :, None] * inverse.unscaled[place, None, :]
        scale = keep * inverse.scale - ratio * inverse.scale[place, None]
        swapped = torch.where(own[:, :, None], patterns[which, None, :], zeros)
        scores[which, place] = _agreement(problem, unscaled, scale, swapped).sum(1) + swapped.sum((1, 2))
    return scores


def _agreement(problem: Problem, unscaled: Tensor, scale: Tensor, zeros: Tensor) -> Int[Tensor, "*n b"]:
    """For each input, the number of neurons that are silent just where its column of D is zero.

    Args:
        unscaled: A p̄_i, (…, b, m).
        scale: s_i, (…, b); the sign of z is that of unscaled / s. Ignored without a bias.
        zeros: zero patterns, (…, b, m).
    """
    if problem.seen.has_bias:
        return ((unscaled * scale.sign()[..., None] > 0) != zeros).sum(-1)
    straight = ((unscaled > 0) != zeros).sum(-1)
    flipped = ((unscaled < 0) != zeros).sum(-1)
    return torch.maximum(straight, flipped)
