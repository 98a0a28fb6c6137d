"""The row-wise steps in Triton: one program a start, its row read and written once. ``reference`` says what they do.

Kernels are not to be type-checked when tests wrap every function: Triton needs them as they are.
"""

from typing import Any, no_type_check

import triton
import triton.language as tl

from spearpp.linalg.kernels.gated.reference import TINY as _TINY
from spearpp.types import Tensor

TINY = tl.constexpr(_TINY)
_rowwise = triton.jit(do_not_specialize=["columns"])  # rounds shrink the rows: one compilation is for all of a size


def _run(kernel: Any, columns: int, rows: int, *arguments: Any) -> None:
    block = triton.next_power_of_2(columns)
    kernel[(rows,)](*arguments, columns, BLOCK=block, num_warps=min(16, max(1, block // 256)))


@_rowwise
@no_type_check
def _gate(silence, weight, total, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    quiet = tl.maximum(-tl.load(silence + at, mask=inside, other=0.0), 0.0)
    square = quiet * quiet
    whole = tl.maximum(tl.sum(square, axis=0), TINY)
    tl.store(silence + at, quiet, mask=inside)
    tl.store(weight + at, square * (columns / whole), mask=inside)
    tl.store(total + row, whole)


def gate(silence: Tensor, weight: Tensor, total: Tensor) -> None:
    """``reference.gate``."""
    _run(_gate, silence.shape[1], silence.shape[0], silence, weight, total)


@_rowwise
@no_type_check
def _begin(right, applied, residual, search, size, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    rest = tl.load(right + at, mask=inside, other=0.0) - tl.load(applied + at, mask=inside, other=0.0)
    tl.store(residual + at, rest, mask=inside)
    tl.store(search + at, rest, mask=inside)
    tl.store(size + row, tl.sum(rest * rest, axis=0))


def begin(right: Tensor, applied: Tensor, residual: Tensor, search: Tensor, size: Tensor) -> None:
    """``reference.begin``."""
    _run(_begin, right.shape[1], right.shape[0], right, applied, residual, search, size)


@_rowwise
@no_type_check
def _advance(search, applied, solution, residual, size, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    along = tl.load(search + at, mask=inside, other=0.0)
    image = tl.load(applied + at, mask=inside, other=0.0)
    before = tl.load(size + row)
    step = before / tl.maximum(tl.sum(along * image, axis=0), TINY)
    tl.store(solution + at, tl.load(solution + at, mask=inside, other=0.0) + step * along, mask=inside)
    rest = tl.load(residual + at, mask=inside, other=0.0) - step * image
    after = tl.sum(rest * rest, axis=0)
    tl.store(residual + at, rest, mask=inside)
    tl.store(search + at, rest + (after / tl.maximum(before, TINY)) * along, mask=inside)
    tl.store(size + row, after)


def advance(search: Tensor, applied: Tensor, solution: Tensor, residual: Tensor, size: Tensor) -> None:
    """``reference.advance``."""
    _run(_advance, search.shape[1], search.shape[0], search, applied, solution, residual, size)


@_rowwise
@no_type_check
def _direct(points, solution, value, direction, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    solved = tl.load(solution + at, mask=inside, other=0.0)
    least = 1.0 / tl.maximum(tl.sum(tl.load(points + at, mask=inside, other=0.0) * solved, axis=0), TINY)
    tl.store(value + row, least)
    tl.store(direction + at, least * solved, mask=inside)


def direct(points: Tensor, solution: Tensor, value: Tensor, direction: Tensor) -> None:
    """``reference.direct``."""
    _run(_direct, points.shape[1], points.shape[0], points, solution, value, direction)


@_rowwise
@no_type_check
def _pull(silence, weight, total, image, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    entry = tl.load(image + at, mask=inside, other=0.0)
    square = entry * entry
    mean = tl.sum(tl.load(weight + at, mask=inside, other=0.0) * square, axis=0) / columns
    quiet = tl.load(silence + at, mask=inside, other=0.0)
    tl.store(image + at, quiet * (square - mean) * (-2.0 * columns / tl.load(total + row)), mask=inside)


def pull(silence: Tensor, weight: Tensor, total: Tensor, image: Tensor) -> None:
    """``reference.pull``."""
    _run(_pull, image.shape[1], image.shape[0], silence, weight, total, image)


@_rowwise
@no_type_check
def _move(
    points, through_gates, through_basis, value, momentum, second, schedule, counter, least: tl.constexpr, columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    point = tl.load(points + at, mask=inside, other=0.0)
    gradient = tl.load(through_gates + at, mask=inside, other=0.0) / tl.load(value + row)
    gradient -= 2.0 * tl.load(through_basis + at, mask=inside, other=0.0)
    gradient -= tl.sum(point * gradient, axis=0) * point
    now = schedule + 4 * tl.load(counter)
    drift, spread = tl.load(momentum + at, mask=inside, other=0.0), tl.load(second + row)
    drift += (gradient - drift) * tl.load(now + 2)
    spread += (tl.sum(gradient * gradient, axis=0) - spread) * tl.load(now + 3)
    point -= drift * (tl.load(now) / (tl.sqrt(spread * tl.load(now + 1)) + least))
    point /= tl.sqrt(tl.sum(point * point, axis=0))
    drift -= tl.sum(point * drift, axis=0) * point
    tl.store(points + at, point, mask=inside)
    tl.store(momentum + at, drift, mask=inside)
    tl.store(second + row, spread)


def move(
    points: Tensor,
    through_gates: Tensor,
    through_basis: Tensor,
    value: Tensor,
    momentum: Tensor,
    second: Tensor,
    schedule: Tensor,
    counter: Tensor,
    least: float,
) -> None:
    """``reference.move``."""
    rows, columns = points.shape
    moved = points, through_gates, through_basis, value, momentum, second, schedule, counter
    _run(_move, columns, rows, *moved, least)
