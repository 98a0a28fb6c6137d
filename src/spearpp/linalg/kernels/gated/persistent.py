"""The whole gated descent in one Triton kernel: a program takes a few starts from their first step to their last.

Small problems spend their time between kernels, not in them. Starts do not depend on each other, so nothing has to
leave the program that has them: points, momentum and the vectors of conjugate gradients stay in registers. Where all
ℓ_k and a_k fit beside them, they are read once (``Plan.whole``); else they come by blocks in every product, and what
silences a neuron is kept in memory meanwhile. Many updates are only more programs.

The mathematics is that of the search's objective and of ``reference``. Every sum has its order: one input, one result.
Kernels are not to be type-checked when tests wrap every function: Triton needs them as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from spearpp.linalg.kernels.gated.blocks import along, beside, block_of, nothing, onto, over_neurons, place_of, together
from spearpp.linalg.kernels.gated.reference import TINY as _TINY
from spearpp.types import Float, Tensor

TINY = tl.constexpr(_TINY)
NARROWEST = 16
"""Columns of what tensor cores multiply, at least."""
SHARED = 128 * 2**10
"""Bytes of ℓ_k and a_k, each in two orders, up to which a program keeps all of them in shared memory."""

_refused: set[tuple["Plan", int, bool, torch.device]] = set()


@dataclass(frozen=True)
class Plan:
    """How the work is cut."""

    starts: int
    """Starts a program."""
    block: int
    """Neurons at a time."""
    warps: int
    parted: bool
    """Whether each warp has neurons of its own, and all have every start's vectors; else all warps share both."""
    whole: bool
    """Whether one block is all."""
    stages: int = 3
    """Blocks under way at a time, where one product reads them."""
    ahead: bool = False
    """Whether the next ℓ_k wait in registers: two products read them, and Triton does not fetch such blocks ahead."""

    @property
    def groups(self) -> int:
        """Parts of a block that different warps have."""
        return self.warps if self.parted else 1


def plan(m: int, width: int, exact: bool) -> Plan:
    """What suits a problem of so many neurons and, padded, columns. Vectors of 32 columns fit every warp."""
    if width > 32:
        return Plan(16, 32 if width > 64 and exact else 64, 8, parted=False, whole=False, ahead=True)
    all_of_them = max(128, triton.next_power_of_2(m))
    whole = all_of_them * width * (32 if exact else 16) <= SHARED  # products of three parts have each factor twice
    return Plan(16, all_of_them if whole else 128, 4 if whole else 8, parted=True, whole=whole)


def padded(columns: int) -> int:
    """The power of two that holds so many columns."""
    return max(NARROWEST, triton.next_power_of_2(columns))


