"""The whole descent of the paper's search in one Triton kernel. ``reference`` defines what it computes.

A program holds a block of starts, each with its point q and its moments, and reads all of L once per step. The program
computes y = q Lᵀ, h'(y) and h'(y) L for one block of rows at a time, so that y never leaves the chip. This is attention
with K = V = L and a sign in place of the softmax.

Tensor cores multiply factors of 11 bits. *Rough* products use float16 factors: as accurate as TF32 at twice its rate.
For *fine* products, each number is the sum of two float16 numbers, high and low, with 22 bits together. A product is
then high·high + high·low + low·high, with the accuracy of float32. Signs are exact in float16, so for signs only L is
split.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from spearpp.linalg.kernels import padded
from spearpp.linalg.kernels.gated.blocks import adam_step
from spearpp.types import Float, Tensor

_EXPONENT = 14
"""Numbers are scaled so that the largest is near 2¹⁴ before they are split into two float16 numbers. Derived: float16
holds numbers below 2¹⁶, and low parts then stay far above its smallest number."""
_SCALE = tl.constexpr(2.0**_EXPONENT)
_SIGN_BIT = tl.constexpr(-(2**15))
"""The sign bit of a 16-bit integer."""
_ONE = tl.constexpr(0x3C00)
"""The bits of 1.0 in float16."""


@dataclass(frozen=True)
class Block:
    """How the kernel divides the work for one width."""

    starts: int
    """Number of starts per program."""
    rows: int
    """Number of rows of L per block."""
    warps: int
    """Number of warps per program."""
    stages: int = 3
    """Number of blocks of rows that are loaded ahead."""
    shared: bool = False
    """Whether q is passed through memory into shared memory, because registers cannot hold both of its parts."""


def block_for(width: int, fine: bool) -> Block:
    """Return the block for b, rounded up to a power of two, and for whether products are fine.

    Measured on an H200 (docs/lab/notebook.md, section "Speed of a step"): three stages are up to 1.4 times as fast as
    two. Compiled for sm_90, all blocks overlap their products. Only the last one, for fine products, spills a few
    registers in the loop over rows.
    """
    if width <= 64:
        return Block(64, 64, 4)
    return Block(128, 64, 8) if width <= 128 else Block(128, 32, 8, shared=fine)


@triton.jit
def _low(value, high):
    """Return what the float16 number ``high`` lacks of ``value``."""
    return (value - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _sign(values):
    """Return ±1 with the sign bit of float32 values. This takes half the instructions of a comparison."""
    upper = (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    return ((upper & _SIGN_BIT) | _ONE).to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["rows", "steps"])  # one compilation serves all problems of a width
def _descend(
    points, momentum, second, shared_high, shared_low, rows_high, rows_low, schedule, rows, steps, sharpness, unscale,
    first_beta: tl.constexpr, second_beta: tl.constexpr, epsilon: tl.constexpr, SMOOTH: tl.constexpr,
    FINE: tl.constexpr, SHARED: tl.constexpr, STARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * STARTS
    start, column = tl.arange(0, STARTS), tl.arange(0, WIDTH)
    at = start[:, None] * WIDTH + column
    at_block = tl.arange(0, ROWS)[:, None] * WIDTH + column
    point = tl.load(points + first * WIDTH + at)
    velocity = tl.load(momentum + first * WIDTH + at)
    square = tl.load(second + first + start)[:, None]
    for step in range(steps):
        scaled = point * _SCALE
        high = scaled.to(tl.float16)
        low = _low(scaled, high)
        if SHARED:
            tl.debug_barrier()
            tl.store(shared_high + first * WIDTH + at, high)
            tl.store(shared_low + first * WIDTH + at, low)
            tl.debug_barrier()
            high = tl.load(shared_high + first * WIDTH + at)
            low = tl.load(shared_low + first * WIDTH + at)
        gradient = tl.zeros((STARTS, WIDTH), dtype=tl.float32)
        for row in tl.range(0, rows, ROWS, num_stages=STAGES):
            block = tl.load(rows_high + row * WIDTH + at_block)
            image = tl.dot(high, block.T)
            if FINE:
                block_low = tl.load(rows_low + row * WIDTH + at_block)
                image = tl.dot(high, block_low.T, image)
                image = tl.dot(low, block.T, image)
            if SMOOTH:
                exact = 2.0 * tl.sigmoid(image * sharpness) - 1.0
                slope = exact.to(tl.float16)
            else:
                slope = _sign(image)
            gradient = tl.dot(slope, block, gradient)
            if FINE:
                gradient = tl.dot(slope, block_low, gradient)
                if SMOOTH:
                    gradient = tl.dot(_low(exact, slope), block, gradient)
        gradient *= unscale
        rate, correction = tl.load(schedule + 2 * step), tl.load(schedule + 2 * step + 1)
        point, velocity, square = adam_step(
            point, gradient, velocity, square, rate, correction, 1.0 - first_beta, 1.0 - second_beta, epsilon, AXIS=1
        )
    tl.store(points + first * WIDTH + at, point)
    tl.store(momentum + first * WIDTH + at, velocity)
    tl.store(second + first + start[:, None], square)


def descend(
    rows: Float[Tensor, "m b"],
    points: Float[Tensor, "starts b"],
    momentum: Float[Tensor, "starts b"],
    second: Float[Tensor, "starts 1"],
    schedule: Float[Tensor, "steps 2"],
    width: float,
    betas: tuple[float, float],
    epsilon: float,
    fine: bool,
    block: Block | None = None,
) -> None:
    """Compute ``reference.descend`` in float32. A given ``block`` replaces that of ``block_for``."""
    padded_width = padded(rows.shape[1])
    block = block or block_for(padded_width, fine)
    scale = 2.0 ** (_EXPONENT - math.frexp(float(rows.abs().max()))[1])
    padded_rows = triton.cdiv(len(rows), block.rows) * block.rows
    scaled = _padded(rows * scale, padded_rows, padded_width)
    high = scaled.half()
    low = (scaled - high).half()
    programs = triton.cdiv(len(points), block.starts)
    padded_starts = programs * block.starts
    state = [
        _padded(values, padded_starts, columns)
        for values, columns in ((points, padded_width), (momentum, padded_width), (second, 1))
    ]
    shared = points.new_empty(2, *(state[0].shape if block.shared else (0, 0)), dtype=torch.float16)
    sharpness = 2 / (width * scale * 2.0**_EXPONENT) if width else 0.0
    _descend[(programs,)](
        *state, *shared, high, low, schedule, padded_rows, len(schedule), sharpness, 1 / scale, *betas, epsilon,
        SMOOTH=width > 0, FINE=fine, SHARED=block.shared, STARTS=block.starts, ROWS=block.rows, WIDTH=padded_width,
        STAGES=block.stages, num_warps=block.warps,
    )  # fmt: skip
    for target, result in zip((points, momentum, second), state, strict=True):
        target.copy_(result[: target.shape[0], : target.shape[1]])


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    """Pad a matrix with zeros below and to the right. ``descend`` discards the starts that the padding adds."""
    margins = 0, columns - values.shape[1], 0, rows - values.shape[0]
    return torch.nn.functional.pad(values, margins).contiguous()
