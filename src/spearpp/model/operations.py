"""Trace a model into the graph of its operations, and evaluate what they do to the output of a Linear layer."""

import copy
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from spearpp.types import Tensor
from spearpp.update.names import plain

SHAPE_METHODS = {"size", "dim", "numel"}
"""Tensor methods that use the shape of a tensor and not its values."""
RESHAPING = {
    *("flatten", "view", "reshape", "contiguous", "unsqueeze", "squeeze", "float", "double", "to", "detach", "clone")
}
"""Methods and functions that keep the values of a tensor."""
RESHAPING_MODULES = (nn.Flatten, nn.Identity, nn.Unflatten)
DROPOUT = (nn.Dropout, nn.AlphaDropout)
PROBED_VALUES = (1e-3, 0.1, 0.5, 1.0, 3.0, 40.0, 1000.0)
"""Absolute values at which an activation is evaluated, with both signs. A design choice: the values cover the range of
pre-activations in a network, with points below and above the values 1 and 6 at which Hardtanh and ReLU6 saturate."""
MAX_SMALL_VALUE = 1.0
"""Largest absolute value at which an activation must equal ReLU to count as "ReLU for small values". A design choice:
pre-activations of a freshly initialised network are about this large. Hardtanh(0, 1) equals ReLU up to 1 and ReLU6 up
to 6, so both are tried. A certificate decides whether the assumption holds."""


class Behaviour(Enum):
    """What a function does to pre-activations."""

    RELU = "ReLU"
    NEARLY_RELU = "ReLU for small values"
    OTHER = "other"


def is_batch_norm(module: object) -> bool:
    """Return whether a module is BatchNorm, which mixes the samples of a batch in training mode."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_linear(module: object) -> bool:
    """Return whether a module is a Linear layer that inherits ``nn.Linear.forward``.

    A subclass that overrides ``forward`` may compute anything, so it does not count.

    >>> is_linear(nn.Linear(2, 3))
    True
    """
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


class Tracer(fx.Tracer):
    """Traces into all modules except PyTorch's own. It also traces into Linear layers that override ``forward``."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a call of the module is one node of the graph."""
        del module_qualified_name
        return is_linear(m) or (m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential))


def readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that use the values of a node, and not only its shape or another attribute."""
    return [
        user
        for user in node.users
        if not (user.op == "call_method" and user.target in SHAPE_METHODS)
        and not (user.op == "call_function" and user.target is getattr)
    ]


def module_of(model: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls, or None if it calls a function or a method."""
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_reshape(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a node keeps all values and may change only shape, dtype or device."""
    if node.op == "call_module":
        return isinstance(module_of(model, node), RESHAPING_MODULES)
    return node.op in ("call_method", "call_function") and label(model, node) in RESHAPING


def is_dropout(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a node sets random values to zero during training."""
    module = module_of(model, node)
    if module is not None:
        return isinstance(module, DROPOUT) and module.p > 0
    return node.op == "call_function" and node.target is functional.dropout


def label(model: nn.Module, node: fx.Node) -> str:
    """Return a readable name of an operation."""
    if node.op == "output":
        return "the model's output"
    if node.op == "call_module":
        return type(module_of(model, node)).__name__
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def calls_of(graph: fx.Graph, name: str) -> list[fx.Node]:
    """Return the nodes that call the module with this plain name."""
    return [node for node in graph.nodes if node.op == "call_module" and plain(str(node.target)) == name]


def activations(model: nn.Module, linear: fx.Node, width: int) -> list[tuple[fx.Node, Behaviour]]:
    """Return every node that the whole output of a Linear layer passes through, and what it makes of this output.

    The function evaluates operations that depend only on this output. It therefore recognises ``z * (z > 0)`` and
    ``(z + |z|) / 2`` as ReLU by their values. It stops at a node that also depends on other values.

    Args:
        model: the network that was traced.
        linear: the node of the Linear layer.
        width: number of neurons of the Linear layer.
    """
    for probe in _probes(width):
        found = list(_evaluated(model, linear, probe))
        if found:
            return found
    return []


def behaviour(function: Callable[[Tensor], Tensor]) -> Behaviour:
    """Classify a function by its values at ``PROBED_VALUES``.

    >>> behaviour(lambda z: z * (z > 0)).value
    'ReLU'
    >>> behaviour(functional.relu6).value
    'ReLU for small values'
    """
    probe = next(_probes(4))
    try:
        return _classify(probe, function(probe.clone()))
    except Exception:  # the function is user code and may raise anything
        return Behaviour.OTHER


def _evaluated(model: nn.Module, linear: fx.Node, probe: Tensor) -> Iterator[tuple[fx.Node, Behaviour]]:
    """Evaluate the nodes after a Linear layer in order, with the probe as the layer's output.

    ``pending`` holds the nodes that use a computed value and are not computed yet. A node takes the whole output of
    the layer if no other node is pending when it is computed.
    """
    values: dict[str, Any] = {linear.name: probe}
    pending = set(readers(linear))
    node = linear.next
    while node.op != "root" and pending:
        inputs = [each for each in node.all_input_nodes if each.op != "get_attr"]
        if any(each.name in values for each in inputs):
            is_end = node.op == "output" or is_linear(module_of(model, node))
            if is_end or any(each.name not in values for each in inputs):
                return
            try:
                value = values[node.name] = _evaluate(model, node, values)
            except Exception:  # the operation is user code and may not accept the probe
                return
            pending.discard(node)
            if not pending and isinstance(value, Tensor) and value.is_floating_point():
                yield node, _classify(probe, value)
            pending |= {each for each in readers(node) if each.name not in values}
        node = node.next


def _evaluate(model: nn.Module, node: fx.Node, values: Mapping[str, Any]) -> Any:
    """Return the value of one node in evaluation mode."""
    args, kwargs = arguments(model, node, values)
    module = module_of(model, node)
    with torch.no_grad():
        return evaluate(model, node, args, kwargs) if module is None else frozen(module, torch.float32)(*args, **kwargs)


def _probes(width: int) -> Iterator[Tensor]:
    """Yield pre-activations with both signs of every probe: first as a batch of samples, then as one sequence.

    The shapes are (2 · probes, width) and (1, 2 · probes, width).
    """
    values = torch.tensor([sign * size for size in PROBED_VALUES for sign in (1.0, -1.0)])
    rows = values[:, None].expand(-1, width).contiguous()
    yield rows
    yield rows[None]


def _classify(probe: Tensor, value: Tensor) -> Behaviour:
    """Compare the values of a function with those of ReLU, up to a positive factor."""
    if value.numel() != probe.numel():
        return Behaviour.OTHER
    value, probe = value.detach().flatten().double(), probe.flatten().double()
    scale = float(value[0] / probe[0])
    if not scale > 0:
        return Behaviour.OTHER

    def close(found: Tensor, expected: Tensor) -> bool:
        return torch.allclose(found, expected, rtol=1e-5, atol=1e-7)  # about 100 times the rounding of float32

    relu, small = scale * probe.clamp_min(0), probe.abs() <= MAX_SMALL_VALUE
    if close(value, relu):
        return Behaviour.RELU
    nearly = close(value[small], relu[small]) and close(value[probe < 0], relu[probe < 0])
    return Behaviour.NEARLY_RELU if nearly else Behaviour.OTHER


def arguments(model: nn.Module, node: fx.Node, values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the positional and the keyword arguments of a node, given the values of earlier nodes by name.

    The first argument of an operation in place is copied, so that the operation does not change an earlier value.
    """

    def value_of(each: fx.Node) -> Any:
        return values[each.name] if each.name in values else attrgetter(str(each.target))(model)

    args: Any = fx.map_arg(node.args, value_of)
    kwargs: Any = fx.map_arg(node.kwargs, value_of)
    if args and _is_in_place(node):
        args = (args[0].clone(), *args[1:])
    return args, kwargs


def evaluate(model: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return the value of one operation of a traced model. Dropout returns its input."""
    module = module_of(model, node)
    if module is not None:
        return module(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = node.target
    return args[0] if function is functional.dropout else function(*args, **kwargs)


def _is_in_place(node: fx.Node) -> bool:
    """Return whether an operation writes its result into its first argument, as ``relu_`` and ``+=`` do."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    augmented = getattr(node.target, "__module__", "") == "_operator" and name in ("iadd", "isub", "imul", "itruediv")
    return bool(node.kwargs.get("inplace")) or augmented or (name.endswith("_") and not name.endswith("__"))


def frozen(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the model on the CPU, in evaluation mode, without gradients and without operations in place."""
    model = copy.deepcopy(model).to("cpu", dtype).eval().requires_grad_(False)
    for module in model.modules():
        if "inplace" in vars(module):
            vars(module)["inplace"] = False
    return model
