"""Evidence, without the truth, that a recovered input is one of the batch.

All b directions give all inputs: x̂_i = Rᵀp_i, where p_i is orthogonal to every other direction. So
input i is right if the others span what they should, and the place to see it is its own mask: the
neurons that x̂_i silences must be those where L q_i is zero. For every input:

- **mask**: of the neurons where both sides can be told from noise, which agree? A silent one with a
  gradient is possible only if local training moved it (**drift**, below); a firing one without is
  allowed as often as a small gradient hides in noise;
- **evidence**: agreeing neurons beyond the b-1 that any vertex gets for nothing. Each is a coin that
  fell right, so 30 + log₂ b of them leave a chance of 1e-9 for the batch;
- **line**: the rows where L q_i is zero and x̂_i clearly silent must have no other kernel, or q_i could be a
  mixture; under drift not even without any one of them, since one mixture of two samples alike is zero there.
  A neuron whose sign is unclear counts for neither: a mixture of two samples can lie exactly on z_k = 0;
- **error**: a bound on the error of x̂_i over its norm: four times the standard deviation σ ‖p_i‖ / |s_i| that the
  noise of the gradient implies.

**Drift.** A client that takes several local steps moves the weights along what it sends, so a neuron's
pre-activation by η Ĝ_k·x̂_i in all, and at most by about η ‖Ĝ_k‖ ‖x̂_i‖ on the way. η is one number for
the batch: the least for which every silent neuron with a gradient may have fired at some time. It is
zero for a single gradient. What may have moved counts neither for nor against an input, so a wrong
one, whose conflicts lie at all sizes of z, leaves nothing that could speak for it.

**Heavier noise.** With networks that know their data a silent neuron may have a gradient several times the bound,
most likely because samples below the noise are noise of low rank. Up to four times counts neither for nor
against; the largest, ω, is a factor of all errors.

And for the batch: the gradient rebuilt from the inputs, with D zero wherever they silence a neuron,
must differ from the one observed by no more than noise.

**Dropout** behind the ReLU sets further entries of a column to zero. ``Problem.dropout`` says that the model does so:
firing neurons without a gradient then count neither for nor against an input, and silent neurons without a gradient
count by how rarely as many lie among the zeros of a column by chance (``coins``).

No certificate from this layer can tell one sample from several that activate the same neurons and have proportional
signals: they are recovered as their weighted mean. So a certificate claims "one sample, or a weighted mean of samples
with this activation pattern". Replaying the input alone can tell more (``spearpp.auditing.signals``).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from spearpp.inversion.evidence.chance import chance_of_zeros, coins, most_by_chance
from spearpp.inversion.evidence.lines import entangled, lines
from spearpp.inversion.problem import Problem
from spearpp.inversion.selection import Selection, fix_scale
from spearpp.inversion.tolerance import RARE
from spearpp.types import Bool, Float, Int, Tensor, select_rows, to_device

CLEAR = 0.1
"""An entry of D can be told from zero if noise reaches at most this share of the root mean square."""
EXACT = 1e-3
"""Largest stated error of an exact input, relative to its norm. It is invisible: half a grey level of an 8-bit image is
1/510 = 2e-3 of the range. The stated error bounds the true one, see ``SIGMAS``."""
SIGMAS = 4.0
"""The stated error is this many standard deviations of what the noise of the gradient implies. Rounding is not
Gaussian: in 3,000 hostile updates the true error reached eight standard deviations (``docs/results/hostile.md``)."""
HEAVIER = 4.0
"""How many times its bound noise may reach at a silent neuron; 2.7 was seen."""
OFF = 3.0
"""How much farther than the farthest neuron that was moved on one may have been moved off."""
RESIDUAL = 3.0
"""How many times the noise the rebuilt gradient may be off."""


@dataclass(frozen=True, eq=False)
class Certificates:
    """One row of evidence for each of the b inputs."""

    zeros: Int[Tensor, "b"]
    """Neurons with a gradient where L q_i is zero."""
    chance: Float[Tensor, "b"]
    """Bound on the probability that a vertex (b-1 zeros for nothing) has that many by chance."""
    agreeing: Int[Tensor, "b"]
    """Neurons where mask and zeros can both be told and agree. Neurons without any gradient should be
    silent for every input; they count by how many more are than are not (pruned ones may fire)."""
    moved: Int[Tensor, "b"]
    """Neurons that x̂_i silences and that have a gradient all the same: only drift explains them."""
    hidden: Int[Tensor, "b"]
    """Neurons that x̂_i fires clearly and whose gradient is zero."""
    allowed: Int[Tensor, "b"]
    """How many hidden ones the noise explains."""
    line: Bool[Tensor, "b"]
    """Whether the rows that are zero because x̂_i silences them determine q_i."""
    entangled: Float[Tensor, "b"]
    """How much of the input, over its size, may change with directions that are not determined."""
    error: Float[Tensor, "b"]
    """Bound on the error of the input over the input's norm: what noise implies, or ``entangled`` if that is more."""
    share: Float[Tensor, "b"]
    """‖d_i‖ ‖x̂_i‖ / Σ_j ‖d_j‖ ‖x̂_j‖: how much of the gradient this input explains."""
    residual: float
    """‖Ĝ - D X̂ᵀ‖ / ‖Ĝ‖ with D set to zero where the recovered inputs silence the neuron."""
    noise: float
    """‖E‖ / ‖Ĝ‖: what the residual would be if only noise were left."""
    heavier: float
    """ω: how many times its bound noise reaches at the neurons that the inputs silence; 1 if it stays within."""
    drift: float
    """η, in units of the update: how far local steps must have moved the weights; 0 for one gradient."""
    batch_size: int
    """b: how many directions there are."""

    @cached_property
    def consistent(self) -> Bool[Tensor, "b"]:
        """Which inputs are in the batch, up to their error."""
        return self._sound & self.line & (self.entangled <= EXACT)

    @cached_property
    def exact(self) -> Bool[Tensor, "b"]:
        """Which inputs are certified: all masks of the batch fit, and this one is determined, with a negligible error.

        A direction that is not determined spoils only the inputs that depend on it.
        """
        return self._sound.all() & self.consistent & (self.error <= EXACT)

    @cached_property
    def _sound(self) -> Bool[Tensor, "b"]:
        """Which masks fit, beyond chance. A gradient of rank one has one input, whatever follows the layer."""
        b = self.batch_size
        if b == 1:
            return torch.isfinite(self.error) & (self.residual <= RESIDUAL * self.noise)
        # η is the best of as many values as there are conflicts.
        choices = b * max(1, int(self.moved.sum()))
        evidence = self.agreeing - (b - 1) >= math.log2(choices / RARE)
        rebuilt = self.residual <= RESIDUAL * self.noise
        rare = self.chance <= RARE
        return (self.hidden <= self.allowed) & evidence & rare & torch.isfinite(self.error) & rebuilt


