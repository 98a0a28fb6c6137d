"""How many threads a computation on the CPU is worth."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORTH = 2**16
"""Entries of L from which a second thread helps. Below, threads wait for each other: where others use the machine too,
two took ten times as long as one at 4,000 entries."""


@contextmanager
def single_thread_if_small(entries: int, device: torch.device) -> Iterator[None]:
    """Use one thread meanwhile if the layer is small.

    The setting is the calling thread's own; but a thread that uses torch for the first time meanwhile takes it over,
    and should set its own.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or entries >= WORTH or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
