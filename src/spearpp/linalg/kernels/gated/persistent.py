"""The whole gated descent in one Triton kernel. Each program takes a few starts from their first step to their last.

Small problems spend most of their time between kernels. Starts do not depend on each other, so a program can keep
everything about its starts: points, momentum and the vectors of conjugate gradients stay in registers. If all ℓ_k and
a_k fit into shared memory, the program reads them once (``Plan.whole``). Otherwise the program reads them block by
block in every product, and stores relu(-a_k·p) of every neuron in scratch memory. Several updates only mean more
programs.

``search.gated.objective`` and ``reference`` define the mathematics. Every sum has a fixed order, so equal inputs give
equal results. The decorator ``no_type_check`` keeps the type checker of the tests away from the kernel, because Triton
can only compile the original function.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from spearpp.linalg.kernels import padded
from spearpp.linalg.kernels.gated.blocks import (
    adam_step,
    add_groups,
    load_block,
    per_start,
    scratch_pointers,
    sum_over_neurons,
    times_matrix,
    times_rows,
    zero_sums,
)
from spearpp.linalg.kernels.gated.reference import TINY as _TINY
from spearpp.types import Float, Tensor

TINY = tl.constexpr(_TINY)
SHARED = 128 * 2**10
"""Largest number of bytes of ℓ_k and a_k, each in two memory orders, that a program keeps in shared memory. Design
choice: below the 163 KiB that an A100 and the 227 KiB that an H200 offer to one program, with room for the rest."""

_unsupported: set[tuple["Plan", int, bool, torch.device]] = set()
"""Plans that Triton could not compile, or for which the GPU has too little memory."""


@dataclass(frozen=True)
class Plan:
    """How the kernel divides the work."""

    starts: int
    """Number of starts per program."""
    block: int
    """Number of neurons per block."""
    warps: int
    """Number of warps per program."""
    parted: bool
    """Whether each warp has its own neurons and the vectors of every start; otherwise all warps share both."""
    whole: bool
    """Whether a single block holds all neurons."""
    stages: int = 3
    """Number of blocks that are loaded ahead, if a single product reads them."""
    ahead: bool = False
    """Whether the next block of ℓ_k is loaded into registers early. Two products read such a block, and Triton does not
    prefetch blocks that two products read."""

    @property
    def groups(self) -> int:
        """Number of parts into which the warps split a block."""
        return self.warps if self.parted else 1


def plan(m: int, width: int, exact: bool) -> Plan:
    """Choose the plan for m neurons, a padded number of columns, and products with or without float32 accuracy.

    The choices for 32 columns and for more were measured with ``benchmarks/descent.py`` on an H200. With up to 32
    columns, every warp can hold the vectors of all starts in its registers.
    """
    if width > 32:
        return Plan(16, 32 if width > 64 and exact else 64, 8, parted=False, whole=False, ahead=True)
    padded_neurons = max(128, triton.next_power_of_2(m))
    whole = padded_neurons * width * (32 if exact else 16) <= SHARED  # exact products store each factor twice
    return Plan(16, padded_neurons if whole else 128, 4 if whole else 8, parted=True, whole=whole)


def descend(
    rows: Float[Tensor, "updates m b"],
    gates: Float[Tensor, "updates m d"],
    basis: Float[Tensor, "updates b d"],
    points: Float[Tensor, "updates starts d"],
    schedule: Float[Tensor, "evaluations 4"],
    *,
    iterations: int,
    ridge: float,
    least: float,
    exact: bool,
    cut: Plan | None = None,
) -> Float[Tensor, "updates starts b"] | None:
    """Move the points to the ends of their descents, and return the directions there.

    Args:
        rows: ℓ_k of every update.
        gates: Nᵀa_k of every update.
        basis: N of every update.
        points: contiguous float32 unit vectors v, updated in place.
        schedule: as in ``reference.move``.
        iterations: conjugate-gradient iterations per evaluation.
        ridge: the small number that makes the matrix of the objective invertible.
        least: ε of Adam.
        exact: whether products have the accuracy of float32; otherwise they round their factors to ten bits (TF32).
        cut: how to divide the work; None chooses ``plan``.

    Returns:
        The directions q. None, with unchanged points, if the GPU or Triton cannot run the kernel.

    Raises:
        TritonError, RuntimeError: if a given ``cut`` cannot be compiled.
    """
    (updates, m, b), (starts, d) = rows.shape, points.shape[1:]
    width = padded(max(b, d))
    chosen = cut or plan(m, width, exact)
    blocks, programs = -(-m // chosen.block), -(-starts // chosen.starts)
    configuration = chosen, width, exact, points.device
    if cut is None and configuration in _unsupported:
        return None
    directions = points.new_empty(updates, starts, b)
    scratch_entries = 0 if chosen.whole else updates * programs * blocks * 2 * chosen.starts * chosen.block
    try:
        _descend[(updates, programs)](
            _padded(rows, blocks * chosen.block, width), _padded(gates, blocks * chosen.block, width),
            _padded(basis, width, width), points, directions,
            schedule, points.new_empty(max(scratch_entries, 1)), float(m), blocks, b, d, starts, len(schedule),
            iterations, ridge, least,
            PRECISION="tf32x3" if exact else "tf32", STARTS=chosen.starts, BLOCK=chosen.block, WIDTH=width,
            GROUPS=chosen.groups, WHOLE=chosen.whole, AHEAD=chosen.ahead,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    except (TritonError, RuntimeError):  # Triton raises both, before the kernel starts
        if cut is not None:
            raise
        _unsupported.add(configuration)
        return None
    return directions


def _padded(matrices: Float[Tensor, "updates r c"], rows: int, columns: int) -> Float[Tensor, "updates rows columns"]:
    """Pad matrices with zeros, so that blocks need no masks."""
    whole = matrices.new_zeros(len(matrices), rows, columns)
    whole[:, : matrices.shape[1], : matrices.shape[2]] = matrices
    return whole


@triton.jit(do_not_specialize=["blocks", "b", "d", "starts", "evaluations", "iterations"])
@no_type_check
def _descend(
    rows, gates, basis, points, directions, schedule, scratch, neurons, blocks, b, d, starts, evaluations, iterations,
    ridge, least: tl.constexpr, PRECISION: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = BLOCK // GROUPS
    update = tl.program_id(0).to(tl.int64)
    start, column = tl.program_id(1) * STARTS + tl.arange(0, STARTS), tl.arange(0, WIDTH)
    row = update * starts + tl.minimum(start, starts - 1)  # surplus starts repeat the last start
    at_points = points + row[:, None] * d + column[None, :]
    ours = (start < starts)[:, None] & (column < d)[None, :]
    rows += update * blocks * (BLOCK * WIDTH)
    gates += update * blocks * (BLOCK * WIDTH)
    at_basis = basis + update * (WIDTH * WIDTH) + column[:, None] * WIDTH + column[None, :]
    if WHOLE:
        all_rows, all_gates = load_block(rows, 0, BLOCK, WIDTH, GROUPS), load_block(gates, 0, BLOCK, WIDTH, GROUPS)
    else:
        program = update * tl.num_programs(1) + tl.program_id(1)
        inactivities = scratch + program * blocks * (2 * STARTS * BLOCK)
        images = inactivities + blocks * (STARTS * BLOCK)

    point = tl.load(at_points, mask=(column < d)[None, :], other=0.0)
    momentum = tl.zeros((STARTS, WIDTH), tl.float32)
    second = tl.zeros((STARTS, 1), tl.float32)
    solution = times_matrix(point, tl.trans(tl.load(at_basis)), PRECISION, GROUPS)
    for evaluation in range(evaluations):
        # relu(-a_k·p) of every neuron
        if WHOLE:
            inactivity = tl.maximum(-times_rows(point, all_gates, PRECISION, GROUPS), 0.0)
            total = sum_over_neurons(inactivity * inactivity, GROUPS)
        else:
            squares = zero_sums(STARTS, EACH, GROUPS)
            tl.debug_barrier()  # wait until all threads have read the scratch memory of the previous step
            for at in range(blocks):
                block = load_block(gates, at, BLOCK, WIDTH, GROUPS)
                inactivity = tl.maximum(-times_rows(point, block, PRECISION, GROUPS), 0.0)
                tl.store(scratch_pointers(inactivities, at, STARTS, BLOCK, GROUPS), inactivity)
                squares += inactivity * inactivity
            total = sum_over_neurons(squares, GROUPS)
            tl.debug_barrier()
        total = tl.maximum(total, TINY)
        scale = neurons / total

        # solve M u = p by conjugate gradients; iteration 0 computes the residual p - M u
        vectors = tl.load(at_basis)
        p = times_matrix(point, tl.trans(vectors), PRECISION, GROUPS)
        residual, search, solution = p, solution, tl.zeros((STARTS, WIDTH), tl.float32)
        size = tl.zeros((STARTS,), tl.float32)
        for iteration in range(iterations + 1):
            sums = zero_sums(STARTS, WIDTH, GROUPS)
            if WHOLE:
                image = times_rows(search, all_rows, PRECISION, GROUPS)
                sums = tl.dot(image * inactivity * inactivity, all_rows, sums, input_precision=PRECISION)
            else:
                if AHEAD:
                    following = load_block(rows, 0, BLOCK, WIDTH, GROUPS)
                for at in range(blocks):
                    if AHEAD:
                        block = following
                        following = load_block(rows, tl.minimum(at + 1, blocks - 1), BLOCK, WIDTH, GROUPS)
                    else:
                        block = load_block(rows, at, BLOCK, WIDTH, GROUPS)
                    inactivity = tl.load(scratch_pointers(inactivities, at, STARTS, BLOCK, GROUPS))
                    image = times_rows(search, block, PRECISION, GROUPS)
                    sums = tl.dot(image * inactivity * inactivity, block, sums, input_precision=PRECISION)
            applied = ridge * search + scale[:, None] * add_groups(sums, GROUPS)
            step = tl.where(iteration == 0, 1.0, size / tl.maximum(tl.sum(search * applied, axis=1), TINY))
            solution += step[:, None] * search
            residual -= step[:, None] * applied
            after = tl.sum(residual * residual, axis=1)
            search = residual + tl.where(iteration == 0, 0.0, after / tl.maximum(size, TINY))[:, None] * search
            size = after
        value = 1.0 / tl.maximum(tl.sum(p * solution, axis=1), TINY)
        direction = value[:, None] * solution

        # coefficients of a_k in the gradient of f
        sums = zero_sums(STARTS, WIDTH, GROUPS)
        factor = per_start(-2.0 * scale, GROUPS)
        if WHOLE:
            image = times_rows(direction, all_rows, PRECISION, GROUPS)
            square = image * image
            mean = per_start(sum_over_neurons(inactivity * inactivity * square, GROUPS) / total, GROUPS)
            sums = tl.dot(inactivity * (square - mean) * factor, all_gates, sums, input_precision=PRECISION)
        else:
            squares = zero_sums(STARTS, EACH, GROUPS)
            for at in range(blocks):
                image = times_rows(direction, load_block(rows, at, BLOCK, WIDTH, GROUPS), PRECISION, GROUPS)
                square = image * image
                inactivity = tl.load(scratch_pointers(inactivities, at, STARTS, BLOCK, GROUPS))
                tl.store(scratch_pointers(images, at, STARTS, BLOCK, GROUPS), square)
                squares += inactivity * inactivity * square
            mean = per_start(sum_over_neurons(squares, GROUPS) / total, GROUPS)
            tl.debug_barrier()
            for at in range(blocks):
                inactivity = tl.load(scratch_pointers(inactivities, at, STARTS, BLOCK, GROUPS))
                square = tl.load(scratch_pointers(images, at, STARTS, BLOCK, GROUPS))
                block = load_block(gates, at, BLOCK, WIDTH, GROUPS)
                sums = tl.dot(inactivity * (square - mean) * factor, block, sums, input_precision=PRECISION)

        # one step of Riemannian Adam; the schedule makes the first steps and the last one zero
        now = schedule + 4 * evaluation
        gradient = add_groups(sums, GROUPS) / value[:, None] - 2.0 * times_matrix(direction, vectors, PRECISION, GROUPS)
        point, momentum, second = adam_step(
            point, gradient, momentum, second, tl.load(now), tl.load(now + 1), tl.load(now + 2), tl.load(now + 3),
            least, AXIS=1,
        )  # fmt: skip
        if evaluation == evaluations - 1:
            at_directions = directions + row[:, None] * b + column[None, :]
            tl.store(at_directions, direction, mask=(start < starts)[:, None] & (column < b)[None, :])
    tl.store(at_points, point, mask=ours)
