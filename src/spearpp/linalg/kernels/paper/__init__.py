"""The paper's whole descent on a GPU: all steps of all starts in one kernel, where Triton can compile it.

Step by step it is nineteen launches a step, and L q moves through memory four times. ``reference`` says what a
descent is, in PyTorch; ``fused`` does it in one Triton kernel with the same signature.
"""

import importlib.util
from functools import cache
from types import ModuleType

import torch

from spearpp.linalg.kernels.paper import reference
from spearpp.types import Float, Tensor

__all__ = ["WIDEST", "for_descent", "reference"]

WIDEST = 256
"""b up to which a program holds its starts."""


def for_descent(points: Float[Tensor, "starts b"], smooth: bool) -> ModuleType | None:
    """The fused kernel for such points and a sign or a smooth slope; None where it is not to be had."""
    b = points.shape[1]
    if not points.is_cuda or points.dtype != torch.float32 or b > WIDEST:
        return None
    return _fused(points.device.index or 0, max(16, 2 ** (b - 1).bit_length()), smooth)


@cache
def _fused(device: int, wide: int, smooth: bool) -> ModuleType | None:
    """Where Triton is installed, finds its compiler and the GPU has the room: one step of one start shows it."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device)[0] < 8:
        return None
    from spearpp.linalg.kernels.paper import fused

    here = torch.device("cuda", device)
    try:
        with torch.cuda.device(device):
            for fine in (False, True):
                one = torch.eye(1, wide, device=here)
                moments = torch.zeros_like(one), torch.zeros(1, 1, device=here)
                schedule = torch.ones(1, 2, device=here)
                fused.descend(one.clone(), one, *moments, schedule, float(smooth), (0.9, 0.999), 1e-8, fine)
            torch.cuda.synchronize()
    except Exception:  # a compiler that is not there shows in many ways; step by step the same is done
        return None
    return fused
