"""Lossy compression of an update between the client and the server."""

from dataclasses import dataclass, replace

import torch

from spearpp.errors import OptionError
from spearpp.update import ClientUpdate


@dataclass(frozen=True)
class TopK:
    """Gradient pruning: keep the largest entries of the whole update, and set all others to zero.

    Args:
        keep: fraction of the entries to keep, within (0, 1].
    """

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise OptionError(f"keep={self.keep}: must be within (0, 1]")

    def __call__(self, update: ClientUpdate) -> ClientUpdate:
        """Return the update with its small entries set to zero."""
        sizes = torch.cat([each.abs().flatten().float() for each in update.gradients.values()])
        smallest_kept = sizes.kthvalue(max(1, len(sizes) - round(self.keep * len(sizes)) + 1)).values
        kept = {name: each * (each.abs() >= smallest_kept) for name, each in update.gradients.items()}
        return replace(update, gradients=kept)


@dataclass(frozen=True)
class Quantise:
    """Round every tensor to 2^bits - 1 equidistant levels between minus and plus its largest absolute entry.

    Args:
        bits: number of bits per entry, 2 to 16.
    """

    bits: int

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise OptionError(f"bits={self.bits}: must be within 2 to 16")

    def __call__(self, update: ClientUpdate) -> ClientUpdate:
        """Return the update after rounding."""
        levels = 2 ** (self.bits - 1) - 1
        rounded = {}
        for name, each in update.gradients.items():
            step = each.abs().max().clamp_min(torch.finfo(each.dtype).tiny) / levels
            rounded[name] = (each / step).round() * step
        return replace(update, gradients=rounded)


@dataclass(frozen=True)
class Cast:
    """Send the update in another floating-point format.

    Args:
        dtype: for example ``torch.float16`` or ``torch.bfloat16``.
    """

    dtype: torch.dtype

    def __call__(self, update: ClientUpdate) -> ClientUpdate:
        """Return the update in this format."""
        return replace(update, gradients={name: each.to(self.dtype) for name, each in update.gradients.items()})
