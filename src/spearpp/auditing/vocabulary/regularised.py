"""Detect rows of an embedding table that a regulariser moved, and not the data, without one rule for all rows.

A regulariser moves a row as a function of its weights. It need not treat all rows alike: some frameworks decay rare
rows more than others, or leave out the first row. A decayed row still moves in parallel to its weights, with a factor
of its own. A regulariser need not be L2 or L1 either: a Huber penalty, or Adam with L2 and weights of very different
sizes, moves every entry by some other function of this entry. Entries of different rows with nearly the same weight
then move alike. A row that the data moved shows neither of these properties, except by chance.
"""

import math
from collections.abc import Callable

import torch

from spearpp.auditing.vocabulary.movements import Movements
from spearpp.types import Bool, Float, Tensor

PARALLEL = 0.03
"""Largest share of a movement that is not parallel to its row, if the factor of the row explains the movement. A design
choice: rounding over some steps leaves less, and the movement of a row with four columns that the data moved is as
parallel by chance in one of 40,000 cases."""
ALIKE = 0.05
"""Largest relative difference between the movement of an entry and of entries with nearly the same weight, for an entry
that a function of its weight explains. A design choice: functions are not constant between neighbouring weights."""
MIN_EXPLAINED = 0.8
"""Share of the entries of a row that must be explained. A design choice, the same as for a pull by signs."""
NEIGHBOURS = (-3, -2, -1, 1, 2, 3)
"""Entries that an entry is compared with, by their place in the order of the weights. A design choice: the median of a
few of them is not changed by single entries that the data moved."""
COMPARED_ENTRIES = 2**20
"""Largest number of entries that others are compared with. A design choice: a few blocks of a file."""
LEAST_CHANCE = 0.05
"""Smallest probability that an entry is explained by chance. It is measured by comparing entries in random order. A
design choice: tables with few entries do not show smaller ones."""
MAX_EXPLAINED_ROWS = 0.01
"""Share of the rows that may be explained by a function of their entries, whatever the chance is. Measured: 0.2 % of
the rows that the data moved, for Adam with L2 (``benchmarks/embeddings.py``)."""
CHANCE_FACTOR = 3.0
"""How many times the expected number of rows may be explained by a function of their entries. A design choice."""


def own_factor(weight: Float[Tensor, "rows d"], movement: Float[Tensor, "rows d"]) -> Float[Tensor, "rows 1"]:
    """Return the factor c of each row for which c w is nearest to its movement."""
    return (weight * movement).sum(1, keepdim=True) / weight.square().sum(1, keepdim=True).clamp_min(1e-300)


def not_parallel(weight: Float[Tensor, "rows d"], movement: Float[Tensor, "rows d"]) -> Float[Tensor, "rows"]:
    """Return the share of the movement of each row that is not parallel to its weights."""
    rest = torch.linalg.vector_norm(movement - own_factor(weight, movement) * weight, dim=1)
    return rest / torch.linalg.vector_norm(movement, dim=1).clamp_min(1e-300)


Rest = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of weights and movements. It returns the part of the movements that a rule for the whole table does not
explain, and the size of this part that rounding explains."""


def is_regularised(view: Movements, used: Bool[Tensor, "rows"], rest_of: Rest) -> bool:
    """Return whether a function of single entries explains the movement of more of these rows than chance does.

    Args:
        view: the table.
        used: the rows.
        rest_of: returns the part of the movements that the rule for the other rows of the table does not explain.
    """
    if view.table.renormalised or not bool(used.any()):
        return False
    weight, movement = (each.reshape(-1, view.columns) for each in view.entries(_some(used, view.columns)))
    own, rounding = rest_of(weight, movement)
    clear = own.abs() > rounding
    visible = clear.sum(1).cpu()
    for others in (used, view.usable):
        weights, movements = view.entries(_some(others, view.columns))
        order = weights.argsort()
        weights, rest = weights[order], rest_of(weights, movements)[0][order]
        if len(weights) <= 2 * len(NEIGHBOURS):
            continue
        mixed = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(0)).to(rest.device)]
        explained, by_chance = ((clear & _alike(weight, own, weights, each)).sum(1).cpu() for each in (rest, mixed))
        share = max(float(by_chance.sum() / visible.sum().clamp_min(1)), LEAST_CHANCE)
        expected = float(_chance(view.columns, share)[visible].sum())
        count = int(((visible > 0) & (explained >= MIN_EXPLAINED * visible)).sum())
        if count > CHANCE_FACTOR * expected + 1 + MAX_EXPLAINED_ROWS * len(visible):
            return True
    return False


def _some(rows: Bool[Tensor, "rows"], columns: int) -> Bool[Tensor, "rows"]:
    """Return every k-th of the rows, so that they have at most ``COMPARED_ENTRIES`` entries."""
    chosen, some = torch.nonzero(rows)[:, 0], torch.zeros_like(rows)
    some[chosen[:: max(1, math.ceil(len(chosen) * columns / COMPARED_ENTRIES))]] = True
    return some


def _chance(columns: int, share: float) -> Float[Tensor, "n"]:
    """Return the probability that chance explains ``MIN_EXPLAINED`` of n entries, for every n up to the columns.

    ``share`` is the probability for one entry.
    """
    least = [math.ceil(MIN_EXPLAINED * n) for n in range(columns + 1)]
    terms = [
        [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(first, n + 1)]
        for n, first in enumerate(least)
    ]
    return torch.tensor([math.fsum(each) for each in terms], dtype=torch.float64)


def _alike(
    weight: Float[Tensor, "rows d"], own: Float[Tensor, "rows d"], weights: Float[Tensor, "e"], rest: Float[Tensor, "e"]
) -> Bool[Tensor, "rows d"]:
    """Return which entries have about the same rest (``own``) as entries (``rest``) with nearly the same weight."""
    places = torch.searchsorted(weights, weight)
    near = torch.stack([(places + step).clamp(0, len(weights) - 1) for step in NEIGHBOURS])
    size = own.abs().maximum(own.abs().mean(1, keepdim=True))
    return (own - rest[near].median(0).values).abs() <= ALIKE * size
