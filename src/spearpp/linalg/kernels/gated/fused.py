"""The row-wise steps of the gated search in Triton. ``reference`` defines what every step computes.

One program handles one start, and reads and writes its row once. The decorator ``no_type_check`` keeps the type checker
of the tests away from the kernels, because Triton can only compile the original function.
"""

from typing import Any, no_type_check

import triton
import triton.language as tl

from spearpp.linalg.kernels.gated.blocks import adam_step
from spearpp.linalg.kernels.gated.reference import TINY as _TINY

TINY = tl.constexpr(_TINY)


def _rowwise(kernel: Any) -> Any:
    """Turn a kernel into the function of ``reference`` that has its name. The first tensor has rows and columns."""
    compiled = triton.jit(do_not_specialize=["columns"])(kernel)  # one compilation serves all sizes

    def launch(*arguments: Any) -> None:
        """Launch one program for each row. Every thread holds about eight entries."""
        rows, columns = arguments[0].shape
        block = triton.next_power_of_2(columns)
        compiled[(rows,)](*arguments, columns, BLOCK=block, num_warps=min(16, max(1, block // 256)))

    return launch


@_rowwise
@no_type_check
def gate(inactivity, weight, total, columns, BLOCK: tl.constexpr):
    """Compute ``reference.gate`` for one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    inactive = tl.maximum(-tl.load(inactivity + at, mask=inside, other=0.0), 0.0)
    square = inactive * inactive
    sum_of_squares = tl.maximum(tl.sum(square, axis=0), TINY)
    tl.store(inactivity + at, inactive, mask=inside)
    tl.store(weight + at, square * (columns / sum_of_squares), mask=inside)
    tl.store(total + row, sum_of_squares)


@_rowwise
@no_type_check
def begin(right, applied, residual, search, size, columns, BLOCK: tl.constexpr):
    """Compute ``reference.begin`` for one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    difference = tl.load(right + at, mask=inside, other=0.0) - tl.load(applied + at, mask=inside, other=0.0)
    tl.store(residual + at, difference, mask=inside)
    tl.store(search + at, difference, mask=inside)
    tl.store(size + row, tl.sum(difference * difference, axis=0))


@_rowwise
@no_type_check
def advance(search, applied, solution, residual, size, columns, BLOCK: tl.constexpr):
    """Compute ``reference.advance`` for one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    vector = tl.load(search + at, mask=inside, other=0.0)
    product = tl.load(applied + at, mask=inside, other=0.0)
    before = tl.load(size + row)
    step = before / tl.maximum(tl.sum(vector * product, axis=0), TINY)
    tl.store(solution + at, tl.load(solution + at, mask=inside, other=0.0) + step * vector, mask=inside)
    remainder = tl.load(residual + at, mask=inside, other=0.0) - step * product
    after = tl.sum(remainder * remainder, axis=0)
    tl.store(residual + at, remainder, mask=inside)
    tl.store(search + at, remainder + (after / tl.maximum(before, TINY)) * vector, mask=inside)
    tl.store(size + row, after)


@_rowwise
@no_type_check
def direct(points, solution, value, direction, columns, BLOCK: tl.constexpr):
    """Compute ``reference.direct`` for one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    unscaled = tl.load(solution + at, mask=inside, other=0.0)
    minimum = 1.0 / tl.maximum(tl.sum(tl.load(points + at, mask=inside, other=0.0) * unscaled, axis=0), TINY)
    tl.store(value + row, minimum)
    tl.store(direction + at, minimum * unscaled, mask=inside)


@_rowwise
@no_type_check
def pull(inactivity, weight, total, image, columns, BLOCK: tl.constexpr):
    """Compute ``reference.pull`` for one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    entry = tl.load(image + at, mask=inside, other=0.0)
    square = entry * entry
    mean = tl.sum(tl.load(weight + at, mask=inside, other=0.0) * square, axis=0) / columns
    inactive = tl.load(inactivity + at, mask=inside, other=0.0)
    tl.store(image + at, inactive * (square - mean) * (-2.0 * columns / tl.load(total + row)), mask=inside)


@_rowwise
@no_type_check
def move(
    points, through_gates, through_basis, value, momentum, second, schedule, counter, least: tl.constexpr, columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``reference.move`` for one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * columns + column, column < columns
    point = tl.load(points + at, mask=inside, other=0.0)
    gradient = tl.load(through_gates + at, mask=inside, other=0.0) / tl.load(value + row)
    gradient -= 2.0 * tl.load(through_basis + at, mask=inside, other=0.0)
    now = schedule + 4 * tl.load(counter)
    velocity, at_second = tl.load(momentum + at, mask=inside, other=0.0), second + row + tl.arange(0, 1)
    point, velocity, square = adam_step(
        point, gradient, velocity, tl.load(at_second), tl.load(now), tl.load(now + 1), tl.load(now + 2),
        tl.load(now + 3), least, AXIS=0,
    )  # fmt: skip
    tl.store(points + at, point, mask=inside)
    tl.store(momentum + at, velocity, mask=inside)
    tl.store(at_second, square)
