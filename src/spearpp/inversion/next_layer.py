"""The next layer's gradient as a second witness.

Where the ReLU is followed by another Linear layer, the client sends G₂ = D₂ Yᵀ too, with the
activations y_i = relu(A p_i) as columns of Y and D₂ = dL/dZ₂. From G₂ = L₂ Σ₂ Vᵀ of rank b:

- **forward**: every y_i lies in span(V), so relu(A p_i) does: m - b equations for the b unknowns of p_i;
- **backward**: d_i = S_i ∘ (W₂ᵀ d₂,i), with S_i the mask of input i and d₂,i = L₂ t_i. So
  S_i ∘ (B t_i) with B = W₂ᵀ L₂ lies in span(L): as many equations for t_i.

Both are the same statement about one mask and two pairs of subspaces, span(A) and span(V), span(B) and
span(L), and both give the input on its own. The four vectors of an input are biorthogonal to those of
every other one: q_i·p_j = 0 and t_i·Σ₂⁻¹c_j = 0, where y_j = V c_j. So what was found shrinks the
first pair of spaces and pins solutions in both.

A next layer of few outputs is no witness, but its weights alone leave few unknowns to a column of D.
"""

from dataclasses import dataclass

import torch

from spearpp.errors import DtypeError, RankError, ShapeError
from spearpp.inversion.factors import Factors, decompose
from spearpp.inversion.factors.rank import CLEAR_GAP
from spearpp.inversion.observation import Observation, observe
from spearpp.inversion.tolerance import INDEPENDENT
from spearpp.linalg import sphere
from spearpp.types import Float, Tensor

FAINT = 1e-6
"""Outputs that send back less than this share of the strongest count as none: softmax gradients sum to zero."""


@dataclass(frozen=True, eq=False)
class NextLayer:
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


@dataclass(frozen=True, eq=False)
class FewOutputs:
    """What the weights of a next layer of few outputs say about the columns of D before their masks."""

    span: Float[Tensor, "m r"]
    """Orthonormal basis of what it sends back: every column lies in it before its mask."""
    weight: Float[Tensor, "outputs m"]
    """W₂."""

    def between(self) -> Float[Tensor, "pairs m"]:
        """What is sent back for one output taken for another, w_i - w_j, within the span; unit vectors.

        A classifier that is sure and wrong sends softmax - label = e_i - e_j.
        """
        if len(self.weight) < 2:
            return self.weight[:0]
        first, second = torch.triu_indices(len(self.weight), len(self.weight), 1, device=self.weight.device)
        sent = ((self.weight[first] - self.weight[second]) @ self.span) @ self.span.T
        size = torch.linalg.vector_norm(sent, dim=1, keepdim=True)
        return (sent / size)[size[:, 0] > FAINT * size.max()]


@dataclass(frozen=True, eq=False)
class Reading:
    """What became of the next layer."""

    why: str
    """In words: "used", or why not."""
    next_layer: NextLayer | None = None
    outputs: FewOutputs | None = None
    """Where it is no witness but has few outputs: what its weights say."""


