"""Row-wise steps of the gated descent: one pass over memory per step on a GPU with Triton, otherwise plain PyTorch.

Between two matrix products, the descent applies a dozen small operations to every row. ``reference`` defines these
operations in PyTorch. ``fused`` does each of them in one Triton kernel with the same signature. ``persistent`` does all
steps of a small problem in one kernel. Tests compare the three.
"""

from functools import cache
from types import ModuleType

import torch

from spearpp.linalg.kernels import load, padded
from spearpp.linalg.kernels.gated import reference
from spearpp.types import Tensor

MAX_ROW_ENTRIES = 16_384
"""Largest number of entries of a row that one program of ``fused`` holds in registers. Derived: a program has at most
16 warps of 32 threads, so this is 32 entries per thread."""
MAX_ENTRIES = 2**16
"""Largest number of entries of ℓ, its columns padded to a power of two, for which one kernel does a whole descent.
Measured: b=50, m=500 took 3.6 ms in one kernel and 10 ms in single steps. b=100, m=1000 took the same time either way
(docs/lab/notebook.md, section "Speed")."""
MAX_COLUMNS = 128
"""Largest padded number of columns for which the vectors of 16 starts fit the registers of one program."""


def for_rows(example: Tensor, widest: int) -> ModuleType:
    """Return the module with the kernels for rows of at most ``widest`` entries, on the device of ``example``."""
    if not example.is_cuda or widest > MAX_ROW_ENTRIES:
        return reference
    return _load_fused(example.device.index or 0) or reference


def for_all_steps(points: Tensor, m: int, columns: int) -> ModuleType | None:
    """Return ``persistent`` if it can do the descent of a problem of this size, and None otherwise.

    Args:
        points: the starts. The kernel needs contiguous float32 tensors on a CUDA device.
        m: number of neurons.
        columns: number of columns of the rows or of the gates, whichever is larger.
    """
    width = padded(columns)
    small = width <= MAX_COLUMNS and m * width <= MAX_ENTRIES and min(points.numel(), m) > 0
    if not (small and points.is_cuda and points.dtype == torch.float32 and points.is_contiguous()):
        return None
    if _load_fused(points.device.index or 0) is None:
        return None
    from spearpp.linalg.kernels.gated import persistent

    return persistent


@cache
def _load_fused(device: int) -> ModuleType | None:
    return load(f"{__name__}.fused", device, lambda fused: fused.gate(*torch.ones(3, 1, 1, device="cuda")))
