"""What Python costs a descent on one core: each step as it is against the same operators without Python between them.

    make bench NAME=overhead

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

from spearpp.linalg import sphere
from spearpp.search.gated import EFFORTS
from spearpp.search.gated.descent import _schedule, _Starts
from spearpp.search.gated.objective import Gates
from spearpp.types import Tensor

SIZES = ((20, 200), (30, 200), (100, 1000))
STARTS = 128
TURNS = 40
RATE = 0.1


class Descent:
    """Random rows and gates, and starts on their way."""

    def __init__(self, b: int, m: int) -> None:
        generator = torch.Generator().manual_seed(b)
        rows, gates = (torch.randn(m, b, generator=generator) / b**0.5 for _ in range(2))
        self.begin = sphere.uniform(STARTS, b, generator)
        self.starts = _Starts(Gates(rows, gates, torch.eye(b)), self.begin.clone(), EFFORTS[0])
        self.schedule = _schedule(EFFORTS[0].steps, RATE, torch.float32)
        self.counter = torch.zeros(1, dtype=torch.long)

    def step(self) -> None:
        """One evaluation and move, as the search does it."""
        self.starts.step(self.schedule, self.counter)

    def recorded(self) -> Callable[[], object]:
        """The same operators on the same tensors, without Python: whatever a step changes is an argument."""
        owners = self.starts, self.starts.objective
        places = [(owner, name) for owner in owners for name, value in vars(owner).items() if isinstance(value, Tensor)]
        tensors = [getattr(*place) for place in places]

        def on(counter: Tensor, *given: Tensor) -> Tensor:
            for place, tensor in zip(places, given, strict=True):
                setattr(*place, tensor)
            self.starts.step(self.schedule, counter)
            return self.starts.points

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replayed = torch.jit.trace(on, (self.counter, *tensors), check_trace=False)
        for place, tensor in zip(places, tensors, strict=True):
            setattr(*place, tensor)
        return lambda: replayed(self.counter, *tensors)

    def seconds(self, step: Callable[[], object]) -> float:
        """A whole descent from the beginning."""
        starts = self.starts
        for tensor in (starts.points, starts.objective.solution):
            tensor.copy_(self.begin)
        for tensor in (starts.momentum, starts.second, self.counter):
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
        apart = descent.starts.points.clone()
        descent.seconds(descent.step)
        far = float((apart - descent.starts.points).abs().max())
        turns = [(descent.seconds(descent.step), descent.seconds(replayed)) for _ in range(TURNS)]
        ours, without = (statistics.median(each) for each in zip(*turns, strict=True))
        share = 100 * (1 - without / ours)
        print(f"b={b:<4} m={m:<5} {1e3 * ours:7.1f} ms, Python {share:4.1f} % of it, ends {far:.0e} apart")
    return 0


if __name__ == "__main__":
    sys.exit(main())
