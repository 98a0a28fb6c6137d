"""Chunk sizes of batched computations, so that their memory stays bounded, and the threads of small ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

HOST_BYTES = 2**27
"""Memory of one chunk on a CPU: 128 MiB. Design choice: small beside the memory of any machine that trains networks."""
DEVICE_BYTES = 2**30
"""Memory of one chunk on a GPU: 1 GiB. Design choice: larger chunks need fewer kernel launches."""
SMALL_HOST_BYTES = 2**22
"""Working set of a loop on a CPU that may stop after every chunk: 4 MiB. Design choice: about the cache of one core."""
SMALL_DEVICE_BYTES = 2**29
"""The same on a GPU: 512 MiB. Design choice: it keeps a GPU busy, and is small against its memory."""
MIN_ENTRIES_FOR_THREADS = 2**16
"""Number of entries of L from which a second thread helps. Measured: for smaller layers the threads mostly wait for
each other. On a machine of two cores that other processes also used, two threads took ten times as long as one at 4,000
entries (docs/lab/notebook.md, section "Speed")."""
MIN_GRAM_ENTRIES_FOR_THREADS = 2**20
"""Number of entries of a Gram matrix from which a second thread helps to decompose it. Measured with 1000 rows: a
second thread on two idle cores saves 0.06 of 0.16 s. Beside another process, two threads take 1.8 s on two cores."""


def chunk_size(device: torch.device, bytes_each: int) -> int:
    """Return how many items of ``bytes_each`` bytes fit the memory of one chunk; at least one.

    >>> chunk_size(torch.device("cpu"), 2**26)
    2
    """
    return max(1, (HOST_BYTES if device.type == "cpu" else DEVICE_BYTES) // bytes_each)


def small_chunk_size(device: torch.device, bytes_each: int) -> int:
    """Return how many items fit the working set of a loop that may stop after every chunk; at least one."""
    return max(1, (SMALL_HOST_BYTES if device.type == "cpu" else SMALL_DEVICE_BYTES) // bytes_each)


@contextmanager
def single_thread_if_small(entries: int, device: torch.device, least: int = MIN_ENTRIES_FOR_THREADS) -> Iterator[None]:
    """Use one CPU thread inside the context if the matrices are small, and restore the setting afterwards.

    PyTorch keeps this setting per thread. However, a thread that uses PyTorch for the first time inside the context
    inherits the setting of one thread. Such a thread should call ``torch.set_num_threads`` on its own. ``entries`` is
    the number of entries of L, or of another matrix if ``least`` says from which number a second thread helps.
    Computations on a GPU are left alone.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or entries >= least or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
