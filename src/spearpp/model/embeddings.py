"""Find the embedding tables of a model, and check that nothing but the lookup of rows uses them.

The gradient of a table is zero in every row that was not looked up. This holds only if the table is used for lookups
and for nothing else. A table that is also the output layer (tied weights) gets a gradient in every row, because the
softmax depends on every row.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional

from spearpp.model import unwrapped
from spearpp.model.operations import Tracer
from spearpp.types import Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import nonzero, tensor_specs
from spearpp.update.names import plain

LOOKUPS = (functional.embedding, functional.embedding_bag, torch.embedding)
"""Functions that look up rows of a table."""
PROBE_SHAPE = (2, 6)
"""Number of sequences and of tokens of the batch that is looked up in a model that cannot be traced. A design choice:
most models accept a small batch of short sequences."""


@dataclass(frozen=True)
class Table:
    """An embedding table of a model."""

    name: str
    """Name of the module."""
    weight: str
    """Name of the parameter."""
    rows: int
    """Number of tokens, categories or items."""
    padding: int | None
    """The row that ``padding_idx`` names. It gets no gradient."""
    why_not: str | None = None
    """Why the rows that moved are not the rows that were looked up. None if they are."""
    renormalised: bool = False
    """Whether every lookup shortens rows to ``max_norm``, which moves them in parallel to their weights."""


def find_tables(model: nn.Module | None, update: ClientUpdate) -> list[Table]:
    """Return every embedding table of a model, in the order of the model.

    Tables are found as ``nn.Embedding`` and ``nn.EmbeddingBag`` modules. Without a model the list is empty, because a
    checkpoint does not say whether a matrix is a table, nor whether it is also the output layer.

    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(24, 2))
    >>> update = ClientUpdate.from_gradients(model, [torch.ones_like(each) for each in model.parameters()])
    >>> [(table.name, table.rows, table.why_not) for table in find_tables(model, update)]
    [('0', 50, None)]
    """
    if model is None:
        return []
    model = unwrapped(model)
    used: dict[int, str | None] = {}
    tables = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        label, key = plain(name) or "(the model itself)", plain(f"{name}.weight" if name else "weight")
        if weight is None:
            why = "its weight is computed from other parameters"
            tables.append(Table(label, key, module.num_embeddings, module.padding_idx, why))
        elif id(weight) not in used:  # a table that two modules share is listed once
            used[id(weight)] = label
            why_not = _without_gradient(key, update) or _other_use(model, module, weight)
            shortens = module.max_norm is not None
            tables.append(Table(label, key, module.num_embeddings, module.padding_idx, why_not, shortens))
    return tables


def _without_gradient(key: str, update: ClientUpdate) -> str | None:
    """Return why the update says nothing about a table, or None."""
    if key not in update.weights:
        return "it is not in the update"
    if key not in update.gradients or not nonzero(update.gradients, key):
        return "it did not change: the table is frozen or was left out"
    return None if tensor_specs(update.gradients)[key].ndim == 2 else "its gradient is not a matrix"


def _other_use(model: nn.Module, table: nn.Module, weight: nn.Parameter) -> str | None:
    """Return what else uses the weight of a table, or None if rows are only looked up."""
    tied = "it is tied to {}, so every row gets a gradient and moved rows are not the rows that were looked up"
    for name, module in model.named_modules():
        shares = any(each is weight for each in module.parameters(recurse=False))
        if shares and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return tied.format(plain(name) or "another module")
    try:
        graph = Tracer().trace(model)
    except Exception:  # forward is user code and may raise anything when it runs on symbols
        return _probe(model, table)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for node in graph.nodes:
        if node.op == "get_attr" and parameters.get(str(node.target)) is weight:
            other = next((user for user in node.users if not _looks_up(user, node)), None)
            if other is not None:
                return tied.format(f"the operation {other.name}")
    return None


def _looks_up(user: fx.Node, weight: fx.Node) -> bool:
    """Return whether an operation looks up rows of a weight."""
    return user.op == "call_function" and user.target in LOOKUPS and user.args[:1] != (weight,)


def _probe(model: nn.Module, table: nn.Module) -> str | None:
    """Run a model that cannot be traced on a few tokens, and check that other rows of the table get no gradient."""
    unknown = (
        "the model can neither be traced nor run on a batch of tokens, so the audit cannot exclude that the table is "
        "tied to the output layer"
    )
    try:
        local = copy.deepcopy(model).eval()
        name = next(name for name, module in model.named_modules() if module is table)
        here = local.get_submodule(name)
        weight = dict(here.named_parameters(recurse=False))["weight"].requires_grad_(True)
        seen: list[Tensor] = []
        handle = here.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].reshape(-1)))
        sizes = [each.num_embeddings for each in local.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
        tokens = torch.arange(torch.Size(PROBE_SHAPE).numel(), device=weight.device).reshape(PROBE_SHAPE) % min(sizes)
        outputs = local(tokens)
        handle.remove()
        total = torch.stack([each.double().square().sum() for each in _floats(outputs) if each.requires_grad]).sum()
        moved = torch.autograd.grad(total, weight)[0].to_dense().any(1)
        looked_up = torch.zeros_like(moved).index_fill(0, torch.cat(seen), True)
    except Exception:  # forward is user code and may raise anything
        return unknown
    if not bool((moved & looked_up).any()) or bool(looked_up.all()):
        return unknown
    if bool((moved & ~looked_up).any()):
        return "rows that are not looked up get a gradient too, for example because the output layer is tied to it"
    return None


def _floats(outputs: object) -> Iterator[Tensor]:
    """Yield the floating-point tensors in the output of a model."""
    if isinstance(outputs, Tensor):
        if outputs.dtype.is_floating_point:
            yield outputs
    elif isinstance(outputs, dict):
        for each in outputs.values():
            yield from _floats(each)
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from _floats(each)
