"""The limits of an audit: how its time is divided, and which layers do not fit into its memory."""

import importlib
import math
import sys
import time
from dataclasses import dataclass, replace

from spearpp.errors import OptionError
from spearpp.model import Layer
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

MIN_SECONDS = 0.5
"""Smallest share of the budget that a layer gets, in seconds: less would not finish one round of a search."""
SEARCH_SHARE = 0.9
"""Share of the budget that the searches may use. A design choice: the rest is for replaying what they found."""
COMPILER = "torch._dynamo"
"""The compiler that ``torch.func`` imports when it first computes a derivative."""
LOADING_SECONDS = 3.0
"""Smallest rest of the budget with which this compiler is loaded for a second search. Measured: loading takes 1.5 to
2.5 s on a CPU core."""
MEMORY = 2**33
"""Default limit for the work on one layer, in bytes. A design choice: 8 GiB fit on most machines."""
INVERTED = 52
"""Bytes per weight of a layer that is inverted. Derived: gradient and weight in float32 and in float64 (24), the
gradient without dead neurons (8), the singular vectors with their workspace (16), and 4 to spare. Measured:
``docs/lab/notebook.md``, Memory (``make bench NAME=memory``)."""
REPLAYED = 24
"""Bytes per weight of a model whose update is replayed. Derived: a copy of the model, the gradients of the model and
the gradients of the update, each up to 8 bytes."""


@dataclass(frozen=True)
class Budget:
    """The time budget of an audit."""

    seconds: float | None
    began: float

    def share(self, layers: int) -> float | None:
        """Seconds for each of the remaining layers; None without a budget."""
        if self.seconds is None:
            return None
        return max(MIN_SECONDS, (self.seconds - (time.monotonic() - self.began)) / layers)

    @property
    def deadline(self) -> float:
        """The end of the budget on the clock ``time.monotonic``; inf without a budget."""
        return math.inf if self.seconds is None else self.began + self.seconds

    @property
    def of_search(self) -> "Budget":
        """The part of the budget that the searches may use."""
        return self if self.seconds is None else replace(self, seconds=SEARCH_SHARE * self.seconds)

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self.seconds is not None and time.monotonic() - self.began >= self.seconds


def load_compiler() -> None:
    """Load the compiler of PyTorch before a search computes derivatives, so that the search does not wait for it."""
    importlib.import_module(COMPILER)


def time_to_load(seconds: float) -> bool:
    """Return whether these seconds are enough to load the compiler, if necessary, and to use it."""
    return seconds > (0.0 if COMPILER in sys.modules else LOADING_SECONDS)


def check_memory(memory: int | None) -> None:
    """Check the ``memory`` option.

    Raises:
        OptionError: if the value is neither None nor a positive integer.
    """
    if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory < 1):
        raise OptionError(f"memory={memory!r}: expected a number of bytes for one layer, or None for no limit")


def check_layer_memory(layer: Layer, update: ClientUpdate, memory: int | None) -> tuple[Layer, str | None]:
    """Return the layer, reduced to what fits into memory, and a sentence about what does not fit (or None).

    A layer that does not fit no longer qualifies. If only the next layer does not fit, the layer is inverted alone.
    """
    if memory is None or not layer.qualifies:
        return layer, None
    sizes = tensor_specs(update.weights)
    own = INVERTED * sizes[layer.weight].numel()
    both = own if layer.next is None else own + INVERTED * sizes[layer.next].numel()
    if own > memory:
        why = f"skipped: inverting it takes about {_readable(own)}, more than the {_readable(memory)} allowed"
        why += "; raise memory= (--memory) to invert it"
        return replace(layer, qualifies=False, reason=why), f"Layer {layer.name} was {why}."
    if both > memory:
        why = f"the gradient of the next layer was not used: both layers take about {_readable(both)}, more than the "
        why += f"{_readable(memory)} allowed; raise memory= (--memory) to use it"
        return replace(layer, next=None), f"Layer {layer.name}: {why}."
    return layer, None


def replay_skip_reason(update: ClientUpdate, memory: int | None) -> str | None:
    """Return a sentence if the model needs too much memory to be replayed, else None."""
    needed = REPLAYED * sum(each.numel() for each in tensor_specs(update.weights).values())
    if memory is None or needed <= memory:
        return None
    return (
        f"No labels and no replay: running the model takes about {_readable(needed)}, more than the "
        f"{_readable(memory)} allowed; raise memory= (--memory) to get them."
    )


def _readable(count: int) -> str:
    """Return a number of bytes with a suitable unit.

    >>> _readable(2**33), _readable(5 * 2**19), _readable(100)
    ('8 GiB', '2.5 MiB', '100 bytes')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
