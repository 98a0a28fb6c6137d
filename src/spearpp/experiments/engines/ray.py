"""A Ray cluster: Ray schedules CPUs and GPUs, and runs a cell again when its worker or node dies."""

import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spearpp.errors import MissingExtraError, OptionError, SpearError
from spearpp.experiments.cell import Cell
from spearpp.experiments.engines.base import Failed, Outcome, Work, judged, measure, worded

RETRIES = 3
"""Times that Ray runs a cell again after a worker or node died under it."""
AHEAD = 2
"""Cells handed to Ray for each that can run at once."""
REACH_SECONDS = 10.0


@dataclass(frozen=True)
class Ray:
    """Cells as Ray tasks. Every node needs the same spearpp, and data files under the same path.

    >>> Ray(gpus=0.25).cpus
    1.0
    """

    address: str | None = None
    """Of a running cluster ("auto", "host:6379", "ray://host:10001"); None starts Ray on this machine."""
    cpus: float = 1.0
    """CPUs a cell takes."""
    gpus: float = 0.0
    """GPUs a cell takes; with a part of one, several cells share it."""
    _started: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    """Not empty once this object connected."""

    def __post_init__(self) -> None:
        if not self.cpus > 0 or self.gpus < 0:
            raise OptionError(f"cpus={self.cpus}, gpus={self.gpus}: a positive number, and none that is negative")

    def run(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """Keep the cluster busy, a few cells ahead, and yield what comes back."""
        ray = _ray()
        if not ray.is_initialized():
            _connect(ray, self.address)
            self._started.append(True)
        task = ray.remote(_task).options(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=RETRIES)
        waiting = deque(cells)
        running: dict[Any, Cell] = {}
        try:
            while waiting or running:
                while waiting and len(running) < AHEAD * self._at_once(ray):
                    cell = waiting.popleft()
                    running[task.remote(cell.to_json())] = cell
                finished, _ = ray.wait(list(running), num_returns=1)
                for reference in finished:
                    yield _outcome(ray, running.pop(reference), reference)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave the cluster, or end it if it was started here."""
        if self._started:
            self._started.clear()
            _ray().shutdown()

    def _at_once(self, ray: Any) -> int:
        """Cells that the cluster can run at a time, nodes that joined since included."""
        there = ray.cluster_resources()
        room = there.get("CPU", 0.0) / self.cpus
        if self.gpus:
            room = min(room, there.get("GPU", 0.0) / self.gpus)
        if room < 1 and not there.get("CPU"):
            raise SpearError("the Ray cluster has no CPUs left: all its nodes are gone")
        if room < 1:
            raise OptionError(
                f"a cell takes {self.cpus:g} CPUs and {self.gpus:g} GPUs, the Ray cluster has "
                f"{there.get('CPU', 0.0):g} and {there.get('GPU', 0.0):g}"
            )
        return int(room)


def _task(cell: str) -> Work:
    """In a Ray worker."""
    return measure(cell, "cuda" if _ray().get_gpu_ids() else "cpu")


def _outcome(ray: Any, cell: Cell, reference: Any) -> Outcome:
    try:
        return judged(cell, ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        return Failed(cell, worded(error.cause if getattr(error, "cause", None) else error))
    except ray.exceptions.RayError as error:
        return Failed(cell, f"Ray gave up after {RETRIES} retries: {worded(error)}")


def _connect(ray: Any, address: str | None) -> None:
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None:
            _reach(address)
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
    except Exception as error:  # Ray raises what its parts raise
        where = "on this machine" if address is None else f"at {address}"
        raise OptionError(f"no Ray {where}: {worded(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminated)  # Ray takes it for itself


def _reach(address: str) -> None:
    """Whether anyone listens there: Ray itself goes on trying for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # "auto" and "local" have none
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Ray", "ray") from error
    return ray