def certify(problem: Problem, chosen: Selection) -> Certificates:
    """Collect the evidence for a choice of b directions."""
    return _determined(problem, chosen, _weigh(problem, chosen.directions, chosen.points, chosen.zeros))


def certify_whole(problem: Problem, chosen: Selection) -> Certificates | None:
    """``certify`` where every input is consistent, else None, as soon as that is plain."""
    seen = _weigh(problem, chosen.directions, chosen.points, chosen.zeros)
    untold = torch.zeros_like(seen.share)
    at_best = seen.certificates(untold == 0, untold, problem.batch_size)
    if not bool(at_best.consistent.all()):
        return None
    certificates = _determined(problem, chosen, seen)
    return certificates if bool(certificates.consistent.all()) else None


def _determined(problem: Problem, chosen: Selection, seen: "_Weighed") -> Certificates:
    """With how well each direction is determined."""
    drifted = bool(seen.drift > 0)
    line = lines(problem, chosen.directions, seen.silent, drifted)
    apart = entangled(problem, chosen.directions, chosen.points, seen.silent, line, drifted)
    return seen.certificates(line, apart, problem.batch_size)


def certify_many(
    problem: Problem, directions: Float[Tensor, "u b b"], pattern: Bool[Tensor, "u b m"]
) -> list[Certificates]:
    """The evidence for the choices of several layers at once, on the CPU; ``problem`` has them along a first dimension.

    Where local steps moved neurons or a direction is not determined, nothing is said to be exact: that takes a
    closer look (``certify``).
    """
    seen = _weigh(problem, directions, torch.linalg.inv(directions.mT), pattern)
    line = lines(problem, directions, seen.silent, False) & (seen.drift == 0)[:, None]
    apart = torch.where(line.all(1, keepdim=True), 0.0, torch.inf).expand(line.shape)
    seen, line, apart = to_device(seen, torch.device("cpu")), line.cpu(), apart.cpu()
    every = range(len(directions))
    return [select_rows(seen, torch.tensor(i)).certificates(line[i], apart[i], problem.batch_size) for i in every]


