"""Number of CPU threads for small computations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORTH = 2**16
"""Number of entries of L from which a second thread helps. Measured: for smaller layers the threads mostly wait for
each other. On a machine of two cores that other processes also used, two threads took ten times as long as one at 4,000
entries (docs/lab/notebook.md, section "Speed")."""


@contextmanager
def single_thread_if_small(entries: int, device: torch.device) -> Iterator[None]:
    """Use one CPU thread inside the context if the layer is small, and restore the setting afterwards.

    PyTorch keeps this setting per thread. However, a thread that uses PyTorch for the first time inside the context
    inherits the setting of one thread. Such a thread should call ``torch.set_num_threads`` on its own.

    Args:
        entries: number of entries of L.
        device: device of the computation. GPU computations are left alone.
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
