"""Use the weights of a next layer with few outputs over several rounds of one client.

Reflections (``two_layers`` explains the method) find triples (d, e, z) near a sample, with d = L q, the signal e before
the activation pattern is applied (``signals``), and z = A p. At every neuron either d = e and z > 0, or d = 0 and
z ≤ 0. The p of a new sample is orthogonal to the directions found so far, so samples that are known already satisfy the
equations of d and e, but not those of z. An end point still has wrong signs at up to a fifth of the neurons.
"""

import torch

from spearpp.inversion.next_layer import FewOutputs
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import complement
from spearpp.linalg.recording import repeat
from spearpp.linalg.time_limit import check_time
from spearpp.search.gated.backward import BackwardRounds
from spearpp.search.gated.refine import DUPLICATE_COSINE, concentrated
from spearpp.search.gated.signals import SignalsOfRound, SignalsOfRounds
from spearpp.types import Bool, Float, Tensor

ALPHA = 1.5
"""α: weight of d relative to e in the metric. Measured: with eight rounds, b=300, m=200, 22 of 128 starts ended near a
true column, and 9 with α = 2 (docs/lab/notebook.md, section "Reflections over rounds")."""
GAMMA = 0.6
"""γ: weight of z relative to e in the metric. Measured: with half of 300 samples known, 128 starts ended near 21 new
columns, with γ = 1 near 6, and with γ = 1.5 near none (same section)."""
MAX_REFLECTIONS = 200
"""Largest number of reflections per start. Measured: with b=300, m=200, 50 reflections find as many columns as 200;
with local steps, 200 find twice as many as 100 (same section)."""
REFLECTIONS_PER_CHECK = 50
"""Number of reflections between two checks whether to stop. Measured together with ``MAX_REFLECTIONS``."""
MIN_GOOD_SHARE = 0.1
"""Share of good end points at which the reflections stop. Measured together with ``MAX_REFLECTIONS``."""
MAX_MISMATCH = 0.28
"""An end point is solved further if the relative difference between d and the masked e is at most this number. Measured
on three clients: 0.08 to 0.28 for all but four of 138 end points near a true column, and 0.25 or more for other end
points."""
REWEIGHTINGS, DELTA_FACTOR = 12, 0.4
"""Iterations of ``solve_columns``, and the factor by which δ shrinks in each of them. Measured: 30 of 31 end points
near a sample were solved, where solving each mask exactly gave 4 of 15 (same section)."""
STABLE_ITERATIONS = 3
"""Iterations without a changed mask after which a column is solved. Design choice."""
FIRST_DELTA_QUANTILE = 0.9
"""Quantile of the residuals at which δ starts. Design choice: a tenth of the neurons counts less than the others."""
MAX_EMPTY_ROUNDS = 3
"""Successive rounds of reflections without a new column after which the search ends. Design choice."""


class BackwardOverRounds(BackwardRounds):
    """Rounds of reflections with the weights of the next layer in several rounds of a client."""

    min_new = 0.0

    @property
    def over(self) -> bool:
        """Whether no further round should follow. All other directions determine the p of the last sample."""
        return len(self.known) >= self.problem.batch_size - 1 or self.poor_rounds == MAX_EMPTY_ROUNDS

    def _columns(self, size: int, generator: torch.Generator) -> tuple[Float[Tensor, "k b"], int]:
        ends, signals, reflections = self._reflect(size, generator)
        units = sphere.retract(ends)
        known = ((units @ self.known.T).abs() > DUPLICATE_COSINE).any(1)
        different = ~known & sphere.first_of_each(units, DUPLICATE_COSINE)
        return solve_columns(self.problem, self.outputs, ends[different], signals[different]), reflections

    def _reflect(
        self, size: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, "ends b"], Float[Tensor, "ends m"], int]:
        """Reflect random starts. Return q and e of the good end points, and the number of reflections per start."""
        rows, signals = self.rows.to(self.dtype), self.signals
        gates, z = self._preactivations_of_others(size, generator)
        e = signals.starts(size, generator, self.dtype)
        d = ALPHA * e * (z > 0)

        def step() -> None:
            projected_d, projected_e, projected_z = (d @ rows) @ rows.T, signals.project(e), (z @ gates) @ gates.T
            # The reflected point, times -1. In each neuron it is moved to the nearer case: active, or inactive.
            minus_d = torch.sub(d, projected_d, alpha=2)
            minus_e = torch.sub(e, projected_e, alpha=2)
            minus_z = torch.sub(z, projected_z, alpha=2)
            nearer = torch.sub(minus_d, minus_e, alpha=ALPHA).square_().div_(1 + ALPHA**2)
            nearer.addcmul_(minus_d, minus_d, value=-1).addcmul_(minus_z, minus_z.abs(), value=GAMMA**2)
            active = (nearer < 0).to(d)
            both = minus_e.add(minus_d, alpha=ALPHA).mul_(active).div_(-1 - ALPHA**2)
            d.sub_(projected_d).add_(both, alpha=ALPHA)
            e.sub_(projected_e).add_(both).sub_(minus_e.mul_(1 - active))
            z.sub_(projected_z).sub_(minus_z.mul_(active == (minus_z < 0)))
            norm = torch.hypot(*(torch.linalg.vector_norm(each, dim=1, keepdim=True) for each in (d, e)))
            d.div_(norm)
            e.div_(norm)
            z.div_(torch.linalg.vector_norm(z, dim=1, keepdim=True))

        done, ends = 0, (d, e, torch.zeros(size, dtype=torch.bool, device=d.device))
        while done < MAX_REFLECTIONS and float(ends[2].float().mean()) < MIN_GOOD_SHARE:
            repeat(step, REFLECTIONS_PER_CHECK, rows.device)
            done += REFLECTIONS_PER_CHECK
            ends = _ends(d, e, rows, signals)
        q, e, good = ends
        return q[good].double() @ self.basis.T, e[good].double(), done

    def _preactivations_of_others(
        self, size: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, "m d"], Float[Tensor, "size m"]]:
        """Return a basis of all z = A p with p orthogonal to the known directions, and random unit vectors z in it."""
        basis = complement(self.known)
        points = sphere.uniform(size, basis.shape[1], generator, dtype=basis.dtype, device=basis.device) @ basis.T
        last = points @ self.problem.factors.right[:, -1:]
        starts = sphere.retract((points * last.sign()) @ self.problem.preactivations.T)
        return torch.linalg.qr(self.problem.preactivations @ basis)[0].to(self.dtype), starts.to(self.dtype)


