"""How a client trained, told from its update: the training is played again on the recovered batch until it fits.

One update holds lr, the number of steps and momentum together, as their product with the gradient. They come apart
because the weights move: the second step's gradient is another one than the first's.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from spearpp.auditing.replay import as_sent, forward
from spearpp.types import Float, Int, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.names import plain

STEPS = 8
"""Steps up to which the training is played again."""
SECONDS = 5.0
"""Time for it; what is not told by then is left open."""
LARGEST = 5_000_000
"""Numbers of an update up to which it is tried: the training is held in float64, several times over."""
FITS = 1e-4
"""Difference up to which a training played again is the client's: recovered inputs are as exact as that."""
ROUNDED = 0.3
"""Steps round weights by this share of a unit in the last place at most: 0.17 to 0.25 was seen for one step, and √s
times that for s. A difference that rounding explains is none."""
APART = 5.0
"""How much worse every other number of steps must fit."""
WRONG = 0.05
"""Share by which a rate that was given may differ from what is told."""
ROUNDS = 12
"""Corrections of lr and momentum for one number of steps."""
STARTS = (0.0, 0.9)
"""Momentum from which on it is corrected."""
MOST = 0.999
"""Momentum at most."""
NUDGE = 1e-4
"""Change of lr and momentum that shows how the training depends on them."""


@dataclass(frozen=True)
class Estimate:
    """How the client trained, if it took every step with its whole batch; None for what its update does not tell."""

    product: float
    """By what the mean gradient was multiplied altogether: lr · steps, with momentum lr · Σ_t (1 - μᵗ) / (1 - μ)."""
    difference: float
    """‖update - training played again‖ / ‖update‖ for what fits best."""
    lr: float | None = None
    steps: int | None = None
    momentum: float | None = None
    """None after one step too: the first step with momentum is one of plain SGD."""

    def differs_from(self, update: ClientUpdate) -> bool:
        """Whether the update was said to be of another rate than the one that is told."""
        if self.lr is None or update.lr is None:
            return False
        given, told = (update.lr, self.lr) if update.steps is None else (update.lr * update.steps, self.product)
        return abs(given - told) > WRONG * told

    def __str__(self) -> str:
        if self.lr is None or self.steps is None:
            return f"lr · steps = {self.product:.3g}, momentum counted in, which do not come apart"
        steps = "one step" if self.steps == 1 else f"{self.steps} steps"
        momentum = "" if self.momentum is None else f" and momentum {round(self.momentum, 3) + 0.0:g}"
        return f"{steps} with the whole batch at lr {self.lr:.3g}{momentum}"


@dataclass(frozen=True)
class _Fit:
    steps: int
    lr: float
    momentum: float
    difference: float


def estimate(
    model: nn.Module,
    update: ClientUpdate,
    inputs: Float[Tensor, "b n"],
    labels: Int[Tensor, "b"],
    *,
    seconds: float = SECONDS,
) -> Estimate:
    """Find the lr, steps and momentum with which the recovered batch gives the weights that the client sent.

    For every number of steps lr and momentum are fitted. The number is told where it fits up to rounding and no other
    does nearly as well. Small steps hardly move the weights: then several schedules are one, and only their product is
    told. So it is for mini-batches, whose order cannot be played again; it then counts their steps.

    Raises:
        OptionError: if the model does not take the inputs.

    >>> from spearpp import simulate
    >>> model = simulate.mlp(30, [40, 40], 10, generator=torch.Generator().manual_seed(2))
    >>> batch = simulate.random_batch(6, features=30, generator=torch.Generator().manual_seed(1))
    >>> update = simulate.FedAvg(epochs=3, mini_batch=6, rate=0.1, momentum=0.9)(model, batch)
    >>> print(estimate(model, update, batch.inputs, batch.labels))
    3 steps with the whole batch at lr 0.1 and momentum 0.9
    """
    training = _Training(model, update, inputs, labels)
    first = training.first()
    training.until = time.monotonic() + seconds
    try:
        return _told(training, first) or Estimate(first.lr, first.difference)
    except TimeoutError:  # what is fitted halfway tells nothing
        return Estimate(first.lr, first.difference)


def _told(training: "_Training", first: "_Fit") -> Estimate | None:
    """The one number of steps that fits, with its lr and momentum."""
    fits = [first]
    for steps in range(2, STEPS + 2):
        fits.append(_best_of(training, steps, first.lr))
        best, *others = sorted(fits, key=lambda each: each.difference)
        whole = best.difference <= max(FITS, training.rounding * best.steps**0.5)
        if best.steps < steps and whole and others[0].difference >= APART * best.difference:
            momentum = None if best.steps == 1 else best.momentum
            total = best.lr * _passes(best.steps, best.momentum)
            return Estimate(total, best.difference, best.lr, best.steps, momentum)
    return None


