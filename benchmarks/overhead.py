"""What Python costs a descent on one core: each step as it is against the same operators without Python between them.

    make bench-overhead

The operators of a step are recorded once (``torch.jit.trace``) and replayed by TorchScript's interpreter; both take
turns, and their end points are compared. TorchScript is on its way out of PyTorch, so it measures here and is used
nowhere else.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch

from spearpp import sphere
from spearpp.kernels.gated import reference
from spearpp.search.gated import EFFORTS
from spearpp.search.gated.descent import EPSILON, _schedule
from spearpp.search.gated.objective import Gates, Objective
from spearpp.shapes import Tensor

SIZES = ((20, 200), (30, 200), (100, 1000))
STARTS = 128
TURNS = 40
RATE = 0.1


class Descent:
    """Random rows and gates, and all tensors that a step changes."""

    def __init__(self, b: int, m: int) -> None:
        generator = torch.Generator().manual_seed(b)
        rows, gates = (torch.randn(m, b, generator=generator) / b**0.5 for _ in range(2))
        self.begin = sphere.uniform(STARTS, b, generator)
        effort = EFFORTS[0]
        self.objective = Objective(
            Gates(rows, gates, torch.eye(b)), self.begin.clone(), epsilon=effort.epsilon, iterations=effort.iterations
        )
        self.moments = torch.zeros_like(self.begin), torch.zeros(STARTS, 1)
        self.schedule = _schedule(effort.steps, RATE, torch.float32)
        self.counter = torch.zeros(1, dtype=torch.long)
        self.names = [name for name, value in vars(self.objective).items() if isinstance(value, Tensor)]

    def step(self) -> None:
        """One evaluation and move."""
        here = self.objective
        here.evaluate()
        parts = here.through_gates, here.through_basis, here.value
        reference.move(here.points, *parts, *self.moments, self.schedule, self.counter, EPSILON)
        self.counter.add_(1)

    def recorded(self) -> Callable[[], object]:
        """The same operators on the same tensors, without Python."""
        tensors = [getattr(self.objective, name) for name in self.names]

        def on(*given: Tensor) -> Tensor:
            mine = self.moments, self.counter
            for name, tensor in zip(self.names, given, strict=False):
                setattr(self.objective, name, tensor)
            self.moments, self.counter = (given[-3], given[-2]), given[-1]
            self.step()
            self.moments, self.counter = mine
            return self.objective.points

        everything = *tensors, *self.moments, self.counter
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replayed = torch.jit.trace(on, everything, check_trace=False)
        for name, tensor in zip(self.names, tensors, strict=True):
            setattr(self.objective, name, tensor)
        return lambda: replayed(*everything)

    def seconds(self, step: Callable[[], object]) -> float:
        """A whole descent from the beginning."""
        self.objective.points.copy_(self.begin)
        self.objective.solution.copy_(self.begin)
        for tensor in (*self.moments, self.counter):
            tensor.zero_()
        began = time.perf_counter()
        for _ in range(len(self.schedule)):
            step()
        return time.perf_counter() - began


def main() -> int:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for b, m in SIZES:
        descent = Descent(b, m)
        replayed = descent.recorded()
        descent.seconds(replayed)
        apart = descent.objective.points.clone()
        descent.seconds(descent.step)
        far = float((apart - descent.objective.points).abs().max())
        turns = [(descent.seconds(descent.step), descent.seconds(replayed)) for _ in range(TURNS)]
        ours, without = (statistics.median(each) for each in zip(*turns, strict=True))
        share = 100 * (1 - without / ours)
        print(f"b={b:<4} m={m:<5} {1e3 * ours:7.1f} ms, Python {share:4.1f} % of it, ends {far:.0e} apart")
    return 0


if __name__ == "__main__":
    sys.exit(main())
