"""How much memory a layer takes, and what is left out where that is more than allowed."""

from dataclasses import replace

from spearpp.errors import OptionError
from spearpp.model import Layer
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

MEMORY = 2**33
"""Bytes that the work on one layer may take, unless the caller says otherwise."""
INVERTED = 52
"""Bytes for each weight of a layer that is inverted: gradient and weight as they came and in float64, and what their
decomposition takes (measured: ``make bench NAME=memory``)."""
REPLAYED = 24
"""Bytes for each weight of a model whose update is computed again: a copy of it, its gradients, and the update's."""


def check_memory(memory: int | None) -> None:
    """Refuse what is no number of bytes."""
    if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory < 1):
        raise OptionError(f"memory={memory!r}: bytes for one layer, or None for no bound")


def check_layer_memory(layer: Layer, update: ClientUpdate, memory: int | None) -> tuple[Layer, str | None]:
    """The layer as far as it fits, and a sentence if it, or the next one as its witness, does not.

    A layer that does not fit no longer qualifies.
    """
    if memory is None or not layer.qualifies:
        return layer, None
    sizes = tensor_specs(update.weights)
    own = INVERTED * sizes[layer.weight].numel()
    both = own if layer.next is None else own + INVERTED * sizes[layer.next].numel()
    if own > memory:
        why = f"skipped: inverting it takes about {_spoken(own)}, more than the {_spoken(memory)} allowed"
        why += "; raise memory= (--memory) to have it looked at"
        return replace(layer, qualifies=False, reason=why), f"Layer {layer.name} was {why}."
    if both > memory:
        why = f"the next layer was left out as its witness: both take about {_spoken(both)}, more than the "
        why += f"{_spoken(memory)} allowed; raise memory= (--memory) to have it heard"
        return replace(layer, next=None), f"Layer {layer.name}: {why}."
    return layer, None


def replay_skip_reason(update: ClientUpdate, memory: int | None) -> str | None:
    """A sentence if the whole model is too large to be run; None if it is not."""
    needed = REPLAYED * sum(each.numel() for each in tensor_specs(update.weights).values())
    if memory is None or needed <= memory:
        return None
    return (
        f"No labels and no replay: running the model takes about {_spoken(needed)}, more than the {_spoken(memory)} "
        "allowed; raise memory= (--memory) to have them."
    )


def _spoken(count: int) -> str:
    """Bytes in the unit that reads best.

    >>> _spoken(2**33), _spoken(5 * 2**19), _spoken(100)
    ('8 GiB', '2.5 MiB', '100 bytes')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