class _Training:
    """The recovered batch in the hands of the client: what becomes of the weights, and what did."""

    def __init__(self, model: nn.Module, update: ClientUpdate, inputs: Tensor, labels: Tensor) -> None:
        self.until = float("inf")
        self.model = as_sent(model, update).double()
        named = dict(self.model.named_parameters())
        self.sent = {name: each.detach() for name, each in named.items() if plain(name) in update.gradients}
        device = next(iter(self.sent.values())).device
        self.inputs, self.labels = inputs.to(device).double(), labels.to(device)
        forward(self.model, self.inputs)
        scale = (update.lr or 1.0) * (update.steps or 1)
        seen = {name: update.gradients[plain(name)].double() * scale for name in self.sent}
        self.seen = _flat(seen)
        weights, size = (float(torch.linalg.vector_norm(each)) for each in (_flat(self.sent), self.seen))
        self.rounding = ROUNDED * torch.finfo(torch.float32).eps * weights / max(size, 1e-300)

    def first(self) -> "_Fit":
        """One step, at the rate at which it fits best."""
        made = self.change(1, 1.0, 0.0)
        rate = float(made @ self.seen / (made @ made).clamp_min(1e-300))
        size = torch.linalg.vector_norm(self.seen).clamp_min(1e-300)
        return _Fit(1, rate, 0.0, float(torch.linalg.vector_norm(self.seen - rate * made) / size))

    def change(self, steps: int, lr: float, momentum: float) -> Float[Tensor, "p"]:
        """The weights before minus those after.

        Raises:
            TimeoutError: when the time is spent.
        """
        now, velocity = self.sent, {name: torch.zeros_like(each) for name, each in self.sent.items()}
        for _ in range(steps):
            if time.monotonic() > self.until:
                raise TimeoutError
            moving = {name: each.detach().requires_grad_(True) for name, each in now.items()}
            loss = nn.functional.cross_entropy(functional_call(self.model, moving, (self.inputs,)), self.labels)
            gradients = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
            for name, gradient in zip(moving, gradients, strict=True):
                velocity[name] = momentum * velocity[name] + (0.0 if gradient is None else gradient)
            now = {name: now[name] - lr * velocity[name] for name in now}
        return _flat({name: self.sent[name] - now[name] for name in now})


def _best_of(training: _Training, steps: int, product: float) -> _Fit:
    """The best lr and momentum for so many steps, from several starts."""
    starts = [_Fit(steps, product / _passes(steps, each), each, 1.0) for each in STARTS]
    return min((_fitted(training, each) for each in starts), key=lambda each: each.difference)


def _fitted(training: _Training, start: _Fit) -> _Fit:
    """Gauss and Newton's corrections of lr and momentum, as long as they help."""
    size = torch.linalg.vector_norm(training.seen).clamp_min(1e-300)

    def left(lr: float, momentum: float) -> Tensor:
        return training.seen - training.change(start.steps, lr, momentum)

    lr, momentum, best = start.lr, start.momentum, left(start.lr, start.momentum)
    for _ in range(ROUNDS):
        faster, heavier = best - left(lr * (1 + NUDGE), momentum), best - left(lr, momentum + NUDGE)
        across = float(faster @ heavier)
        normal = torch.tensor(
            [[float(faster @ faster), across], [across, float(heavier @ heavier)]], dtype=torch.float64
        )
        towards = torch.tensor([float(faster @ best), float(heavier @ best)], dtype=torch.float64)
        more, heavy = (NUDGE * torch.linalg.lstsq(normal, towards[:, None]).solution[:, 0]).tolist()
        trial = lr * min(2.0, max(0.5, 1 + more)), min(MOST, max(0.0, momentum + heavy))
        found = left(*trial)
        if not float(torch.linalg.vector_norm(found)) < 0.999 * float(torch.linalg.vector_norm(best)):
            break
        (lr, momentum), best = trial, found
    return _Fit(start.steps, lr, momentum, float(torch.linalg.vector_norm(best) / size))


def _passes(steps: int, momentum: float) -> float:
    """How often the gradient of each step counts, summed: ``steps`` without momentum."""
    return sum(sum(momentum**age for age in range(steps - step)) for step in range(steps))


def _flat(tensors: Mapping[str, Tensor]) -> Float[Tensor, "p"]:
    return torch.cat([each.flatten() for each in tensors.values()])
