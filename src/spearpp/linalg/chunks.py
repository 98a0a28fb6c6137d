"""Chunk sizes of batched computations, so that their memory stays bounded."""

import torch

HOST_BYTES = 2**27
"""Memory of one chunk on a CPU: 128 MiB. Design choice: small beside the memory of any machine that trains networks."""
DEVICE_BYTES = 2**30
"""Memory of one chunk on a GPU: 1 GiB. Design choice: larger chunks need fewer kernel launches."""


def chunk_size(device: torch.device, bytes_each: int) -> int:
    """Return how many items of ``bytes_each`` bytes fit the memory of one chunk; at least one.

    >>> chunk_size(torch.device("cpu"), 2**26)
    2
    """
    return max(1, (HOST_BYTES if device.type == "cpu" else DEVICE_BYTES) // bytes_each)