@dataclass(frozen=True, eq=False)
class _Weighed:
    """The evidence of all inputs but how well each direction is determined."""

    zeros: Int[Tensor, "*u k"]
    chance: Float[Tensor, "*u k"]
    agreeing: Int[Tensor, "*u k"]
    moved: Int[Tensor, "*u k"]
    hidden: Int[Tensor, "*u k"]
    allowed: Int[Tensor, "*u k"]
    error: Float[Tensor, "*u k"]
    share: Float[Tensor, "*u k"]
    residual: Float[Tensor, "*u"]
    noise: Float[Tensor, "*u"]
    heavier: Float[Tensor, "*u"]
    drift: Float[Tensor, "*u"]
    silent: Bool[Tensor, "*u k m"]
    """Neurons with a gradient that are zero because x̂ silences them."""

    def certificates(self, line: Bool[Tensor, "k"], entangled: Float[Tensor, "k"], batch_size: int) -> Certificates:
        """Of one layer."""
        return Certificates(
            zeros=self.zeros,
            chance=self.chance,
            agreeing=self.agreeing,
            moved=self.moved,
            hidden=self.hidden,
            allowed=self.allowed,
            line=line,
            entangled=entangled,
            error=torch.where(torch.isfinite(entangled), torch.maximum(self.error, entangled), self.error),
            share=self.share,
            residual=float(self.residual),
            noise=float(self.noise),
            heavier=float(self.heavier),
            drift=float(self.drift),
            batch_size=batch_size,
        )


def _weigh(
    problem: Problem,
    directions: Float[Tensor, "*u b b"],
    inverse: Float[Tensor, "*u b b"],
    pattern: Bool[Tensor, "*u b m"],
) -> _Weighed:
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
    fires = z > 0
    excess = torch.where(clear & (z.abs() > slack) & ~fires, values.abs() / bound, 1.0)
    near = (excess <= HEAVIER) & (values.abs() <= CLEAR * level)
    heavier = torch.where(near, excess, 1.0).clamp_min(1).amax((-2, -1))
    conflict = (excess > 1) & ~near
    size = torch.linalg.vector_norm(signed * factors.singular_values[..., None, :], dim=-1)  # ‖Rᵀp‖
    reach = size[..., None] * factors.row_norms[..., None, :]
    moved_by = (z.abs() - slack) / reach
    drift = torch.where(conflict, moved_by, 0.0).amax((-2, -1))
    # What moved neurons on moved others off, before the only step that their sample took part in. One
    # such neuron of an input may be a small gradient by chance.
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
    return _Weighed(
        zeros=silent.sum(-1),
        chance=chance_of_zeros(silent.sum(-1), bound / level, live, problem.batch_size),
        agreeing=agreeing + _dead_evidence(live, z, slack),
        moved=conflict.sum(-1),
        hidden=hidden,
        allowed=most_by_chance(hiding),
        error=spread / (size / columns**0.5),
        share=weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny),
        residual=factors.distance(masked.mT, signed / length[..., None]) / whole,
        noise=noise / whole,
        heavier=heavier,
        drift=drift,
        silent=silent & clearly_silent,
    )


def widened(slack: Tensor, drift: Tensor | float, reach: Tensor) -> Float[Tensor, "*u b m"]:
    """slack + η reach, a hair more: the neuron that η = (|z| - slack) / reach was taken from is within it."""
    return slack + (1 + 1e-9) * drift * reach


def _dead_evidence(live: Tensor, z: Tensor, slack: Tensor) -> Int[Tensor, "*u b"]:
    told = ~live & (z.abs() > slack)
    return ((told & (z < 0)).sum(-1) - (told & (z > 0)).sum(-1)).clamp_min(0)
