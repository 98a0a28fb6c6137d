"""Measures cells in a pool of processes on this machine, with one queue for each device."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from multiprocessing.synchronize import Event

import torch

from spearpp.errors import OptionError
from spearpp.experiments.cell import Cell
from spearpp.experiments.engine import Done, Failed, Outcome, measure, worded

ATTEMPTS = 2
"""A cell fails if its process is killed this many times. The first kill may have another cause, such as memory that
other processes used. A second attempt tells."""
POLL_SECONDS = 0.2
"""How often a worker process checks whether to stop. Design choice: not noticeable to a user, and no load."""


@dataclass(frozen=True)
class Local:
    """Runs each cell in one process. Processes are spawned, not forked.

    >>> Local(devices=("cpu",), workers=2)
    Local(devices=('cpu',), workers=2)
    """

    devices: tuple[str, ...] = ("cpu",)
    workers: int = 1
    """Number of processes for each device."""
    _queues: list["_Queue"] = field(default_factory=list, init=False, repr=False, compare=False)
    """Kept between runs, because a process takes seconds to start."""

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.devices:
            raise OptionError(f"devices={self.devices}, workers={self.workers}: at least one of each is needed")

    @classmethod
    def here(cls, device: str | None = None, workers: int | None = None) -> "Local":
        """Return an engine for this machine.

        Args:
            device: name of a torch device; None takes all GPUs, or the CPU if there is none.
            workers: processes for each device; None takes one for a GPU, and one for each core of the CPU.
        """
        if device is None:
            count = torch.cuda.device_count()
            devices = tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)
        else:
            devices = (str(_checked(device)),)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(devices, workers if workers is not None else cores if devices == ("cpu",) else 1)

    def run(self, cells: Sequence[Cell]) -> Generator[Outcome, None, None]:
        """Measure the cells. A device takes the next cell when one of its processes is free."""
        waiting = deque((cell, 1) for cell in cells)
        queues = self._queues
        if not queues:
            queues += [_Queue(device, self.workers) for device in self.devices]
        try:
            while waiting or any(queue.running for queue in queues):
                for queue in queues:
                    queue.fill(waiting)
                running = {future for queue in queues for future in queue.running}
                finished = wait(running, return_when=FIRST_COMPLETED).done
                for queue in queues:
                    yield from queue.collect(finished, waiting)
        finally:
            if waiting or any(queue.running for queue in queues):
                self.close()

    def close(self) -> None:
        """Stop the processes, even if they are measuring."""
        while self._queues:
            self._queues.pop().stop()


@dataclass
class _Queue:
    """The processes of one device, and the cells that they are measuring."""

    device: str
    workers: int
    running: dict[Future[Done], tuple[Cell, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._stopping = spawn.Event()
        self._pool = ProcessPoolExecutor(self.workers, spawn, initializer=_initialise, initargs=(self._stopping,))

    def fill(self, waiting: deque[tuple[Cell, int]]) -> None:
        """Submit one cell for each free process. Cells that are not submitted are safe if a process dies."""
        while waiting and len(self.running) < self.workers:
            cell, attempt = waiting.popleft()
            self.running[self._pool.submit(measure, cell, self.device)] = cell, attempt

    def collect(self, finished: set[Future[Done]], waiting: deque[tuple[Cell, int]]) -> Iterator[Outcome]:
        """Yield the finished cells. If a process died, start a new pool and try its unfinished cells again."""
        broken = False
        for future in [each for each in self.running if each in finished]:
            cell, attempt = self.running.pop(future)
            error = future.exception()
            if error is None:
                yield future.result()
            elif not isinstance(error, BrokenProcessPool):
                yield Failed(cell, worded(error))
            else:
                broken = True
                if attempt < ATTEMPTS:
                    waiting.appendleft((cell, attempt + 1))
                else:
                    yield Failed(
                        cell, f"the process was killed {ATTEMPTS} times, perhaps because the machine ran out of memory"
                    )
        if broken:
            waiting.extendleft((cell, attempt + 1) for cell, attempt in self.running.values())
            self.running.clear()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._start()

    def stop(self) -> None:
        """Stop the processes, even if they are measuring."""
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _initialise(stopping: Event) -> None:
    """Run in a new process: ignore Ctrl-C, which the parent handles, and end when the parent ends or is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, args=(stopping,), daemon=True).start()


def _exit_with_parent(stopping: Event) -> None:
    parent = multiprocessing.parent_process()
    while not stopping.is_set():
        if parent is not None and wait_for([parent.sentinel], POLL_SECONDS):
            break
    os._exit(1)


def _checked(device: str) -> torch.device:
    try:
        found = torch.device(device)
        if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
            raise OptionError(f"--device {device}: torch finds {torch.cuda.device_count()} CUDA devices here")
    except RuntimeError as error:
        raise OptionError(f"--device {device}: expected cpu, cuda or cuda:0") from error
    return found
