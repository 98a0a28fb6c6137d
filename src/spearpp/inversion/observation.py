"""The gradient and the weights of one layer, checked and converted to one form.

For a layer Z = W X + b with gradients G = dL/dW and g = dL/db, the bias is treated as the weight of one more input that
is always 1: Ĝ = [G g], Ŵ = [W b], x̂ = [x; 1]. Then Ĝ = D X̂ᵀ and Z = Ŵ X̂, where column i of D is dL/dz for sample i.
"""

import math
from dataclasses import dataclass

import torch

from spearpp.errors import DtypeError, NonFiniteError, ShapeError
from spearpp.types import Float, Tensor

MAX_MAGNITUDE = 1e100
"""Largest entry of a gradient that is used without scaling, and one over the smallest. Derived: squares of such
numbers, and sums of many squares, stay within the range of float64, which is 1e-308 to 1e308."""


@dataclass(frozen=True)
class Observation:
    """Ĝ and Ŵ in float64, with the precision of the tensors they were built from."""

    gradient: Float[Tensor, "m columns"]
    """Ĝ: the weight gradient, with the bias gradient as the last column if the layer has a bias."""
    weight: Float[Tensor, "m columns"]
    """Ŵ: the weight, with the bias as the last column if the layer has a bias."""
    has_bias: bool
    """Whether the last column of Ĝ and Ŵ belongs to the bias."""
    gradient_epsilon: float
    """Machine epsilon of the dtype in which the gradient was passed; the coarser one if weight and bias differ."""
    weight_epsilon: float
    """Machine epsilon of the dtype of the weights, in which the client computed."""
    dtype: torch.dtype
    """Dtype of the recovered inputs: the dtype of the gradient, but at least float32."""

    @property
    def device(self) -> torch.device:
        """Device of the gradient."""
        return self.gradient.device


def observe(
    grad_weight: Tensor,
    grad_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    prefix: str = "",
) -> Observation:
    """Check the four tensors of a layer and append the bias as the last column.

    A gradient with entries above 1e100 or below 1e-100 is scaled by a power of two, so that its squares are finite.

    Args:
        grad_weight: G = dL/dW, of shape (m, n).
        grad_bias: g = dL/db, of shape (m,), or None for a layer without bias.
        weight: W, of shape (m, n).
        bias: b, of shape (m,), or None for a layer without bias.
        prefix: text that error messages put before these argument names.

    Returns:
        The gradient and the weights in float64.

    Raises:
        DtypeError: if an argument is not a dense floating-point tensor, or the tensors are on different devices.
        ShapeError: if the shapes do not belong to one Linear layer.
        NonFiniteError: if a tensor contains NaN or Inf.

    >>> import torch
    >>> seen = observe(torch.ones(3, 2), torch.zeros(3), torch.ones(3, 2), torch.zeros(3))
    >>> seen.gradient[0].tolist(), seen.has_bias
    ([1.0, 1.0, 0.0], True)
    """
    given = {"grad_weight": grad_weight, "grad_bias": grad_bias, "weight": weight, "bias": bias}
    present = {name: t for name, t in given.items() if t is not None or name in ("grad_weight", "weight")}
    for name, tensor in present.items():
        _check_type(prefix + name, tensor)
    devices = {str(tensor.device) for tensor in present.values() if tensor is not None}
    if len(devices) > 1:
        raise DtypeError(f"the tensors are on {' and '.join(sorted(devices))}: move them to one device")
    if (grad_bias is None) != (bias is None):
        missing, other = ("grad_bias", "bias") if grad_bias is None else ("bias", "grad_bias")
        raise ShapeError(
            f"{missing} is None but {other} is not: pass both, or None for both if the layer has no bias "
            "(inputs are then recovered up to scale)"
        )
    _check_shapes(grad_weight, grad_bias, weight, bias, prefix)
    largest = _largest({prefix + name: tensor for name, tensor in present.items() if tensor is not None})
    magnitude = max(largest[prefix + name] for name in present if name.startswith("grad"))
    return Observation(
        gradient=_scale_into_range(_append_column(grad_weight, grad_bias), magnitude),
        weight=_append_column(weight, bias),
        has_bias=bias is not None,
        gradient_epsilon=max(torch.finfo(t.dtype).eps for t in (grad_weight, grad_bias) if t is not None),
        weight_epsilon=torch.finfo(weight.dtype).eps,
        dtype=torch.promote_types(grad_weight.dtype, torch.float32),
    )


def _append_column(matrix: Float[Tensor, "m n"], column: Float[Tensor, "m"] | None) -> Float[Tensor, "m columns"]:
    """Return the matrix and the column side by side in float64.

    The result is filled in place, because a second float64 copy of a large layer may not fit into memory.
    """
    if column is None:
        return matrix.detach().double()
    m, n = matrix.shape
    joined = torch.empty(m, n + 1, dtype=torch.float64, device=matrix.device)
    joined[:, :-1] = matrix.detach()
    joined[:, -1] = column.detach()
    return joined


def _scale_into_range(gradient: Tensor, magnitude: float) -> Tensor:
    """Scale the gradient by a power of two if its squares would overflow or underflow in float64.

    Scaling is exact and changes no result, because the scale of a loss is arbitrary. ``magnitude`` is the largest
    absolute value in the gradient.
    """
    if magnitude == 0 or 1 / MAX_MAGNITUDE < magnitude < MAX_MAGNITUDE:
        return gradient
    return torch.ldexp(gradient, torch.tensor(-math.frexp(magnitude)[1], device=gradient.device))


def _check_type(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise DtypeError(f"{name} has dtype {tensor.dtype}: expected a floating-point tensor of 16, 32 or 64 bits")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise DtypeError(f"{name} is {tensor.layout} on {tensor.device}: pass a dense tensor that contains data")


def _largest(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest absolute value in each tensor, by name.

    Raises:
        NonFiniteError: if a tensor contains NaN or Inf.
    """
    ends = torch.stack([torch.stack(torch.aminmax(each.detach())).double() for each in tensors.values()])
    found = dict(zip(tensors, ends.abs().amax(1).tolist(), strict=True))
    for name, largest in found.items():
        if not math.isfinite(largest):
            nan, inf = int(torch.isnan(tensors[name]).sum()), int(torch.isinf(tensors[name]).sum())
            raise NonFiniteError(
                f"{name} holds {nan} NaN and {inf} Inf in {tensors[name].numel()} values: "
                "the update is damaged, or the loss of the client overflowed"
            )
    return found


def _check_shapes(
    grad_weight: Tensor, grad_bias: Tensor | None, weight: Tensor, bias: Tensor | None, prefix: str
) -> None:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ShapeError(f"{prefix}weight has shape {tuple(weight.shape)}: expected (m neurons, n inputs)")
    if grad_weight.shape != weight.shape:
        hint = " (grad_weight looks transposed)" if grad_weight.shape == weight.T.shape else ""
        raise ShapeError(
            f"{prefix}grad_weight has shape {tuple(grad_weight.shape)}, {prefix}weight {tuple(weight.shape)}: "
            f"both must have the same shape{hint}"
        )
    for name, vector in (("grad_bias", grad_bias), ("bias", bias)):
        if vector is not None and tuple(vector.shape) != (weight.shape[0],):
            raise ShapeError(
                f"{name} has shape {tuple(vector.shape)}, but the weight has {weight.shape[0]} neurons: "
                f"expected ({weight.shape[0]},)"
            )
