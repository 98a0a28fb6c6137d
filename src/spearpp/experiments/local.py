"""Measures cells in processes on this machine."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from multiprocessing.synchronize import Event

import torch

from spearpp.errors import OptionError
from spearpp.experiments.cell import Cell
from spearpp.experiments.engine import Done, Failed, Outcome, measure, worded

ATTEMPTS = 2
"""A cell fails if its process is killed this many times. The first kill may have another cause, such as memory that
other processes used. A second attempt tells."""
KILLED = f"the process was killed {ATTEMPTS} times, perhaps because the machine ran out of memory"
POLL_SECONDS = 0.2
"""How often a worker process checks whether to stop. Design choice: not noticeable to a user, and no load."""


@dataclass
class Local:
    """Runs each cell in one process. Processes are spawned, not forked.

    >>> Local(devices=("cpu",), workers=2)
    Local(devices=('cpu',), workers=2)
    """

    devices: tuple[str, ...] = ("cpu",)
    workers: int = 1
    """Number of processes for each device."""

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.devices:
            raise OptionError(f"devices={self.devices}, workers={self.workers}: at least one of each is needed")
        self._processes: list[_Process] = []  # kept between runs, because a process takes seconds to start

    @classmethod
    def here(cls, device: str | None = None, workers: int | None = None) -> "Local":
        """Return an engine for this machine.

        Args:
            device: name of a torch device; None takes all GPUs, or the CPU if there is none.
            workers: processes for each device; None takes one for a GPU, and one for each core of the CPU.
        """
        gpus = tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
        devices = gpus or ("cpu",) if device is None else (str(named_device(device)),)
        if workers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            workers = cores if devices == ("cpu",) else 1
        return cls(devices, workers)

    def run(self, cells: Sequence[Cell]) -> Generator[Outcome, None, None]:
        """Measure the cells. Each process takes the next cell when it is free."""
        if not self._processes:
            self._processes.extend(_Process(device) for _ in range(self.workers) for device in self.devices)
        waiting, free = deque((cell, 1) for cell in cells), deque(self._processes)
        running: dict[Future[Done], tuple[_Process, Cell, int]] = {}
        try:
            while waiting or running:
                while waiting and free:
                    process, (cell, attempt) = free.popleft(), waiting.popleft()
                    running[process.pool.submit(measure, cell, process.device)] = process, cell, attempt
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    process, cell, attempt = running.pop(future)
                    free.append(process)
                    error = future.exception()
                    if error is None:
                        yield future.result()
                    elif not isinstance(error, BrokenProcessPool):
                        yield Failed(cell, worded(error))
                    else:
                        process.pool.shutdown(wait=False, cancel_futures=True)
                        process.start()
                        if attempt < ATTEMPTS:
                            waiting.appendleft((cell, attempt + 1))
                        else:
                            yield Failed(cell, KILLED)
        finally:
            if waiting or running:
                self.close()

    def close(self) -> None:
        """Stop the processes, even if they are measuring."""
        for process in self._processes:
            process.stopping.set()
        while self._processes:
            self._processes.pop().pool.shutdown(wait=True, cancel_futures=True)


class _Process:
    """One process of a device, which measures one cell at a time. If it dies, no other cell is affected."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.start()

    def start(self) -> None:
        """Start the process, also after an earlier one died."""
        spawn = multiprocessing.get_context("spawn")
        self.stopping = spawn.Event()
        self.pool = ProcessPoolExecutor(1, spawn, initializer=_initialise, initargs=(self.stopping,))


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


def named_device(name: str, others: str = "") -> torch.device:
    """Return the device with this name. ``others`` is what else the option accepts, for the error message."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f"--device {name}: expected {others}cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"--device {name}: torch finds {torch.cuda.device_count()} CUDA devices here")
    return device
