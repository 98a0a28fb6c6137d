"""Triton kernels, each with a PyTorch reference of the same signature.

``gated`` holds the steps of the gated search, and the whole descent for small problems. ``paper`` holds the whole
descent of the paper's search. Without Triton, both searches run step by step in PyTorch.
"""

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

MIN_TENSOR_CORE_COLUMNS = 16
"""Smallest number of columns that ``tl.dot`` multiplies on tensor cores."""


def padded(columns: int) -> int:
    """Return the power of two to which ``columns`` columns are padded."""
    return max(MIN_TENSOR_CORE_COLUMNS, 1 << (columns - 1).bit_length())


def load(name: str, device: int, run: Callable[[Any], None]) -> ModuleType | None:
    """Import a module of kernels, and run some of them. Return None if Triton or the GPU cannot do this."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device)[0] < 8:
        return None
    try:
        module = importlib.import_module(name)
        with torch.cuda.device(device):
            run(module)
            torch.cuda.synchronize()
    except Exception:  # a missing compiler raises many kinds of errors; the PyTorch reference computes the same
        return None
    return module
