"""Evidence from the gradient of one layer.

All b directions together give all inputs: x̂_i = Rᵀp_i, where p_i is orthogonal to every other direction. Input i is
right if the other directions span the right space. The activation pattern of x̂_i shows whether they do: the neurons
that x̂_i leaves inactive must be the neurons where L q_i is zero. For every input:

- **pattern**: among the neurons where both sides are clear of noise, which agree? An inactive neuron with a gradient is
  possible only if local training moved the neuron (**drift**, below). A firing neuron without a gradient is allowed as
  often as a small gradient disappears in noise;
- **chance**: the number of agreeing neurons beyond the b-1 that any vertex has by construction. Each agreement is a
  fair coin that fell right, so 30 + log₂ b of them leave a probability of 1e-9 for the batch;
- **determined**: the rows where L q_i is zero and x̂_i clearly inactive must have a kernel that contains only q_i, or
  q_i could be a mixture. With drift this must hold even without any one of them. A neuron whose sign is unclear does
  not count, because a mixture of two samples can lie exactly on z_k = 0;
- **error**: four times the standard deviation σ ‖p_i‖ / |s_i| that the noise of the gradient implies for x̂_i.

**Drift.** A client that takes several local steps moves its weights along the update that it sends. The pre-activation
of neuron k for input i changes by η Ĝ_k·x̂_i in total, and by at most about η ‖Ĝ_k‖ ‖x̂_i‖ on the way. η is one number
for the batch: the smallest that lets every inactive neuron with a gradient have fired at some time. η is zero for a
single gradient. Neurons that may have moved count neither for nor against an input. A wrong input has conflicts at all
sizes of z, so nothing is left that could count for it. If the gradient is known to come from one step
(``Problem.one_step``), η is zero, and an input with a conflict is wrong.

**Heavier noise.** With networks that fit their data, an inactive neuron may have a gradient of several times the bound,
most likely because samples whose gradient is below the noise add an error of low rank. Up to four times the bound
counts neither for nor against. The largest ratio, ω, multiplies all errors.

For the batch: the gradient rebuilt from the inputs, with D zero wherever they leave a neuron inactive, must differ from
the observed gradient by no more than noise.

**Dropout** after the ReLU sets further entries of a column to zero. ``Problem.dropout`` says whether the model does
this. Firing neurons without a gradient then count neither for nor against an input, and inactive neurons without a
gradient count by how rarely as many lie among the zeros of a column by chance (``coins``).

**Several rounds.** If the rows belong to several rounds (``Problem.rounds``), a sample may be absent from some of them:
its column is zero in all rows of such a round. These rows count neither for nor against the input. They do use up
zeros that exist by construction: of the b-1 independent zeros of a vertex, as many lie in the rows of absent rounds as
these rows have rank, and only the others can lie among the neurons that count.

The evidence of one layer cannot tell one sample from several samples that activate the same neurons and have
proportional signals: they are recovered as their weighted mean.
"""

import math
from dataclasses import dataclass

import torch

from spearpp.inversion.evidence.determined import entangled, only_direction_with_zeros
from spearpp.inversion.evidence.evidence import EXACT, Evidence, chance_of_zeros, coins, most_by_chance
from spearpp.inversion.problem import Problem
from spearpp.inversion.selection import Selection, fix_scale
from spearpp.inversion.tolerance import RARE
from spearpp.types import Bool, Float, Int, Tensor, select_rows, to_device

