"""One name for each parameter, whoever wrapped the model."""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from spearpp.errors import DataError, OptionError, ShapeError
from spearpp.types import Tensor
from spearpp.update.lazy import Lazy, Named, TensorSpec, pick, tensor_specs

WRAPPED = re.compile(r"^(?:_module\.|module\.|_orig_mod\.)+")
"""What Opacus, DistributedDataParallel and torch.compile put before names."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Tensors = nn.Module | Named | Sequence[Tensor]


def plain(name: str) -> str:
    """The name without the prefixes of wrappers.

    >>> plain("_module.module.fc1.weight")
    'fc1.weight'
    """
    return WRAPPED.sub("", name)


def parameters_of(tensors: Tensors) -> Named:
    """The parameters of a model, a state dict or a list, by plain name; buffers left out.

    A model's own order of parameters is kept; of a state dict, integers and running statistics are no parameters.
    """
    whole: Named = tensors if isinstance(tensors, Lazy) else _dense_ones(tensors)
    kept = [name for name, each in tensor_specs(whole).items() if not is_buffer(name, each)]
    found = {plain(name): name for name in kept}
    if len(found) < len(kept):
        raise DataError("two names are the same without the prefixes of wrappers (module., _module.)")
    return pick(whole, found)


def _dense_ones(tensors: Tensors) -> dict[str, Tensor]:
    if isinstance(tensors, nn.Module):
        named: Mapping[str, object] = dict(tensors.named_parameters())
    elif isinstance(tensors, Mapping):
        named = tensors
    elif isinstance(tensors, Sequence):
        named = {str(i): each for i, each in enumerate(tensors)}
    else:
        raise OptionError(f"a {type(tensors).__name__}: expected a module, a state dict or a list of tensors")
    return {str(name): dense(str(name), each) for name, each in named.items()}


def dense(name: str, tensor: object) -> Tensor:
    """A tensor of plain numbers: sparse ones are filled, float8 becomes float32.

    Raises:
        DataError: for what holds no numbers, or holds them in another way.
    """
    if not isinstance(tensor, Tensor):
        raise DataError(f"{name[:80]!r} is a {type(tensor).__name__}, not a tensor")
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) or tensor.is_meta:
        raise DataError(f"{name[:80]!r} holds no numbers yet: run the model once, or load its weights")
    if tensor.is_quantized or tensor.is_complex() or tensor.is_nested:
        raise DataError(f"{name[:80]!r} is quantised, complex or nested: send floating-point numbers")
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.float() if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 else tensor


def is_buffer(name: str, tensor: Tensor | TensorSpec) -> bool:
    """Whether it is a running statistic or a counter."""
    return name.rsplit(".", 1)[-1] in STATISTICS or not tensor.dtype.is_floating_point


def match(parameters: Named, given: Named, what: str) -> Named:
    """``given`` under the names of the parameters: by name, or in order where its names are numbers.

    Parameters that are not given are left out. Raises DataError for unknown names, ShapeError for other shapes.
    """
    wanted, found = tensor_specs(parameters), tensor_specs(given)
    order = {name: name for name in found}
    if found and all(name.isdecimal() for name in found) and not set(found) <= set(wanted):
        if len(found) != len(wanted):
            raise DataError(f"{what} holds {len(found)} tensors, the model has {len(wanted)} parameters")
        order = dict(zip(wanted, sorted(found, key=int), strict=True))
    unknown = [name for name in order if name not in wanted]
    if unknown:
        raise DataError(f"{what} has names that are not in the model: {_some(unknown)}; the model has {_some(wanted)}")
    for name, own in order.items():
        if found[own].shape != wanted[name].shape:
            raise ShapeError(
                f"{what}: {name} has shape {tuple(found[own].shape)}, in the model it is {tuple(wanted[name].shape)}"
            )
    return pick(given, {name: order[name] for name in wanted if name in order})


def _some(names: Iterable[str]) -> str:
    names = [repr(name[:80]) for name in names]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
