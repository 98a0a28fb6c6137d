"""Products of a few vectors with blocks of many rows, in Triton: what ``persistent`` is made of.

A block is shared by all warps, or parted among groups of them (``GROUPS``): then each has rows of its own and every
vector, and one sum over the groups is left.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def block_of(matrix, at, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Some rows, [BLOCK, WIDTH], or parted among the groups, [GROUPS, BLOCK / GROUPS, WIDTH]."""
    column = tl.arange(0, WIDTH)
    if GROUPS == 1:
        row = at * BLOCK + tl.arange(0, BLOCK)
        return tl.load(matrix + row[:, None] * WIDTH + column[None, :])
    else:
        EACH: tl.constexpr = BLOCK // GROUPS
        row = at * BLOCK + tl.arange(0, GROUPS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        return tl.load(matrix + row[:, :, None] * WIDTH + column[None, None, :])


@triton.jit
@no_type_check
def place_of(scratch, at, STARTS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Where the scratch memory has what belongs to a block of neurons, in the shape of ``onto``."""
    base, start = scratch + at * (STARTS * BLOCK), tl.arange(0, STARTS)
    if GROUPS == 1:
        return base + start[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    else:
        EACH: tl.constexpr = BLOCK // GROUPS
        group, neuron = tl.arange(0, GROUPS), tl.arange(0, EACH)
        return base + group[:, None, None] * (STARTS * EACH) + start[None, :, None] * EACH + neuron[None, None, :]


@triton.jit
@no_type_check
def onto(vectors, block, PRECISION: tl.constexpr, GROUPS: tl.constexpr):
    """Every vector times every row of the block: [STARTS, BLOCK], or [GROUPS, STARTS, BLOCK / GROUPS]."""
    if GROUPS == 1:
        return tl.dot(vectors, tl.trans(block), input_precision=PRECISION)
    else:
        same = tl.broadcast_to(vectors[None, :, :], (GROUPS, vectors.shape[0], vectors.shape[1]))
        return tl.dot(same, tl.permute(block, (0, 2, 1)), input_precision=PRECISION)


@triton.jit
@no_type_check
def nothing(STARTS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Sums to begin with; a group has its own."""
    if GROUPS == 1:
        return tl.zeros((STARTS, WIDTH), tl.float32)
    else:
        return tl.zeros((GROUPS, STARTS, WIDTH), tl.float32)


@triton.jit
@no_type_check
def together(sums, GROUPS: tl.constexpr):
    """Sums of rows, of all groups."""
    if GROUPS == 1:
        return sums
    else:
        return tl.sum(sums, axis=0)


@triton.jit
@no_type_check
def along(vectors, matrix, PRECISION: tl.constexpr, GROUPS: tl.constexpr):
    """Vectors times a matrix that is not parted: every group does the same, and the mean of equal numbers is exact."""
    if GROUPS == 1:
        return tl.dot(vectors, matrix, input_precision=PRECISION)
    else:
        same = tl.broadcast_to(vectors[None, :, :], (GROUPS, vectors.shape[0], vectors.shape[1]))
        other = tl.broadcast_to(matrix[None, :, :], (GROUPS, matrix.shape[0], matrix.shape[1]))
        return tl.sum(tl.dot(same, other, input_precision=PRECISION), axis=0) / GROUPS


@triton.jit
@no_type_check
def over_neurons(entries, GROUPS: tl.constexpr):
    """Over the neurons of a block."""
    if GROUPS == 1:
        return tl.sum(entries, axis=1)
    else:
        return tl.sum(tl.sum(entries, axis=2), axis=0)


@triton.jit
@no_type_check
def beside(numbers, GROUPS: tl.constexpr):
    """A number for every start, beside its neurons."""
    if GROUPS == 1:
        return numbers[:, None]
    else:
        return numbers[None, :, None]
