"""Measures the share of time that the Python interpreter takes in a descent on one core.

    make bench NAME=overhead

``torch.jit.trace`` records the operators of a step, and TorchScript replays them without Python. The benchmark times
both in turns and compares their end points. PyTorch deprecates TorchScript, so the package itself does not use it.
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
"""(b, m): batch size and layer width."""
STARTS = 128
"""Number of starts, as in the first round of a search on a CPU."""
REPEATS = 40
"""Timed descents of each kind, of which the median is reported. Design choice."""
RATE = 0.1
"""Learning rate, as in the gated search."""


class Descent:
    """A descent on random rows and gates."""

    def __init__(self, b: int, m: int) -> None:
        generator = torch.Generator().manual_seed(b)
        rows, gates = (torch.randn(m, b, generator=generator) / b**0.5 for _ in range(2))
        self.begin = sphere.uniform(STARTS, b, generator)
        self.starts = _Starts(Gates(rows, gates, torch.eye(b)), self.begin.clone(), EFFORTS[0])
        self.schedule = _schedule(EFFORTS[0].steps, RATE, torch.float32)
        self.counter = torch.zeros(1, dtype=torch.long)

    def step(self) -> None:
        """Take one step, as the search does."""
        self.starts.step(self.schedule, self.counter)

    def recorded(self) -> Callable[[], object]:
        """Return a step that runs the recorded operators on the same tensors without Python.

        All tensors that a step changes are arguments of the recorded function.
        """
        owners = self.starts, self.starts.objective
        places = [(owner, name) for owner in owners for name, value in vars(owner).items() if isinstance(value, Tensor)]
        tensors = [getattr(*place) for place in places]

        def traced(counter: Tensor, *arguments: Tensor) -> Tensor:
            for place, tensor in zip(places, arguments, strict=True):
                setattr(*place, tensor)
            self.starts.step(self.schedule, counter)
            return self.starts.points

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replayed = torch.jit.trace(traced, (self.counter, *tensors), check_trace=False)
        for place, tensor in zip(places, tensors, strict=True):
            setattr(*place, tensor)
        return lambda: replayed(self.counter, *tensors)

    def seconds(self, step: Callable[[], object]) -> float:
        """Return the duration of a whole descent from the first step on."""
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
        ends = descent.starts.points.clone()
        descent.seconds(descent.step)
        difference = float((ends - descent.starts.points).abs().max())
        turns = [(descent.seconds(descent.step), descent.seconds(replayed)) for _ in range(REPEATS)]
        ours, without = (statistics.median(each) for each in zip(*turns, strict=True))
        share = 100 * (1 - without / ours)
        print(
            f"b={b:<4} m={m:<5} {1e3 * ours:7.1f} ms, {share:4.1f} % of it in Python, ends differ by {difference:.0e}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
