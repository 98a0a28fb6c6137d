"""Triton functions that several kernels share: a step of Riemannian Adam, and products with blocks of rows.

The products multiply a few vectors with a block of many rows. Either all warps share a block, or ``GROUPS`` groups of
warps split its rows. In the second case each group holds its own rows and every vector, and the results of the groups
are added at the end.

The decorator ``no_type_check`` keeps the type checker of the tests away from these functions, because Triton can only
compile the original function.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def adam_step(
    point, gradient, momentum, second, rate, correction, first_weight, second_weight, epsilon, AXIS: tl.constexpr
):  # fmt: skip
    """``sphere.adam_step`` for vectors along ``AXIS``. Returns the new point, momentum and second moment.

    The second moment keeps ``AXIS`` with size one.
    """
    gradient -= tl.sum(point * gradient, axis=AXIS, keep_dims=True) * point
    momentum += (gradient - momentum) * first_weight
    second += (tl.sum(gradient * gradient, axis=AXIS, keep_dims=True) - second) * second_weight
    point -= momentum * (rate / (tl.sqrt(second * correction) + epsilon))
    point /= tl.sqrt(tl.sum(point * point, axis=AXIS, keep_dims=True))
    momentum -= tl.sum(point * momentum, axis=AXIS, keep_dims=True) * point
    return point, momentum, second


@triton.jit
@no_type_check
def load_block(matrix, index, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Load one block of rows: [BLOCK, WIDTH], or [GROUPS, BLOCK / GROUPS, WIDTH] if groups split the rows."""
    column = tl.arange(0, WIDTH)
    if GROUPS == 1:
        row = index * BLOCK + tl.arange(0, BLOCK)
        return tl.load(matrix + row[:, None] * WIDTH + column[None, :])
    else:
        EACH: tl.constexpr = BLOCK // GROUPS
        row = index * BLOCK + tl.arange(0, GROUPS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        return tl.load(matrix + row[:, :, None] * WIDTH + column[None, None, :])


@triton.jit
@no_type_check
def scratch_pointers(scratch, index, STARTS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Return pointers to the scratch memory of one block of neurons, in the shape that ``times_rows`` returns."""
    base, start = scratch + index * (STARTS * BLOCK), tl.arange(0, STARTS)
    if GROUPS == 1:
        return base + start[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    else:
        EACH: tl.constexpr = BLOCK // GROUPS
        group, neuron = tl.arange(0, GROUPS), tl.arange(0, EACH)
        return base + group[:, None, None] * (STARTS * EACH) + start[None, :, None] * EACH + neuron[None, None, :]


@triton.jit
@no_type_check
def times_rows(vectors, block, PRECISION: tl.constexpr, GROUPS: tl.constexpr):
    """Multiply every vector with every row of the block: [STARTS, BLOCK], or [GROUPS, STARTS, BLOCK / GROUPS]."""
    if GROUPS == 1:
        return tl.dot(vectors, tl.trans(block), input_precision=PRECISION)
    else:
        same = tl.broadcast_to(vectors[None, :, :], (GROUPS, vectors.shape[0], vectors.shape[1]))
        return tl.dot(same, tl.permute(block, (0, 2, 1)), input_precision=PRECISION)


@triton.jit
@no_type_check
def zero_sums(STARTS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Return zeros to which products are added: one matrix, or one matrix for each group."""
    if GROUPS == 1:
        return tl.zeros((STARTS, WIDTH), tl.float32)
    else:
        return tl.zeros((GROUPS, STARTS, WIDTH), tl.float32)


@triton.jit
@no_type_check
def add_groups(sums, GROUPS: tl.constexpr):
    """Add the sums of all groups."""
    if GROUPS == 1:
        return sums
    else:
        return tl.sum(sums, axis=0)


@triton.jit
@no_type_check
def times_matrix(vectors, matrix, PRECISION: tl.constexpr, GROUPS: tl.constexpr):
    """Multiply vectors with a matrix that is not split.

    Every group computes the same product. The mean over the groups is exact because all groups have equal numbers and
    their count is a power of two.
    """
    if GROUPS == 1:
        return tl.dot(vectors, matrix, input_precision=PRECISION)
    else:
        same = tl.broadcast_to(vectors[None, :, :], (GROUPS, vectors.shape[0], vectors.shape[1]))
        other = tl.broadcast_to(matrix[None, :, :], (GROUPS, matrix.shape[0], matrix.shape[1]))
        return tl.sum(tl.dot(same, other, input_precision=PRECISION), axis=0) / GROUPS


@triton.jit
@no_type_check
def sum_over_neurons(entries, GROUPS: tl.constexpr):
    """Add the entries of all neurons of a block, for each start."""
    if GROUPS == 1:
        return tl.sum(entries, axis=1)
    else:
        return tl.sum(tl.sum(entries, axis=2), axis=0)


@triton.jit
@no_type_check
def per_start(numbers, GROUPS: tl.constexpr):
    """Reshape one number for each start so that it broadcasts over the neurons of a block."""
    if GROUPS == 1:
        return numbers[:, None]
    else:
        return numbers[None, :, None]
