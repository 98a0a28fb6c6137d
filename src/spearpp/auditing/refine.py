"""Fit all recovered inputs together to a noisy gradient.

The equations of the network use only the row and column space of each layer's gradient, sample by sample. With noise,
least squares over all entries of all gradients is more accurate: the noise of all entries is the same, and the whole
network determines every input. Gauss-Newton steps from the recovered inputs find the minimum, and conjugate gradients
solve each step without forming a matrix.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp

from spearpp.auditing.claims import Claim, ClaimKind
from spearpp.auditing.replay import as_sent, forward
from spearpp.auditing.result import LayerAudit
from spearpp.errors import OptionError
from spearpp.inversion.evidence import Scope
from spearpp.inversion.result import Inversion
from spearpp.linalg.time_limit import OutOfTimeError, check_time
from spearpp.model import Layer
from spearpp.types import Float, Int, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs
from spearpp.update.names import plain

MAX_STEPS, SMALL_STEP = 10, 1e-4
"""Largest number of Gauss-Newton steps. The fit stops earlier when a step changes every input by less than the share
``SMALL_STEP``. Measured: most fits take four steps. A faint sample whose stated error was 0.65 gained 2 dB after the
fourth step."""
MAX_ITERATIONS = 100
"""Largest number of conjugate-gradient iterations in a Gauss-Newton step. Measured: the remainder is then 1e-6 of the
slope."""
MAX_REMAINDER = 1e-6
"""Conjugate gradients stop when the norm of the remainder is at most this share of the norm of the slope. Design
choice: far below noise."""
MAX_PARAMETERS = 5_000_000
"""Largest number of parameters of an update that is fitted. Design choice: several copies of the gradient are held in
float64."""
MAX_NOISE_RATIO = 1.2
"""If one input was missing, the fit is kept only if the residual of the layer's gradient is at most this many times its
noise. Measured: 0.96 times with the right inputs, and 6 times without one of them (σ = 1e-5, b = 20)."""

MISSING = Claim(
    ClaimKind.FITS,
    float("inf"),
    float("nan"),
    "the equations did not give this input; it was computed from all others, and together they explain the gradient",
)
"""The claim for an input that the equations did not find."""

Gradients = dict[str, Tensor]


def refine(audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None) -> list[LayerAudit]:
    """Fit inputs that are approximate because of noise. Their claims and stated errors do not change.

    A layer is fitted only if it receives the inputs of the model, and if the equations of the network found its inputs
    and labels from a single gradient. If the fit moves an input farther than its stated error, nothing changes. An
    input whose stated error is too large to be reported is fitted with the others, and is still not reported.

    One input may be missing, because noise can leave one solution for two faint samples. The missing input follows from
    the others. It is added without a proof if the gradients of all inputs then explain the update up to noise.
    """
    size = sum(each.numel() for each in tensor_specs(update.gradients).values())
    if model is None or update.kind != "gradients" or update.clients > 1 or size > MAX_PARAMETERS:
        return audits
    return [_refined(each, update, model) for each in audits]


def _refined(audited: LayerAudit, update: ClientUpdate, model: nn.Module) -> LayerAudit:
    found, labels = audited.inversion, audited.labels
    if found is None or labels is None or found.evidence is None or found.evidence.scope is not Scope.NETWORK:
        return audited
    missing = found.batch_size - len(found.inputs)
    consistent = bool(found.evidence.consistent.all()) and bool((labels >= 0).all())
    if audited.layer.sees != "inputs" or missing > 1 or not consistent or not found.missing:
        return audited
    labels = labels.to(found.inputs.device)
    with suppress(OptionError, OutOfTimeError):
        gradients = _Gradients(update, as_sent(model, update).double())
        if not missing:
            return replace(audited, inversion=_fitted(found, labels, gradients) or found)
        completed = _with_missing(found)
        if completed is not None:
            labels = gradients.with_last_label(completed.inputs, labels)
            fitted = _fitted(completed, labels, gradients)
            if fitted is not None and gradients.explained(fitted, labels, audited.layer):
                return replace(audited, inversion=fitted, labels=labels, claims=(*audited.claims, MISSING))
    return audited


class _Gradients:
    """The observed gradients of a model, and the gradients computed from inputs and labels."""

    def __init__(self, update: ClientUpdate, model: nn.Module) -> None:
        self._model = model
        self._weights = {
            name: each.detach() for name, each in model.named_parameters() if plain(name) in update.gradients
        }
        self.observed = {name: update.gradients[plain(name)].double() for name in self._weights}

    def __call__(self, inputs: Float[Tensor, "b n"], labels: Int[Tensor, "b"]) -> Gradients:
        """Return the gradients of the mean cross-entropy."""

        def loss(weights: Gradients) -> Tensor:
            return nn.functional.cross_entropy(functional_call(self._model, weights, (inputs,)), labels)

        return grad(loss)(self._weights)

    def with_last_label(self, inputs: Float[Tensor, "b n"], labels: Int[Tensor, "k"]) -> Int[Tensor, "b"]:
        """Return the labels, completed by the label of the last input that leaves the smallest residual."""
        classes = forward(self._model, inputs[:1].double()).shape[1]
        guesses = [torch.cat([labels, labels.new_tensor([label])]) for label in range(classes)]
        return min(guesses, key=lambda guess: math.hypot(*self._residuals(inputs.double(), guess).values()))

    def explained(self, found: Inversion, labels: Int[Tensor, "b"], layer: Layer) -> bool:
        """Return whether noise explains the difference between the layer's observed and computed gradients."""
        residual = self._residuals(found.inputs.double(), labels)[layer.weight]
        entries = layer.neurons * layer.features
        return found.factors is not None and residual <= MAX_NOISE_RATIO * found.factors.entry_noise * entries**0.5

    def _residuals(self, inputs: Float[Tensor, "b n"], labels: Int[Tensor, "b"]) -> dict[str, float]:
        """Return the norm of the difference between observed and computed gradients of each parameter."""
        computed = self(inputs, labels)
        return {plain(name): float((self.observed[name] - each).norm()) for name, each in computed.items()}


