"""Row-wise steps of the gated descent: one pass over memory each on a GPU with Triton, else plain PyTorch.

Between two matrix products a step does a dozen small things to every row. ``reference`` says what they are, in
PyTorch; ``fused`` does each in one Triton kernel with the same signature. ``persistent`` does all steps of a small
problem in one kernel. Tests hold them against each other.
"""

import importlib.util
from functools import cache
from types import ModuleType

import torch

from spearpp.linalg.kernels.gated import reference
from spearpp.types import Tensor

WIDEST = 16_384
"""Entries of a row up to which one block of threads holds it."""
SMALL = 2**16
"""Entries of ℓ, its columns padded to a power of two, up to which one kernel does a whole descent."""
MOST_COLUMNS = 128
"""Columns up to which a few starts' vectors fit the registers of one block of threads."""


def for_rows(example: Tensor, widest: int) -> ModuleType:
    """The kernels for rows of up to so many entries on the device of the example."""
    return _fused(example.device.index or 0) or reference if example.is_cuda and widest <= WIDEST else reference


def for_all_steps(points: Tensor, m: int, columns: int) -> ModuleType | None:
    """``persistent``, where it does the descent of a problem of that size; None where steps are done one by one."""
    width = 1 << max(4, (columns - 1).bit_length())
    small = width <= MOST_COLUMNS and m * width <= SMALL and min(points.numel(), m) > 0
    if not (small and points.is_cuda and points.dtype == torch.float32 and points.is_contiguous()):
        return None
    if _fused(points.device.index or 0) is None:
        return None
    from spearpp.linalg.kernels.gated import persistent

    return persistent


@cache
def _fused(device: int) -> ModuleType | None:
    """The Triton kernels, where Triton is installed, finds its compiler and the GPU can run them."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device)[0] < 8:
        return None
    from spearpp.linalg.kernels.gated import fused

    try:
        with torch.cuda.device(device):
            fused.gate(*(torch.ones(1, 1, device="cuda") for _ in range(3)))
            torch.cuda.synchronize()
    except Exception:  # a compiler that is not there shows in many ways; PyTorch's kernels do the same
        return None
    return fused