CLEAR = 0.1
"""An entry of D is clear of noise if the noise bound is at most this share of the column's root mean square. A design
choice: a tenth of the typical entry."""
SIGMAS = 4.0
"""The stated error is this many standard deviations of what the noise of the gradient implies. Rounding is not
Gaussian: in 3,000 hostile updates the true error reached eight standard deviations (``docs/results/hostile.md``)."""
HEAVIER = 4.0
"""Largest ratio of an entry to its noise bound at an inactive neuron that still counts as noise. Measured: 2.7 was the
largest ratio on networks that fit their data (``docs/lab/notebook.md``)."""
OFF = 3.0
"""A neuron may have been switched off by a drift of up to OFF times the largest drift that switched a neuron on. A
design choice."""
RESIDUAL = 3.0
"""Largest ratio of the difference between the rebuilt and the observed gradient to the noise. A design choice: the
ratio is 1 for noise alone."""
RANK = 1e-4
"""Smallest singular value, relative to the largest, that counts for the rank of the rows of absent rounds. A design
choice: far above the noise of float32 gradients. A rank that is too small asks for more evidence than necessary."""


def certify(problem: Problem, chosen: Selection) -> Evidence:
    """Collect the evidence for a choice of b directions."""
    return _with_determined(problem, chosen, _compare(problem, chosen.directions, chosen.points, chosen.zeros))


def certify_whole(problem: Problem, chosen: Selection) -> Evidence | None:
    """The evidence of ``certify`` if every input is consistent, else None. It returns as soon as this is clear."""
    compared = _compare(problem, chosen.directions, chosen.points, chosen.zeros)
    if not bool(compared.holds(problem.batch_size).all()):
        return None
    evidence = _with_determined(problem, chosen, compared)
    return evidence if bool(evidence.consistent.all()) else None


def certify_many(
    problem: Problem, directions: Float[Tensor, "u b b"], pattern: Bool[Tensor, "u b m"]
) -> list[Evidence]:
    """The evidence for the choices of several layers at once, on the CPU; ``problem`` stacks them along a dimension.

    Where local steps moved neurons or a direction is not determined, no input is exact. ``certify`` looks closer.
    """
    compared = _compare(problem, directions, torch.linalg.inv(directions.mT), pattern)
    line = only_direction_with_zeros(problem, directions, compared.silent, False) & (compared.drift == 0)[:, None]
    apart = torch.where(line.all(1, keepdim=True), 0.0, torch.inf).expand(line.shape)
    compared, line, apart = to_device(compared, torch.device("cpu")), line.cpu(), apart.cpu()
    every = range(len(directions))
    return [select_rows(compared, torch.tensor(i)).evidence(line[i], apart[i], problem.batch_size) for i in every]


def _with_determined(problem: Problem, chosen: Selection, compared: "_Compared") -> Evidence:
    drifted = bool(compared.drift > 0)
    line = only_direction_with_zeros(problem, chosen.directions, compared.silent, drifted)
    apart = entangled(problem, chosen.directions, chosen.points, compared.silent, line, drifted)
    return compared.evidence(line, apart, problem.batch_size)