def read_next_layer(
    next_grad_weight: Tensor | None, next_weight: Tensor | None, preactivations: Float[Tensor, "m b"]
) -> Reading:
    """Read the next layer's gradient, and find out whether it is a witness.

    It is none if its rank is below the batch size: then its row space is smaller than the span of the
    activations and says nothing about any one of them. A layer of ten outputs has rank ten.

    Args:
        next_grad_weight: G₂, (m₂, m), or None together with
        next_weight: W₂, (m₂, m).
        preactivations: A.

    Raises:
        ShapeError: if one is missing, or the next layer does not take this layer's neurons as inputs.
        DtypeError, NonFiniteError: as for the layer itself.
    """
    neurons, batch_size = preactivations.shape
    if next_grad_weight is None and next_weight is None:
        return Reading("not given")
    if next_grad_weight is None or next_weight is None:
        missing = "next_grad_weight" if next_grad_weight is None else "next_weight"
        raise ShapeError(f"{missing} is missing: the second witness needs the next layer's gradient and its weight")
    seen = observe(next_grad_weight, None, next_weight, None, prefix="next_")
    if next_weight.shape[1] != neurons:
        raise ShapeError(
            f"next_weight has shape {tuple(next_weight.shape)}, but this layer has {neurons} neurons: "
            f"the next layer's weight is (outputs, {neurons})"
        )
    if next_weight.device != preactivations.device:
        raise DtypeError(f"next_weight is on {next_weight.device}, weight on {preactivations.device}: use one device")
    if batch_size < 2:
        return Reading("not needed")
    outputs = next_weight.shape[0]
    if outputs <= batch_size:
        return _without_rank(
            seen, batch_size, f"not used: its {outputs} outputs cannot tell {batch_size} samples apart"
        )
    factors = _clearly_factored(seen)
    held = 0 if factors is None else factors.batch_size
    if held > batch_size:
        return Reading(
            f"not used: its gradient shows {held} samples, this layer's only {batch_size}: inputs depend on each other"
        )
    if factors is None or held != batch_size:
        try:
            factors = decompose(seen, batch_size)
        except RankError:
            why = f"not used: its gradient has a rank below the {batch_size} samples of the batch"
            return _without_rank(seen, batch_size, why)
    next_layer = _of(factors, seen.weight)
    for name, matrix in (("this layer's weights", preactivations), ("the next layer's", next_layer.back)):
        # Columns are as long as the samples are strong, which says nothing about what tells them apart.
        pivots = torch.linalg.qr(sphere.retract(matrix.T).T)[1].diagonal().abs()
        if bool(pivots.min() <= INDEPENDENT):
            return Reading(f"not used: {name} do not tell {batch_size} samples apart")
    return Reading("used", next_layer)


def _clearly_factored(seen: Observation) -> Factors | None:
    """The factors of a gradient at the rank after which its spectrum has a clear gap; None where it has none."""
    try:
        factors = decompose(seen)
    except RankError:
        return None
    rank = factors.batch_size
    clear = 0 < rank < len(factors.spectrum)
    return factors if clear and bool(factors.spectrum[rank - 1] >= CLEAR_GAP * factors.spectrum[rank]) else None


def _without_rank(seen: Observation, batch_size: int, why: str) -> Reading:
    outputs = few_outputs(seen, batch_size)
    if outputs is None:
        return Reading(why)
    unknowns = outputs.span.shape[1]
    return Reading(f"{why}; its weights leave {unknowns} unknowns to a column of D", outputs=outputs)


def few_outputs(seen: Observation, batch_size: int) -> FewOutputs | None:
    """span(W₂ᵀ L₂), L₂ the columns of G₂, if that is small; None otherwise.

    Every d_i before its mask lies in it. Small: at most half of the samples, and of the neurons.
    """
    outputs, neurons = seen.weight.shape
    if 2 * outputs > min(batch_size, neurons):
        return None
    columns, sizes, _ = torch.linalg.svd(seen.gradient, full_matrices=False)
    sent = seen.weight.T @ columns[:, sizes > FAINT * sizes[0]]
    span, sizes, _ = torch.linalg.svd(sent, full_matrices=False)
    return FewOutputs(span[:, sizes > FAINT * sizes[0]].contiguous(), seen.weight) if sent.numel() else None


def _of(factors: Factors, weight: Tensor) -> NextLayer:
    live = max(1, factors.live_neurons)
    return NextLayer(
        activations=(factors.right / factors.singular_values[:, None]).T.contiguous(),
        singular_values=factors.singular_values,
        back=weight.T @ factors.left,
        column=float(weight.square().sum(0).mean().sqrt()),
        noise=float(torch.linalg.vector_norm(factors.row_noise)) / live**0.5,
    )
