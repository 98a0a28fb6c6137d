"""Compares the paper's descent in one GPU kernel with single steps: end points, seconds and TFLOP/s.

    make bench NAME=fused

The benchmark first compares the end points of the fused kernel with a reference, and counts the sparse end points of
both implementations for a batch of b=20, m=200. It fails if either differs. Then it times both implementations, the
fused one over the paper's 500 steps, and shorter runs of the kernel for each precision and several block sizes. It
compares the speeds with those of large matrix products.
"""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from benchmarks import command
from benchmarks.recovery import FIRST_SEED, Setting, attack
from spearpp.inversion.observation import observe
from spearpp.inversion.pool import admit, empty_pool
from spearpp.inversion.problem import Problem, pose
from spearpp.linalg import sphere
from spearpp.linalg.chunks import SMALL_DEVICE_BYTES
from spearpp.linalg.kernels import padded
from spearpp.linalg.kernels.paper import for_descent, reference
from spearpp.linalg.tensor_cores import tensor_cores
from spearpp.search import RiemannianAdam
from spearpp.search.descent import Descent
from spearpp.types import Tensor

if TYPE_CHECKING:
    from spearpp.linalg.kernels.paper.fused import Block

DescentState = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Rows, points, first moments, second moments and schedule of a descent."""
SIZES = ((20, 200), (65, 1000), (100, 1000), (150, 4000), (210, 4000))
"""(b, m): batch sizes and layer widths of the paper's tables."""
PADDED_SIZES = (32, 128, 256)
"""Batch sizes of ``SIZES``, padded to a power of two."""
KERNEL_STEPS = 40
"""Steps of a timed run of the kernel. Design choice: all steps take the same time, and many block sizes are timed."""
SINGLE_STEPS = 100
"""Steps of a timed run of single steps. All steps take the same time, so the paper's 500 are not needed."""
REPEATS = 3
"""Timed runs, of which the fastest is reported. Design choice."""
COMPARED_STARTS = 65_536
"""Starts of both implementations whose sparse end points are counted. Design choice: a small statistical error."""
LARGEST_DIFFERENCE = 1e-4
"""Largest distance between the end points of the kernel and of the reference after 4 steps.

The reference rounds the factors of products as the kernel does, so only the order of sums differs.
"""
LARGEST_DEVIATION = 4
"""Largest difference between the counts of sparse end points, in standard deviations: by chance once in 16,000 runs."""
PRODUCTS = {False: 2, True: 5}
"""Products of float16 matrices in one step, for rough and for fine precision."""


@dataclass(frozen=True)
class Row:
    """One implementation at one size."""

    device: str
    b: int
    m: int
    starts: int
    steps: int
    way: str
    cut: str
    """Block sizes: starts per program x rows at a time, warps, stages. An s means that q is in shared memory."""
    seconds: float
    tflops: float
    """TFLOP/s, at 4·m·b operations for each step of each start."""
    of_float32: float
    """TFLOP/s, divided by those of a large float32 product."""
    of_tf32: float
    """TFLOP/s, divided by those of a large TF32 product."""
    executed: float
    """TFLOP/s of the float16 products that are computed, including padding and the low parts of split numbers."""
    of_float16: float
    """Executed TFLOP/s, divided by those of a large float16 product."""
    intensity: float
    """Operations for each byte that is read.

    The kernel reads L from the L2 cache, once for each program and step. Single steps read L q from memory four times.
    """


def main() -> int:
    chosen = command.parser(__doc__).parse_args()
    if chosen.device.type != "cuda":
        print("error: the fused descent needs a CUDA device", file=sys.stderr)
        return 2
    _compile_all()
    worst = _largest_difference(chosen.device)
    deviation = _compare_counts(chosen.data, chosen.device)
    status = command.run(command.printed(_rows(chosen.device)), chosen.out)
    if worst > LARGEST_DIFFERENCE:
        print("error: the fused descent differs from the reference", file=sys.stderr)
        status = 1
    if deviation > LARGEST_DEVIATION:
        print("error: the numbers of sparse end points differ", file=sys.stderr)
        status = 1
    return status


