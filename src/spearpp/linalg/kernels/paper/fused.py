"""The whole descent in one Triton kernel; ``reference`` says what it does.

A program holds a block of starts, q and its moments, and streams L past them once a step: y = q Lᵀ, h'(y) and
h'(y) L for some rows at a time, so that y never leaves the chip. It is attention with K = V = L and a sign in place
of the softmax.

Tensor cores multiply 11 bits by 11. *Rough* products take them as they are, in float16: as good as TF32, at twice its
rate. For *fine* ones a number is the sum of two float16, high and low, of 22 bits together, and a product is
high·high + high·low + low·high, the accuracy of float32. Signs have one bit: L is all there is to cut for them.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from spearpp.types import Float, Tensor

_EXPONENT = 14
"""The largest entry becomes 2¹⁴ before it is cut in two: float16 holds it, and low parts are far from its smallest."""
_SCALE = tl.constexpr(2.0**_EXPONENT)
_SIGN_BIT = tl.constexpr(-(2**15))
_ONE = tl.constexpr(0x3C00)


@dataclass(frozen=True)
class Block:
    """How the work of one width is cut."""

    starts: int
    """A program's."""
    rows: int
    """Of L at a time."""
    warps: int
    stages: int = 2
    """Blocks of rows in flight."""
    shared: bool = False
    """Whether q goes through memory into shared memory, where registers cannot hold both its parts."""


BLOCKS = {
    (16, False): Block(64, 64, 4, 3),
    (16, True): Block(64, 64, 4, 3),
    (32, False): Block(64, 64, 4, 3),
    (32, True): Block(64, 64, 4, 3),
    (64, False): Block(64, 64, 4, 3),
    (64, True): Block(64, 64, 4, 3),
    (128, False): Block(128, 64, 8, 3),
    (128, True): Block(128, 64, 8, 3),
    (256, False): Block(128, 32, 8, 3),
    (256, True): Block(128, 32, 8, 3, shared=True),
}
"""By b, rounded up to a power of two, and whether products are fine.

Compiled for sm_90, all keep their products in flight, and only the last spills a few registers in the loop over rows.
"""


@triton.jit
def _low(whole, high):
    return (whole - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _sign(values):
    """±1 with the sign bit of float32 values; half the instructions of comparing."""
    upper = (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    return ((upper & _SIGN_BIT) | _ONE).to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["rows", "steps"])  # one compilation is for all of a width
def _descend(
    points, momentum, second, shared_high, shared_low, rows_high, rows_low, schedule, rows, steps, sharpness, unscale,
    first_beta: tl.constexpr, second_beta: tl.constexpr, epsilon: tl.constexpr, SMOOTH: tl.constexpr,
    FINE: tl.constexpr, SHARED: tl.constexpr, STARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * STARTS
    start, column = tl.arange(0, STARTS), tl.arange(0, WIDTH)
    at = start[:, None] * WIDTH + column
    some = tl.arange(0, ROWS)[:, None] * WIDTH + column
    point = tl.load(points + first * WIDTH + at)
    drift = tl.load(momentum + first * WIDTH + at)
    spread = tl.load(second + first + start)
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
            block = tl.load(rows_high + row * WIDTH + some)
            image = tl.dot(high, block.T)
            if FINE:
                rest = tl.load(rows_low + row * WIDTH + some)
                image = tl.dot(high, rest.T, image)
                image = tl.dot(low, block.T, image)
            if SMOOTH:
                whole = 2.0 * tl.sigmoid(image * sharpness) - 1.0
                slope = whole.to(tl.float16)
            else:
                slope = _sign(image)
            gradient = tl.dot(slope, block, gradient)
            if FINE:
                gradient = tl.dot(slope, rest, gradient)
                if SMOOTH:
                    gradient = tl.dot(_low(whole, slope), block, gradient)
        gradient *= unscale
        gradient -= tl.sum(point * gradient, axis=1)[:, None] * point
        drift += (gradient - drift) * (1.0 - first_beta)
        spread = spread * second_beta + tl.sum(gradient * gradient, axis=1) * (1.0 - second_beta)
        rate, correction = tl.load(schedule + 2 * step), tl.load(schedule + 2 * step + 1)
        point -= drift * (rate / (tl.sqrt(spread * correction) + epsilon))[:, None]
        point /= tl.sqrt(tl.sum(point * point, axis=1))[:, None]
        drift -= tl.sum(point * drift, axis=1)[:, None] * point
    tl.store(points + first * WIDTH + at, point)
    tl.store(momentum + first * WIDTH + at, drift)
    tl.store(second + first + start, spread)


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
    """``reference.descend``, all in float32; ``block`` overrules the table."""
    wide = max(16, triton.next_power_of_2(rows.shape[1]))
    block = block or BLOCKS[wide, fine]
    scale = 2.0 ** (_EXPONENT - math.frexp(float(rows.abs().max()))[1])
    tall = triton.cdiv(len(rows), block.rows) * block.rows
    scaled = _padded(rows * scale, tall, wide)
    high = scaled.half()
    low = (scaled - high).half()
    programs = triton.cdiv(len(points), block.starts)
    many = programs * block.starts
    held = _padded(points, many, wide), _padded(momentum, many, wide), _padded(second, many, 1)
    shared = points.new_empty(2, *(held[0].shape if block.shared else (0, 0)), dtype=torch.float16)
    sharpness = 2 / (width * scale * 2.0**_EXPONENT) if width else 0.0
    _descend[(programs,)](
        *held, shared[0], shared[1], high, low, schedule, tall, len(schedule), sharpness, 1 / scale, *betas, epsilon,
        SMOOTH=width > 0, FINE=fine, SHARED=block.shared, STARTS=block.starts, ROWS=block.rows, WIDTH=wide,
        STAGES=block.stages, num_warps=block.warps,
    )  # fmt: skip
    for mine, theirs in zip((points, momentum, second), held, strict=True):
        mine.copy_(theirs[: mine.shape[0], : mine.shape[1]])


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    """With zeros below and to the right. Whatever becomes of the starts that this adds is cut off again."""
    margins = 0, columns - values.shape[1], 0, rows - values.shape[0]
    return torch.nn.functional.pad(values, margins).contiguous()
