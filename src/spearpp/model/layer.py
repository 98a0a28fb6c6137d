"""What is known of one Linear layer."""

from dataclasses import dataclass

from torch import nn

from spearpp.update.names import plain


@dataclass(frozen=True)
class Layer:
    """A Linear layer of the model and what the audit can do with it."""

    name: str
    """The module's name; of a checkpoint, the weight's without ``.weight``."""
    weight: str
    bias: str | None
    neurons: int
    features: int
    qualifies: bool
    reason: str
    """Why it qualifies, or why not, in words."""
    sees: str = "features"
    """What its inputs are: "inputs" of the model itself, "one input of several", or "features" that earlier layers
    computed."""
    next: str | None = None
    """The weight of the Linear layer that takes its ReLU and nothing else."""
    assumed: bool = False
    """The ReLU was not seen, only guessed; a certificate proves it."""
    dropout: bool = False
    """Dropout follows the ReLU, so that firing neurons may have no gradient."""


def layer_of(
    model: nn.Module, name: str, *, qualifies: bool, reason: str, assumed: bool = False, bias: str | None = None
) -> Layer:
    """A Linear module by its name, or a weight that ``functional.linear`` is called with."""
    module = dict(model.named_modules()).get(name)
    if not isinstance(module, nn.Linear):
        neurons, features = model.get_parameter(name).shape
        own, weight = plain(name).removesuffix(".weight"), plain(name)
        return Layer(own, weight, None if bias is None else plain(bias), neurons, features, qualifies, reason)
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
