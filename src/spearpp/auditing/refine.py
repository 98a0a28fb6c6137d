"""Fit all recovered inputs together to a noisy gradient.

The equations of the network use each layer's gradient through its row and column space, sample by sample. With noise,
least squares over all entries of all gradients is better: it weights every entry by its noise, which is the same for
all, and it uses the whole network for every input. Gauss-Newton steps from the recovered inputs find its minimum, and
conjugate gradients solve each step without forming a matrix.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp

from spearpp.auditing.replay import as_sent, forward
from spearpp.auditing.result import LayerAudit
from spearpp.errors import OptionError
from spearpp.inversion.evidence import WHOLE_NETWORK
from spearpp.inversion.result import Inversion
from spearpp.linalg.time_limit import OutOfTimeError, check_time
from spearpp.types import Float, Int, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs
from spearpp.update.names import plain

STEPS, SMALL_STEP = 10, 1e-4
"""Largest number of Gauss-Newton steps, and the largest relative change of an input by the last step. Measured: most
fits take four steps. A faint sample whose stated error was 0.65 gained 2 dB after the fourth."""
ITERATIONS = 100
"""Largest number of iterations of conjugate gradients in a step. Measured: the rest is then 1e-6 of the slope."""
SOLVED = 1e-6
"""Size of the rest, over the size of the slope, at which conjugate gradients stop. Design choice: far below noise."""
MAX_PARAMETERS = 5_000_000
"""Largest number of parameters. Design choice: several copies of the gradient are held in float64."""

Gradients = dict[str, Tensor]


def refine(audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None) -> list[LayerAudit]:
    """Fit inputs that are approximate because of noise. Claims and stated errors do not change.

    Only a layer that sees the inputs of the model, and whose inputs and labels the equations of the network all found
    from a single gradient, is fitted. An input must stay within its stated error, else nothing changes. An input whose
    stated error is too large to report it is fitted with the others, and still not reported.
    """
    size = sum(each.numel() for each in tensor_specs(update.gradients).values())
    if model is None or update.kind != "gradients" or update.clients > 1 or size > MAX_PARAMETERS:
        return audits
    return [_refined(each, update, model) for each in audits]


def _refined(audited: LayerAudit, update: ClientUpdate, model: nn.Module) -> LayerAudit:
    found, labels = audited.inversion, audited.labels
    if found is None or labels is None or found.evidence is None or found.evidence.layers != WHOLE_NETWORK:
        return audited
    consistent = bool(found.evidence.consistent.all()) and bool((labels >= 0).all())
    whole = len(found.inputs) == found.batch_size and consistent
    if audited.layer.sees != "inputs" or not whole or bool(found.certified.all()):
        return audited
    with suppress(OptionError, OutOfTimeError):
        fitted = _fitted(found, found.evidence.error, labels, update, as_sent(model, update).double())
        return replace(audited, inversion=fitted)
    return audited


def _fitted(
    found: Inversion, stated: Float[Tensor, "b"], labels: Int[Tensor, "b"], update: ClientUpdate, model: nn.Module
) -> Inversion:
    """Return the inversion with fitted inputs, or unchanged if an input moves farther than its stated error."""
    forward(model, found.inputs[:1])
    named = {name: each.detach() for name, each in model.named_parameters() if plain(name) in update.gradients}
    observed = {name: update.gradients[plain(name)].double() for name in named}

    def gradients(inputs: Tensor) -> Gradients:
        def loss(parameters: Gradients) -> Tensor:
            return nn.functional.cross_entropy(functional_call(model, parameters, (inputs,)), labels.to(inputs.device))

        return grad(loss)(named)

    start = found.inputs.double()
    fitted = least_squares(gradients, observed, start)
    moved = torch.linalg.vector_norm(fitted - start, dim=1) / torch.linalg.vector_norm(start, dim=1)
    return replace(found, inputs=fitted.to(found.inputs.dtype)) if bool((moved <= stated.to(moved)).all()) else found


def least_squares(
    gradients: Callable[[Tensor], Gradients], observed: Gradients, inputs: Float[Tensor, "b n"]
) -> Float[Tensor, "b n"]:
    """Return the inputs whose gradients are closest to the observed ones, from inputs nearby."""
    for _ in range(STEPS):
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
    """Return about (JᵀJ)⁻¹ times the slope."""
    found, rest, direction = torch.zeros_like(slope), slope, slope
    size = rest.square().sum()
    goal = SOLVED**2 * size
    for _ in range(ITERATIONS):
        if size <= goal:
            break
        check_time()
        image = product(direction)
        length = size / (direction * image).sum()
        found, rest = found + length * direction, rest - length * image
        before, size = size, rest.square().sum()
        direction = rest + size / before * direction
    return found