def _fitted(found: Inversion, labels: Int[Tensor, "b"], gradients: _Gradients) -> Inversion | None:
    """Return the inversion with fitted inputs, or None if an input moves farther than its stated error."""
    start = found.inputs.double()
    fitted = least_squares(lambda inputs: gradients(inputs, labels), gradients.observed, start)
    moved = torch.linalg.vector_norm(fitted - start, dim=1) / torch.linalg.vector_norm(start, dim=1)
    within = found.evidence is not None and bool((moved <= found.evidence.error.to(moved)).all())
    return replace(found, inputs=fitted.to(found.inputs.dtype)) if within else None


def _with_missing(found: Inversion) -> Inversion | None:
    """Return the inversion with the last input, which follows from all others; None if it has no finite scale.

    With x̂ = V p̄, the point p̄ of the last sample is orthogonal to Σ⁻¹q for every other direction q, and its direction
    is orthogonal to Σ⁻¹p̄ for every other point.
    """
    factors, evidence = found.factors, found.evidence
    if factors is None or evidence is None or not found.scale_known:
        return None
    points = torch.nn.functional.pad(found.inputs.double(), (0, 1), value=1.0) @ factors.rows.T
    scaled = torch.stack([found.directions, points]) / factors.singular_values
    point, direction = torch.linalg.qr(scaled.mT, mode="complete")[0][:, :, -1]
    row = point @ factors.rows
    last = (row[:-1] / row[-1]).to(found.inputs.dtype)
    if not bool(torch.isfinite(last).all()):
        return None
    return replace(
        found,
        inputs=torch.cat([found.inputs, last[None]]),
        certified=torch.nn.functional.pad(found.certified, (0, 1)),
        directions=torch.cat([found.directions, direction[None]]),
        evidence=evidence.with_unproved(1),
        zeros=torch.nn.functional.pad(found.zeros, (0, 1)),
        fits=torch.nn.functional.pad(found.fits, (0, 1), value=True),
    )


def least_squares(
    gradients: Callable[[Tensor], Gradients], observed: Gradients, inputs: Float[Tensor, "b n"]
) -> Float[Tensor, "b n"]:
    """Return the inputs whose gradients are closest to the observed ones, from inputs nearby."""
    for _ in range(MAX_STEPS):
        computed, pull, *_ = vjp(gradients, inputs)
        slope = pull({name: observed[name] - computed[name] for name in observed})[0]

        def product(direction: Tensor, at: Tensor = inputs, pull: Callable[..., tuple[Tensor]] = pull) -> Tensor:
            return pull(jvp(gradients, (at,), (direction,))[1])[0]

        step = _conjugate_gradients(product, slope)
        inputs = inputs + step
        if bool((torch.linalg.vector_norm(step, dim=1) <= SMALL_STEP * torch.linalg.vector_norm(inputs, dim=1)).all()):
            break
    return inputs


def _conjugate_gradients(product: Callable[[Tensor], Tensor], slope: Tensor) -> Tensor:
    """Return an approximation of (JᵀJ)⁻¹ times the slope."""
    found, rest, direction = torch.zeros_like(slope), slope, slope
    size = rest.square().sum()
    goal = MAX_REMAINDER**2 * size
    for _ in range(MAX_ITERATIONS):
        if size <= goal:
            break
        check_time()
        image = product(direction)
        length = size / (direction * image).sum()
        found, rest = found + length * direction, rest - length * image
        before, size = size, rest.square().sum()
        direction = rest + size / before * direction
    return found
