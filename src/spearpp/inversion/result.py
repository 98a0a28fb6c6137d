"""The result of an inversion, its statistics, the duration of its stages, and the progress of a running search."""

import html
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from spearpp.inversion.evidence import Evidence
from spearpp.inversion.factors import Factors
from spearpp.pictures import gallery
from spearpp.types import Bool, Float, Int, Tensor

Item = TypeVar("Item")


class Clock:
    """Wall-clock seconds of each stage, including GPU kernels that the stage launched.

    >>> clock = Clock()
    >>> with clock("search"):
    ...     pass
    >>> list(clock.seconds)
    ['search']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time that the ``with`` block takes to the stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began

    def each(self, stage: str, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items, and add the time that the iterator needs for each item to the stage."""
        while True:
            with self(stage):
                item = next(items, None)
            if item is None:
                return
            yield item


@dataclass(frozen=True)
class Progress:
    """The state of a running search, for progress displays."""

    batch_size: int
    """b, the number of samples that the gradient shows."""
    found: int
    """Number of independent candidate directions, or of inputs that match two layers if there are more; at most b."""
    starts: int
    """Number of random starts so far."""
    total_starts: int
    """Largest number of random starts of this search."""
    score: float | None
    """λ of the best selection so far; None until b independent directions are found. ``Equations`` has no selection."""
    rounds: int = 0
    """Number of passes of the search so far. They are not rounds of federated learning."""


@dataclass(frozen=True)
class Stats:
    """The cost of an inversion, and why its search ended."""

    starts: int = 0
    """Number of random starts."""
    steps: int = 0
    """Number of gradient steps, summed over all starts."""
    candidates: int = 0
    """Number of candidate directions in the pool at the end."""
    found: int = 0
    """Number of directions that were found. The other directions of the result complete the basis."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds by stage: decompose, search, pool, filter."""
    stopped: str = ""
    """Why the search ended, in words that continue a sentence: no capital letter and no full stop."""
    rounds: int = 0
    """Number of passes of the search. They are not rounds of federated learning."""
    interrupted: bool = False
    """Whether Ctrl-C ended the search. The result contains what had been found by then."""


@dataclass(frozen=True, eq=False)
class Inversion:
    """The inputs that were recovered from the gradient of a layer.

    ``inputs[i]`` belongs to ``directions[i]``. From the gradient of one layer, all b directions together determine the
    inputs. If fewer than b directions were found, the orthogonal complement of these directions completes them. All
    inputs are then approximate, and the last inputs belong to no direction. If single rows of the gradient revealed
    some inputs, only those are returned instead, without a certificate. With the gradient of the next layer, each
    input is determined on its own, and only inputs that match both layers are returned.
    """

    inputs: Float[Tensor, "k n"]
    """Computed inputs, certified inputs first. Only inputs with ``certified`` are proved. If the batch was not
    recovered as a whole, other rows may be arbitrary vectors. k is b, or fewer if the inputs were recovered one by
    one."""
    certified: Bool[Tensor, "k"]
    """Which inputs are certified as exact. A certificate needs no ground truth (see ``evidence``). A certified input is
    one training sample, or the weighted mean of several samples that activate the same neurons with proportional
    gradients: the gradient of this layer does not distinguish the two. ``spearpp.audit`` can distinguish them if the
    model and the loss are known."""
    score: float
    """For searches of sparse directions λ, the sparsity matching coefficient of the paper: the share of entries of D
    that are zero exactly where the neuron is inactive for the recovered input. For ``Equations``, the share of the
    batch that was found."""
    batch_size: int
    """b, the number of samples that the gradient shows. Repeated samples count once. Samples that activate no neuron
    are not visible and do not count."""
    directions: Float[Tensor, "found b"]
    """The unit directions q that were found and used, one row for each."""
    scale_known: bool
    """Whether the scale of the inputs is known. It is unknown for a layer without bias; inputs then have unit norm."""
    evidence: Evidence | None
    """The evidence for each input; None if directions are missing and no input was recovered on its own."""
    spectrum: Float[Tensor, "r"]
    """Singular values of the gradient, largest first. The first b are above the noise."""
    zeros: Int[Tensor, "found"]
    """For each direction, the number of neurons that have a gradient, but not from the input of this direction."""
    fits: Bool[Tensor, "k"]
    """Which inputs fit the gradient, certified or not: neurons that are inactive for an input get no gradient from
    it."""
    next_layer: str
    """How the gradient of the next layer was used: "not given", "used", or the reason why it was not used."""
    stats: Stats
    """The cost of the inversion."""
    factors: Factors | None = None
    """The factors L and R of the gradient, which replays need; None for a result that was read from a folder."""

    @property
    def missing(self) -> int:
        """Number of samples of the batch for which no certified input was recovered."""
        return self.batch_size - int(self.certified.sum())

    def __repr__(self) -> str:
        scale = "" if self.scale_known else ", up to scale"
        return (
            f"Inversion({int(self.certified.sum())} of {self.batch_size} inputs certified{scale}, "
            f"λ = {self.score:.6g}, {self.stats.starts:,} starts, {self.stats.stopped})"
        )

    def _repr_html_(self) -> str:
        captions = ["certified" if exact else "not certified" for exact in self.certified.tolist()]
        return f"<p><b>{html.escape(repr(self))}</b></p>" + gallery(self.inputs, captions)