def _ends(
    d: Float[Tensor, "k m"],
    e: Float[Tensor, "k m"],
    rows: Float[Tensor, "m d"],
    signals: SignalsOfRound | SignalsOfRounds,
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k m"], Bool[Tensor, "k"]]:
    """Return the direction q and the signal e of each point, in the scale of a unit d = L q, and which are good."""
    q = sphere.retract(d @ rows)
    d, e = q @ rows.T, ALPHA * signals.project(e) / sphere.norm(d @ rows)[:, None]
    active = d.abs() > 0.5 * e.abs()
    return q, e, torch.linalg.vector_norm(d - active * e, dim=1) <= MAX_MISMATCH * torch.linalg.vector_norm(d, dim=1)


def solve_columns(
    problem: Problem, outputs: FewOutputs, directions: Float[Tensor, "k b"], signals: Float[Tensor, "k m"]
) -> Float[Tensor, "k b"]:
    """Solve q and the signal e of each column, and decide which neurons are active.

    Minimise Σ_k min(|ℓ_k·q|, |ℓ_k·q - e_k|) by iteratively reweighted least squares, where e lies in the span that the
    weights of the next layer allow, with one r_t for every round. The weights are 1/max(residual, δ), where δ shrinks.
    Neurons with a wrong sign therefore lose their influence. Local steps turn columns out of the span, but leave their
    zeros, so q is finally solved for the inactive neurons alone. ``directions`` and ``signals`` are q and e near a
    sample, in the scale of L q for a unit q.
    """
    if not len(directions):
        return directions
    left, live = problem.factors.left, problem.factors.live
    system = torch.cat([left, -outputs.span], 1)
    q = sphere.retract(directions)
    for part in torch.arange(len(q), device=q.device).split(chunk_size(q.device, 8 * system.numel())):
        solved, active = _solve_columns(system, left.shape[1], live, q[part], signals[part])
        q[part] = concentrated(problem, ~active & live, solved)[0]
    return q


def _solve_columns(
    system: Float[Tensor, "m u"],
    b: int,
    live: Bool[Tensor, "m"],
    q: Float[Tensor, "k b"],
    e: Float[Tensor, "k m"],
) -> tuple[Float[Tensor, "k b"], Bool[Tensor, "k m"]]:
    """Run the iterations of ``solve_columns`` for one chunk."""
    left, span = system[:, :b], -system[:, b:]
    active, delta = torch.zeros_like(e, dtype=torch.bool), e.new_zeros(len(e), 1)
    unchanged = torch.zeros(len(e), dtype=torch.long, device=e.device)
    for iteration in range(REWEIGHTINGS):
        check_time()
        open_ = torch.nonzero(unchanged < STABLE_ITERATIONS)[:, 0]
        if not len(open_):
            break
        d = q[open_] @ left.T
        difference = (d - e[open_]).abs()
        now_active = (difference < d.abs()) & live
        residual = torch.where(now_active, difference, d.abs())
        if iteration == 0:
            delta = residual.quantile(FIRST_DELTA_QUANTILE, dim=1, keepdim=True)
        weight = live / torch.maximum(residual, DELTA_FACTOR**iteration * delta[open_]).clamp_min(1e-300)
        rows = system * weight.sqrt()[:, :, None]
        rows[:, :, b:] *= now_active[:, :, None]
        start = torch.cat([q[open_], (d * now_active) @ span], 1)
        solved = _inverse_step(rows.mT @ rows, start)
        size = torch.linalg.vector_norm(solved[:, :b], dim=1, keepdim=True).clamp_min(1e-300)
        q[open_], e[open_] = solved[:, :b] / size, (solved[:, b:] / size) @ span.T
        unchanged[open_] = torch.where((now_active != active[open_]).any(1), 0, unchanged[open_] + 1)
        active[open_] = now_active
    return q, active


def _inverse_step(gram: Float[Tensor, "k u u"], start: Float[Tensor, "k u"]) -> Float[Tensor, "k u"]:
    """Return the solution of one step of inverse iteration, or the start where the matrix is not positive definite."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal.add_(1e-12 * diagonal.mean(1, keepdim=True))
    factor, failed = torch.linalg.cholesky_ex(gram)
    return torch.where((failed == 0)[:, None], torch.cholesky_solve(start[:, :, None], factor)[:, :, 0], start)
