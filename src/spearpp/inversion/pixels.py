"""From features to pixels: solve ψ(x) = f for the input x of a model, given the features f that a Linear layer saw.

ψ is the front end of the model (``spearpp.model.front``), and every feature that depends on x gives one equation. Adam
minimises ‖ψ(x) - f‖² for many pictures at once, with ReLU and max-pooling smoothed at first
(``spearpp.model.smoothing``), which passes over their kinks. Gauss-Newton steps with the full Jacobian J = dψ/dx
finish. A picture that ends in a local minimum is searched again.

**Uniqueness.** Let e be the number of features that depend on x (rows of J that are not zero), and n the number of
unknowns. If e ≤ n, or if J does not have rank n, other pictures have the same features, and x is not determined. The
residual r of a determined picture shows the noise of the features, because e - n combinations of the equations do not
depend on x. The error of x that this noise implies is

    ‖x - x*‖ ≈ ‖r‖ / √(e - n) · √(trace (JᵀJ)⁻¹).

A front end with a symmetry, such as ψ(-x) = ψ(x), has distant pictures with equal features, and then none is
determined. Therefore no negated, mirrored, rotated or shifted solution may have the same features, and a few pictures
are solved again from another start. (``docs/method.md``, section "Features to pixels")
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.time_limit import time_is_up
from spearpp.model.front import FrontEnd
from spearpp.types import Bool, Float, Int, Tensor, replace_rows

ADAM_STEPS = 700
"""Steps of Adam in an attempt. Measured: 700 steps solve most pictures of the CNN of the FedAvg paper
(``docs/lab/notebook.md``, "Features to pixels")."""
ADAM_RATE = 0.2
"""First step size of Adam, relative to the size of the inputs. It falls to zero as a cosine. Measured, as
``ADAM_STEPS``: 0.05 needs twice the steps."""
FIRST_WIDTH = 0.5
"""First width of the smoothed operations, relative to the standard deviation of their argument. It falls linearly to
zero in the first half of the steps. Measured, as ``ADAM_STEPS``: without smoothing one picture in eight is missed."""
MAX_ATTEMPTS = 8
"""How often a picture is searched. Design choice: a second attempt found the four pictures of 96 that the first one
missed (measured, as ``ADAM_STEPS``)."""
RANDOM_ATTEMPTS = (2, 4, 6)
"""Attempts that start at a random picture. The others go on where the last one of them ended. Measured: of two pictures
of LEAF's network that the first attempt missed, one was found by going on and not by seven of eight random starts, the
other by random starts and not by going on ten times."""
RANDOM_CHANGE = 0.1
"""Size of the random change before every attempt but the first, relative to the size of the inputs. Design choice: half
of the first step of Adam, enough to leave a point where all derivatives are zero.
"""
MAX_GAUSS_NEWTON_STEPS = 3
"""Largest number of Gauss-Newton steps at the end. Derived: with the right signs of all ReLUs ψ is linear, and one step
ends at the solution; the others correct the signs."""
MAX_REMAINING_SHARE = 0.5
"""A Gauss-Newton step that leaves more than this share of the residual is the last one: the rest is noise."""
MIN_PIVOT = 1e-10
"""Smallest pivot of JᵀJ, relative to the largest, of a matrix of full rank. Derived: a thousand times the rounding
error of float64 for a thousand unknowns, and the square of the relative singular value 1e-5."""
BETAS = (0.9, 0.99)
"""Decay of the averages of the gradient and of its square in Adam. Design choice: the usual values for short runs."""
PICTURES_ON_CPU = 4
"""Pictures that are solved at the same time on a CPU. Design choice: few are left half done if the time ends."""
SIZE_PREFERENCE = 0.01
"""Preference for inputs of size one, in units of the logarithm, if the features hardly depend on the size of the
inputs, as behind LayerNorm. Design choice: small beside the factor of two between two sizes."""
SECOND_STARTS = 2
"""Number of solved pictures that are solved again from another start. Design choice: a symmetry of ψ holds for every
picture, so few of them show it."""
MIN_DIFFERENT_DISTANCE = 0.1
"""Relative distance of two pictures from which they count as different solutions. Design choice: far above the error of
a solved picture."""
DRAWN_INPUTS = 8
"""Number of random inputs that the size of the inputs is estimated from. Design choice: a median needs a few."""
MAX_SOLVED_RESIDUAL = 1e-2
"""Relative residual from which the steps in float64 are worth their time. Design choice: pictures that end in a local
minimum have a relative residual of 1e-2 to 1e-1."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """Solutions of ψ(x) = f, one row for each feature vector."""

    inputs: Float[Tensor, "k n"]
    """x, in float64."""
    residual: Float[Tensor, "k"]
    """‖ψ(x) - f‖ / ‖f‖."""
    equations: Int[Tensor, "k"]
    """e, the number of features that depend on x at the solution."""
    error: Float[Tensor, "k"]
    """Expected error of x over the norm of x, if f is ψ of one picture plus noise. inf if x is not determined."""
    slope: Float[Tensor, "k"]
    """√(trace (JᵀJ)⁻¹) ‖f‖ / ‖x‖: the relative error of x over the relative error of f. inf if J has a lower rank."""


def solve(
    front: FrontEnd,
    features: Float[Tensor, "k m"],
    noise: Float[Tensor, "k"],
    *,
    generator: torch.Generator,
) -> Pictures:
    """Solve ψ(x) = f for every feature vector, or for as many as the ``time_limit`` of the caller allows.

    Args:
        front: ψ.
        features: f, one row for each picture.
        noise: relative residual at which a picture is solved.
        generator: source of randomness, for the starting points.

    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 5))
    >>> front = FrontEnd(net, "3", (1, 8, 8))
    >>> x = torch.rand(2, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    >>> found = solve(front, front(x), torch.full((2,), 1e-9), generator=torch.Generator().manual_seed(0))
    >>> bool(torch.allclose(found.inputs, x, atol=1e-6)), bool((found.equations > 64).all())
    (True, True)
    """
    features = features.double()
    norms = torch.linalg.vector_norm(features, dim=1).clamp_min(1e-300)
    for dtype in (torch.float32, torch.float64):
        front.prepare(features.device, dtype)
    found, unique, checked = _unsolved(front, features), True, 0
    ends = found.inputs.clone()
    with _full_precision():
        scale = _input_scale(front, norms, generator)
        for attempt in range(MAX_ATTEMPTS):
            rows = torch.nonzero(found.residual > noise.to(norms))[:, 0]
            if not len(rows) or time_is_up():
                break
            for some in rows.split(len(rows) if rows.is_cuda else PICTURES_ON_CPU):
                drawn = _draw(len(some), front, generator, features.device)
                again = ends[some].nan_to_num() + (RANDOM_CHANGE * scale * drawn if attempt else 0)
                start = scale * drawn if attempt in RANDOM_ATTEMPTS else again
                points = _descend(front, features[some], start, scale).double()
                ends[some] = ends[some] if attempt in RANDOM_ATTEMPTS else points
                for row, point in zip(some.split(1), points.split(1), strict=True):
                    ended = _finish(front, point, features[row], float(noise[row]))
                    if bool(ended.residual < found.residual[row]):
                        found = replace_rows(found, row, ended)
                solved = some[(found.residual <= noise.to(norms))[some]][: SECOND_STARTS - checked]
                if len(solved):
                    checked += len(solved)
                    unique &= _same_from_elsewhere(front, features, noise, found, solved, scale, generator)
    if not unique or not checked or _has_symmetry(front, features, found, found.residual <= noise.to(norms)):
        nothing = torch.full_like(norms, torch.inf)
        return replace(found, slope=nothing, error=nothing)
    return found


def _same_from_elsewhere(
    front: FrontEnd,
    features: Float[Tensor, "k m"],
    noise: Float[Tensor, "k"],
    found: Pictures,
    rows: Int[Tensor, "j"],
    scale: float,
    generator: torch.Generator,
) -> bool:
    """Return whether no start elsewhere ends at another picture with the same features.

    The Jacobian shows that no neighbouring picture has the same features. Where ψ is an even function, as x², distant
    pictures have them too, and a start at random ends at one of these.
    """
    start = scale * _draw(len(rows), front, generator, features.device)
    points = _descend(front, features[rows], start, scale)
    for row, point in zip(rows.split(1), points.double().split(1), strict=True):
        other = _finish(front, point, features[row], float(noise[row]))
        distance = torch.linalg.vector_norm(other.inputs - found.inputs[row])
        different = distance > MIN_DIFFERENT_DISTANCE * torch.linalg.vector_norm(found.inputs[row])
        if bool((other.residual <= MAX_SOLVED_RESIDUAL) & different):
            return False
    return not time_is_up()


def _has_symmetry(front: FrontEnd, features: Float[Tensor, "k m"], found: Pictures, solved: Bool[Tensor, "k"]) -> bool:
    """Return whether a negated, mirrored, rotated or shifted solution has the same features as the solution.

    The negative of a picture is also tried with its own brightness, as in a photographic negative.
    """
    pictures = found.inputs[solved].reshape(-1, *front.shape)
    axes = range(1, pictures.ndim)
    others = [pictures.flip(some) for count in range(len(axes) + 1) for some in combinations(axes, count)]
    if pictures.ndim > 2 and front.shape[-1] == front.shape[-2]:
        others += [each.mT for each in others]
    others += [pictures.roll(1, axis) for axis in axes]
    twice_mean = 2 * pictures.flatten(1).mean(1).reshape(-1, *(1 for _ in axes))
    for other in [*others, *(-each for each in others), *(twice_mean - each for each in others)]:
        moved = torch.linalg.vector_norm((other - pictures).flatten(1), dim=1)
        apart = moved > MIN_DIFFERENT_DISTANCE * torch.linalg.vector_norm(pictures.flatten(1), dim=1)
        difference = torch.linalg.vector_norm(front(other.flatten(1)) - features[solved], dim=1)
        alike = difference <= MAX_SOLVED_RESIDUAL * torch.linalg.vector_norm(features[solved], dim=1)
        if bool((apart & alike).any()):
            return True
    return False


def _unsolved(front: FrontEnd, features: Float[Tensor, "k m"]) -> Pictures:
    """Return a table in which no picture is solved."""
    nothing = torch.full_like(features[:, 0], torch.inf)
    inputs = features.new_zeros(len(features), front.unknowns)
    return Pictures(inputs, nothing, torch.zeros_like(nothing).long(), nothing, nothing)


def _descend(
    front: FrontEnd, features: Float[Tensor, "k m"], start: Float[Tensor, "k n"], scale: float
) -> Float[Tensor, "k n"]:
    """Return the end points of Adam in single precision, for inputs of about the size ``scale``."""
    points = start.float()
    widths = front.scales(scale * _draw(DRAWN_INPUTS, front, torch.Generator().manual_seed(0), features.device).float())
    norms = torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp_min(1e-300)
    target, norms = (features / norms).float(), norms.float()
    mean, square = torch.zeros_like(points), torch.zeros_like(points)
    for step in range(ADAM_STEPS):
        if time_is_up():
            break
        width = FIRST_WIDTH * (1 - 2 * step / ADAM_STEPS)
        smooth = {name: width * each for name, each in widths.items() if each > 0} if width > 0 else None
        with torch.enable_grad():
            points.requires_grad_(True)
            loss = (front(points, smooth) / norms - target).square().sum()
            (slope,) = torch.autograd.grad(loss, points)
        mean = mean.lerp(slope, 1 - BETAS[0])
        square = square.lerp(slope.square(), 1 - BETAS[1])
        corrected = (square / (1 - BETAS[1] ** (step + 1))).sqrt().clamp_min(1e-30)
        rate = scale * ADAM_RATE * (1 + math.cos(math.pi * step / ADAM_STEPS)) / 2
        points = points.detach() - rate / (1 - BETAS[0] ** (step + 1)) * mean / corrected
    return points


def _finish(front: FrontEnd, point: Float[Tensor, "1 n"], features: Float[Tensor, "1 m"], noise: float) -> Pictures:
    """Take Gauss-Newton steps in double precision, and measure how well the equations determine the end point.

    The steps end when the residual is below the noise.
    """
    norm = torch.linalg.vector_norm(features).clamp_min(1e-300)

    def residual_of(x: Tensor) -> Tensor:
        return ((front(x) - features) / norm)[0]

    residual = residual_of(point)
    size = torch.linalg.vector_norm(residual)
    found = replace(_unsolved(front, features), inputs=point, residual=size[None])
    for step in range(MAX_GAUSS_NEWTON_STEPS + 1):
        if not bool(size <= MAX_SOLVED_RESIDUAL) or time_is_up():
            break
        matrix = jacobian(front, point)[0] / norm
        equations = (matrix != 0).any(1).sum()
        factor, failed = torch.linalg.cholesky_ex(matrix.mT @ matrix)
        pivots = factor.diagonal().square()
        slope, full = torch.full_like(size, torch.inf), (failed == 0) & (equations > front.unknowns)
        if bool(full & (pivots.min() > MIN_PIVOT * pivots.max())):
            trace = torch.cholesky_inverse(factor).diagonal().sum()
            slope = trace.sqrt() / torch.linalg.vector_norm(point).clamp_min(1e-300)
        error = size / (equations - front.unknowns).clamp_min(1).double().sqrt() * slope
        found = Pictures(point, size[None], equations[None], error[None], slope[None])
        if not bool(torch.isfinite(slope)) or step == MAX_GAUSS_NEWTON_STEPS:
            break
        moved = point - torch.cholesky_solve((matrix.mT @ residual)[:, None], factor)[:, 0]
        after = residual_of(moved)
        left = torch.linalg.vector_norm(after) / size
        if not bool(left < 1):
            break
        point, residual, size = moved, after, size * left
        if bool((left > MAX_REMAINING_SHARE) | (size <= noise)):  # the matrix hardly changes
            found = replace(found, inputs=point, residual=size[None], error=error[None] * left)
            break
    return found


def _draw(count: int, front: FrontEnd, generator: torch.Generator, device: torch.device) -> Float[Tensor, "k n"]:
    """Draw random inputs of size one: half of their variance is a constant, as neighbouring pixels are alike."""
    drawn = torch.randn(count, front.unknowns + 1, generator=generator, device=generator.device, dtype=torch.float64)
    return ((drawn[:, :-1] + drawn[:, -1:]) / math.sqrt(2)).to(device)


def _input_scale(front: FrontEnd, norms: Float[Tensor, "k"], generator: torch.Generator) -> float:
    """Return the power of two for which random inputs of this size have features as large as the given ones."""
    drawn = _draw(DRAWN_INPUTS, front, generator, norms.device)
    sizes = [2.0**power for power in range(-20, 21)]
    found = torch.stack([torch.linalg.vector_norm(front(size * drawn), dim=1).median() for size in sizes])
    distance = (found.clamp_min(1e-300).log() - norms.median().log()).abs()
    distance += SIZE_PREFERENCE * torch.tensor(sizes, device=norms.device).log().abs()
    return sizes[int(distance.nan_to_num(torch.inf).argmin())]


def jacobian(front: FrontEnd, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k m n"]:
    """Return dψ/dx at every input, by forward differentiation along all axes of x."""
    count, unknowns = inputs.shape
    bytes_each = inputs.element_size() * count * front.numbers_each(inputs)
    axes = torch.eye(unknowns, dtype=inputs.dtype, device=inputs.device)

    def along(axis: Tensor) -> Tensor:
        derivative: Tensor = torch.func.jvp(front, (inputs,), (axis.expand_as(inputs),))[1]
        return derivative

    parts = [torch.func.vmap(along)(each) for each in axes.split(chunk_size(inputs.device, 2 * bytes_each))]
    return torch.cat(parts).permute(1, 2, 0)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Switch off TF32, whose rounding error of 1e-3 would end the search early, and choose repeatable algorithms."""
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