@dataclass(frozen=True, eq=False)
class _Compared:
    """Activation patterns compared with zeros: all evidence except how well each direction is determined."""

    zeros: Int[Tensor, "*u k"]
    """Neurons with a gradient where L q_i is zero."""
    chance: Float[Tensor, "*u k"]
    """Bound on the probability that a vertex, with b-1 zeros by construction, has as many zeros by chance."""
    agreeing: Int[Tensor, "*u k"]
    """Neurons where pattern and zeros are both clear and agree. Neurons without any gradient should be inactive for
    every input; they count by how many more are inactive than firing (pruned neurons may fire)."""
    moved: Int[Tensor, "*u k"]
    """Neurons that x̂_i leaves inactive and that have a gradient nevertheless: only drift explains them."""
    hidden: Int[Tensor, "*u k"]
    """Neurons that clearly fire for x̂_i and whose gradient is zero."""
    allowed: Int[Tensor, "*u k"]
    """How many hidden neurons noise explains."""
    free: Int[Tensor, "*u k"]
    """How many neurons agree by construction: b-1, without those in rounds from which the sample is absent."""
    error: Float[Tensor, "*u k"]
    share: Float[Tensor, "*u k"]
    residual: Float[Tensor, "*u"]
    """‖Ĝ - D X̂ᵀ‖ / ‖Ĝ‖ with D set to zero where the recovered inputs leave the neuron inactive."""
    noise: Float[Tensor, "*u"]
    """‖E‖ / ‖Ĝ‖: what the residual would be if only noise remained."""
    heavier: Float[Tensor, "*u"]
    """ω: how many times its bound noise reaches at inactive neurons; 1 if noise stays within its bound."""
    drift: Float[Tensor, "*u"]
    """η, in units of the update: how far local steps must have moved the weights; 0 for one gradient."""
    silent: Bool[Tensor, "*u k m"]
    """Neurons with a gradient where L q is zero and x̂ is clearly inactive."""

    def holds(self, batch_size: int) -> Bool[Tensor, "k"]:
        """Which patterns agree beyond chance. A gradient of rank one has one input, whatever follows the layer."""
        rebuilt = torch.isfinite(self.error) & (self.residual <= RESIDUAL * self.noise)
        if batch_size == 1:
            return rebuilt
        # η is the best of as many values as there are conflicts.
        choices = batch_size * max(1, int(self.moved.sum()))
        beyond_chance = self.agreeing - self.free >= math.log2(choices / RARE)
        return (self.hidden <= self.allowed) & beyond_chance & (self.chance <= RARE) & rebuilt

    def evidence(self, line: Bool[Tensor, "k"], apart: Float[Tensor, "k"], batch_size: int) -> Evidence:
        """The evidence of one layer, given which directions are determined and how much each input may change."""
        columns = ("zeros", "chance", "agreeing", "moved", "hidden", "allowed")
        return Evidence(
            holds=self.holds(batch_size),
            determined=line & (apart <= EXACT),
            error=torch.where(torch.isfinite(apart), torch.maximum(self.error, apart), self.error),
            share=self.share,
            layers=1,
            details={**{name: getattr(self, name) for name in columns}, "entangled": apart},
            numbers={name: float(getattr(self, name)) for name in ("residual", "noise", "heavier", "drift")},
        )


