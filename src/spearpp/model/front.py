"""The front end of a network: what the operations before one Linear layer compute from the input of the model.

A layer after convolutions sees features f = ψ(x). ``torch.fx`` records the operations of ψ, so that ψ can be run, and
differentiated, without the rest of the model. ψ must compute every sample on its own and without randomness, in
training mode too: otherwise f is not a function of one picture, and no picture follows from it. ψ must also consist of
known operations. Others, such as the absolute value, can give distant pictures the same features.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from spearpp.errors import OptionError
from spearpp.model.known import first_exchangeable, first_unknown
from spearpp.model.operations import (
    Tracer,
    arguments,
    calls_of,
    evaluate,
    is_batch_norm,
    is_dropout,
    label,
    module_of,
)
from spearpp.model.rest import PROBE_SAMPLES, TOLERANCE, TracedPart, device_of
from spearpp.model.smoothing import max_pooling_of, smoothed, smoothed_max_pool
from spearpp.types import Float, Tensor

COMMON_SIDES = (28, 32, 64, 96, 128, 224)
"""Side lengths that are tried before others if the shape of the input is not given: MNIST, CIFAR, Tiny ImageNet, STL,
and the usual sizes of photographs. For a wrong shape ψ(x) = f has no solution, unless ψ ignores the border that the
guess leaves out."""
MAX_SIDE = 256
"""Largest side length that is tried. Design choice."""
UNKNOWN_SHAPE = "the shape of the model's input is unknown; pass it (input_shape=, --shape)"
"""Reason why nothing follows from features if the shape is not given and cannot be guessed."""
TRAINING_RUNS = 6
"""How often the model runs in training mode to find out whether the front end is random. Design choice: an augmentation
that is applied with probability 1/2 is missed with a probability of 1/64, and the equations then have no solution for
the pictures that were augmented."""


class FrontEnd(TracedPart):
    """ψ: the operations of a model between its input and the input of one Linear layer, in evaluation mode.

    Args:
        model: the network with the weights that the client started from.
        name: plain name of the Linear module.
        shape: shape of one input of the model; None to guess it from the first layer and the number of features.

    Attributes:
        shape: shape of one input of the model.
        unknowns: number of values of one input.
        features: number of values of ψ(x).
        guessed: whether the shape is a guess from the number of features.
        batch_norm: whether ψ contains BatchNorm, which mixes samples if the client trained in training mode.

    Raises:
        OptionError: if ψ cannot be computed for each sample on its own; the message says why.

    >>> net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5))
    >>> front = FrontEnd(net, "4")
    >>> front.shape, front.unknowns, front.features
    ((1, 8, 8), 64, 72)
    >>> front(torch.zeros(2, 64, dtype=torch.float64)).shape
    torch.Size([2, 72])
    """

    def __init__(self, model: nn.Module, name: str, shape: tuple[int, ...] | None = None) -> None:
        try:
            graph = Tracer().trace(model)
        except Exception as error:  # forward is user code and may raise anything when it runs on symbols
            raise OptionError("the operations before the layer cannot be traced") from error
        super().__init__(model)
        self._models["meta"] = copy.deepcopy(self._models[torch.float64]).to("meta")
        self._nodes, layer = _nodes_before(model, graph, name)
        self._end = layer.all_input_nodes[0].name
        self._start = next(node.name for node in graph.nodes if node.op == "placeholder")
        self.features = int(getattr(module_of(model, layer), "in_features", 0))
        self.batch_norm = any(is_batch_norm(module_of(model, node)) for node in self._nodes)
        self.shape = self._guess_shape(model) if shape is None else tuple(shape)
        self.guessed = shape is None and len(self.shape) > 1
        self.unknowns = int(torch.Size(self.shape).numel())
        self._check(model, str(layer.target))

    def __call__(self, inputs: Float[Tensor, "k n"], widths: Mapping[str, float] | None = None) -> Float[Tensor, "k m"]:
        """Return ψ of every input.

        Args:
            inputs: one flat input per row.
            widths: by name of a node, the width of the smoothed activation or the temperature of the smoothed
                max-pooling; None for the exact operations.
        """
        return self._run(inputs.reshape(-1, *self.shape), widths)[self._end]

    def scales(self, inputs: Float[Tensor, "k n"]) -> dict[str, float]:
        """Return the standard deviation of the argument of every activation and max-pooling, by name of its node."""
        values = self._run(inputs.reshape(-1, *self.shape), None)
        nodes = [node for node in self._nodes if self._activation(node) is not None or self._pooling(node) is not None]
        return {node.name: float(values[node.all_input_nodes[0].name].std()) for node in nodes}

    def numbers_each(self, inputs: Float[Tensor, "k n"]) -> int:
        """Return how many numbers all operations compute for one input."""
        values = self._run(inputs[:1].reshape(-1, *self.shape), None)
        return sum(each.numel() for each in values.values() if isinstance(each, Tensor))

    def _run(self, x: Tensor, widths: Mapping[str, float] | None) -> dict[str, Any]:
        model = self._models["meta" if x.is_meta else x.dtype]
        values: dict[str, Any] = {self._start: x}
        for node in self._nodes:
            args, kwargs = arguments(model, node, values)
            if widths is None or node.name not in widths:
                values[node.name] = evaluate(model, node, args, kwargs)
            elif (pooling := self._pooling(node)) is not None:
                values[node.name] = smoothed_max_pool(args[0], pooling, widths[node.name])
            else:
                values[node.name] = smoothed(self._activation(node), args[0], widths[node.name])
        return values

    def _pooling(self, node: fx.Node) -> nn.MaxPool2d | None:
        return max_pooling_of(self._target(node), node.args[1:], node.kwargs)

    def _guess_shape(self, model: nn.Module) -> tuple[int, ...]:
        """Return the shape of the input that the first layer takes and that gives the right number of features."""
        for node in self._nodes:
            module = module_of(model, node)
            if isinstance(module, nn.Linear) and self._fits((module.in_features,)):
                return (module.in_features,)
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                dimensions = len(module.kernel_size)
                sides = (*COMMON_SIDES, *(each for each in range(1, MAX_SIDE + 1) if each not in COMMON_SIDES))
                shapes = ((module.in_channels, *(side,) * dimensions) for side in sides)
                found = next((shape for shape in shapes if self._fits(shape)), None)
                if found is not None:
                    return found
                break
        raise OptionError(UNKNOWN_SHAPE)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether an input of this shape gives the right number of features, without computing them."""
        try:
            values = self._run(torch.empty(1, *shape, dtype=torch.float64, device="meta"), None)
            return tuple(values[self._end].shape) == (1, self.features)
        except Exception:  # the operations are user code and may raise anything for a wrong shape
            return False

    def _check(self, model: nn.Module, name: str) -> None:
        """Raise an error unless ψ computes each sample alone, and as the model does in training mode."""
        generator = torch.Generator().manual_seed(0)
        probe = torch.rand(PROBE_SAMPLES, self.unknowns, generator=generator, dtype=torch.float64)
        probe = probe.to(device_of(self._models[torch.float64]))
        try:
            together = self(probe)
            alone = torch.cat([self(each) for each in probe.split(1)])
            seen = _seen_by_layer(model, name, probe.reshape(-1, *self.shape))
        except Exception as error:  # the operations are user code and may raise anything
            shape = "x".join(map(str, self.shape))
            raise OptionError(f"the model does not accept inputs of shape {shape} before the layer: {error}") from error
        if together.shape != (PROBE_SAMPLES, self.features):
            shape = "x".join(map(str, self.shape))
            raise OptionError(f"an input of shape {shape} does not give one row of {self.features} features")
        if not torch.allclose(together, alone, TOLERANCE, TOLERANCE):
            raise OptionError("the operations before the layer mix the samples of a batch")
        if not all(
            each.shape == together.shape and torch.allclose(each, together, TOLERANCE, TOLERANCE) for each in seen
        ):
            raise OptionError("the operations before the layer are random, or differ between training and evaluation")


