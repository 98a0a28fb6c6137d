"""Invert a layer of a client that trained locally for several steps, for any activation.

Local steps move the weights, so the equations of the network hold only approximately. The inversion has three parts:

1. the equations are solved with the weights halfway between those before and after the training
   (``spearpp.inversion.levels``). This gives all samples, with an error of about one percent, and their labels;
2. the samples are fitted to the update by repeating the training, with an unknown order of the mini-batches
   (``spearpp.inversion.local_fit``);
3. the samples count only if the repeated training reproduces the whole update up to the rounding of the weights. There
   are far more equations than unknowns, so only the training of this client reproduces the update so closely. The error
   of each sample then follows from the remaining residual.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from spearpp.auditing.estimate import WEIGHT_ROUNDING
from spearpp.auditing.replay import as_sent
from spearpp.auditing.task import Budget, Task
from spearpp.errors import OptionError, RankError
from spearpp.inversion.evidence import Evidence, Scope
from spearpp.inversion.levels import halfway_network
from spearpp.inversion.local_fit import LocalFit, Seen, fit_training
from spearpp.inversion.network import SIGMAS, Network
from spearpp.inversion.observation import Observation, observe
from spearpp.inversion.problem import Problem, pose
from spearpp.inversion.result import Inversion, Progress, Stats
from spearpp.inversion.solutions import Solutions, no_solutions
from spearpp.inversion.training import LocalTraining
from spearpp.linalg import sphere
from spearpp.linalg.time_limit import OutOfTimeError, time_limit
from spearpp.model import Layer, Sees
from spearpp.model.following import Following
from spearpp.model.loss import Loss
from spearpp.search.equations.rounds import run_rounds
from spearpp.types import join_rows
from spearpp.update import ClientUpdate

MAX_SAMPLES = 32
"""Largest number of samples. Design choice: the derivatives of 32 samples take 0.5 GB."""
TRIED_EPOCHS = (1, 2, 3)
"""Numbers of epochs that are tried if the number is unknown. Design choice: each takes as long as the whole fit."""
MAX_EPOCHS = 6
"""Largest number of epochs. Design choice: time and memory grow with it."""
MAX_RESIDUAL = 2.0
"""Largest residual of a training that counts as repeated, in units of the rounding of the weights. Measured: 0.3 to 0.6
for the right samples and order; 4 with one sample in a wrong mini-batch
(``docs/lab/notebook.md``, "Local training with any activation")."""
MAX_RELATIVE_RESIDUAL = 0.01
"""Largest residual, relative to the update, whatever the rounding is. Design choice: wrong samples leave more."""
EQUATIONS_PER_UNKNOWN = 2
"""Smallest number of equations for each unknown. Design choice: a fit with fewer equations proves little."""


@dataclass(frozen=True, eq=False)
class _Posed:
    """One layer of a client that trained locally, with its equations."""

    problem: Problem
    """The layer with the weights halfway between before and after the training."""
    network: Network
    layers: list[Observation]
    """The layer and all later ones, with the weights before the training."""
    following: Following
    """The rest of the network with the weights before the training."""
    scale: float
    """The factor between the gradient and the movement of the weights."""


def invert_training(layer: Layer, update: ClientUpdate, task: Task) -> Inversion | None:
    """Recover the inputs of the first layer from the weights after local training.

    Args:
        layer: the layer.
        update: what the client sent.
        task: what the caller asks for, with the budget for this layer.

    Returns:
        The inversion, or None if the network or the update does not allow it, or if repeating the training does not
        reproduce the update.
    """
    deadline = Budget.of(task.budget).deadline
    with suppress(OptionError, RankError, OutOfTimeError), time_limit(deadline):
        posed = _pose(layer, update, task)
        if posed is None:
            return None
        began = time.monotonic()
        tell = None if task.progress is None else partial(task.progress, layer)
        found, starts = _search(posed, task.generator, deadline, tell)
        if len(found) < posed.problem.batch_size:
            return None
        for epochs in TRIED_EPOCHS if update.steps is None else (update.steps,):
            fit = _fit(posed, found, epochs, task.generator)
            if fit is not None and fit.residual <= min(MAX_RELATIVE_RESIDUAL, MAX_RESIDUAL * fit.expected):
                return _inversion(posed, fit, starts, time.monotonic() - began)
    return None


def _pose(layer: Layer, update: ClientUpdate, task: Task) -> _Posed | None:
    """Return the layer with its equations halfway; None if the training cannot be repeated."""
    if task.model is None or task.loss is not Loss.CROSS_ENTROPY:
        return None
    if update.kind == "gradients" or update.clients > 1 or layer.sees is not Sees.INPUTS or layer.dropout:
        return None
    if update.steps is not None and update.steps > MAX_EPOCHS:
        return None
    path = []
    for share in (0.0, 0.5, 1.0):
        weights = {name: update.weights[name] for name in update.weights}
        weights |= {name: weights[name] - share * update.scale * update.gradients[name] for name in update.gradients}
        moved = replace(update, weights=weights)
        following = Following.of_model(as_sent(task.model, moved), moved, layer)
        path.append((observe(*moved.layer(layer.weight, layer.bias)), following))
    following = path[0][1]
    whole = following.rest.is_chain and set(following.rest.layers) == set(following.layers)
    if not whole or following.loss is not Loss.CROSS_ENTROPY or _other_parameters(update, layer, following):
        return None
    problem = pose(path[1][0])
    if not 1 < problem.batch_size <= MAX_SAMPLES:
        return None
    network = halfway_network(path, problem.factors)
    if network is None:
        return None
    later = [observe(*following.layers[name]) for name in following.rest.layers]
    return _Posed(replace(problem, network=network), network, [path[0][0], *later], following, update.scale)


def _other_parameters(update: ClientUpdate, layer: Layer, following: Following) -> bool:
    """Return whether the client trained anything but the layer and those after it."""
    known = {layer.weight, layer.bias}
    known |= {f"{name}.{part}" for name in following.rest.layers for part in ("weight", "bias")}
    return not set(update.gradients) <= known


def _search(
    posed: _Posed, generator: torch.Generator, deadline: float, progress: Callable[[Progress], None] | None
) -> tuple[Solutions, int]:
    """Solve the equations with the weights halfway. Return the solutions and the number of starts."""
    found, starts, rounds = no_solutions(posed.problem), 0, 0
    for new, taken, _ in run_rounds(posed.problem, posed.network, generator, deadline):
        found, starts, rounds = join_rows(found, new), starts + taken, rounds + 1
        if progress is not None:
            progress(Progress(posed.problem.batch_size, len(found), starts, starts, None, rounds))
    return found, starts


def _fit(posed: _Posed, found: Solutions, epochs: int, generator: torch.Generator) -> LocalFit | None:
    """Fit the samples by repeating the training; None if there are too few equations."""
    factors, rest = posed.problem.factors, posed.following.rest
    before, *later = posed.layers
    first = before.weight @ factors.rows.T
    training = LocalTraining(
        [first, *(each.weight for each in later)],
        [each.has_bias for each in posed.layers],
        [function for _, function in rest.steps(first[:, :1].T).activations],
        found.labels,
    )
    movements = [before.gradient @ factors.rows.T, *(each.gradient for each in later)]
    b = posed.problem.batch_size
    seen = Seen.of([posed.scale * each for each in movements], b)
    if seen.observed.numel() < EQUATIONS_PER_UNKNOWN * (2 * b * b + 1):
        return None
    on_cpu = generator if generator.device.type == "cpu" else torch.Generator().manual_seed(0)
    basis = posed.problem.input_space[1]
    return fit_training(training, seen, found.coordinates, basis, epochs, _rounding(posed), on_cpu)


def _rounding(posed: _Posed) -> float:
    """Return the rounding of the weights in one step, relative to their whole movement, averaged over the layers."""
    squares = [each.weight.square().sum() / each.gradient.square().sum() for each in posed.layers]
    epsilon = max(each.gradient_epsilon for each in posed.layers)
    return WEIGHT_ROUNDING * epsilon * float(torch.stack(squares).mean().sqrt()) / posed.scale


def _inversion(posed: _Posed, fit: LocalFit, starts: int, seconds: float) -> Inversion:
    """Return the samples of a training that reproduces the update, with their evidence."""
    factors, seen, b = posed.problem.factors, posed.layers[0], posed.problem.batch_size
    inputs = fit.points @ factors.rows
    columns = inputs.shape[1]
    norms = torch.linalg.vector_norm(inputs[:, : columns - seen.has_bias], dim=1)
    of_rows = factors.entry_noise * columns**0.5 * torch.linalg.vector_norm(fit.points / factors.singular_values, dim=1)
    spread = torch.full_like(norms, torch.inf) if fit.spread is None else fit.spread
    error = SIGMAS * torch.hypot(spread, of_rows) / norms
    directions = sphere.retract(torch.linalg.inv(fit.points).T * factors.singular_values)
    evidence = Evidence(
        holds=torch.ones_like(norms, dtype=torch.bool),
        determined=torch.isfinite(error),
        error=error,
        share=factors.shares(directions, fit.points),
        scope=Scope.NETWORK,
        numbers={"residual": fit.residual},
    )
    stopped = f"repeating the local training reproduces the update up to {fit.residual:.1e} of its size"
    return Inversion(
        inputs=inputs[:, : columns - seen.has_bias].to(seen.dtype),
        certified=evidence.exact,
        score=1.0,
        batch_size=b,
        directions=directions,
        scale_known=seen.has_bias,
        evidence=evidence,
        spectrum=factors.spectrum,
        zeros=torch.zeros(b, dtype=torch.int64, device=inputs.device),
        fits=evidence.holds,
        next_layer="not given",
        stats=Stats(starts=starts, found=b, seconds={"search": seconds}, stopped=stopped),
        factors=factors,
    )