def _compare(
    problem: Problem,
    directions: Float[Tensor, "*u b b"],
    inverse: Float[Tensor, "*u b b"],
    pattern: Bool[Tensor, "*u b m"],
) -> _Compared:
    """Compare the activation patterns of inputs with the zeros of their directions."""
    tolerance, factors = problem.tolerance, problem.factors
    live = factors.live[..., None, :]
    neurons = live.sum(-1)
    scale = fix_scale(problem, inverse, pattern)
    signed = inverse * scale.sign()[..., None]
    z = signed @ problem.preactivations.mT
    far = torch.linalg.vector_norm(inverse * tolerance.preactivation[..., None, :], dim=-1)
    slack = far[..., None] * tolerance.weight_norms[..., None, :]
    values = directions @ factors.left.mT
    bound = tolerance.entry(directions)
    level = neurons.clamp_min(1).to(z).rsqrt()[..., None]
    zeros = values.abs() <= bound
    clear = live & (bound <= CLEAR * level)
    free = torch.full_like(zeros.sum(-1), problem.batch_size - 1)
    if problem.rounds > 1 and not problem.dropout:
        absent = _absent_rounds(zeros | ~live, problem.rounds)
        clear &= ~absent.repeat_interleave(zeros.shape[-1] // problem.rounds, dim=-1)
        free -= _ranks_of_rounds(factors.left, absent)
    fires = z > 0
    excess = torch.where(clear & (z.abs() > slack) & ~fires, values.abs() / bound, 1.0)
    near = (excess <= HEAVIER) & (values.abs() <= CLEAR * level)
    heavier = torch.where(near, excess, 1.0).clamp_min(1).amax((-2, -1))
    conflict = (excess > 1) & ~near
    size = torch.linalg.vector_norm(signed * factors.singular_values[..., None, :], dim=-1)  # ‖Rᵀp‖
    reach = size[..., None] * factors.row_norms[..., None, :]
    moved_by = (z.abs() - slack) / reach
    drift = torch.where(conflict, moved_by, 0.0).amax((-2, -1)) * (not problem.one_step)
    # Local steps that switched neurons on switched others off, before the only step that their sample took part in.
    # One such neuron of an input may be a small gradient by chance.
    farthest = OFF * drift[..., None, None]
    off = torch.where(clear & (z.abs() > slack) & fires & zeros & (moved_by <= farthest), moved_by, 0.0)
    if off.shape[-1] > 1:
        drift = torch.maximum(drift, off.topk(2, dim=-1).values[..., 1].amax(-1))
    clearly_silent = z < -slack
    slack = widened(slack, drift[..., None, None], reach)
    told = clear & (z.abs() > slack)
    hiding = torch.where(told & fires, bound / level, 0.0).sum(-1)
    masked = values * scale[..., None]
    if problem.batch_size > 1:
        masked = torch.where(fires | (z.abs() <= slack), masked, 0.0)
    length = scale.abs().clamp_min(torch.finfo(z.dtype).tiny)
    size, columns = size / length, max(1, factors.right.shape[-1])
    spread = (SIGMAS * heavier * tolerance.noise)[..., None] * torch.linalg.vector_norm(inverse, dim=-1)
    spread = spread / scale.abs()
    weight = torch.linalg.vector_norm(masked, dim=-1) * size
    whole = torch.linalg.vector_norm(factors.row_norms, dim=-1)
    noise = torch.linalg.vector_norm(factors.row_noise, dim=-1) * columns**0.5
    silent = zeros & live
    agreeing = (told & (fires != zeros)).sum(-1)
    hidden = (told & fires & zeros).sum(-1)
    if problem.dropout:
        agreeing = coins(neurons, silent.sum(-1), (told & ~fires & zeros).sum(-1), problem.batch_size - 1).long()
        agreeing, hidden = agreeing + problem.batch_size - 1, torch.zeros_like(hidden)
    if problem.one_step:
        agreeing = torch.where(conflict.any(-1), 0, agreeing)
    return _Compared(
        zeros=silent.sum(-1),
        chance=chance_of_zeros(silent.sum(-1), bound / level, live, problem.batch_size),
        agreeing=agreeing + _dead_evidence(live, z, slack),
        moved=conflict.sum(-1),
        hidden=hidden,
        free=free,
        allowed=most_by_chance(hiding),
        error=spread / (size / columns**0.5),
        share=weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny),
        residual=factors.distance(masked.mT, signed / length[..., None]) / whole,
        noise=noise / whole,
        heavier=heavier,
        drift=drift,
        silent=silent & clearly_silent,
    )


def _absent_rounds(zeros: Bool[Tensor, "k m"], rounds: int) -> Bool[Tensor, "k T"]:
    """Return from which rounds each sample is absent: its column is zero in all rows of the round."""
    return zeros.reshape(len(zeros), rounds, -1).all(-1)


def _ranks_of_rounds(left: Float[Tensor, "m b"], absent: Bool[Tensor, "k T"]) -> Int[Tensor, "k"]:
    """Return for each sample the rank of the rows of L in the rounds from which it is absent."""
    parts = left.reshape(absent.shape[1], -1, left.shape[1])
    patterns, which = absent.unique(dim=0, return_inverse=True)
    ranks = [
        int(torch.linalg.matrix_rank(parts[each].flatten(0, 1), rtol=RANK)) if each.any() else 0 for each in patterns
    ]
    return torch.tensor(ranks, device=left.device)[which]


def widened(slack: Tensor, drift: Tensor | float, reach: Tensor) -> Float[Tensor, "*u b m"]:
    """slack + η reach, slightly enlarged, so that it includes the neuron that defined η = (|z| - slack) / reach."""
    return slack + (1 + 1e-9) * drift * reach


def _dead_evidence(live: Tensor, z: Tensor, slack: Tensor) -> Int[Tensor, "*u b"]:
    told = ~live & (z.abs() > slack)
    return ((told & (z < 0)).sum(-1) - (told & (z > 0)).sum(-1)).clamp_min(0)
