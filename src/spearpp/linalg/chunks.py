"""How much of a batched computation to do at once, so that memory stays bounded."""

import torch

HOST_BYTES = 2**27
DEVICE_BYTES = 2**30


def chunk_size(device: torch.device, bytes_each: int) -> int:
    """How many of something of so many bytes: a tenth of a gigabyte of them on a CPU, one on a GPU.

    >>> at_once(torch.device("cpu"), 2**26)
    2
    """
    return max(1, (HOST_BYTES if device.type == "cpu" else DEVICE_BYTES) // bytes_each)
