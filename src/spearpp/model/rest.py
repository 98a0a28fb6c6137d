"""The rest of a network: what the operations after one Linear layer compute from its pre-activations.

``torch.fx`` records the operations of a model. Everything that depends only on the output of one Linear layer can be
computed sample by sample: activations, LayerNorm, BatchNorm in evaluation mode, residual branches, products of two
branches, and all later Linear layers. The equations of the network (``spearpp.inversion.network``) need the inputs of
these layers, and the derivatives of the loss at their outputs.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.func import grad, jvp, vmap

from spearpp.model.operations import (
    Tracer,
    arguments,
    calls_of,
    evaluate,
    frozen,
    is_dropout,
    is_linear,
    label,
    module_of,
)
from spearpp.model.smoothing import activation_of, smoothed
from spearpp.types import Float, Tensor
from spearpp.update.names import plain

PROBE_SAMPLES = 3
"""Number of random samples that test whether each sample is computed on its own. Design choice: two would
show it, and a third costs nothing."""
TOLERANCE = 1e-9
"""Largest difference, relative and absolute, between two float64 results that count as equal. Design choice: 1e7 times
the rounding error."""


class TracedPart:
    """Some operations of a traced model, in evaluation mode. ``Rest`` and ``FrontEnd`` are such parts."""

    _nodes: list[fx.Node]

    def __init__(self, model: nn.Module) -> None:
        self._models: dict[Any, nn.Module] = {torch.float64: frozen(model, torch.float64)}

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copy the weights to a device and dtype. Calls with such tensors need this first."""
        if dtype not in self._models or device_of(self._models[dtype]) != device:
            self._models[dtype] = copy.deepcopy(self._models[torch.float64]).to(device, dtype)

    def _target(self, node: fx.Node, dtype: torch.dtype = torch.float64) -> Any:
        """Return the module, the function or the name of the method that a node calls."""
        module = module_of(self._models[dtype], node)
        return node.target if module is None else module

    def _activation(self, node: fx.Node, dtype: torch.dtype = torch.float64) -> Any:
        """Return the activation that a node applies to every entry on its own, or None."""
        return activation_of(self._target(node, dtype))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model, which is the CPU if it has no parameters."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


class Steps(NamedTuple):
    """What the activations and Linear layers of a chain see."""

    activations: list[tuple[Tensor, Callable[[Tensor], Tensor]]]
    """Argument and function of each activation."""
    inputs: list[Tensor]
    """Input of each Linear layer."""
    weights: list[Tensor]
    """Weight of each Linear layer."""
    outputs: Tensor
    """Output of the last Linear layer."""


