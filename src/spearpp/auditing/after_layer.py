"""The part of a model after a Linear layer: its outputs, their Jacobian, and the labels they imply."""

import torch
from torch import nn

from spearpp.auditing.replay import as_sent, forward, module_name
from spearpp.errors import OptionError
from spearpp.inversion.factors import Factors
from spearpp.inversion.result import Inversion
from spearpp.linalg.chunks import chunk_size
from spearpp.model import Layer
from spearpp.types import Float, Int, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

MAX_SHARE_OUTSIDE = 0.6
"""Largest share of a signal outside the column space of the gradient for which a label fits.

Measured: 1e-6 for exact inputs, up to 0.5 for inputs that noise has moved by 7 %, and 0.7 to 0.9 for wrong labels.
"""
LABEL_MARGIN = 1.3
"""How many times the share outside of the best label the share of the second-best label must be.

A design choice: 1.3 is below the ratio of 1.4 or more between wrong and right labels, whose shares are given above.
"""
LABEL_RESOLUTION = 0.01
"""Smallest share outside that the second-best label must have.

A design choice: smaller shares may be rounding, even if they exceed the share of the best label many times.
"""
FIRST_CHUNK = 64
"""Number of inputs that are replayed at once before the size of the Jacobian is known.

A design choice: the Jacobians of 64 inputs fit into memory for typical classifiers.
"""


def labels_of(
    model: nn.Module, update: ClientUpdate, layer: Layer, result: Inversion, *, uphill: bool = False
) -> Int[Tensor, "k"]:
    """Return the label of each recovered input, or -1 for an input that no label fits.

    With the right label the predicted signal lies in the column space of the layer's gradient. With a wrong label the
    signal lies outside, so each label can be determined without the other samples. With two classes the signals of both
    labels lie inside, and the sign decides: the signal must point in the direction of L q_i. If ``uphill`` is True, the
    signal must point in the opposite direction, because the weights before and after training were swapped.

    Raises:
        OptionError: if the model does not accept the inputs or is not a classifier, or if the result was read from a
            folder, which holds no factors.
    """
    factors = result.factors
    if factors is None:
        raise OptionError("labels need the factors of the gradient, which a folder does not hold")
    network = AfterLayer(model, update, layer)
    observed = observed_signals(factors, result) * (-1 if uphill else 1)
    shares_outside = []
    for rows in torch.arange(len(result.inputs)).split(network.rows_at_once):
        outputs, jacobian = network(result.inputs[rows])
        signals = signals_of_labels(outputs.softmax(1), jacobian)
        outside = torch.linalg.vector_norm(signals - (signals @ factors.left) @ factors.left.T, dim=2)
        share = outside / torch.linalg.vector_norm(signals, dim=2).clamp_min(torch.finfo(signals.dtype).tiny)
        has_direction = rows < len(observed)
        opposite = (signals[has_direction] * observed[rows[has_direction], None]).sum(2) <= 0
        share[has_direction] = torch.where(opposite, torch.inf, share[has_direction])
        shares_outside.append(share)
    shares, labels = torch.cat(shares_outside).sort(dim=1)
    clear = shares[:, 1] >= (LABEL_MARGIN * shares[:, 0]).clamp_min(LABEL_RESOLUTION)
    return torch.where((shares[:, 0] <= MAX_SHARE_OUTSIDE) & clear, labels[:, 0], -1)


class AfterLayer:
    """The part of a model after a Linear layer, linearised at given inputs."""

    def __init__(self, model: nn.Module, update: ClientUpdate, layer: Layer) -> None:
        self.model = as_sent(model, update).double()
        self.layer, self.module = layer, self.model.get_submodule(module_name(self.model, layer))
        self.device = tensor_specs(update.gradients)[layer.weight].device
        self.rows_at_once = FIRST_CHUNK

    def outputs(self, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k classes"]:
        """Return the outputs without the Jacobian."""
        return forward(self.model, inputs.to(self.device)).detach()

    def __call__(self, inputs: Float[Tensor, "k n"]) -> tuple[Float[Tensor, "k c"], Float[Tensor, "k c m"]]:
        """Return the outputs and their Jacobian with respect to the pre-activations of the layer.

        Raises:
            OptionError: if the input of the layer does not have one row per sample.
        """
        preactivations: list[Tensor] = []

        def record(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            preactivations.append(output)
            return output.clone()  # an in-place ReLU would overwrite the recorded tensor

        handle = self.module.register_forward_hook(record)
        try:
            outputs = forward(self.model, inputs.to(self.device))
        finally:
            handle.remove()
        if len(preactivations) != 1 or preactivations[0].shape != (len(inputs), self.layer.neurons):
            raise OptionError(
                "the input of the layer does not have one row per sample: no sample can be replayed alone"
            )
        rows = [
            torch.autograd.grad(outputs[:, column].sum(), preactivations[0], retain_graph=True)[0]
            for column in range(outputs.shape[1])
        ]
        jacobian = torch.stack(rows, dim=1)
        # Three float64 tensors of the size of the Jacobian are in memory at the same time.
        self.rows_at_once = chunk_size(jacobian.device, 24 * jacobian[0].numel())
        return outputs.detach(), jacobian


def observed_signals(factors: Factors, result: Inversion) -> Float[Tensor, "found m"]:
    """Return d_i = L q_i / (q_i·p_i) for every input whose direction was found."""
    found = result.directions.to(factors.left)
    inputs = result.inputs[: len(found)].to(factors.left)
    if factors.right.shape[1] > inputs.shape[1]:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    points = inputs @ factors.right.T / factors.singular_values.square()
    product = (points * found).sum(1, keepdim=True)
    return (found / torch.where(product == 0, 1.0, product)) @ factors.left.T


def signals_of_labels(predicted: Float[Tensor, "k c"], jacobian: Float[Tensor, "k c m"]) -> Float[Tensor, "k c m"]:
    """Return Jᵀ (f - e_y) for every label y, where f is what the network predicts: softmax(o) for cross-entropy."""
    return torch.einsum("kc,kcm->km", predicted, jacobian)[:, None] - jacobian
