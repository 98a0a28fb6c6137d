"""Which rows of an embedding table the data moved.

Let w be a row before training and Δ = before - after its movement (or its gradient). A row that no sample looked up has
no gradient from the data. Three things can still move it:

- weight decay, momentum and L2 in the loss: Δ = c w, with the same c for all such rows;
- L1 in the loss, or Adam with L2 in the gradient: Δ = a sign(w), with the same a for all entries far from zero;
- rounding of the checkpoint.

The audit finds the rows that one of these explains completely. If there are such rows, the other rows were looked up.
If there are none, for example because noise moved every row, nothing is claimed. The table must be used for lookups
only (``spearpp.model.embeddings``).
"""

import torch

from spearpp.auditing.vocabulary.movements import MANTISSA, Movements
from spearpp.auditing.vocabulary.regularised import PARALLEL, is_regularised, not_parallel, own_factor
from spearpp.model.embeddings import Table
from spearpp.types import Bool, Float, Tensor
from spearpp.update import ClientUpdate

ROUNDED_ONCE = 0.6
"""Largest movement by rounding, in units of rounding, if nothing else moved a row. Derived: rounding to the nearest
number moves an entry by half a unit at most."""
ROUNDED_OFTEN = 5000.0
"""Largest movement by rounding in every step of a training in float32, in units of rounding. Derived: half a unit for
each of at most 10,000 steps. A design choice: clients train for fewer steps."""
ROUNDED_A_FEW = 8.0
"""Movement by rounding in a few steps, in units of rounding. A design choice."""
ROUNDED_GRADIENT = 4.0
"""Largest rounding of a gradient λ w, in units of rounding. A design choice: a few operations round it."""
COLLINEAR, COLLINEAR_HALF = 0.1, 0.5
"""Largest share of a movement that is not parallel to the row, for rows from which the weight decay is estimated: in
general, and in half precision. Design choices: a wrong estimate explains no rows, so that nothing is claimed."""
MOVEMENT_GAP = 4.0
"""Smallest ratio between the unexplained movement of a claimed row and that of any row that decay explains. A design
choice: the rounding of different rows differs by less."""
MAX_UNDECIDED_ROWS = 0.01
"""Largest number of rows between the explained and the claimed rows, as a share of the explained rows. A design choice:
a few rows that moved little are left undecided."""
MIN_ROWS, MIN_ENTRIES = 8, 64
"""Smallest number of rows that establish a weight decay, and of entries that establish that there is none. Design
choices: this many rows do not agree on one factor by chance, and rounding does not hide this many entries while it
shows entries of other rows."""
MIN_DECAY_COLUMNS, MIN_HALF_COLUMNS, MIN_SIGN_COLUMNS = 4, 8, 16
"""Smallest number of columns of a table that shows weight decay, that may be rounded to half precision, and that shows
a pull by signs. Derived: a row with one entry is always parallel to its movement, the third-largest entry needs eight
columns, and the signs of 16 entries agree with those of the weights by chance in one of 65,536 rows."""
VISIBLE, VISIBLE_HALF, VISIBLE_FEW_COLUMNS = 2.0, 0.75, 1000.0
"""Units of rounding by which the third-largest entry of a row must move: in general, in half precision, and with fewer
than eight columns. Derived: a single rounding moves by half a unit. Design choices: two units leave a margin in
float32, and a decay that is smaller than rounding, one unit in each of 1,000 steps, hides in all entries of a row only
if there are few."""
STRONGEST_DECAY = 0.5
"""Largest c of weight decay. A design choice: no training halves its weights, but ``max_norm`` may."""
HIDDEN_DECAY_UNITS = {False: 1000.0, True: 32.0}
"""Units of rounding up to which a movement towards zero may be a decay that rounding hides in other rows. Design
choices: one unit in each of 1,000 steps in float32, and in each of 32 steps in half precision (True)."""
CHANCE_FACTOR = 3.0
"""How many times the expected number of rows may move towards zero in every visible entry. A design choice."""
SIMILAR_MOVEMENT = 1e-2
"""Largest relative difference of the movements of two entries that are similar. A design choice: the pull of Adam with
L2 varies by less for entries far from zero."""
SIGN_PRECISION = 2e-3
"""Largest relative deviation from a(|w|) of rows that Adam with L2 explains. Measured (benchmarks/embeddings.py): the
polynomial is accurate to less than 1e-3 over 50 steps."""
WEIGHT_RANGE_FACTOR = 1.5
"""By which factor the weights of a claimed row may be smaller or larger than those of all rows that Adam with L2
explains. A design choice: the polynomial is not accurate outside the range of weights that it was fitted to."""
DEGREE, TRIMS = 6, 4
"""Degree of the polynomial a(1/|w|), and how often it is fitted again to the better half of the rows. Design choices:
the accuracy above needs six terms, and four times suffice where half of the rows were looked up."""