def descend(
    rows: Float[Tensor, "updates m b"],
    gates: Float[Tensor, "updates m d"],
    basis: Float[Tensor, "updates b d"],
    points: Float[Tensor, "updates starts d"],
    counts: Sequence[int],
    schedule: Float[Tensor, "evaluations 4"],
    *,
    iterations: int,
    epsilon: float,
    least: float,
    exact: bool,
    cut: Plan | None = None,
) -> Float[Tensor, "updates starts b"] | None:
    """Move the points, contiguous and in float32, and return their directions.

    ``counts`` says how many neurons each update has; its further rows are zero. ``schedule`` and ``least`` are those
    of ``reference.move``. Unless ``exact``, products round their factors to ten bits (TF32). None, and
    nothing moved, where the GPU has too little shared memory for it or Triton cannot compile it; with a ``cut`` that
    is an error.
    """
    (updates, m, b), (starts, d) = rows.shape, points.shape[1:]
    width = padded(max(b, d))
    chosen = cut or plan(m, width, exact)
    blocks, programs = -(-m // chosen.block), -(-starts // chosen.starts)
    asked = chosen, width, exact, points.device
    if cut is None and asked in _refused:
        return None
    directions = points.new_empty(updates, starts, b)
    kept = 0 if chosen.whole else updates * programs * blocks * 2 * chosen.starts * chosen.block
    arguments = (
        _padded(rows, blocks * chosen.block, width),
        _padded(gates, blocks * chosen.block, width),
        _padded(basis, width, width),
        points,
        directions,
        torch.tensor(counts, dtype=torch.float32).to(points.device, non_blocking=True),
        schedule,
        points.new_empty(max(kept, 1)),
    )
    sizes = blocks, b, d, starts, len(schedule), iterations
    try:
        _descend[(updates, programs)](
            *arguments,
            *sizes,
            epsilon,
            least,
            PRECISION="tf32x3" if exact else "tf32",
            STARTS=chosen.starts,
            BLOCK=chosen.block,
            WIDTH=width,
            GROUPS=chosen.groups,
            WHOLE=chosen.whole,
            AHEAD=chosen.ahead,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
    except (TritonError, RuntimeError):  # Triton raises both, before anything runs
        if cut is not None:
            raise
        _refused.add(asked)
        return None
    return directions


def _padded(matrices: Float[Tensor, "updates r c"], rows: int, columns: int) -> Float[Tensor, "updates rows columns"]:
    """With zeros, so that blocks need no masks."""
    whole = matrices.new_zeros(len(matrices), rows, columns)
    whole[:, : matrices.shape[1], : matrices.shape[2]] = matrices
    return whole


@triton.jit(do_not_specialize=["blocks", "b", "d", "starts", "evaluations", "iterations"])
@no_type_check
def _descend(
    rows, gates, basis, points, directions, counts, schedule, scratch, blocks, b, d, starts, evaluations, iterations,
    epsilon, least: tl.constexpr, PRECISION: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = BLOCK // GROUPS
    update = tl.program_id(0).to(tl.int64)
    start, column = tl.program_id(1) * STARTS + tl.arange(0, STARTS), tl.arange(0, WIDTH)
    row = update * starts + tl.minimum(start, starts - 1)  # what is too many does as the last start does
    at_points = points + row[:, None] * d + column[None, :]
    ours = (start < starts)[:, None] & (column < d)[None, :]
    count = tl.load(counts + update)
    rows += update * blocks * (BLOCK * WIDTH)
    gates += update * blocks * (BLOCK * WIDTH)
    at_basis = basis + update * (WIDTH * WIDTH) + column[:, None] * WIDTH + column[None, :]
    if WHOLE:
        all_rows, all_gates = block_of(rows, 0, BLOCK, WIDTH, GROUPS), block_of(gates, 0, BLOCK, WIDTH, GROUPS)
    else:
        program = update * tl.num_programs(1) + tl.program_id(1)
        silences = scratch + program * blocks * (2 * STARTS * BLOCK)
        images = silences + blocks * (STARTS * BLOCK)

    point = tl.load(at_points, mask=(column < d)[None, :], other=0.0)
    momentum = tl.zeros((STARTS, WIDTH), tl.float32)
    second = tl.zeros((STARTS,), tl.float32)
    solution = along(point, tl.trans(tl.load(at_basis)), PRECISION, GROUPS)
    for taken in range(evaluations):
        # which neurons are silent, and how much so
        if WHOLE:
            silence = tl.maximum(-onto(point, all_gates, PRECISION, GROUPS), 0.0)
            total = over_neurons(silence * silence, GROUPS)
        else:
            squares = nothing(STARTS, EACH, GROUPS)
            tl.debug_barrier()  # the last step has read what it kept
            for at in range(blocks):
                silence = tl.maximum(-onto(point, block_of(gates, at, BLOCK, WIDTH, GROUPS), PRECISION, GROUPS), 0.0)
                tl.store(place_of(silences, at, STARTS, BLOCK, GROUPS), silence)
                squares += silence * silence
            total = over_neurons(squares, GROUPS)
            tl.debug_barrier()
        total = tl.maximum(total, TINY)
        scale = count / total

        # M u = p by conjugate gradients; the first time round p - M u becomes the residual
        vectors = tl.load(at_basis)
        p = along(point, tl.trans(vectors), PRECISION, GROUPS)
        residual, search, solution = p, solution, tl.zeros((STARTS, WIDTH), tl.float32)
        size = tl.zeros((STARTS,), tl.float32)
        for iteration in range(iterations + 1):
            sums = nothing(STARTS, WIDTH, GROUPS)
            if WHOLE:
                image = onto(search, all_rows, PRECISION, GROUPS)
                sums = tl.dot(image * silence * silence, all_rows, sums, input_precision=PRECISION)
            else:
                if AHEAD:
                    following = block_of(rows, 0, BLOCK, WIDTH, GROUPS)
                for at in range(blocks):
                    if AHEAD:
                        block = following
                        following = block_of(rows, tl.minimum(at + 1, blocks - 1), BLOCK, WIDTH, GROUPS)
                    else:
                        block = block_of(rows, at, BLOCK, WIDTH, GROUPS)
                    silence = tl.load(place_of(silences, at, STARTS, BLOCK, GROUPS))
                    image = onto(search, block, PRECISION, GROUPS)
                    sums = tl.dot(image * silence * silence, block, sums, input_precision=PRECISION)
            applied = epsilon * search + scale[:, None] * together(sums, GROUPS)
            step = tl.where(iteration == 0, 1.0, size / tl.maximum(tl.sum(search * applied, axis=1), TINY))
            solution += step[:, None] * search
            residual -= step[:, None] * applied
            after = tl.sum(residual * residual, axis=1)
            search = residual + tl.where(iteration == 0, 0.0, after / tl.maximum(size, TINY))[:, None] * search
            size = after
        value = 1.0 / tl.maximum(tl.sum(p * solution, axis=1), TINY)
        direction = value[:, None] * solution

        # what each a_k has in the gradient of f
        sums = nothing(STARTS, WIDTH, GROUPS)
        factor = beside(-2.0 * scale, GROUPS)
        if WHOLE:
            image = onto(direction, all_rows, PRECISION, GROUPS)
            square = image * image
            mean = beside(over_neurons(silence * silence * square, GROUPS) / total, GROUPS)
            sums = tl.dot(silence * (square - mean) * factor, all_gates, sums, input_precision=PRECISION)
        else:
            squares = nothing(STARTS, EACH, GROUPS)
            for at in range(blocks):
                image = onto(direction, block_of(rows, at, BLOCK, WIDTH, GROUPS), PRECISION, GROUPS)
                square = image * image
                silence = tl.load(place_of(silences, at, STARTS, BLOCK, GROUPS))
                tl.store(place_of(images, at, STARTS, BLOCK, GROUPS), square)
                squares += silence * silence * square
            mean = beside(over_neurons(squares, GROUPS) / total, GROUPS)
            tl.debug_barrier()
            for at in range(blocks):
                silence = tl.load(place_of(silences, at, STARTS, BLOCK, GROUPS))
                square = tl.load(place_of(images, at, STARTS, BLOCK, GROUPS))
                block = block_of(gates, at, BLOCK, WIDTH, GROUPS)
                sums = tl.dot(silence * (square - mean) * factor, block, sums, input_precision=PRECISION)

        # a step of Riemannian Adam; by nothing at first and at last
        now = schedule + 4 * taken
        gradient = together(sums, GROUPS) / value[:, None]
        gradient -= 2.0 * along(direction, vectors, PRECISION, GROUPS)
        gradient -= tl.sum(point * gradient, axis=1)[:, None] * point
        momentum += (gradient - momentum) * tl.load(now + 2)
        second += (tl.sum(gradient * gradient, axis=1) - second) * tl.load(now + 3)
        point -= momentum * (tl.load(now) / (tl.sqrt(second * tl.load(now + 1)) + least))[:, None]
        point /= tl.sqrt(tl.sum(point * point, axis=1))[:, None]
        momentum -= tl.sum(point * momentum, axis=1)[:, None] * point
        if taken == evaluations - 1:
            at_directions = directions + row[:, None] * b + column[None, :]
            tl.store(at_directions, direction, mask=(start < starts)[:, None] & (column < b)[None, :])
    tl.store(at_points, point, mask=ours)
