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
        spec = tensor_specs(update.weights)[self.name]
        self.shape, self.columns = spec.shape, spec.shape[1]
        self.weight_dtype = self._rounded_to(lambda w, d: w - d, spec.dtype)
        self.movement_dtype = self._rounded_to(lambda _, d: d, tensor_specs(update.gradients)[self.name].dtype)
        stored = self.movement_dtype if update.kind == "gradients" else self.weight_dtype
        self.half = torch.float16 in (stored, self.movement_dtype) or stored is torch.bfloat16
        nonzero = self.per_row(lambda _, d: torch.where(d == 0, torch.inf, d.abs()).amin(1))
        self.smallest = float(nonzero.min())  # compression may round all movements to multiples of this one

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the rows of a block with their w and Δ in float64. A block has at most the block size of a file."""
        weights, gradients = (blocks(each, self.name) for each in (self.update.weights, self.update.gradients))
        for rows, weight, gradient in zip(row_blocks(self.shape), weights, gradients, strict=True):
            yield slice(*rows), weight.double(), gradient.double() * self.update.scale

    def per_row(self, compute: Callable[[Tensor, Tensor], Tensor]) -> Float[Tensor, "rows"]:
        """Return one number per row, computed from blocks of w and Δ."""
        result = torch.zeros(self.shape[0], dtype=torch.float64)
        for block, weight, movement in self:
            result[block] = compute(weight, movement).double().cpu()
        return result

    def entries(self, rows: Bool[Tensor, "rows"]) -> tuple[Float[Tensor, "e"], Float[Tensor, "e"]]:
        """Return all entries of some rows, and how they moved."""
        weights, movements = [], []
        for block, weight, movement in self:
            chosen = rows[block].to(weight.device)
            weights.append(weight[chosen].flatten())
            movements.append(movement[chosen].flatten())
        return torch.cat(weights), torch.cat(movements)

    def _rounded_to(self, values: Callable[[Tensor, Tensor], Tensor], own: torch.dtype) -> torch.dtype:
        """Return the half precision that nearly all moved values have, or else their own dtype."""
        count, hits = 0, {torch.bfloat16: 0, torch.float16: 0}
        for _, weight, movement in self:
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
