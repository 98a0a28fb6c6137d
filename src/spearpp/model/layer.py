"""Description of one Linear layer of a model."""

from dataclasses import dataclass, replace
from enum import StrEnum

from torch import nn

from spearpp.update.names import plain

MIN_OUTPUTS = 3
"""Smallest number of outputs of an output layer that can be inverted. Derived: with two outputs every signal is a
multiple of (1, -1), so the gradient has rank one for any batch."""


class Sees(StrEnum):
    """What the inputs of a layer are. Every member equals its plain string.

    >>> Sees.INPUTS == "inputs"
    True
    """

    INPUTS = "inputs"
    """The input of the model."""
    ONE_INPUT = "one input of several"
    """One input of a model that has several inputs."""
    INPUTS_FROM_FEATURES = "inputs from features"
    """The input of the model, computed from the features that the layer sees."""
    FEATURES = "features"
    """Features that earlier layers computed."""


@dataclass(frozen=True)
class Layer:
    """A Linear layer of the model, and whether the audit can invert it."""

    name: str
    """Name of the module. Without a model, the name of the weight without ``.weight``."""
    weight: str
    """Name of the weight parameter."""
    bias: str | None
    """Name of the bias parameter, or None if the layer has no bias."""
    neurons: int
    features: int
    """Number of inputs of the layer."""
    qualifies: bool
    """Whether the structure of the model allows an inversion: a ReLU follows the layer, or the equations of the network
    can be solved; and the update holds a gradient for it. The audit may leave out such a layer, for example because it
    needs too much memory (``LayerAudit.feasible``)."""
    reason: str
    """Why the layer qualifies, or why it does not. A colon separates what the output goes to from the rest."""
    sees: Sees | str = Sees.FEATURES
    """What the inputs of the layer are. A plain string, as stored reports hold it, is converted to ``Sees``."""
    next: str | None = None
    """Name of the weight of the next Linear layer, if its only input is this layer's ReLU output, else None."""
    assumed: bool = False
    """Whether the activation after the layer was assumed, not found in the model. A certificate proves it."""
    equations: bool = False
    """Whether the layer is inverted by the equations of the network, because no ReLU follows it."""
    output: bool = False
    """Whether the layer is the output layer, found or assumed. The equations of cross-entropy alone invert it if there
    are fewer than half as many samples as outputs."""
    tokens: bool = False
    """Whether every token counts as a sample, because the layer acts on each token of a sequence."""
    dropout: bool = False
    """Whether Dropout follows the ReLU. Active neurons may then have a zero gradient."""

    @property
    def destination(self) -> str:
        """What the output of the layer goes to, in words: the part of ``reason`` before the colon."""
        return self.reason.partition(":")[0]

    @property
    def noun(self) -> str:
        """What one input of the layer stands for, in the plural: "tokens" or "samples"."""
        return "tokens" if self.tokens else "samples"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sees", Sees(self.sees))


def as_output(layer: Layer) -> Layer:
    """Return an output layer, qualified if it has enough outputs: softmax(z) - e_y has two dimensions or more."""
    if layer.neurons < MIN_OUTPUTS:
        return layer
    reason = f"{layer.destination}: the equations of cross-entropy are solved"
    return replace(layer, qualifies=True, equations=True, output=True, reason=reason)


def layer_of(
    model: nn.Module, name: str, *, qualifies: bool, reason: str, assumed: bool = False, bias: str | None = None
) -> Layer:
    """Describe a Linear layer.

    Args:
        model: the network.
        name: name of a Linear module, or name of a weight parameter that the model passes to ``functional.linear``.
        qualifies: value of ``Layer.qualifies``.
        reason: value of ``Layer.reason``.
        assumed: value of ``Layer.assumed``.
        bias: name of the bias parameter. It is used only if ``name`` is the name of a weight.
    """
    module = dict(model.named_modules()).get(name)
    if not isinstance(module, nn.Linear):
        neurons, features = model.get_parameter(name).shape
        stem, weight = plain(name).removesuffix(".weight"), plain(name)
        return Layer(stem, weight, None if bias is None else plain(bias), neurons, features, qualifies, reason)
    prefix = plain(f"{name}." if name else "")
    return Layer(
        name=plain(name) or "(the model itself)",
        weight=f"{prefix}weight",
        bias=None if module.bias is None else f"{prefix}bias",
        neurons=module.out_features,
        features=module.in_features,
        qualifies=qualifies,
        reason=reason,
        assumed=assumed,
    )
