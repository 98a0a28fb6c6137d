"""Estimate how a client trained: repeat the training on the recovered batch until the result fits the update.

An update contains only the product of the gradient with lr, steps and momentum. The three numbers can be determined
separately only because the weights move: the gradient of the second step differs from the gradient of the first step.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from spearpp.auditing.checks import Finding
from spearpp.auditing.replay import Replay, as_sent, forward
from spearpp.errors import OptionError
from spearpp.linalg.time_limit import OutOfTimeError, check_time, time_limit
from spearpp.types import Float, Int, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs
from spearpp.update.names import plain

MAX_STEPS = 8
"""Largest number of steps that can be determined. A design choice: the time grows with the square of this number."""
SECONDS = 5.0
"""Time limit for the estimate. Without a clear fit by then, only the product is reported. A design choice: the estimate
is an extra and should not take longer than a typical audit."""
MAX_PARAMETERS = 5_000_000
"""Largest number of parameters of an update whose training is estimated. A design choice: several copies of the
parameters are held in float64, 40 MB each at this size."""
MAX_DIFFERENCE = 1e-4
"""Largest relative difference at which a repeated training counts as the client's training. A design choice: recovered
inputs are about as exact as this."""
WEIGHT_ROUNDING = 0.3
"""Rounding of the weights in one step, in units of the last place. s steps round √s times as much. Measured: 0.17 to
0.25 for one step. A difference that rounding explains does not count."""
CLEARLY_WORSE = 5.0
"""How many times the difference of the best number of steps the difference of every other number must be. A design
choice: the best number must be clearly better than all others."""
RATE_TOLERANCE = 0.05
"""Largest relative difference between the given and the estimated learning rate that is not reported. A design choice:
the estimate is far more accurate than 5 %, and a larger difference is a mistake in the given values."""
MAX_CORRECTIONS = 12
"""Largest number of corrections of lr and momentum for one number of steps. A design choice: Gauss-Newton converges
within a few corrections, and the loop stops when it has converged."""
IMPROVEMENT = 0.999
"""A correction is accepted if it multiplies the difference by less than this factor. A design choice: smaller
improvements do not change the reported digits."""
FIRST_MOMENTA = (0.0, 0.9)
"""Values of momentum from which the corrections start: plain SGD, and the usual value with momentum."""
MAX_MOMENTUM = 0.999
"""Largest momentum that is tried. A design choice: SGD with momentum diverges at 1."""
DERIVATIVE_STEP = 1e-4
"""Relative change of lr, and change of momentum, for the numerical derivatives of the training. A design choice for
forward differences in float64: the relative error is about 1e-4."""


@dataclass(frozen=True)
class Estimate:
    """How the client trained, if every step used the whole batch. Fields that the update leaves open are None."""

    product: float
    """Total factor of the mean gradient: lr · steps, or lr · Σ_t (1 - μᵗ) / (1 - μ) with momentum μ."""
    difference: float
    """‖update - repeated training‖ / ‖update‖ for the best fit."""
    lr: float | None = None
    steps: int | None = None
    momentum: float | None = None
    """Also None for one step: the first step with momentum is the same as a step of plain SGD."""

    def differs_from(self, update: ClientUpdate) -> bool:
        """Return whether the learning rate that the caller gave for the update contradicts this estimate."""
        if self.lr is None or update.lr is None:
            return False
        given, estimated = (update.lr, self.lr) if update.steps is None else (update.lr * update.steps, self.product)
        return abs(given - estimated) > RATE_TOLERANCE * estimated

    def __str__(self) -> str:
        if self.lr is None or self.steps is None:
            product = f"lr · steps = {self.product:.3g}, including momentum"
            return f"{product} (the update does not determine lr, steps and momentum separately)"
        steps = "one step" if self.steps == 1 else f"{self.steps} steps"
        momentum = "" if self.momentum is None else f" and momentum {round(self.momentum, 3) + 0.0:g}"
        return f"{steps} with the whole batch at lr {self.lr:.3g}{momentum}"


@dataclass(frozen=True)
class _Fit:
    """One schedule, and how well it reproduces the update."""

    steps: int
    lr: float
    momentum: float
    difference: float


def estimate_training(
    model: nn.Module | None, update: ClientUpdate, batches: list[tuple[Tensor, Tensor]], replayed: Replay | None
) -> Estimate | None:
    """Estimate how the client trained, with the first of several batches that the model accepts.

    Returns:
        The estimate, or None if no replay proves the recovered batch, if the client sent gradients instead of weights,
        if the update is a sum of several clients, or if the update is too large.
    """
    if model is None or replayed is None or not replayed.proves or replayed.scale <= 0:
        return None
    if update.kind == "gradients" or update.clients > 1:
        return None
    if sum(each.numel() for each in tensor_specs(update.gradients).values()) > MAX_PARAMETERS:
        return None
    for inputs, labels in batches:
        with suppress(OptionError, OutOfTimeError):
            return estimate(model, update, inputs, labels)
    return None


def training_findings(trained: Estimate | None, update: ClientUpdate) -> Iterator[Finding]:
    """Yield a finding about how the client trained: a warning if the caller gave another lr, else a note."""
    if trained is None:
        return
    if trained.differs_from(update):
        given = f"lr={update.lr:.3g}" + ("" if update.steps is None else f", steps={update.steps}")
        yield Finding("warning", "update", f"{given} was given, but the update fits {trained}")
    elif trained.lr is not None or update.lr is None:
        yield Finding("note", "update", f"the update fits {trained}")


def estimate(
    model: nn.Module, update: ClientUpdate, inputs: Float[Tensor, "b n"], labels: Int[Tensor, "b"]
) -> Estimate:
    """Find the lr, the number of steps and the momentum with which the recovered batch reproduces the update.

    For every number of steps the function fits lr and momentum. It reports a number of steps if this number fits up to
    rounding and every other number fits clearly worse. If the steps are too small to move the weights, several
    schedules have the same result, and only the product is reported. The same holds for mini-batches, whose order is
    unknown. The product then counts the steps of all mini-batches.

    Args:
        model: the network.
        update: what the client sent.
        inputs: the recovered inputs, all samples of the batch.
        labels: their labels.

    Raises:
        OptionError: if the model does not accept the inputs.

    >>> from spearpp import simulate
    >>> model = simulate.mlp(30, [40, 40], 10, generator=torch.Generator().manual_seed(2))
    >>> batch = simulate.random_batch(6, features=30, generator=torch.Generator().manual_seed(1))
    >>> update = simulate.FedAvg(epochs=3, mini_batch=6, rate=0.1, momentum=0.9)(model, batch)
    >>> print(estimate(model, update, batch.inputs, batch.labels))
    3 steps with the whole batch at lr 0.1 and momentum 0.9
    """
    training = _Training(model, update, inputs, labels)
    first = training.first()
    with suppress(OutOfTimeError), time_limit(time.monotonic() + SECONDS):  # an unfinished fit shows nothing
        return _clear_fit(training, first) or Estimate(first.lr, first.difference)
    return Estimate(first.lr, first.difference)


def _clear_fit(training: "_Training", first: "_Fit") -> Estimate | None:
    """Return the estimate for the only number of steps that fits, or None if no number is clearly the best."""
    fits = [first]
    for steps in range(2, MAX_STEPS + 2):
        fits.append(_fit_schedule(training, steps, first.lr))
        best, *others = sorted(fits, key=lambda each: each.difference)
        exact = best.difference <= max(MAX_DIFFERENCE, training.rounding * best.steps**0.5)
        if best.steps < steps and exact and others[0].difference >= CLEARLY_WORSE * best.difference:
            momentum = None if best.steps == 1 else best.momentum
            total = best.lr * total_factor(best.steps, best.momentum)
            return Estimate(total, best.difference, best.lr, best.steps, momentum)
    return None


class _Training:
    """Training of the model on the recovered batch, for comparison with the update."""

    def __init__(self, model: nn.Module, update: ClientUpdate, inputs: Tensor, labels: Tensor) -> None:
        self.model = as_sent(model, update).double()
        named = dict(self.model.named_parameters())
        self.before = {name: each.detach() for name, each in named.items() if plain(name) in update.gradients}
        device = next(iter(self.before.values())).device
        self.inputs, self.labels = inputs.to(device).double(), labels.to(device)
        forward(self.model, self.inputs)
        self.observed = _flat({name: update.gradients[plain(name)].double() * update.scale for name in self.before})
        weights, size = (float(torch.linalg.vector_norm(each)) for each in (_flat(self.before), self.observed))
        self.rounding = WEIGHT_ROUNDING * torch.finfo(torch.float32).eps * weights / max(size, 1e-300)

    def first(self) -> "_Fit":
        """Return the best fit of one step."""
        gradient = self.change(1, 1.0, 0.0)
        rate = float(gradient @ self.observed / (gradient @ gradient).clamp_min(1e-300))
        size = torch.linalg.vector_norm(self.observed).clamp_min(1e-300)
        return _Fit(1, rate, 0.0, float(torch.linalg.vector_norm(self.observed - rate * gradient) / size))

    def change(self, steps: int, lr: float, momentum: float) -> Float[Tensor, "p"]:
        """Train, and return the weights before the training minus the weights after it."""
        now, velocity = self.before, {name: torch.zeros_like(each) for name, each in self.before.items()}
        for _ in range(steps):
            check_time()
            current = {name: each.detach().requires_grad_(True) for name, each in now.items()}
            loss = nn.functional.cross_entropy(functional_call(self.model, current, (self.inputs,)), self.labels)
            gradients = torch.autograd.grad(loss, list(current.values()), materialize_grads=True)
            for name, gradient in zip(current, gradients, strict=True):
                velocity[name] = momentum * velocity[name] + gradient
            now = {name: now[name] - lr * velocity[name] for name in now}
        return _flat({name: self.before[name] - now[name] for name in now})


def _fit_schedule(training: _Training, steps: int, product: float) -> _Fit:
    """Return the best lr and momentum for a number of steps, from several starting points."""
    starts = [_Fit(steps, product / total_factor(steps, each), each, 1.0) for each in FIRST_MOMENTA]
    return min((_gauss_newton(training, each) for each in starts), key=lambda each: each.difference)


def _gauss_newton(training: _Training, start: _Fit) -> _Fit:
    """Correct lr and momentum by Gauss-Newton steps as long as the difference shrinks."""
    size = torch.linalg.vector_norm(training.observed).clamp_min(1e-300)

    def residual(lr: float, momentum: float) -> Tensor:
        return training.observed - training.change(start.steps, lr, momentum)

    lr, momentum, best = start.lr, start.momentum, residual(start.lr, start.momentum)
    for _ in range(MAX_CORRECTIONS):
        by_lr = best - residual(lr * (1 + DERIVATIVE_STEP), momentum)
        by_momentum = best - residual(lr, momentum + DERIVATIVE_STEP)
        slopes = torch.stack([by_lr, by_momentum])
        normal, right = (slopes @ slopes.T).cpu(), (slopes @ best).cpu()
        more_lr, more_momentum = (DERIVATIVE_STEP * torch.linalg.lstsq(normal, right[:, None]).solution[:, 0]).tolist()
        # One correction halves or doubles lr at most.
        trial = lr * min(2.0, max(0.5, 1 + more_lr)), min(MAX_MOMENTUM, max(0.0, momentum + more_momentum))
        found = residual(*trial)
        if not float(torch.linalg.vector_norm(found)) < IMPROVEMENT * float(torch.linalg.vector_norm(best)):
            break
        (lr, momentum), best = trial, found
    return _Fit(start.steps, lr, momentum, float(torch.linalg.vector_norm(best) / size))


def total_factor(steps: int, momentum: float) -> float:
    """Return the sum of the weights of all gradients: ``steps`` without momentum, and more with momentum."""
    return sum(sum(momentum**age for age in range(steps - step)) for step in range(steps))


def _flat(tensors: Mapping[str, Tensor]) -> Float[Tensor, "p"]:
    """Return all elements in one vector."""
    return torch.cat([each.flatten() for each in tensors.values()])
