"""One name for each parameter, whoever wrapped the model."""

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from spearpp.errors import DataError, ShapeError
from spearpp.shapes import Tensor

WRAPPED = re.compile(r"^(?:_module\.|module\.|_orig_mod\.)+")
"""What Opacus, DistributedDataParallel and torch.compile put before names."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Tensors = nn.Module | Mapping[str, Tensor] | Sequence[Tensor]


def plain(name: str) -> str:
    """The name without the prefixes of wrappers.

    >>> plain("_module.module.fc1.weight")
    'fc1.weight'
    """
    return WRAPPED.sub("", name)


def parameters_of(tensors: Tensors) -> dict[str, Tensor]:
    """The parameters of a model, a state dict or a list, by plain name; buffers left out.

    A model's own order of parameters is kept; of a state dict, integers and running statistics are no parameters.
    """
    if isinstance(tensors, nn.Module):
        return {plain(name): each.detach() for name, each in tensors.named_parameters()}
    named = tensors if isinstance(tensors, Mapping) else {str(i): each for i, each in enumerate(tensors)}
    for name, each in named.items():
        if not isinstance(each, Tensor):
            raise DataError(f"{name!r} is a {type(each).__name__}, not a tensor")
    found = {plain(str(name)): each.detach() for name, each in named.items() if not is_buffer(str(name), each)}
    if len(found) < sum(not is_buffer(str(name), each) for name, each in named.items()):
        raise DataError("two names are the same without the prefixes of wrappers (module., _module.)")
    return found


def is_buffer(name: str, tensor: Tensor) -> bool:
    """Whether it is a running statistic or a counter."""
    return name.rsplit(".", 1)[-1] in STATISTICS or not tensor.is_floating_point()


def match(parameters: Mapping[str, Tensor], given: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """``given`` under the names of the parameters: by name, or in order where its names are numbers.

    Parameters that are not given are left out. Raises DataError for unknown names, ShapeError for other shapes.
    """
    if given and all(name.isdecimal() for name in given) and not set(given) <= set(parameters):
        ordered = [given[name] for name in sorted(given, key=int)]
        if len(ordered) != len(parameters):
            raise DataError(f"{what} holds {len(ordered)} tensors, the model has {len(parameters)} parameters")
        given = dict(zip(parameters, ordered, strict=True))
    unknown = [name for name in given if name not in parameters]
    if unknown:
        raise DataError(
            f"{what} has names that are not in the model: {_some(unknown)}; the model has {_some(parameters)}"
        )
    for name, tensor in given.items():
        if tensor.shape != parameters[name].shape:
            raise ShapeError(
                f"{what}: {name} has shape {tuple(tensor.shape)}, in the model it is {tuple(parameters[name].shape)}"
            )
    return {name: given[name] for name in parameters if name in given}


def _some(names: Iterable[str]) -> str:
    names = [repr(name[:80]) for name in names]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
