"""What the operations of a traced model do to the output of a Linear layer, found out by evaluating them."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from spearpp.types import Tensor

SHAPE_ONLY = {"size", "dim", "numel"}
RESHAPING = {
    "flatten",
    "view",
    "reshape",
    "contiguous",
    "unsqueeze",
    "squeeze",
    "float",
    "double",
    "to",
    "detach",
    "clone",
}
RESHAPING_MODULES = (nn.Flatten, nn.Identity, nn.Unflatten)
DROPOUT = (nn.Dropout, nn.AlphaDropout)
DROPOUT_FUNCTIONS = {functional.dropout}
PROBES = (1e-3, 0.1, 0.5, 1.0, 3.0, 40.0, 1000.0)
"""Sizes at which an activation is evaluated, with both signs."""
NEAR = 1.0
"""Up to this size an activation such as ReLU6, which bends later, must be ReLU to be "nearly" one."""


class Behaviour(Enum):
    """What a function does to pre-activations."""

    IDENTITY = "identity"
    RELU = "ReLU"
    NEARLY_RELU = "ReLU for small values"
    OTHER = "other"


@dataclass(frozen=True)
class Activation:
    """The ReLU that takes the output of a Linear layer."""

    node: fx.Node
    """The node whose value is the activation."""
    behaviour: Behaviour


def is_linear(module: object) -> bool:
    """Whether calling a module is ``nn.Linear.forward`` and nothing else.

    A subclass may compute anything. It counts only if it inherits the method.

    >>> is_linear(nn.Linear(2, 3))
    True
    """
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that use the values of a node, not only its shape."""
    return [
        user
        for user in node.users
        if not (user.op == "call_method" and user.target in SHAPE_ONLY)
        and not (user.op == "call_function" and user.target is getattr)
    ]


def is_reshape(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node passes values on as they are."""
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), RESHAPING_MODULES)
    return node.op in ("call_method", "call_function") and label(model, node) in RESHAPING


def is_dropout(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node sets a random part of the values to zero during training."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return isinstance(module, DROPOUT) and module.p > 0
    return node.op == "call_function" and node.target in DROPOUT_FUNCTIONS


def label(model: nn.Module, node: fx.Node) -> str:
    """The name of an operation, for people."""
    if node.op == "output":
        return "the model's output"
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))).__name__
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def activations(model: nn.Module, linear: fx.Node, width: int) -> Iterator[Activation]:
    """Every node through which all of a Linear layer's output passes, with what the way to it does to the values.

    Only operations that depend on this output alone are followed, so ``z * (z > 0)`` and ``(z + |z|) / 2`` are
    recognised by their values. Nothing is yielded behind a node that other values take part in.

    Args:
        model: the network that was traced.
        linear: the node of the Linear layer.
        width: its number of neurons.
    """
    for probe in _probes(width):
        values: dict[fx.Node, Any] = {linear: probe}
        found = list(_exits(model, linear, probe, values))
        if found:
            yield from found
            return


def behaviour(function: Callable[[Tensor], Tensor]) -> Behaviour:
    """What a function does to numbers, judged by its values.

    >>> behaviour(lambda z: z * (z > 0)).value
    'ReLU'
    >>> behaviour(functional.relu6).value
    'ReLU for small values'
    """
    probe = next(_probes(4))
    try:
        return _behaviour(probe, function(probe.clone()))
    except Exception:  # the function is the user's code
        return Behaviour.OTHER


def _exits(model: nn.Module, linear: fx.Node, probe: Tensor, values: dict[fx.Node, Any]) -> Iterator[Activation]:
    open_ends = set(readers(linear))
    node = linear.next
    while node.op != "root" and open_ends:
        inputs = [each for each in node.all_input_nodes if each.op != "get_attr"]
        if any(each in values for each in inputs):
            ends = node.op == "output" or (
                node.op == "call_module" and is_linear(model.get_submodule(str(node.target)))
            )
            if ends or any(each not in values for each in inputs):
                return
            try:
                values[node] = _evaluate(model, node, values)
            except Exception:  # an operation of the user's that does not take these probes
                return
            open_ends.discard(node)
            if open_ends <= {node} and node in _carriers(node, values):
                yield Activation(node, _behaviour(probe, values[node]))
            open_ends |= set(readers(node)) - values.keys()
        node = node.next


def _carriers(node: fx.Node, values: dict[fx.Node, Any]) -> set[fx.Node]:
    """The node itself if its value is a tensor of numbers, as an activation is."""
    value = values[node]
    return {node} if isinstance(value, Tensor) and value.is_floating_point() else set()


def _evaluate(model: nn.Module, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    def known(each: fx.Node) -> Any:
        if each in values:
            value = values[each]
            return value.clone() if isinstance(value, Tensor) else value
        found: Any = model
        for part in str(each.target).split("."):
            found = getattr(found, part)
        return found

    args, kwargs = fx.map_arg(node.args, known), fx.map_arg(node.kwargs, known)
    with torch.no_grad():
        if node.op == "call_module":
            return copy.deepcopy(model.get_submodule(str(node.target))).eval()(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.target in DROPOUT_FUNCTIONS:
            return args[0]
        return _call(node.target, *args, **kwargs)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _probes(width: int) -> Iterator[Tensor]:
    """Pre-activations of all sizes and both signs: a row for each, as samples or as tokens of one sequence."""
    sizes = torch.tensor([sign * size for size in PROBES for sign in (1.0, -1.0)])
    rows = sizes[:, None].expand(-1, width).contiguous()
    yield rows
    yield rows[None]


def _behaviour(probe: Tensor, value: Tensor) -> Behaviour:
    if value.numel() != probe.numel():
        return Behaviour.OTHER
    value, probe = value.detach().flatten().double(), probe.flatten().double()
    scale = float(value[0] / probe[0])
    if not scale > 0:
        return Behaviour.OTHER
    relu, small = scale * probe.clamp_min(0), probe.abs() <= NEAR
    if torch.allclose(value, scale * probe, rtol=1e-5, atol=1e-7):
        return Behaviour.IDENTITY
    if torch.allclose(value, relu, rtol=1e-5, atol=1e-7):
        return Behaviour.RELU
    near = torch.allclose(value[small], relu[small], rtol=1e-5, atol=1e-7) and bool(
        (value[probe < 0].abs() <= 1e-7).all()
    )
    return Behaviour.NEARLY_RELU if near else Behaviour.OTHER
