"""What one client trains on."""

from dataclasses import dataclass

from spearpp.normalisation import Normalisation
from spearpp.shapes import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """What one client trains on."""

    inputs: Float[Tensor, "b n"]
    """As the network is fed them."""
    labels: Int[Tensor, "b"]
    normalisation: Normalisation
    """How the inputs came from the [0, 1] scale."""
    image_shape: tuple[int, int, int] | None = None
    """(channels, height, width) where a row is an image."""
    feature_names: tuple[str, ...] | None = None
    """Column names where a row is a record."""
