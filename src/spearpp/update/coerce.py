"""Convert what a caller passes to one form: parameters without buffers, finite, at least float32, and copied."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spearpp.errors import NonFiniteError, OptionError
from spearpp.types import Tensor
from spearpp.update.lazy import Lazy, Named, elementwise, map_blocks, pick, tensor_specs
from spearpp.update.names import Tensors, parameters_of, plain


def plain_lr_and_steps(lr: Any, steps: Any) -> tuple[float | None, int | None]:
    """Convert a learning rate and a number of steps of any numeric type to a float and an int.

    Raises:
        OptionError: if a value is not a number, or is not positive.
    """
    try:
        rate = None if lr is None else float(lr)
        count = None if steps is None else operator.index(steps)
        if isinstance(lr, bool | str) or isinstance(steps, bool):
            raise TypeError("a bool or a str is not a number here")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        expected = "expected a number or None for lr, and a whole number or None for steps"
        raise OptionError(f"lr={lr!r}, steps={steps!r}: {expected}") from error
    if rate is not None and not 0 < rate < float("inf"):
        raise OptionError(f"lr={lr}: the learning rate must be positive and finite, or None if it is not known")
    if count is not None and count < 1:
        raise OptionError(f"steps={steps}: the number of steps must be at least 1, or None if it is not known")
    return rate, count


def parameters_and_buffers(model: Tensors, given: Tensors) -> tuple[Named, tuple[str, ...]]:
    """Split tensors into the model's parameters and the names of all other tensors.

    The other tensors are buffers, and the second names of tied weights. A list with one tensor for every entry of the
    module's state dict, as Flower clients send it, takes the names of the state dict.
    """
    if isinstance(model, nn.Module) and isinstance(given, Sequence) and len(given) == len(model.state_dict()):
        given = dict(zip(model.state_dict(), given, strict=True))
    found = parameters_of(given)
    names = [str(name) for name in given] if isinstance(given, Mapping) else []
    buffers = tuple(name for name in names if plain(name) not in found)
    if isinstance(model, nn.Module):
        own = {plain(name) for name, _ in model.named_parameters()}
        extra = {plain(name) for name in model.state_dict()} - own
        buffers += tuple(name for name in found if name in extra)
        found = pick(found, {name: name for name in found if name not in extra})
    return found, buffers


def finite(tensors: Named, what: str) -> Named:
    """Check that no tensor holds NaN or Inf: now if the tensors are in memory, else whenever one is read.

    Args:
        tensors: the tensors by name.
        what: what the tensors are, for the error message.

    Raises:
        NonFiniteError: if a tensor holds NaN or Inf.
    """

    def check_of(name: str) -> Callable[[Tensor], Tensor]:
        def check(tensor: Tensor) -> Tensor:
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"{what}: {name} holds NaN or Inf: training diverged, or the file is damaged")
            return tensor

        return check

    if isinstance(tensors, Lazy):
        return Lazy({name: map_blocks(check_of(name), stored) for name, stored in tensors.stored.items()})
    for name, tensor in tensors.items():
        check_of(name)(tensor)
    return tensors


def copied_weights(tensors: Tensors) -> Named:
    """Return a copy of the parameters in at least float32, because the caller may continue to train the model."""
    return copied(in_floats(parameters_of(tensors)))


def copied(tensors: Named) -> Named:
    """Return a copy of tensors in memory. Tensors in files need no copy."""
    return tensors if isinstance(tensors, Lazy) else {name: tensor.clone() for name, tensor in tensors.items()}


def in_floats(tensors: Named) -> Named:
    """Convert half precision to float32. A client may send half precision, but an audit does not compute in it."""
    return elementwise(lambda tensor: tensor.to(torch.promote_types(tensor.dtype, torch.float32)), tensors)


def moved_to(tensors: Named, device: torch.device | str) -> Named:
    """Move tensors to a device. Tensors that are on the device already are returned unchanged."""
    there = all(spec.device == torch.device(device) for spec in tensor_specs(tensors).values())
    return tensors if there else elementwise(lambda tensor: tensor.to(device), tensors)
