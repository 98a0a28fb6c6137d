"""The next layer's gradient as a second witness.

Where the ReLU is followed by another Linear layer, the client sends G₂ = D₂ Yᵀ too, with the
activations y_i = relu(A p_i) as columns of Y and D₂ = dL/dZ₂. From G₂ = L₂ Σ₂ Vᵀ of rank b:

- **forward**: every y_i lies in span(V), so relu(A p_i) does: m - b equations for the b unknowns of p_i;
- **backward**: d_i = S_i ∘ (W₂ᵀ d₂,i), with S_i the mask of input i and d₂,i = L₂ t_i. So
  S_i ∘ (B t_i) with B = W₂ᵀ L₂ lies in span(L): as many equations for t_i.

Both are the same statement about one mask and two pairs of subspaces, span(A) and span(V), span(B) and
span(L), and both give the input on its own. The four vectors of an input are biorthogonal to those of
every other one: q_i·p_j = 0 and t_i·Σ₂⁻¹c_j = 0, where y_j = V c_j. What was found shrinks all
four spaces.
"""

from dataclasses import dataclass

import torch

from spearpp.errors import RankError, ShapeError
from spearpp.lowrank import Factors, decompose
from spearpp.observation import observe
from spearpp.shapes import Float, Tensor


@dataclass(frozen=True, eq=False)
class Witness:
    """What the next layer says about the masks and activations of this one."""

    activations: Float[Tensor, "m b"]
    """V, with orthonormal columns: the span of y_1 … y_b."""
    singular_values: Float[Tensor, "b"]
    """The diagonal of Σ₂."""
    back: Float[Tensor, "m b"]
    """B = W₂ᵀ L₂: what reaches the neurons of this layer, before their masks."""
    column: float
    """The root mean square norm of a column of W₂."""
    noise: float
    """σ₂: the standard deviation of the noise in an entry of G₂."""

    def spread(self, coordinates: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
        """σ₂ ‖Σ₂⁻¹c‖: what the noise of G₂ adds to every entry of y = V c, or of d₂ = L₂ t."""
        return self.noise * torch.linalg.vector_norm(coordinates / self.singular_values, dim=1)


def call(next_grad_weight: Tensor, next_weight: Tensor, neurons: int, batch_size: int) -> tuple[Witness | None, str]:
    """Read the next layer's gradient, and say in words whether it is a witness.

    It is none if its rank is below the batch size: then its row space is smaller than the span of the
    activations and says nothing about any one of them. A layer of ten outputs has rank ten.

    Raises:
        ShapeError: if the next layer does not take this layer's neurons as inputs.
        DtypeError, NonFiniteError: as for the layer itself.
    """
    seen = observe(next_grad_weight, None, next_weight, None, prefix="next_")
    if next_weight.shape[1] != neurons:
        raise ShapeError(
            f"next_weight has shape {tuple(next_weight.shape)}, but this layer has {neurons} neurons: "
            f"the next layer's weight is (outputs, {neurons})"
        )
    if min(seen.gradient.shape) <= batch_size:
        return None, f"not used: its {min(seen.gradient.shape)} outputs cannot tell {batch_size} samples apart"
    try:
        factors = decompose(seen, batch_size)
    except RankError:
        return None, f"not used: its gradient has a rank below the {batch_size} samples of the batch"
    return _of(factors, seen.weight), "used"


def few_outputs(next_grad_weight: Tensor, next_weight: Tensor, batch_size: int) -> Float[Tensor, "m r"] | None:
    """An orthonormal basis of span(W₂ᵀ L₂), L₂ the columns of G₂, if that is small; None otherwise.

    Every d_i before its mask lies in it. Small: at most half of the samples, and of the neurons.
    """
    gradient, weight = next_grad_weight.detach().double(), next_weight.detach().double()
    outputs, neurons = weight.shape
    if 2 * outputs > min(batch_size, neurons):
        return None
    u, s, _ = torch.linalg.svd(gradient, full_matrices=False)
    rank = int((s > 1e-6 * s[:1].sum()).sum())
    span, values, _ = torch.linalg.svd(weight.T @ u[:, :rank], full_matrices=False)
    return span[:, values > 1e-6 * values[:1].sum()].contiguous() if rank else None


def _of(factors: Factors, weight: Tensor) -> Witness:
    live = max(1, factors.live_neurons)
    return Witness(
        activations=(factors.right / factors.singular_values[:, None]).T.contiguous(),
        singular_values=factors.singular_values,
        back=weight.T @ factors.left,
        column=float(weight.square().sum(0).mean().sqrt()),
        noise=float(torch.linalg.vector_norm(factors.row_noise)) / live**0.5,
    )
