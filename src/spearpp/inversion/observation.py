"""What the attacker sees of one layer, checked and brought into one form.

For a layer Z = W X + b with gradients G = dL/dW and g = dL/db, the bias is treated as one more
input that is always 1: Ĝ = [G g], Ŵ = [W b], x̂ = [x; 1]. Then Ĝ = D X̂ᵀ and Z = Ŵ X̂.
"""

import math
from dataclasses import dataclass

import torch

from spearpp.errors import DtypeError, NonFiniteError, ShapeError
from spearpp.linalg.chunks import chunk_size
from spearpp.types import Float, Tensor


@dataclass(frozen=True)
class Observation:
    """Ĝ and Ŵ in float64, and what is known of where they came from."""

    gradient: Float[Tensor, "*u m columns"]
    """Ĝ: the weight gradient, with the bias gradient as last column where the layer has one."""
    weight: Float[Tensor, "*u m columns"]
    """Ŵ, likewise."""
    has_bias: bool
    gradient_epsilon: float
    """Relative spacing of the dtype the gradient arrived in."""
    weight_epsilon: float
    """Relative spacing of the dtype the client computed in."""
    dtype: torch.dtype
    """The dtype to hand results back in: the gradient's, but float32 at least."""

    @property
    def device(self) -> torch.device:
        """Where the update lies."""
        return self.gradient.device


def observe(
    grad_weight: Tensor,
    grad_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    prefix: str = "",
) -> Observation:
    """Check the four tensors of a layer and append the bias.

    Args:
        grad_weight: G, (m, n).
        grad_bias: g, (m,), or None for a layer without bias.
        weight: W, (m, n).
        bias: b, (m,), or None for a layer without bias.
        prefix: what errors put before these names.

    Raises:
        ShapeError, DtypeError, NonFiniteError: with what was seen.
    """
    given = {"grad_weight": grad_weight, "grad_bias": grad_bias, "weight": weight, "bias": bias}
    present = {name: t for name, t in given.items() if t is not None or name in ("grad_weight", "weight")}
    for name, tensor in present.items():
        _check_type(prefix + name, tensor)
    devices = {str(tensor.device) for tensor in present.values() if tensor is not None}
    if len(devices) > 1:
        raise DtypeError(f"tensors on {' and '.join(sorted(devices))}: move them to one device")
    if (grad_bias is None) != (bias is None):
        missing, other = ("grad_bias", "bias") if grad_bias is None else ("bias", "grad_bias")
        raise ShapeError(
            f"{missing} is None but {other} is not: give both, or neither for a layer without bias "
            "(inputs are then recovered up to scale)"
        )
    _check_shapes(grad_weight, grad_bias, weight, bias, prefix)
    for name, tensor in present.items():
        if tensor is not None:
            _check_finite(prefix + name, tensor)
    return Observation(
        gradient=_in_range(_appended(grad_weight, grad_bias)),
        weight=_appended(weight, bias),
        has_bias=bias is not None,
        gradient_epsilon=max(torch.finfo(t.dtype).eps for t in (grad_weight, grad_bias) if t is not None),
        weight_epsilon=torch.finfo(weight.dtype).eps,
        dtype=torch.promote_types(grad_weight.dtype, torch.float32),
    )


def _appended(matrix: Tensor, column: Tensor | None) -> Tensor:
    """Both side by side in float64, without a copy on the way: large layers fill the memory."""
    if column is None:
        return matrix.detach().double()
    rows, columns = matrix.shape
    whole = torch.empty(rows, columns + 1, dtype=torch.float64, device=matrix.device)
    whole[:, :-1] = matrix.detach()
    whole[:, -1] = column.detach()
    return whole


def _in_range(gradient: Tensor) -> Tensor:
    """The gradient, times a power of two if its squares would overflow or vanish: a loss has no unit."""
    least, most = torch.aminmax(gradient)
    size = max(-float(least), float(most))
    if size == 0 or 1e-100 < size < 1e100:
        return gradient
    return torch.ldexp(gradient, torch.tensor(-math.frexp(size)[1], device=gradient.device))


def _check_type(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise DtypeError(f"{name} has dtype {tensor.dtype}: expected a float tensor of 16, 32 or 64 bits")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise DtypeError(f"{name} is {tensor.layout} on {tensor.device}: pass a dense tensor that holds data")


def _check_finite(name: str, tensor: Tensor) -> None:
    rows = tensor.reshape(len(tensor), -1)
    at_a_time = chunk_size(tensor.device, tensor.element_size() * max(1, rows.shape[1]))
    if not all(bool(torch.isfinite(some).all()) for some in rows.split(at_a_time)):
        nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
        raise NonFiniteError(
            f"{name} holds {nan} NaN and {inf} Inf in {tensor.numel()} values: "
            "the update is damaged or the client's loss overflowed"
        )


def _check_shapes(
    grad_weight: Tensor, grad_bias: Tensor | None, weight: Tensor, bias: Tensor | None, prefix: str
) -> None:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ShapeError(f"{prefix}weight has shape {tuple(weight.shape)}: a Linear layer's is (m neurons, n inputs)")
    if grad_weight.shape != weight.shape:
        hint = ": it looks transposed" if grad_weight.shape == weight.T.shape else ""
        raise ShapeError(
            f"{prefix}grad_weight has shape {tuple(grad_weight.shape)}, {prefix}weight {tuple(weight.shape)}; "
            f"they must agree{hint}"
        )
    for name, vector in (("grad_bias", grad_bias), ("bias", bias)):
        if vector is not None and tuple(vector.shape) != (weight.shape[0],):
            raise ShapeError(
                f"{name} has shape {tuple(vector.shape)}, but the weight has {weight.shape[0]} neurons: "
                f"expected ({weight.shape[0]},)"
            )
