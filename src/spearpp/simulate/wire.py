"""What happens to an update on its way to the server."""

from dataclasses import dataclass, replace

import torch

from spearpp.errors import OptionError
from spearpp.update import ClientUpdate


@dataclass(frozen=True)
class TopK:
    """Gradient pruning: the largest share of all entries is sent, the others are zero."""

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise OptionError(f"keep={self.keep}: a share within (0, 1]")

    def __call__(self, update: ClientUpdate) -> ClientUpdate:
        """The update with its small entries at zero."""
        sizes = torch.cat([each.abs().flatten().float() for each in update.gradients.values()])
        least = sizes.kthvalue(max(1, len(sizes) - round(self.keep * len(sizes)) + 1)).values
        kept = {name: each * (each.abs() >= least) for name, each in update.gradients.items()}
        return replace(update, gradients=kept)


@dataclass(frozen=True)
class Quantise:
    """Every tensor rounded to 2^bits - 1 levels between minus and plus its largest entry."""

    bits: int

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise OptionError(f"bits={self.bits}: 2 to 16")

    def __call__(self, update: ClientUpdate) -> ClientUpdate:
        """The update after a round trip."""
        levels = 2 ** (self.bits - 1) - 1
        rounded = {}
        for name, each in update.gradients.items():
            step = each.abs().max().clamp_min(torch.finfo(each.dtype).tiny) / levels
            rounded[name] = (each / step).round() * step
        return replace(update, gradients=rounded)


@dataclass(frozen=True)
class Cast:
    """Sent in another floating-point format, float16 or bfloat16."""

    dtype: torch.dtype

    def __call__(self, update: ClientUpdate) -> ClientUpdate:
        """The update in that format."""
        return replace(update, gradients={name: each.to(self.dtype) for name, each in update.gradients.items()})
