"""Measures cells on a Ray cluster. Ray schedules them, and runs a cell again if its worker or node dies."""

import signal
import socket
import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from spearpp.errors import OptionError, SpearError, needs
from spearpp.experiments.cell import Cell
from spearpp.experiments.engine import Done, Failed, Outcome, measure, worded

RETRIES = 3
"""How often Ray runs a cell again after its worker or node died. 3 is also the default of Ray."""
SUBMITTED_PER_SLOT = 2
"""Cells submitted for each cell that can run at the same time. The second one starts without delay when one ends."""
CONNECT_SECONDS = 10.0
"""Longest time to wait for a cluster to accept a connection. Ray itself would try for minutes."""


@dataclass
class Ray:
    """Runs each cell as a Ray task.

    Every node needs the same version of spearpp, and data files under the same path.

    >>> Ray(gpus=0.25)
    Ray(address=None, gpus=0.25)
    """

    address: str | None = None
    """Address of a running cluster ("auto", "host:6379", "ray://host:10001"); None starts Ray on this machine."""
    gpus: float = 0.0
    """Number of GPUs for each cell, beside one CPU. With a fraction, several cells share one GPU."""

    def __post_init__(self) -> None:
        self._started = False  # whether this object started or joined the cluster
        if self.gpus < 0:
            raise OptionError(f"gpus={self.gpus}: expected 0 or more")

    def run(self, cells: Sequence[Cell]) -> Generator[Outcome, None, None]:
        """Measure the cells. Submit a few more cells than the cluster can run, so that it stays busy."""
        ray = _ray()
        if not ray.is_initialized():
            _connect(ray, self.address)
            self._started = True
        task = ray.remote(_task).options(num_cpus=1, num_gpus=self.gpus, max_retries=RETRIES)
        waiting = deque(cells)
        running: dict[Any, Cell] = {}
        try:
            while waiting or running:
                while waiting and len(running) < SUBMITTED_PER_SLOT * self._slots(ray):
                    cell = waiting.popleft()
                    running[task.remote(cell)] = cell
                finished, _ = ray.wait(list(running), num_returns=1)
                for reference in finished:
                    yield _outcome(ray, running.pop(reference), reference)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave the cluster, and stop it if this object started it."""
        if self._started:
            self._started = False
            _ray().shutdown()

    def _slots(self, ray: Any) -> int:
        """Return the number of cells that the cluster can run at the same time, including nodes that joined later."""
        resources = ray.cluster_resources()
        cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        if not cpus:
            raise SpearError("the Ray cluster has no CPUs: all its nodes are gone")
        slots = min(cpus, gpus / self.gpus) if self.gpus else cpus
        if slots < 1:
            needed = f"a cell needs one CPU and {self.gpus:g} GPUs"
            raise OptionError(f"{needed}, but the Ray cluster has {cpus:g} CPUs and {gpus:g} GPUs")
        return int(slots)


def _task(cell: Cell) -> Done:
    return measure(cell, "cuda" if _ray().get_gpu_ids() else "cpu")


def _outcome(ray: Any, cell: Cell, reference: Any) -> Outcome:
    try:
        measured: Done = ray.get(reference)
        return measured
    except ray.exceptions.RayTaskError as error:
        return Failed(cell, worded(error.cause if getattr(error, "cause", None) else error))
    except ray.exceptions.RayError as error:
        return Failed(cell, f"Ray stopped after {RETRIES} retries: {worded(error)}")


def _connect(ray: Any, address: str | None) -> None:
    previous_handler = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None:
            _check_connection(address)
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
    except Exception as error:  # Ray raises many kinds of errors here
        where = "on this machine" if address is None else f"at {address}"
        raise OptionError(f"no Ray {where}: {worded(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous_handler)  # Ray replaces the handler


def _check_connection(address: str) -> None:
    """Raise an ``OSError`` if nothing listens at the address. Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # "auto" and "local" have no port
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def _ray() -> Any:
    with needs("Ray", "ray"):
        import ray
    return ray
