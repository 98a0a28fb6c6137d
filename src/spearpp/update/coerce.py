"""What a caller gave, made ready: parameters apart from buffers, finite, in float32 at least, and nobody else's."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from spearpp.errors import NonFiniteError, OptionError
from spearpp.types import Tensor
from spearpp.update.lazy import Lazy, Named, changed, elementwise, pick, tensor_specs
from spearpp.update.names import Tensors, is_buffer, parameters_of, plain


def plain_lr_and_steps(lr: Any, steps: Any) -> tuple[float | None, int | None]:
    """Both as plain numbers, whatever kind of number they came as."""
    try:
        rate = None if lr is None else float(lr)
        count = None if steps is None else operator.index(steps)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise OptionError(f"lr={lr!r}, steps={steps!r}: a number and a whole number, or None") from error
    if isinstance(lr, bool | str) or isinstance(steps, bool):
        raise OptionError(f"lr={lr!r}, steps={steps!r}: a number and a whole number, or None")
    if rate is not None and not 0 < rate < float("inf"):
        raise OptionError(f"lr={lr}: a learning rate is positive, or None if it is not known")
    if count is not None and count < 1:
        raise OptionError(f"steps={steps}: a client takes one step at least, or None if that is not known")
    return rate, count


def parameters_and_buffers(model: Tensors, given: Tensors) -> tuple[Named, tuple[str, ...]]:
    """Parameters, and the names of what a module has besides: buffers, and second names of tied weights."""
    found, buffers = parameters_of(given), _buffers(given)
    if isinstance(model, nn.Module):
        own = {plain(name) for name, _ in model.named_parameters()}
        extra = {plain(name) for name in model.state_dict()} - own
        buffers += tuple(name for name in found if name in extra)
        found = pick(found, {name: name for name in found if name not in extra})
    return found, buffers


def finite(tensors: Named, what: str) -> Named:
    """The same, of which nothing is NaN or Inf: now if they are in memory, else whenever one is read."""

    def checking(name: str) -> Callable[[Tensor], Tensor]:
        def check(tensor: Tensor) -> Tensor:
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"{what}: {name} holds NaN or Inf: training diverged, or the file is damaged")
            return tensor

        return check

    if isinstance(tensors, Lazy):
        return Lazy({name: changed(checking(name), each) for name, each in tensors.stored.items()})
    for name, each in tensors.items():
        checking(name)(each)
    return tensors


def copied_weights(tensors: Tensors) -> Named:
    """A copy: the model may train on."""
    return copied(in_floats(parameters_of(tensors)))


def copied(tensors: Named) -> Named:
    """A copy of what is in memory; files are nobody else's already."""
    return tensors if isinstance(tensors, Lazy) else {name: each.clone() for name, each in tensors.items()}


def in_floats(tensors: Named) -> Named:
    """In float32 at least: half precision is what the wire had, not what to compute in."""
    return elementwise(lambda each: each.to(torch.promote_types(each.dtype, torch.float32)), tensors)


def moved_to(tensors: Named, device: torch.device | str) -> Named:
    """On that device; as they are if they lie there already."""
    there = all(each.device == torch.device(device) for each in tensor_specs(tensors).values())
    return tensors if there else elementwise(lambda each: each.to(device), tensors)


def _buffers(tensors: Tensors) -> tuple[str, ...]:
    if not isinstance(tensors, Mapping):
        return ()
    named = tensor_specs(tensors) if isinstance(tensors, Lazy) else tensors
    return tuple(str(name) for name, each in named.items() if is_buffer(str(name), each))
