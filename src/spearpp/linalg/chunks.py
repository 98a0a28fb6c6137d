"""Chunk sizes of batched computations, so that their memory stays bounded."""

import torch

HOST_BYTES = 2**27
"""Memory of one chunk on a CPU: 128 MiB. Design choice: small beside the memory of any machine that trains networks."""
DEVICE_BYTES = 2**30
"""Memory of one chunk on a GPU: 1 GiB. Design choice: larger chunks need fewer kernel launches."""
CACHE_BYTES, BUSY_BYTES = 2**22, 2**29
"""Working set of a loop that may stop after every chunk, on a CPU and on a GPU. Design choice: 4 MiB are about the
cache of one core. 512 MiB keep a GPU busy, and are small against its memory."""


def chunk_size(device: torch.device, bytes_each: int) -> int:
    """Return how many items of ``bytes_each`` bytes fit the memory of one chunk; at least one.

    >>> chunk_size(torch.device("cpu"), 2**26)
    2
    """
    return max(1, (HOST_BYTES if device.type == "cpu" else DEVICE_BYTES) // bytes_each)


def small_chunk_size(device: torch.device, bytes_each: int) -> int:
    """Return how many items fit the working set of a loop that may stop after every chunk; at least one."""
    return max(1, (CACHE_BYTES if device.type == "cpu" else BUSY_BYTES) // bytes_each)
