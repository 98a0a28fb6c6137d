"""The one type of evidence, and the one rule that turns it into certificates."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from spearpp.types import Bool, Float, Tensor

EXACT = 1e-3
"""The definition of an exact input: the largest stated error, relative to the norm of the input.

Derived: half a grey level of an 8-bit image is 1/510 = 2e-3 of the range, so an error of 1e-3 is invisible. The stated
error bounds the true error (``docs/results/hostile.md``). All other modules import this value.
"""
WHOLE_NETWORK = 3
"""Value of ``Evidence.layers`` if the equations come from all layers of a network."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the gradient says about recovered inputs, one row for each of the k inputs."""

    holds: Bool[Tensor, "k"]
    """Whether the input satisfies the equations of its layers up to noise, and chance does not explain this."""
    determined: Bool[Tensor, "k"]
    """Whether no other input satisfies the same equations."""
    error: Float[Tensor, "k"]
    """Bound on the error of the input over the input's norm, if the input is a sample of the batch."""
    share: Float[Tensor, "k"]
    """‖d_i‖ ‖x̂_i‖ over the size of the gradient: how much of the gradient this input explains."""
    layers: int
    """How many layers the equations come from: 1, 2, or ``WHOLE_NETWORK``. The equations of one layer hold for an input
    only if those of all others hold too. The equations of several layers hold for each input on its own."""
    details: dict[str, Tensor] = field(default_factory=dict)
    """The numbers behind ``holds`` and ``determined``, by name, one row for each input."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers about the whole batch, by name: ``residual``, and for one layer ``noise``, ``heavier``, ``drift``."""

    @property
    def consistent(self) -> Bool[Tensor, "k"]:
        """Which inputs are samples of the batch, up to their error."""
        return self.holds & self.determined

    @property
    def exact(self) -> Bool[Tensor, "k"]:
        """Which inputs are certified: samples of the batch with a negligible error."""
        together = torch.ones_like(self.holds[:1]) if self.layers > 1 else self.holds.all()[None]
        return self.consistent & (self.error <= EXACT) & together

    def rows(self, which: Tensor) -> "Evidence":
        """The same evidence for some of the inputs, or in another order."""
        return self._with(lambda column: column[which])

    def replaced(self, which: Tensor, other: "Evidence") -> "Evidence":
        """The same evidence with that of other inputs in some rows."""
        columns = other.columns
        details = {name: each.index_copy(0, which, columns[name]) for name, each in self.details.items()}
        named = ("holds", "determined", "error", "share")
        return replace(
            self, details=details, **{name: getattr(self, name).index_copy(0, which, columns[name]) for name in named}
        )

    def to(self, device: torch.device) -> "Evidence":
        """The same evidence on another device."""
        return self._with(lambda column: column.to(device))

    @property
    def columns(self) -> dict[str, Tensor]:
        """All tensors by name."""
        named = ("holds", "determined", "error", "share")
        return {**{name: getattr(self, name) for name in named}, **self.details}

    def _with(self, change: Callable[[Tensor], Tensor]) -> "Evidence":
        return replace(
            self,
            holds=change(self.holds),
            determined=change(self.determined),
            error=change(self.error),
            share=change(self.share),
            details={name: change(each) for name, each in self.details.items()},
        )