def _nodes_before(model: nn.Module, graph: fx.Graph, name: str) -> tuple[list[fx.Node], fx.Node]:
    """Return the nodes that the input of a Linear layer is computed from, in order, and the node of the layer."""
    calls = calls_of(graph, name)
    if not calls:
        raise OptionError("the layer is part of a module that cannot be traced")
    if len(calls) > 1 or not calls[0].all_input_nodes:
        raise OptionError(f"the layer is called {len(calls)} times")
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        raise OptionError("the model has several inputs")
    needed, stack = set(), [calls[0].all_input_nodes[0]]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    if not any(node.op == "placeholder" for node in needed):
        raise OptionError("the layer does not depend on the input of the model")
    nodes = [node for node in graph.nodes if node in needed and node.op not in ("placeholder", "get_attr")]
    if any(isinstance(module_of(model, node), nn.Embedding | nn.EmbeddingBag) for node in nodes):
        raise OptionError("the operations before the layer look up an embedding, so the inputs are tokens")
    unknown = first_unknown(model, nodes)
    if unknown is not None:
        why = "so different inputs may have the same features"
        raise OptionError(f"the audit does not know the operation {label(model, unknown)} before the layer, {why}")
    twice = first_exchangeable(model, nodes)
    if twice is not None:
        why = "combines values that the same weights computed, so different inputs may have the same features"
        raise OptionError(f"the operation {label(model, twice)} before the layer {why}")
    random = next((node for node in nodes if is_dropout(model, node)), None)
    if random is not None:
        raise OptionError(f"{label(model, random)} comes before the layer, and its mask is unknown")
    return nodes, calls[0]


def _seen_by_layer(model: nn.Module, name: str, inputs: Tensor) -> list[Tensor]:
    """Run a copy of the model in training mode, with BatchNorm in evaluation mode, and return what the layer sees."""
    model = copy.deepcopy(model).to(inputs).train().requires_grad_(False)
    for module in model.modules():
        if is_batch_norm(module):
            module.eval()
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    devices = [inputs.device] if inputs.is_cuda else []
    try:
        with torch.random.fork_rng(devices):
            for _ in range(TRAINING_RUNS):
                model(inputs)
    finally:
        handle.remove()
    return seen
