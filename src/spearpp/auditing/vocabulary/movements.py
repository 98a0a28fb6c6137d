"""The rows of an embedding table and how they moved, read in blocks, with the rounding of the numbers."""

from collections.abc import Callable, Iterator

import torch

from spearpp.model.embeddings import Table
from spearpp.types import Bool, Float, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import blocks, row_blocks, tensor_specs

MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Number of stored bits of the significand: the spacing at 1 is 2 to the power of minus this number."""
ON_GRID = 0.999
"""Share of the moved entries that must be float16 or bfloat16 values for the checkpoint to have been rounded to it. A
design choice: by chance, one entry in a thousand of a float32 checkpoint is such a value."""


class Movements:
    """The rows of a table and their movements, read in blocks of rows."""

    def __init__(self, update: ClientUpdate, table: Table) -> None:
        self.update, self.table, self.name = update, table, table.weight
        self.usable = torch.ones(table.rows, dtype=torch.bool)
        if table.padding is not None:
            self.usable[table.padding] = False
        self.weight_dtype = self._rounded_to(lambda w, d: w - d, tensor_specs(update.weights)[self.name].dtype)
        self.movement_dtype = self._rounded_to(lambda _, d: d, tensor_specs(update.gradients)[self.name].dtype)
        stored = self.movement_dtype if update.kind == "gradients" else self.weight_dtype
        self.half = torch.float16 in (stored, self.movement_dtype) or stored is torch.bfloat16
        self.columns = tensor_specs(update.weights)[self.name].shape[1]
        nonzero = self.per_row(lambda _, d: torch.where(d == 0, torch.inf, d.abs()).amin(1))
        self.smallest = float(nonzero.min())  # compression may round all movements to multiples of this one

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of w and Δ in float64, with at most the block size of a file."""
        pairs = zip(blocks(self.update.weights, self.name), blocks(self.update.gradients, self.name), strict=True)
        for weight, gradient in pairs:
            yield weight.double(), gradient.double() * self.update.scale

    def per_row(self, compute: Callable[[Tensor, Tensor], Tensor]) -> Float[Tensor, "rows"]:
        """Return one number per row, computed from blocks of w and Δ."""
        shape = tensor_specs(self.update.weights)[self.name].shape
        result = torch.zeros(shape[0], dtype=torch.float64)
        for (start, stop), (weight, movement) in zip(row_blocks(shape), self, strict=True):
            result[start:stop] = compute(weight, movement).double().cpu()
        return result

    def entries(self, rows: Bool[Tensor, "rows"]) -> tuple[Float[Tensor, "e"], Float[Tensor, "e"]]:
        """Return all entries of some rows, and how they moved."""
        shape = tensor_specs(self.update.weights)[self.name].shape
        parts = [
            (
                weight[rows[start:stop].to(weight.device)].flatten(),
                movement[rows[start:stop].to(weight.device)].flatten(),
            )
            for (start, stop), (weight, movement) in zip(row_blocks(shape), self, strict=True)
        ]
        return torch.cat([each[0] for each in parts]), torch.cat([each[1] for each in parts])

    def _rounded_to(self, values: Callable[[Tensor, Tensor], Tensor], own: torch.dtype) -> torch.dtype:
        """Return the half precision that nearly all moved values have, or else their own dtype."""
        count, hits = 0, {torch.bfloat16: 0, torch.float16: 0}
        for weight, movement in self:
            moved = movement != 0
            numbers = values(weight, movement)[moved]
            slack = 2.0**-22 * (numbers.abs() + movement[moved].abs())
            count += numbers.numel()
            for dtype in hits:
                hits[dtype] += int(((numbers - numbers.to(dtype).double()).abs() <= slack).sum())
        found = (dtype for dtype, hit in hits.items() if hit >= ON_GRID * count)
        return next(found, own if own in MANTISSA else torch.float32)

    def unit(self, weight: Tensor, movement: Tensor) -> Tensor:
        """Return how far rounding can be between two neighbouring values of each movement."""
        if self.update.kind == "gradients":
            return _spacing(movement, self.movement_dtype).clamp_min(self.smallest)
        after = _spacing(torch.maximum(weight.abs(), (weight - movement).abs()), self.weight_dtype)
        if self.update.kind == "weights":
            return after
        return after.clamp_min(self.smallest) + _spacing(movement, self.movement_dtype)


def _spacing(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance from each number to the next one of a dtype."""
    exponent = torch.frexp(numbers.abs().clamp_min(torch.finfo(dtype).smallest_normal)).exponent
    return torch.ldexp(torch.ones_like(numbers), exponent - 1 - MANTISSA[dtype])