OTHER_REGULARISER = "a regulariser that is neither L2, L1 nor weight decay moves rows"
"""Reason why nothing is claimed about a table."""


def looked_up(update: ClientUpdate, table: Table) -> tuple[Bool[Tensor, "rows"], str]:
    """Return which rows of a table the data moved, and what explains the other rows or why nothing is claimed."""
    view = _View(update, table)
    nothing = torch.zeros(table.rows, dtype=torch.bool)
    empty = view.per_row(lambda w, _: (w == 0).all(1)).bool()
    rows = view.usable & (~empty if not bool(empty.all()) else empty)
    for explain in (view.by_rounding, view.by_decay, view.by_sign):
        found = explain(rows)
        if found is not None:
            padding = "" if table.padding is None else "; the padding row is not counted"
            return found[0] & view.usable, found[1] + padding
    dense = "noise, a dense regulariser or a table that the loss uses as a whole moves every row"
    still = int((~view.per_row(lambda _, d: (d != 0).any(1)).bool() & view.usable).sum())
    if not still:
        return nothing, f"every row moved, because the training looked up all of them, or because {dense}"
    if still < -(-MIN_ENTRIES // view.columns):
        few = f"only {still} of the rows did not move, which is too few to exclude other reasons"
        return nothing, f"{few}: {dense}"
    return nothing, f"rounding hides which rows were looked up, or {dense}"


class _View(Movements):
    """The explanations of how the rows of a table moved."""

    def unexplained(self, c: float | None) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows"]]:
        """Return how far Δ is from c w in each row, in units of rounding: the largest and the third-largest entry.

        If c is None, each row has a factor of its own. With fewer than eight columns, the third-largest is replaced by
        the second-largest or the largest one.
        """

        def units(weight: Tensor, movement: Tensor) -> Tensor:
            factor = own_factor(weight, movement) if c is None else c
            return (movement - factor * weight).abs() / self.unit(weight, movement)

        rank = min(3, 1 + self.columns // 4)
        largest = self.per_row(lambda w, d: units(w, d).amax(1))
        return largest, self.per_row(lambda w, d: units(w, d).topk(rank, dim=1).values[:, -1])

    def beyond_rounding(self, rows: Bool[Tensor, "rows"], c: float, fewest: int) -> Bool[Tensor, "rows"] | None:
        """Return the rows that are farther from c w than a single rounding explains, or None if this is not clear.

        If something moves every row by less than rounding shows, single entries of many rows move visibly. Rows of
        which a single entry moves must therefore be rare. Also, the rows that move towards zero in every visible entry
        must not be more than chance explains, because a decay that rounding hides moves entries towards zero only.
        """
        least = VISIBLE_HALF if self.half else VISIBLE
        if self.columns < MIN_HALF_COLUMNS:
            if self.half:
                return None
            least = VISIBLE_FEW_COLUMNS
        largest, third = self.unexplained(c)
        used, explained = rows & (third > least), rows & (largest <= ROUNDED_ONCE)
        undecided = int((rows & ~used & ~explained).sum())
        if int(explained.sum()) < fewest or undecided > MAX_UNDECIDED_ROWS * int(explained.sum()):
            return None

        def visible(weight: Tensor, movement: Tensor) -> Tensor:
            return (movement - c * weight).abs() > least * self.unit(weight, movement)

        def away(weight: Tensor, movement: Tensor) -> Tensor:
            return visible(weight, movement) & ((movement - c * weight) * weight <= 0)

        entries = self.per_row(lambda w, d: visible(w, d).sum(1))
        towards = used & (third <= HIDDEN_DECAY_UNITS[self.half]) & (self.per_row(lambda w, d: away(w, d).sum(1)) == 0)
        expected = float((2.0 ** -entries[used].clamp_max(60.0)).sum()) if bool(used.any()) else 0.0
        return used & ~towards if int(towards.sum()) > CHANCE_FACTOR * expected + 1 else used

    def decays_alone(self, most: float) -> Bool[Tensor, "rows"]:
        """Return the rows that decay with a factor of their own, up to a number of units of rounding."""
        if self.columns < MIN_DECAY_COLUMNS or self.table.renormalised:
            return torch.zeros_like(self.usable)
        return self.unexplained(None)[1] <= most

    def by_data(self, used: Bool[Tensor, "rows"], c: float, why: str) -> tuple[Bool[Tensor, "rows"], str]:
        """Return these rows with the reason, or no row if a regulariser other than c w explains too many of them."""

        def rest(weight: Tensor, movement: Tensor) -> tuple[Tensor, Tensor]:
            return movement - c * weight, ROUNDED_A_FEW * self.unit(weight, movement)

        return (torch.zeros_like(used), OTHER_REGULARISER) if is_regularised(self, used, rest) else (used, why)

    def by_rounding(self, rows: Bool[Tensor, "rows"]) -> tuple[Bool[Tensor, "rows"], str] | None:
        """Return the rows that moved by more than rounding, or None if no sufficient number of rows stayed."""
        used = self.beyond_rounding(rows, 0.0, -(-MIN_ENTRIES // self.columns))
        if used is None:
            return None
        still = int((rows & ~used).sum())
        if self.columns >= MIN_DECAY_COLUMNS and not self.table.renormalised:  # some rows may decay, others not
            used &= self.per_row(not_parallel) > PARALLEL
        used &= ~self.decays_alone(VISIBLE_HALF if self.half else VISIBLE)
        return self.by_data(used, 0.0, f"{still:,} other rows did not move")

    def by_decay(self, rows: Bool[Tensor, "rows"]) -> tuple[Bool[Tensor, "rows"], str] | None:
        """Return the rows that Δ = c w does not explain, or None if no c explains a sufficient number."""
        if self.columns < MIN_DECAY_COLUMNS:
            return None
        factors, shares = self.per_row(lambda w, d: own_factor(w, d)[:, 0]), self.per_row(not_parallel)
        parallel = rows & (shares <= (COLLINEAR_HALF if self.half else COLLINEAR))
        if int(parallel.sum()) < MIN_ROWS:
            return None
        # Rows that were looked up a little are nearly parallel too, so the most parallel rows decide. In half precision
        # rounding decides how parallel a row is, so the median of all is more precise.
        part = 1.0 if self.half else MIN_ROWS / int(parallel.sum())
        c = float(factors[parallel & (shares <= shares[parallel].quantile(part))].median())
        if not 0 < c <= STRONGEST_DECAY:
            return None
        gradients = self.update.kind == "gradients"
        threshold: float | None = VISIBLE_HALF
        if self.half:
            used = None if gradients else self.beyond_rounding(rows, c, MIN_ROWS)
        else:
            most = ROUNDED_GRADIENT if gradients else min(ROUNDED_OFTEN, c * 2.0 ** MANTISSA[self.weight_dtype])
            units = self.unexplained(c)[1]
            threshold = _threshold(units[rows], 0.5, most, MIN_ROWS)
            used = None if threshold is None else rows & (units > threshold)
        if used is None or threshold is None:
            return None
        alone = used & self.decays_alone(threshold)
        used &= ~alone
        others = int((rows & ~used & ~alone).sum())
        by = f"a factor of {1 - c:.6g}" if not gradients else f"{c:.3g} times the weights"
        return self.by_data(used, c, f"weight decay ({by}) explains the movement of {others:,} other rows")

    def by_sign(self, rows: Bool[Tensor, "rows"]) -> tuple[Bool[Tensor, "rows"], str] | None:
        """Return the rows that Δ = a(|w|) sign(w) does not explain, or None if no a explains a sufficient number.

        The function a is a polynomial in 1/|w|, because the pull of Adam decreases where an entry approaches zero.
        """

        def agreement(weight: Tensor, movement: Tensor) -> Tensor:
            amount = movement * weight.sign()
            centre = amount.median(1, keepdim=True).values
            return ((amount - centre).abs() <= SIMILAR_MOVEMENT * centre.abs()).double().mean(1)

        if self.columns < MIN_SIGN_COLUMNS or self.half:
            return None
        medians = self.per_row(lambda w, d: (d * w.sign()).median(1).values)
        constant = rows & (self.per_row(agreement) >= 0.5)
        if int(constant.sum()) < MIN_ROWS or not float(medians[constant].median()) > 0:
            return None
        a = float(medians[constant].median())
        near = 2 * a if self.update.kind != "gradients" else 0.0  # entries below may have crossed zero

        def powers(weight: Tensor) -> Tensor:
            inverse = (near or 1.0) / weight.abs().clamp_min(near or 1e-300)
            return torch.stack([inverse**power for power in range(DEGREE + 1 if near else 1)], dim=-1)

        def fit(chosen: Bool[Tensor, "rows"]) -> Tensor:
            gram = right = torch.zeros((), dtype=torch.float64)
            for block, weight, movement in self:
                entries = chosen[block, None].to(weight.device) & (weight.abs() > near)
                basis = powers(weight[entries])
                gram = gram + (basis.T @ basis).cpu()
                right = right + (basis.T @ (movement * weight.sign())[entries]).cpu()
            return torch.linalg.lstsq(gram, right[:, None], driver="gelsd").solution[:, 0]

        coefficients = fit(constant)

        def deviation(weight: Tensor, movement: Tensor) -> Tensor:
            off = (movement * weight.sign() - powers(weight) @ coefficients.to(weight)).abs() / a
            far = weight.abs() > near
            row = torch.where(far, off, torch.nan).nanquantile(0.8, dim=1)
            return torch.where(far.sum(1) >= max(4, weight.shape[1] // 2), row, -1.0)

        deviations = self.per_row(deviation)
        for _ in range(TRIMS):
            kept = constant & (deviations >= 0)
            if int(kept.sum()) < MIN_ROWS:
                return None
            coefficients = fit(kept & (deviations <= deviations[kept].median()))
            deviations = self.per_row(deviation)
        judged = rows & (deviations >= 0)
        threshold = _threshold(deviations[judged], 1e-6, SIGN_PRECISION, MIN_ROWS)
        if threshold is None:
            return None
        used = judged & (deviations > threshold)
        explained = int((judged & ~used).sum())
        sizes = self.per_row(lambda w, _: w.abs().median(1).values)
        known = sizes[judged & ~used]  # the function a is not known for weights of another size
        used &= (sizes >= known.min() / WEIGHT_RANGE_FACTOR) & (sizes <= known.max() * WEIGHT_RANGE_FACTOR)

        def rest(weight: Tensor, movement: Tensor) -> tuple[Tensor, Tensor]:
            pull = (powers(weight) @ coefficients.to(weight)) * weight.sign()
            return movement - pull, torch.where(weight.abs() > near, threshold * a, torch.inf)

        if is_regularised(self, used, rest):
            return torch.zeros_like(used), OTHER_REGULARISER
        return used, f"L1, or L2 with Adam, explains the movement of {explained:,} other rows"


def _threshold(values: Float[Tensor, "rows"], least: float, most: float, fewest: int) -> float | None:
    """Return the unexplained movement from which on a row was looked up, or None if the rows do not fall apart.

    The rows up to some value x are explained. Nearly no rows may lie between x and ``MOVEMENT_GAP`` times x, and the
    rows above were looked up. The x with the widest gap above it is used.

    Args:
        values: the unexplained movement of each row.
        least: smaller values count as this one.
        most: the largest x, which is the largest movement that rounding explains.
        fewest: smallest number of explained rows.
    """
    ordered = values.clamp_min(least).sort().values
    below = int((ordered <= most).sum())
    if below < fewest:
        return None
    explained = torch.arange(below, device=ordered.device) + 1
    following = explained + (MAX_UNDECIDED_ROWS * explained).long()  # the first row that is not between, for each x
    padded = torch.cat([ordered, (MOVEMENT_GAP * ordered[-1:]).expand(below)])
    widths = padded[following] / ordered[:below]
    widths[: fewest - 1] = 0.0
    best = int(widths.argmax())
    return MOVEMENT_GAP * float(ordered[best]) if float(widths[best]) >= MOVEMENT_GAP else None
