"""One step many times over: on a GPU recorded once and replayed, so that its small kernels do not wait for the host."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

LEFT = 2**30
"""Bytes that graphs may leave behind before they are given back to the device."""
_COUNTING = threading.Lock()
_OWN = threading.local()
_LEFT_BEHIND: dict[torch.device, int] = {}


def repeat(step: Callable[[], None], times: int, device: torch.device) -> None:
    """Call ``step`` that often. On a GPU it is recorded once and replayed: small kernels cost their launch.

    The step must work in place on the same tensors every time and not wait for the device.
    """
    if device.type != "cuda" or times < 3:
        for _ in range(times):
            step()
        return
    with _aside(device):
        step()  # compiles, and gives cuBLAS its memory, which a recording must not
        before = torch.cuda.memory_reserved(device)
        graph = _recorded(step)
        for _ in range(times - 1):
            graph.replay()
        grown = torch.cuda.memory_reserved(device) - before
        del graph
    _give_back(grown, device)


def _recorded(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """As ``torch.cuda.graph`` does it, but without emptying all caches first, which takes longer than the descent.

    What the step allocates comes from a pool of the graph's own. Other threads may go on meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        step()
    except BaseException:
        with suppress(RuntimeError):  # the step's own error says more
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On a stream where recording is allowed, one for each thread: cuBLAS keeps memory for every stream it has seen."""
    number = torch.cuda.current_device() if device.index is None else device.index
    streams: dict[int, torch.cuda.Stream] = _OWN.__dict__.setdefault("streams", {})
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


def _give_back(grown: int, device: torch.device) -> None:
    """Empty the caches once the pools of past graphs, which nothing else uses, may have grown to ``LEFT``."""
    with _COUNTING:
        _LEFT_BEHIND[device] = _LEFT_BEHIND.get(device, 0) + max(0, grown)
        if _LEFT_BEHIND[device] < LEFT:
            return
        _LEFT_BEHIND[device] = 0
    torch.cuda.empty_cache()
