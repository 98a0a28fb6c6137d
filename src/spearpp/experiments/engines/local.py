"""A pool of processes on this machine, one queue for each device."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from multiprocessing.synchronize import Event

import torch

from spearpp.errors import OptionError
from spearpp.experiments.cell import Cell
from spearpp.experiments.engines.base import Failed, Outcome, Work, judged, measure, worded

ATTEMPTS = 2
"""How often a cell may take a worker down with it before it counts as failed."""
LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Local:
    """``workers`` processes for each device; a cell runs on one of them. Processes are spawned, not forked.

    >>> Local(devices=("cpu",), workers=2)
    Local(devices=('cpu',), workers=2)
    """

    devices: tuple[str, ...] = ("cpu",)
    workers: int = 1
    """Processes a device."""
    _queues: list["_Queue"] = field(default_factory=list, init=False, repr=False, compare=False)
    """Kept between runs: a process takes seconds to start."""

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.devices:
            raise OptionError(f"devices={self.devices}, workers={self.workers}: at least one of each")

    @classmethod
    def here(cls, device: str | None = None, workers: int | None = None) -> "Local":
        """All GPUs with one process each, or all cores; or as told."""
        if device is None:
            count = torch.cuda.device_count()
            devices = tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)
        else:
            devices = (str(_known(device)),)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(devices, workers if workers is not None else cores if devices == ("cpu",) else 1)

    def run(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """Deal the cells out, a device taking the next when it has room."""
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
        """End the processes, whatever they are doing."""
        while self._queues:
            self._queues.pop().stop()


@dataclass
class _Queue:
    """The processes of one device and what they are doing."""

    device: str
    workers: int
    running: dict[Future[Work], tuple[Cell, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._stopping = spawn.Event()
        self._pool = ProcessPoolExecutor(self.workers, spawn, initializer=_begin, initargs=(self._stopping,))

    def fill(self, waiting: deque[tuple[Cell, int]]) -> None:
        """Take as many cells as there are processes: what is not handed out is not lost with them."""
        while waiting and len(self.running) < self.workers:
            cell, attempt = waiting.popleft()
            self.running[self._pool.submit(measure, cell.to_json(), self.device)] = cell, attempt

    def collect(self, finished: set[Future[Work]], waiting: deque[tuple[Cell, int]]) -> Iterator[Outcome]:
        """What is done. If a process died, all in flight are tried again in a new pool."""
        broken = False
        for future in [each for each in self.running if each in finished]:
            cell, attempt = self.running.pop(future)
            error = future.exception()
            if error is None:
                yield judged(cell, future.result())
            elif not isinstance(error, BrokenProcessPool):
                yield Failed(cell, worded(error))
            else:
                broken = True
                if attempt < ATTEMPTS:
                    waiting.appendleft((cell, attempt + 1))
                else:
                    yield Failed(cell, f"its process was killed {ATTEMPTS} times, perhaps for lack of memory")
        if broken:
            waiting.extendleft((cell, attempt + 1) for cell, attempt in self.running.values())
            self.running.clear()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._start()

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _begin(stopping: Event) -> None:
    """In a new process: leave Ctrl-C to the parent, and end with it, also when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_watch, args=(stopping,), daemon=True).start()


def _watch(stopping: Event) -> None:
    parent = multiprocessing.parent_process()
    while not stopping.is_set():
        if parent is not None and wait_for([parent.sentinel], LOOK_SECONDS):
            break
    os._exit(1)


def _known(device: str) -> torch.device:
    try:
        found = torch.device(device)
        if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
            raise OptionError(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices here")
    except RuntimeError as error:
        raise OptionError(f"--device {device}: expected cpu, cuda or cuda:0") from error
    return found