class Rest(TracedPart):
    """The operations of a model after one Linear layer, in evaluation mode.

    Args:
        model: the network with the weights that the client started from.
        name: name of the Linear module.

    Attributes:
        layers: names of the later Linear modules whose inputs depend on the layer only, in order of execution.
        outputs: number of outputs of the model if they depend on the layer only, else 0.
        reason: why the operations end before the outputs of the model; an empty string if they reach the outputs.
        is_chain: whether activations and Linear layers alternate, with nothing else, so that ``steps`` can be used.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    >>> rest = Rest(net, "0")
    >>> rest.layers, rest.outputs
    (['3', '5'], 3)
    >>> inputs, outputs = rest(torch.zeros(2, 8, dtype=torch.float64), {})
    >>> [tuple(each.shape) for each in inputs], tuple(outputs.shape)
    ([(2, 8), (2, 6)], (2, 3))
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__(model)
        starts = calls_of(Tracer().trace(model), name)
        if len(starts) != 1:
            raise ValueError(f"layer {name} is used {len(starts)} times")
        self.start = starts[0]
        self._pairs: dict[torch.dtype, list[tuple[str, Callable[[Tensor], Tensor], Any]]] = {}
        self._nodes, self.reason = nodes_after(model, self.start)
        self.layers = linear_names(model, self._nodes)
        self.outputs = 0
        self._keep_what_runs(int(getattr(model.get_submodule(str(self.start.target)), "out_features", 0)))
        self.is_chain = bool(self.layers) and self._alternates()

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copy the weights to a device and dtype. Calls with such tensors need this first."""
        super().prepare(device, dtype)
        self._pairs.pop(dtype, None)

    def __call__(
        self,
        preactivations: Float[Tensor, "k m"],
        shifts: Mapping[str, Tensor],
        widths: Mapping[str, float] | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Run the rest of the network.

        Args:
            preactivations: the output of the layer for each sample.
            shifts: by name of a later Linear layer, what is added to its output. The derivative of the loss with
                respect to a shift is the signal of this layer.
            widths: by name of an activation's node, the standard deviation of the normal distribution that the
                activation is convolved with; None for the exact activations.

        Returns:
            The inputs of the later ``layers``, and the output of the model, which is empty if ``outputs`` is 0.
        """
        inputs, values = self._run(preactivations, shifts, widths)
        return [inputs[name] for name in self.layers], values.get("output", preactivations[:, :0])

    def steps(self, preactivations: Float[Tensor, "k m"], widths: Mapping[str, float] | None = None) -> Steps:
        """Run a chain, and return what its activations and Linear layers see."""
        if preactivations.dtype not in self._pairs:
            self._pairs[preactivations.dtype] = self._find_pairs(preactivations.dtype)
        activations, inputs, weights, z = [], [], [], preactivations
        for name, function, linear in self._pairs[preactivations.dtype]:
            if widths is not None and name in widths:
                function = partial(smoothed, function, width=widths[name])
            activations.append((z, function))
            inputs.append(function(z))
            weights.append(linear.weight)
            z = linear(inputs[-1])
        return Steps(activations, inputs, weights, z)

    def _find_pairs(self, dtype: torch.dtype) -> list[tuple[str, Callable[[Tensor], Tensor], Any]]:
        """Return the name of the node of each activation in a chain, the activation, and the Linear layer after it."""
        nodes = [node for node in self._nodes if node.op != "output"]
        pairs = zip(nodes[::2], nodes[1::2], strict=True)
        return [(each.name, self._activation(each, dtype), self._target(linear, dtype)) for each, linear in pairs]

    def weight(self, name: str) -> Float[Tensor, "outputs inputs"]:
        """Return the weight of a later layer in float64."""
        modules = {plain(each): module for each, module in self._models[torch.float64].named_modules()}
        return modules[name].get_parameter("weight")

    def scales(self, preactivations: Float[Tensor, "k m"]) -> dict[str, float]:
        """Return the standard deviation of the argument of every activation, by name of its node."""
        _, values = self._run(preactivations, {}, None)
        nodes = [node for node in self._nodes if self._activation(node) is not None]
        return {node.name: float(values[node.all_input_nodes[0].name].std()) for node in nodes}

    def _run(
        self, z: Tensor, shifts: Mapping[str, Tensor], widths: Mapping[str, float] | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = self._models[z.dtype]
        values: dict[str, Any] = {self.start.name: z}
        inputs: dict[str, Tensor] = {}

        for node in self._nodes:
            args, kwargs = arguments(model, node, values)
            if node.op == "output":
                values["output"] = args[0]
            elif self._is_linear(node):
                target = plain(str(node.target))
                inputs[target] = args[0]
                values[node.name] = model.get_submodule(str(node.target))(args[0]) + shifts.get(target, 0.0)
            elif widths is not None and node.name in widths:
                activation = self._activation(node)
                values[node.name] = smoothed(activation, args[0], widths[node.name])
            else:
                values[node.name] = evaluate(model, node, args, kwargs)
        return inputs, values

    def _keep_what_runs(self, neurons: int) -> None:
        """Drop operations that cannot be run on one row per sample, or that mix samples."""
        whole = list(self._nodes)
        while not self._runs_alone(neurons):
            self._nodes.pop()
        if len(self._nodes) < len(whole):
            model = self._models[torch.float64]
            why = "does not act on each sample alone, or has no second derivative"
            self.reason = f"{label(model, whole[len(self._nodes)])} {why}"
            self.layers = linear_names(model, self._nodes)

    def _runs_alone(self, neurons: int) -> bool:
        """Return whether the nodes give the same values for samples in a batch and for each sample alone.

        Second derivatives must exist. ``torch.func`` must be able to compute them, unless formulas for chains do.
        """
        if not self._nodes:
            return True
        probe = torch.randn(PROBE_SAMPLES, neurons, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        try:
            together, *alone = (self._run(rows, {}, None) for rows in (probe, *probe.split(1)))
            last = "output" if self._nodes[-1].op == "output" else self._nodes[-1].name
            names = linear_names(self._models[torch.float64], self._nodes)
            pairs = [(together[0][name], torch.cat([inputs[name] for inputs, _ in alone])) for name in names]
            pairs.append((together[1][last], torch.cat([values[last] for _, values in alone])))
            self._differentiate(probe, last)
        except Exception:  # the operations are user code and may raise anything
            return False
        self.outputs = pairs[-1][0].shape[1] if last == "output" and pairs[-1][0].ndim == 2 else 0
        return all(a.ndim == 2 and torch.allclose(a, b, TOLERANCE, TOLERANCE) for a, b in pairs)

    def _differentiate(self, probe: Float[Tensor, "k m"], last: str) -> None:
        """Compute a second derivative as the equations of the network need it. Some operations do not allow this."""

        def total(z: Tensor) -> Tensor:
            inputs, values = self._run(z, {}, None)
            return torch.stack([each.sum() for each in (*inputs.values(), values[last])]).sum()

        if self._alternates():
            with torch.enable_grad():
                point = probe.clone().requires_grad_()
                slope = torch.autograd.grad(total(point), point, create_graph=True)[0]
                if slope.requires_grad:
                    torch.autograd.grad(slope.sum(), point, allow_unused=True)
            return
        vmap(lambda direction: jvp(grad(total), (probe,), (direction,))[1])(probe[None])

    def _is_linear(self, node: fx.Node) -> bool:
        return is_linear(self._target(node))

    def _alternates(self) -> bool:
        """Return whether the nodes are an activation, a Linear layer, an activation, and so on, each of one value."""
        nodes = [node for node in self._nodes if node.op != "output"]
        before = [self.start, *nodes]
        return (
            len(nodes) == 2 * len(self.layers)
            and all(self._activation(node) is not None and len(node.args) == 1 for node in nodes[::2])
            and all(self._is_linear(node) for node in nodes[1::2])
            and all(node.all_input_nodes == [each] for node, each in zip(nodes, before[:-1], strict=True))
            and all(set(node.kwargs) <= {"inplace"} for node in nodes)
        )


def nodes_after(model: nn.Module, start: fx.Node) -> tuple[list[fx.Node], str]:
    """Return the nodes that depend on one node and on nothing else that differs between samples, in order.

    The second value says why later nodes are missing; it is empty if all nodes after the start are returned. Nodes
    after Dropout are missing, because the mask of Dropout is unknown.
    """
    known, mixed, found, reason = {start}, set(), [], ""
    for node in start.graph.nodes:
        sources = [each for each in node.all_input_nodes if each.op != "get_attr"]
        if node is start or not any(each in known or each in mixed for each in sources):
            continue
        if not all(each in known for each in sources):
            mixed.add(node)
            if not any(each in mixed for each in sources):
                reason = reason or f"{label(model, node)} combines it with other values of the model"
        elif is_dropout(model, node):
            mixed.add(node)
            reason = reason or "the mask of Dropout is unknown"
        else:
            known.add(node)
            found.append(node)
    return found, reason


def linear_names(model: nn.Module, nodes: list[fx.Node]) -> list[str]:
    """Return the plain names of the Linear modules that are called exactly once among the nodes."""
    used = [str(node.target) for node in nodes if is_linear(module_of(model, node))]
    return [plain(each) for each in used if used.count(each) == 1]
