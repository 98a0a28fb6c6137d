"""Repeat a step. On a GPU, a CUDA graph records the step once, so that small kernels do not wait for the host."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from spearpp.linalg.time_limit import check_time

STEPS_PER_CHECK = 2
"""Number of steps between two checks whether to stop. Measured on an H200: with 4 the equations take 1.1 to 1.3 times
as long (``docs/lab/notebook.md``, "When a round ends")."""
_THREAD = threading.local()


def repeat(
    step: Callable[[], None], times: int, device: torch.device, done: Callable[[], bool] = lambda: False
) -> None:
    """Call ``step`` the given number of times. On a GPU, the step is recorded once and then replayed.

    Args:
        step: works in place on the same tensors every time, and does not wait for the device.
        times: number of calls.
        device: device of the tensors.
        done: asked before every ``STEPS_PER_CHECK``-th call whether to stop.
    """
    if device.type != "cuda" or times < 3:
        for count in range(times):
            if count % STEPS_PER_CHECK == 0 and done():
                return
            check_time()
            step()
        return
    with _side_stream(device):
        step()  # compiles kernels and allocates the memory of cuBLAS, which is not allowed while recording
        _make_room(device)
        graph = _record(step)
        for count in range(times - 1):
            if count % STEPS_PER_CHECK == 0:
                if done():
                    break
                check_time()
            graph.replay()


def _record(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record a step like ``torch.cuda.graph``, but without emptying all caches, which takes longer than a descent.

    The memory that the step allocates comes from a pool that belongs to the graph. Other threads may use the device
    while the step is recorded.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        step()
    except BaseException:
        with suppress(RuntimeError):  # the error of the step is more useful
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Switch to a stream that allows recording.

    Each thread has one such stream per device, because cuBLAS keeps memory for every stream that it has seen.
    """
    number = torch.cuda.current_device() if device.index is None else device.index
    streams: dict[int, torch.cuda.Stream] = _THREAD.__dict__.setdefault("streams", {})
    if number not in streams:
        streams[number] = torch.cuda.Stream(device)
    stream = streams[number]
    before = torch.cuda.current_stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


def _make_room(device: torch.device) -> None:
    """Release the memory that is reserved but not used, if it is more than what is free.

    While a step is recorded, PyTorch cannot release memory. The memory of finished graphs stays reserved. Releasing it
    takes 7 ms on an H200, which is longer than many descents.
    """
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if unused > torch.cuda.mem_get_info(device)[0]:
        torch.cuda.empty_cache()