def _blocks(wide: int, fine: bool) -> "list[Block]":
    """Return the block size that the kernel uses, and others to compare with."""
    from spearpp.linalg.kernels.paper.fused import Block, block_for

    first = block_for(wide, fine)
    others = [
        replace(first, starts=192 - first.starts, warps=12 - first.warps),  # 64 and 4, or 128 and 8
        replace(first, stages=3),
        replace(first, rows=128)
        if wide == 32
        else Block(128, 32, 8, stages=2)
        if wide == 128
        else replace(first, stages=4),
    ]
    return [first, *others]


def _compile(wide: int, fine: bool, block: "Block") -> None:
    """Compile the kernel into Triton's cache on disk."""
    from spearpp.linalg.kernels.paper import fused

    fused.descend(*_problem(wide, 2 * wide, 1, 1, torch.device("cuda")), 0.0, (0.9, 0.999), 1e-8, fine, block)


def _compile_all() -> None:
    """Compile all kernels in parallel. Each takes seconds on one core."""
    variants = [(wide, fine, block) for wide in PADDED_SIZES for fine in (False, True) for block in _blocks(wide, fine)]
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done, variant in [(pool.submit(_compile, *variant), variant) for variant in variants]:
            if done.exception() is not None:
                print(f"{variant}: {str(done.exception()).splitlines()[0]}")


def _problem(b: int, m: int, starts: int, steps: int, device: torch.device) -> DescentState:
    """Return an L with orthonormal columns, random points, moments of zero and a schedule."""
    generator = torch.Generator(device).manual_seed(b + m)
    rows = torch.linalg.qr(torch.randn(m, b, generator=generator, device=device))[0].contiguous()
    points = sphere.uniform(starts, b, generator, device=device)
    (schedule, _), *_ = RiemannianAdam(steps=steps).stages(points)
    return rows, points, torch.zeros_like(points), torch.zeros_like(points[:, :1]), schedule


def _largest_difference(device: torch.device) -> float:
    """Return the largest distance of end points from the reference, over all sizes.

    The distance of a size is the 90 % quantile over the starts, because the sign of an entry y near zero can flip.
    """
    worst = 0.0
    for b, m in SIZES:
        for fine in (False, True):
            ours, expected = (_problem(b, m, 1000, 4, device) for _ in range(2))
            fused = for_descent(ours[1], smooth=False)
            assert fused is not None, "Triton cannot compile the kernel here"
            fused.descend(*ours, 0.0, (0.9, 0.999), 1e-8, fine)
            reference.descend(*expected, 0.0, (0.9, 0.999), 1e-8, fine)
            difference = float(torch.linalg.vector_norm(ours[1] - expected[1], dim=1).quantile(0.9))
            print(f"b={b} m={m} {'fine' if fine else 'rough'}: after 4 steps {difference:.1e} from the reference")
            worst = max(worst, difference)
    return worst


def _compare_counts(data: str | None, device: torch.device) -> float:
    """Return the difference between the two numbers of sparse end points, in standard deviations."""
    search = RiemannianAdam(starts=COMPARED_STARTS)
    batch, (seen, *_) = attack(Setting("speed", 20, 200, search), data).prepare(FIRST_SEED, device)
    problem = pose(observe(*seen))
    rows = problem.live_rows.float()
    starts = sphere.uniform(COMPARED_STARTS, 20, torch.Generator().manual_seed(0), device=device)
    counted = []
    for name, descend in (("fused", search.descend), ("step by step", _step_by_step(search))):
        ends = descend(rows, starts.clone()).double()
        near = problem.tolerance.look_zero(ends @ problem.factors.left.T, ends)[:, problem.factors.live]
        counted.append(int((near.sum(1) >= problem.tolerance.least_zeros).sum()))
        pool = admit(empty_pool(problem), problem, ends)
        true = (pool.directions @ _true_directions(problem, batch.inputs.to(device)).T).abs() > 1 - 1e-9
        print(
            f"b=20 m=200 {name}: {counted[-1]} of {COMPARED_STARTS} end points are sparse, {len(pool)} candidates, "
            f"{int(true.any(0).sum())} of the 20 directions"
        )
    share = sum(counted) / 2 / COMPARED_STARTS
    return abs(counted[0] - counted[1]) / max(1.0, (2 * COMPARED_STARTS * share * (1 - share)) ** 0.5)


def _step_by_step(search: RiemannianAdam) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda rows, points: Descent.descend(search, rows, points)


