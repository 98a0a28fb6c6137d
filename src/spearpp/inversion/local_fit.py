"""Fit all samples of a batch to an update by repeating the local training (``spearpp.inversion.training``).

The equations are the entries of the update in all layers, seen in the leading singular vectors of each layer. The
unknowns are the coordinates of the samples, the size κ of their steps, and the order of the mini-batches:

1. with any mixing: b samples have about 2 b² unknowns and more than 20 b² equations, and Gauss-Newton steps from points
   nearby solve them up to terms of second order in the movement of the weights;
2. the mixing gives the likely orders of the mini-batches (``likely_orders``). Each is repeated exactly,
   and the order that leaves the least outside the span of the derivatives is kept;
3. with this order, Gauss-Newton steps solve the equations for the coordinates and κ alone.

The derivatives leave out how a sample changes the visits of the others, so every step removes all but about a fifth of
the error. The residual is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, permutations

import torch

from spearpp.inversion.training import LocalTraining, Visits, likely_orders, mixing_of, number_of_batches
from spearpp.linalg.time_limit import check_time
from spearpp.types import Float, Int, Tensor

VECTORS_PER_SAMPLE = 3
"""Number of singular vectors of each layer, over the batch size, in which the update is seen. Derived: with three
epochs, b samples have 3 b inputs and 3 b signals in every layer."""
MAX_STEPS = 15
"""Largest number of Gauss-Newton steps. Measured: four to six until the residual stays the same."""
MAX_PROGRESS_RATIO = 0.98
"""Factor of the residual up to which a step, or a change of the order, counts as progress. Design choice."""
MIXING_MEAN, MIXING_DEVIATION = 0.4, 0.3
"""Mean and standard deviation of the mixing of two samples before anything is known. Derived: with S mini-batches the
mean is (S - 1) / 2S, and over three epochs the standard deviation is 0.28 for S = 4."""
OWN_MIXING_DEVIATION = 1e-3
"""Standard deviation of the mixing of a sample with itself, which is 0. Design choice: any small number fixes it."""
MAX_EXACT_ORDERS = 4
"""Number of likely orders that are repeated exactly, each with all orders of its epochs. Design choice."""
MAX_PERMUTATIONS = 24
"""Largest number of orders of the epochs that are tried. Derived: all of four epochs."""


@dataclass(frozen=True, eq=False)
class Seen:
    """The movement of all layers, in the leading singular vectors of each, divided by its norm."""

    left: list[Tensor]
    right: list[Tensor]
    observed: Float[Tensor, "e"]
    scales: list[float]

    @classmethod
    def of(cls, movements: list[Tensor], batch_size: int) -> "Seen":
        """Describe the movements of all layers. The columns of the first one are coordinates."""
        left, right, parts, scales = [], [], [], []
        for each in movements:
            u, _, vt = torch.linalg.svd(each)
            left.append(u[:, : VECTORS_PER_SAMPLE * batch_size])
            right.append(vt[: VECTORS_PER_SAMPLE * batch_size].T)
            scales.append(1 / max(float(torch.linalg.vector_norm(each)), torch.finfo(each.dtype).tiny))
            parts.append(scales[-1] * (left[-1].T @ each @ right[-1]).flatten())
        return cls(left, right, torch.cat(parts), scales)

    def outer(self, signals: list[Tensor], inputs: list[Tensor]) -> Float[Tensor, "*d e"]:
        """Return d_i y_iᵀ of every sample, in the same form as ``observed``. Leading dimensions are kept."""
        blocks = [
            scale * (d @ left)[..., :, None] * (y @ right)[..., None, :]
            for d, y, left, right, scale in zip(signals, inputs, self.left, self.right, self.scales, strict=True)
        ]
        return torch.cat([each.flatten(-2) for each in blocks], dim=-1)


@dataclass(frozen=True, eq=False)
class LocalFit:
    """Samples that reproduce an update, and how well they do."""

    points: Float[Tensor, "b r"]
    sizes: Float[Tensor, "e b"]
    """κ of each sample in each epoch."""
    mixing: Float[Tensor, "e b b"]
    residual: float = float("inf")
    """Norm of what the samples do not explain, over the norm of the update, averaged over the layers."""
    spread: Tensor | None = None
    """Standard deviation of each point, if what is not explained is noise."""
    expected: float = 0.0
    """The residual that the rounding of the weights explains, once the order is known."""
    jacobian: Tensor | None = None
    """Derivatives of the predicted update with respect to the points and κ."""


def fit_training(
    training: LocalTraining,
    seen: Seen,
    points: Float[Tensor, "b r"],
    basis: Float[Tensor, "r u"],
    epochs: int,
    rounding: float,
    generator: torch.Generator,
) -> LocalFit:
    """Find the samples and the order of the mini-batches that reproduce the update, from points nearby.

    Args:
        training: the network with the weights before the training, and the labels of the samples.
        seen: the update.
        points: coordinates of the samples, a few percent off.
        basis: directions in which the points may move (``Problem.input_space``).
        epochs: number of epochs.
        rounding: what the rounding of the weights in one step leaves unexplained, in the units of the residual.
        generator: source of randomness, on the CPU.
    """
    relaxed = _solve(training, seen, _start(training, seen, points, epochs), basis, any_mixing=True)
    count = number_of_batches(relaxed.mixing[0])
    training = replace(training, passes=count)
    expected = rounding * (epochs * count) ** 0.5
    trials = _Trials(training, seen, relaxed)
    orders = likely_orders(relaxed.mixing[0], epochs, count, MAX_EXACT_ORDERS, generator)
    tried = [order[list(rows)] for order in orders for rows in islice(permutations(range(epochs)), MAX_PERMUTATIONS)]
    order = trials.improve(min(tried, key=trials.residual), expected)
    return replace(_solve(training, seen, trials.fit(order), basis, any_mixing=False), expected=expected)


def _start(training: LocalTraining, seen: Seen, points: Tensor, epochs: int) -> LocalFit:
    """Return the points with the size that fits best if the weights do not move, and with the usual mixing."""
    b = len(points)
    sizes = points.new_zeros(epochs, b)
    mixing = points.new_full((b, b), MIXING_MEAN).fill_diagonal_(0).expand(epochs, b, b)
    total = _outer(seen, training.run(points, sizes, mixing)).sum((0, 1))
    size = float(total @ seen.observed) / max(float(total @ total), torch.finfo(points.dtype).tiny)
    return LocalFit(points, sizes + size, mixing)


def _outer(seen: Seen, epochs: list[Visits]) -> Float[Tensor, "epochs b e"]:
    return torch.stack([seen.outer(each.signals, each.inputs) for each in epochs])


def _predicted(seen: Seen, epochs: list[Visits], sizes: Float[Tensor, "epochs b"]) -> Float[Tensor, "e"]:
    """Return the movement of all layers."""
    return torch.einsum("tb,tbe->e", sizes, _outer(seen, epochs))


class _Trials:
    """Exact repetitions of the training with different orders of the mini-batches."""

    def __init__(self, training: LocalTraining, seen: Seen, relaxed: LocalFit) -> None:
        self.training, self.seen, self.relaxed = training, seen, relaxed
        jacobian = relaxed.jacobian
        if jacobian is None:
            raise ValueError("the relaxed fit has no derivatives")
        self.span = torch.linalg.qr(jacobian.T)[0]
        b, count = len(relaxed.points), training.passes
        full = -(-b // count)
        rest = b - full * (count - 1)
        self.last = full / rest if rest > 0 else 1.0

    def fit(self, order: Int[Tensor, "e b"]) -> LocalFit:
        """Return the start of a fit with a known order.

        κ is the learning rate over the size of the mini-batch. All have the same size, except the last one if the
        number of samples is not divisible.
        """
        sizes = self.relaxed.sizes.mean() * torch.ones_like(self.relaxed.sizes)
        sizes[(order == self.training.passes - 1).to(sizes.device)] *= self.last
        return LocalFit(self.relaxed.points, sizes, mixing_of(order).to(sizes))

    def residual(self, order: Int[Tensor, "e b"]) -> float:
        """Return the part of the residual that no small change of the points explains."""
        check_time()
        fit = self.fit(order)
        epochs = self.training.run(fit.points, fit.sizes, fit.mixing)
        rest = self.seen.observed - _predicted(self.seen, epochs, fit.sizes)
        outside = rest - self.span @ (self.span.T @ rest)
        return float(torch.linalg.vector_norm(outside)) / len(self.seen.left) ** 0.5

    def improve(self, order: Int[Tensor, "e b"], enough: float) -> Int[Tensor, "e b"]:
        """Move single samples to other mini-batches as long as this lowers the residual and it is not small enough."""
        best, improved = self.residual(order), True
        while improved and best > enough:
            improved = False
            for changed in _neighbours(order, self.training.passes):
                value = self.residual(changed)
                if value < MAX_PROGRESS_RATIO * best:
                    order, best, improved = changed, value, True
                    break
        return order


def _neighbours(order: Int[Tensor, "e b"], count: int) -> Iterator[Int[Tensor, "e b"]]:
    """Yield the orders in which one sample is in other mini-batches: exchanged in two epochs, or moved in one."""
    for sample in range(order.shape[1]):
        for first in range(len(order)):
            for second in range(first):
                if order[first, sample] != order[second, sample]:
                    changed = order.clone()
                    changed[[first, second], sample] = order[[second, first], sample]
                    yield changed
    for epoch in range(len(order)):
        for sample in range(order.shape[1]):
            for other in range(count):
                if order[epoch, sample] != other:
                    changed = order.clone()
                    changed[epoch, sample] = other
                    yield changed


def _solve(
    training: LocalTraining, seen: Seen, start: LocalFit, basis: Float[Tensor, "r u"], *, any_mixing: bool
) -> LocalFit:
    """Take Gauss-Newton steps as long as they lower the residual."""
    best, state = start, start
    for _ in range(MAX_STEPS):
        check_time()
        fit, state = _gauss_newton(training, seen, state, basis, any_mixing)
        progress = fit.residual < MAX_PROGRESS_RATIO * best.residual
        best = fit if fit.residual < best.residual else best
        if not progress:
            break
    return best


def _gauss_newton(
    training: LocalTraining, seen: Seen, state: LocalFit, basis: Float[Tensor, "r u"], any_mixing: bool
) -> tuple[LocalFit, LocalFit]:
    """Return how well a state fits, and the state after one step."""
    points, sizes, mixing = state.points, state.sizes, state.mixing
    b = len(points)
    epochs = training.run(points, sizes, mixing)
    changes = training.tangents(points, sizes, mixing, epochs, basis.T, any_mixing=any_mixing)
    predicted = _predicted(seen, epochs, sizes)
    residuals = seen.observed - predicted
    by_point, by_mixing = _derivatives(seen, epochs, changes, sizes).split([basis.shape[1], b * any_mixing], dim=1)
    jacobian = torch.cat([by_point.flatten(0, 1), predicted[None], by_mixing.flatten(0, 1)])
    variance = float(residuals @ residuals) / max(1, seen.observed.numel() - len(jacobian))
    normal, slope = jacobian @ jacobian.T, jacobian @ residuals
    known = by_point[..., 0].numel() + 1
    if any_mixing:
        deviation = torch.full_like(mixing[0], MIXING_DEVIATION).fill_diagonal_(OWN_MIXING_DEVIATION)
        precision = variance / deviation.square().flatten()
        usual = torch.full_like(mixing[0], MIXING_MEAN).fill_diagonal_(0)
        normal.diagonal()[known:] += precision
        slope[known:] -= precision * (mixing[0] - usual).flatten()
    normal.diagonal().add_(torch.finfo(normal.dtype).eps * normal.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(normal)
    step = torch.cholesky_solve(slope[:, None], factor)[:, 0]
    covariance = torch.cholesky_inverse(factor).diagonal()[: known - 1].unflatten(0, (b, -1)).sum(1)
    spread = (variance * covariance).sqrt() if not int(failed) else torch.full_like(points[:, 0], torch.inf)
    residual = float(torch.linalg.vector_norm(residuals)) / len(seen.left) ** 0.5
    fit = replace(state, residual=residual, spread=spread, jacobian=jacobian[:known])
    moved = points + step[: known - 1].unflatten(0, (b, -1)) @ basis.T
    if any_mixing:
        mixing = mixing + step[known:].unflatten(0, (b, b))
    return fit, LocalFit(moved, sizes * (1 + step[known - 1]), mixing)


def _derivatives(
    seen: Seen, epochs: list[Visits], changes: list[Visits], sizes: Float[Tensor, "e b"]
) -> Float[Tensor, "b u equations"]:
    """Return how the predicted update changes with u unknowns of every sample."""
    total = torch.zeros_like(seen.observed)
    for now, change, size in zip(epochs, changes, sizes, strict=True):
        moved = seen.outer(change.signals, now.inputs) + seen.outer(now.signals, change.inputs)
        total = total + size[:, None] * moved
    return total.transpose(0, 1)
