"""The whole descent of the paper's search on a GPU: one Triton kernel does all steps of all starts.

Step by step, PyTorch needs nineteen kernel launches per step and moves L q through memory four times.
``reference`` defines the descent in PyTorch. ``fused`` is a Triton kernel with the same signature.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch

from spearpp.linalg.kernels import load, padded
from spearpp.linalg.kernels.paper import reference
from spearpp.types import Float, Tensor

__all__ = ["MAX_BATCH_SIZE", "for_descent", "reference"]

MAX_BATCH_SIZE = 256
"""Largest b for which one program can hold its starts in registers."""


def for_descent(points: Float[Tensor, "starts b"], smooth: bool) -> ModuleType | None:
    """Return the module ``fused`` if its kernel can run for these points, and None otherwise.

    Args:
        points: the starts. The kernel needs float32 on a CUDA device and at most ``MAX_BATCH_SIZE`` columns.
        smooth: whether the derivative of the loss is tanh(y/μ); otherwise the derivative is sign(y).
    """
    b = points.shape[1]
    if not points.is_cuda or points.dtype != torch.float32 or b > MAX_BATCH_SIZE:
        return None
    return _load_fused(points.device.index or 0, padded(b), smooth)


@cache
def _load_fused(device: int, padded_width: int, smooth: bool) -> ModuleType | None:
    """Compile the kernel by running one step of one start."""

    def run(fused: Any) -> None:
        for fine in (False, True):
            one = torch.eye(1, padded_width, device="cuda")
            moments = torch.zeros_like(one), torch.zeros(1, 1, device="cuda")
            schedule = torch.ones(1, 2, device="cuda")
            fused.descend(one.clone(), one, *moments, schedule, float(smooth), (0.9, 0.999), 1e-8, fine)

    return load(f"{__name__}.fused", device, run)
