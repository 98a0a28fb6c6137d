"""What follows a layer: the rest of the network, with the gradients of its Linear layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spearpp.errors import OptionError, ShapeError
from spearpp.model.layer import Layer
from spearpp.model.loss import Loss
from spearpp.model.rest import Rest
from spearpp.types import LayerTensors, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.names import plain

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}
"""Common activations by their name in ``torch.nn.functional``, the most common first."""


@dataclass(frozen=True, eq=False)
class Following:
    """The rest of a network after a layer. ``spearpp.invert`` uses it for layers with any activation."""

    rest: Rest
    """The operations after the layer."""
    layers: Mapping[str, LayerTensors]
    """The gradients and weights of the later Linear layers, by name."""
    loss: Loss | None
    """The loss of the client; None if it is unknown."""
    outputs: int
    """Number of outputs of the network; 0 if they do not depend on the layer alone."""

    @classmethod
    def of_layers(
        cls,
        activation: str | nn.Module,
        layers: Sequence[LayerTensors],
        loss: str | None = "cross-entropy",
    ) -> "Following":
        """Describe a fully connected network: one activation after the layer and between all later layers.

        Args:
            activation: the activation, by name ("gelu", "tanh", …) or as a module.
            layers: grad_weight, grad_bias, weight and bias of every later layer, in order.
            loss: "cross-entropy", "mse" or "bce" if the last layer is the output of the network; None or "unknown" if
                it is not, or if the loss is unknown.

        >>> import torch, spearpp
        >>> from spearpp import simulate
        >>> from spearpp.model.following import Following
        >>> net = nn.Sequential(nn.Linear(30, 60), nn.GELU(), nn.Linear(60, 60), nn.GELU(), nn.Linear(60, 10))
        >>> batch = simulate.random_batch(8, features=30, generator=torch.Generator().manual_seed(1))
        >>> first, *later = simulate.fedsgd(net, batch)
        >>> result = spearpp.invert(*first, following=Following.of_layers("gelu", later))
        >>> int(result.certified.sum())
        8
        """
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise OptionError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}, or a module")
        if not layers:
            raise OptionError("no later layer is given: the equations need at least the output layer")
        chosen = ACTIVATIONS[activation]() if isinstance(activation, str) else activation
        before = layers[0][2].shape[1]
        modules: list[nn.Module] = [nn.Linear(1, before)]
        for _, _, weight, bias in layers:
            if weight.ndim != 2 or weight.shape[1] != before:
                raise ShapeError(f"a later layer has a weight of shape {tuple(weight.shape)}, not (outputs, {before})")
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            with torch.no_grad():
                linear.weight.copy_(weight)
                if bias is not None:
                    linear.bias.copy_(bias)
            modules += [chosen, linear]
            before = weight.shape[0]
        rest = Rest(nn.Sequential(*modules), "0")
        named = dict(zip(rest.layers, layers, strict=True))
        known = None if loss is None else Loss.named(loss)
        return cls(rest, named, known, 0 if known is None else before)

    @classmethod
    def of_output(cls, neurons: int, loss: Loss | str = Loss.CROSS_ENTROPY) -> "Following":
        """Describe an output layer: nothing but the loss follows it.

        Args:
            neurons: number of outputs of the layer.
            loss: "cross-entropy", "mse" or "bce".

        >>> import torch, spearpp
        >>> from spearpp import simulate
        >>> batch = simulate.random_batch(8, features=30, classes=40, generator=torch.Generator().manual_seed(1))
        >>> head = simulate.fedsgd(nn.Linear(30, 40), batch)[0]
        >>> int(spearpp.invert(*head, following=Following.of_output(40)).certified.sum())
        8
        """
        return cls(Rest(nn.Sequential(nn.Linear(1, neurons)), "0"), {}, Loss.named(loss), neurons)

    @classmethod
    def of_model(
        cls, model: nn.Module, update: ClientUpdate, layer: Layer, loss: Loss | None = Loss.CROSS_ENTROPY
    ) -> "Following":
        """Describe what follows a layer of a model.

        Args:
            model: the network with the weights that the client started from.
            update: what the client sent.
            layer: the layer.
            loss: the loss of the client; None if it is unknown. A network with one output needs no loss.

        Raises:
            OptionError: if the model cannot be traced, or nothing that follows the layer can be computed from it alone.
        """
        parent = _transformer_layer(model, layer.name)
        try:
            rest = Rest(model, layer.name) if parent is None else _feed_forward(parent)
        except Exception as error:  # the model is user code and may raise anything when it is copied or traced
            raise OptionError(f"what follows layer {layer.name} cannot be computed: {error}") from error
        if not rest.layers and not rest.outputs:
            raise OptionError(f"the equations end after layer {layer.name}: {rest.reason}")
        prefix = "" if parent is None else layer.name.removesuffix("linear1")
        tensors = {}
        for name in rest.layers:
            weight, bias = f"{prefix}{name}.weight", f"{prefix}{name}.bias"
            if weight in update.gradients and (bias in update.gradients or bias not in update.weights):
                tensors[name] = update.layer(weight, bias if bias in update.weights else None)
        outputs = 0 if parent is not None else rest.outputs
        if outputs == 1:
            loss = Loss.ONE_OUTPUT
        return cls(rest, tensors, loss if outputs else None, outputs if loss is not None else 0)


def _transformer_layer(model: nn.Module, name: str) -> nn.Module | None:
    """Return the transformer layer of PyTorch whose first feed-forward layer has this name, or None."""
    for outer, module in model.named_modules():
        is_transformer = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        if is_transformer and plain(f"{outer}." if outer else "") + "linear1" == name:
            return module
    return None


def _feed_forward(parent: nn.Module) -> Rest:
    """Return the feed-forward part of a transformer layer, up to its second Linear layer. Dropout must be off."""
    dropout = getattr(parent, "dropout", None)
    if isinstance(dropout, nn.Dropout) and dropout.p > 0:
        raise OptionError("the mask of Dropout is unknown")
    return Rest(_FeedForward(parent), "linear1")


class _FeedForward(nn.Module):
    """linear1, activation and linear2 of a transformer layer, without its skip connection."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.linear1, self.linear2 = parent.get_submodule("linear1"), parent.get_submodule("linear2")
        activation = vars(parent).get("activation") or parent.get_submodule("activation")
        self.activation: Callable[[Tensor], Tensor] = activation

    def forward(self, x: Any) -> Any:
        """Return the output of linear2, which is not an output of the model."""
        return self.linear2(self.activation(self.linear1(x)))