def _true_directions(problem: Problem, inputs: Tensor) -> Tensor:
    """Return the true unit directions q_i, one in each row, from X̂ᵀ = Q⁻¹ R."""
    inputs = inputs.double()
    if problem.seen.has_bias:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    return sphere.retract(torch.linalg.inv(inputs @ torch.linalg.pinv(problem.factors.right)).T)


@dataclass(frozen=True)
class _Peaks:
    """TFLOP/s of large square matrix products."""

    float32: float
    tf32: float
    float16: float


def _peaks(device: torch.device) -> _Peaks:
    size = 8192
    a = torch.randn(size, size, device=device)
    b = a.half()

    def rate(product: Callable[[], Tensor]) -> float:
        return 2 * size**3 / min(command.seconds(product, device) for _ in range(6)) / 1e12

    with tensor_cores(True):
        tf32 = rate(lambda: a @ a)
    return _Peaks(rate(lambda: a @ a), tf32, rate(lambda: b @ b))


def _rows(device: torch.device) -> Iterator[Row]:
    peaks = _peaks(device)
    print(f"{torch.cuda.get_device_name(device)}; TFLOP/s of large products: {peaks}")
    for b, m in SIZES:
        yield from _size(b, m, device, peaks)


def _size(b: int, m: int, device: torch.device, peaks: _Peaks) -> Iterator[Row]:
    """Time both implementations of the whole search, and then the kernel with all block sizes."""
    starts = SMALL_DEVICE_BYTES // (4 * m)
    rows, points, *_ = _problem(b, m, starts, 1, device)
    wide = padded(b)
    search = RiemannianAdam()

    def row(way: str, steps: int, seconds: float, done: float, intensity: float, cut: str = "") -> Row:
        operations = 4.0 * m * b * starts * steps / seconds / 1e12
        executed = done / seconds / 1e12
        shares = operations / peaks.float32, operations / peaks.tf32, executed, executed / peaks.float16
        return Row(str(device), b, m, starts, steps, way, cut, seconds, operations, *shares, intensity)

    def best(work: Callable[[], object]) -> float:
        return min(command.seconds(work, device) for _ in range(REPEATS))

    short = replace(search, steps=SINGLE_STEPS)
    for way, allowed in (("step by step", False), ("... in TF32", True)):
        with tensor_cores(allowed):
            seconds = best(lambda: Descent.descend(short, rows, points.clone()))
        yield row(way, SINGLE_STEPS, seconds, 4.0 * m * b * starts * SINGLE_STEPS, b / 4)
    stages = list(search.stages(points))
    done = sum(2.0 * PRODUCTS[fine] * m * wide * starts * len(schedule) for schedule, fine in stages)
    read = sum(
        2.0 * (1 + fine) * m * wide * len(schedule) * starts / _starts_per_program(wide, fine)
        for schedule, fine in stages
    )
    yield row("fused", search.steps, best(lambda: search.descend(rows, points.clone())), done, done / read)
    for fine in (False, True):
        for block in _blocks(wide, fine):
            work = _timed(b, m, starts, fine, block, device)
            try:
                seconds = best(work)
            except Exception as error:  # for example too little shared memory: skip this block size
                print(f"{b:>4}{m:>6}  {block}: {str(error).splitlines()[0]}")
                continue
            done = 2.0 * PRODUCTS[fine] * m * wide * starts * KERNEL_STEPS
            read = 2.0 * (1 + fine) * m * wide * KERNEL_STEPS * starts / block.starts
            cut = f"{block.starts}x{block.rows} {block.warps}w {block.stages}st{' s' if block.shared else ''}"
            yield row("fine" if fine else "rough", KERNEL_STEPS, seconds, done, done / read, cut)


def _starts_per_program(wide: int, fine: bool) -> int:
    from spearpp.linalg.kernels.paper.fused import block_for

    return block_for(wide, fine).starts


def _timed(b: int, m: int, starts: int, fine: bool, block: "Block", device: torch.device) -> Callable[[], None]:
    from spearpp.linalg.kernels.paper import fused

    state = _problem(b, m, starts, KERNEL_STEPS, device)
    return lambda: fused.descend(*state, 0.0, (0.9, 0.999), 1e-8, fine, block)


if __name__ == "__main__":
    sys.exit(main())
