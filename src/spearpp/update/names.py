"""Parameter names that do not depend on how the model was wrapped."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from spearpp.errors import CHECK_MODEL, DataError, OptionError, ShapeError
from spearpp.types import Tensor
from spearpp.update.lazy import Lazy, Named, TensorSpec, pick, tensor_specs

WRAPPER_PREFIX = re.compile(r"^(?:_module\.|module\.|_orig_mod\.)+")
"""Prefixes that Opacus, DistributedDataParallel and torch.compile add to parameter names."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of the buffers of PyTorch's normalisation layers."""
Tensors = nn.Module | Named | Sequence[Any]
"""A module, a state dict, or a list of tensors or NumPy arrays in parameter order."""


def plain(name: str) -> str:
    """Return a parameter name without the prefixes of wrappers.

    >>> plain("_module.module.fc1.weight")
    'fc1.weight'
    """
    return WRAPPER_PREFIX.sub("", name)


def parameters_of(tensors: Tensors) -> Named:
    """Return the parameters of a module, a state dict or a list, by plain name and in their own order.

    Integer tensors and running statistics are buffers, not parameters, and are left out.

    Raises:
        DataError: if two names are equal without the prefixes of wrappers, or a value is not a usable tensor.
    """
    named: Named = tensors if isinstance(tensors, Lazy) else _dense_tensors(tensors)
    kept = [name for name, spec in tensor_specs(named).items() if not is_buffer(name, spec)]
    found = {plain(name): name for name in kept}
    if len(found) < len(kept):
        raise DataError("two names are the same without the prefixes of wrappers (module., _module.)")
    return pick(named, found)


def _dense_tensors(tensors: Tensors) -> dict[str, Tensor]:
    if isinstance(tensors, nn.Module):
        named: Mapping[str, object] = dict(tensors.named_parameters())
    elif isinstance(tensors, Mapping):
        named = tensors
    elif isinstance(tensors, Sequence) and not isinstance(tensors, str | bytes):
        named = {str(index): tensor for index, tensor in enumerate(tensors)}
    else:
        raise OptionError(f"got a {type(tensors).__name__}: expected a module, a state dict or a list of tensors")
    return {str(name): dense(str(name), tensor) for name, tensor in named.items()}


def dense(name: str, tensor: object) -> Tensor:
    """Convert a tensor or a NumPy array to a dense tensor without gradient. float8 becomes float32.

    Args:
        name: name of the tensor, for error messages.
        tensor: the value to convert.

    Raises:
        DataError: if the value is not a tensor, holds no numbers, or is quantised, complex or nested.
    """
    if isinstance(tensor, numpy.ndarray | numpy.generic):
        try:
            tensor = torch.from_numpy(numpy.array(tensor, dtype=tensor.dtype.newbyteorder("=")))
        except TypeError as error:
            raise DataError(f"{name[:80]!r} is an array whose elements are not numbers: {error}") from error
    if not isinstance(tensor, Tensor):
        raise DataError(f"{name[:80]!r} is a {type(tensor).__name__}, not a tensor")
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) or tensor.is_meta:
        raise DataError(f"{name[:80]!r} is not initialised: run the model once, or load its weights")
    if tensor.is_quantized or tensor.is_complex() or tensor.is_nested:
        raise DataError(f"{name[:80]!r} is quantised, complex or nested: only floating-point tensors are supported")
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.float() if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 else tensor


def is_buffer(name: str, tensor: Tensor | TensorSpec) -> bool:
    """Return whether a tensor is a running statistic or an integer counter."""
    return name.rsplit(".", 1)[-1] in STATISTICS or not tensor.dtype.is_floating_point


def match(parameters: Named, given: Named, what: str) -> Named:
    """Rename tensors to the names of the parameters that they belong to.

    Tensors are matched by name. If all names are numbers, as those of a list are, they are matched by position. If no
    name is in the model, a prefix that all names share is ignored (``common_prefix``). Parameters without a tensor are
    left out.

    Args:
        parameters: the parameters of the model, by name.
        given: the tensors to match.
        what: where the tensors come from, for error messages.

    Raises:
        DataError: if a name is not in the model, or a list has another length.
        ShapeError: if a shape differs from that of the parameter.
    """
    wanted, found = tensor_specs(parameters), tensor_specs(given)
    order = {name: name for name in found}
    if found and all(name.isdecimal() for name in found) and not set(found) <= set(wanted):
        if len(found) != len(wanted):
            raise DataError(f"{what} holds {len(found)} tensors, the model has {len(wanted)} parameters")
        order = dict(zip(wanted, sorted(found, key=int), strict=True))
    elif not set(found) & set(wanted):
        prefix = common_prefix(wanted, found)
        longer = common_prefix(found, wanted)
        order = {f"{longer}{name.removeprefix(prefix)}": name for name in found}
    unknown = [name for name in order if name not in wanted]
    if unknown:
        why = f"{what} has names that are not in the model: {_some(unknown)}; the model has {_some(wanted)}"
        raise DataError(why, hint="both files must come from the same model: first BEFORE, then UPDATE")
    for name, own in order.items():
        if found[own].shape != wanted[name].shape:
            shapes = f"shape {tuple(found[own].shape)}, in the model it has {tuple(wanted[name].shape)}"
            raise ShapeError(f"{what}: {name} has {shapes}", hint=CHECK_MODEL)
    return pick(given, {name: order[name] for name in wanted if name in order})


def common_prefix(names: Iterable[str], longer: Iterable[str]) -> str:
    """Return the prefix by which names differ: ``"model."`` if Lightning stored a network as the attribute ``model``.

    Args:
        names: names without the prefix.
        longer: names with the prefix.

    Returns:
        The prefix, ending in a dot, or "". Either every name of ``longer`` is the prefix and one of ``names``, or it is
        the only prefix with which all ``names`` occur in ``longer``, which may then hold further tensors.

    >>> common_prefix(["0.weight", "0.bias"], ["model.0.weight", "model.0.bias"])
    'model.'
    >>> common_prefix(["0.weight", "0.bias"], ["loss.weight", "model.0.weight", "model.0.bias"])
    'model.'
    """
    short, long = dict.fromkeys(names), dict.fromkeys(longer)
    if not short or not long:
        return ""
    first = next(iter(long))
    for start in (first[: index + 1] for index, letter in enumerate(first) if letter == "."):
        if all(name.startswith(start) and name[len(start) :] in short for name in long):
            return start
    ending = f".{next(iter(short))}"
    starts = [name[: 1 - len(ending)] for name in long if name.endswith(ending)]
    complete = [start for start in starts if all(f"{start}{name}" in long for name in short)]
    return complete[0] if len(complete) == 1 else ""


def _some(names: Iterable[str]) -> str:
    """Return the first three names as text, and the number of the others."""
    quoted = [repr(name[:80]) for name in names]
    return ", ".join(quoted[:3]) + (f" and {len(quoted) - 3} more" if len(quoted) > 3 else "")
