"""Equations from the gradient of the next layer.

If the ReLU feeds another Linear layer, the next layer, the client also sends its gradient G₂ = D₂ Yᵀ. The columns of Y
are the activations y_i = relu(A p_i), and D₂ = dL/dZ₂. Let G₂ = L₂ Σ₂ Vᵀ be its singular value decomposition of rank b:

- **forward equations**: every y_i lies in span(V). So relu(A p_i) lies in span(V), which gives m - b equations for the
  b unknowns of p_i;
- **backward equations**: d_i = S_i ∘ (W₂ᵀ d₂,i), where S_i is the activation pattern of input i and d₂,i = L₂ t_i is
  its gradient at the next layer. So S_i ∘ (B t_i) with B = W₂ᵀ L₂ lies in span(L), which gives m - b equations for t_i.

Both determine an input on its own, without the other inputs of the batch. The vectors of an input are also orthogonal
to those of every other input j: q_i·p_j = 0 and t_i·Σ₂⁻¹c_j = 0, where y_j = V c_j. Inputs that have been found
therefore restrict the search for the others.

A next layer with fewer outputs than samples gives no such equations, but its weights alone restrict every column of D
to a subspace of small dimension (``FewOutputs``).
"""

from contextlib import suppress
from dataclasses import dataclass

import torch

from spearpp.errors import DtypeError, RankError, ShapeError
from spearpp.inversion.factors import Factors, decompose
from spearpp.inversion.factors.rank import has_clear_gap
from spearpp.inversion.observation import Observation, observe
from spearpp.inversion.tolerance import MIN_INDEPENDENT_DISTANCE
from spearpp.linalg import sphere
from spearpp.types import Float, Tensor

NEGLIGIBLE_SHARE = 1e-6
"""Singular values below this share of the largest count as zero in the gradient of a next layer with few outputs.
Design choice: well above float32 rounding. Softmax gradients sum to zero, so one singular value is only rounding."""


@dataclass(frozen=True, eq=False)
class NextLayer:
    """The equations that the gradient of the next layer gives for activations and activation patterns of this layer."""

    activations: Float[Tensor, "m b"]
    """V, with orthonormal columns: the span of the activations y_1 … y_b."""
    singular_values: Float[Tensor, "b"]
    """The diagonal of Σ₂."""
    back: Float[Tensor, "m b"]
    """B = W₂ᵀ L₂. Every column of D lies in span(B) before its activation pattern is applied."""
    column: float
    """Root mean square norm of a column of W₂."""
    noise: float
    """σ₂, the standard deviation of the noise in an entry of G₂."""

    def spread(self, coordinates: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
        """Return σ₂ ‖Σ₂⁻¹c‖, the standard deviation that the noise of G₂ causes in an entry of y = V c or d₂ = L₂ t."""
        return self.noise * torch.linalg.vector_norm(coordinates / self.singular_values, dim=1)


@dataclass(frozen=True, eq=False)
class FewOutputs:
    """The equations that the weights of a next layer with few outputs give for the columns of D."""

    span: Float[Tensor, "m r"]
    """Orthonormal basis of span(W₂ᵀ L₂). Every column of D lies in it before its activation pattern is applied."""
    weight: Float[Tensor, "outputs m"]
    """W₂."""
    rounds: int = 1
    """Number of rounds of one client. The weights of the rounds are side by side, and the span has one block each."""

    def between(self) -> Float[Tensor, "pairs m"]:
        """Return the unit vectors w_i - w_j for all pairs of outputs, projected onto the span.

        A classifier that confidently predicts class i for a sample of class j has the output gradient e_i - e_j, and
        sends w_i - w_j back.
        """
        if len(self.weight) < 2:
            return self.weight[:0]
        first, second = torch.triu_indices(len(self.weight), len(self.weight), 1, device=self.weight.device)
        sent = ((self.weight[first] - self.weight[second]) @ self.span) @ self.span.T
        size = torch.linalg.vector_norm(sent, dim=1, keepdim=True)
        return (sent / size)[size[:, 0] > NEGLIGIBLE_SHARE * size.max()]


@dataclass(frozen=True, eq=False)
class Reading:
    """The equations that the next layer gives, or the reason why it gives none."""

    why: str
    """"used", "not given", "not needed", or "not used: " and the reason."""
    next_layer: NextLayer | None = None
    """Equations from the gradient of the next layer; None if it is not used."""
    outputs: FewOutputs | None = None
    """Equations from the weights of a next layer with few outputs, if its gradient is not used."""


def read_next_layer(
    next_grad_weight: Tensor | None,
    next_weight: Tensor | None,
    preactivations: Float[Tensor, "m b"],
    rounds: int = 1,
) -> Reading:
    """Check the tensors of the next layer, and derive its equations if its gradient has the rank of the batch.

    If the rank of G₂ is below the batch size b, its row space is smaller than the span of the activations and does not
    contain single activations. A layer with ten outputs has at most rank ten. If the rank of G₂ is above the rank b of
    this layer's gradient, the inputs are linearly dependent and the row space at rank b has no meaning. The next layer
    is used in neither case.

    Args:
        next_grad_weight: G₂ = dL/dW₂, of shape (m₂, m), or None if there is no next layer.
        next_weight: W₂, of shape (m₂, m), or None together with ``next_grad_weight``.
        preactivations: A, whose columns give the pre-activations A p of this layer.
        rounds: number of rounds of one client whose tensors are side by side. Only the weights are used then.

    Returns:
        The equations, or the reason why there are none.

    Raises:
        ShapeError: if only one tensor is given, or if the inputs of the next layer are not the neurons of this layer.
        DtypeError: if a tensor is not a dense floating-point tensor, or is on another device than this layer.
        NonFiniteError: if a tensor contains NaN or Inf.
    """
    if next_grad_weight is None and next_weight is None:
        return Reading("not given")
    seen = _observe(next_grad_weight, next_weight, preactivations)
    batch_size, outputs = preactivations.shape[1], len(seen.weight)
    if batch_size < 2:
        return Reading("not needed")
    if rounds > 1:
        return _weights_only(seen, batch_size, "not used: its activations differ between the rounds", rounds)
    if outputs <= batch_size:
        why = f"not used: its {outputs} outputs cannot distinguish {batch_size} samples"
        return _weights_only(seen, batch_size, why)
    factors = _factors_at_clear_gap(seen)
    rank = 0 if factors is None else factors.batch_size
    if rank > batch_size:
        return Reading(
            f"not used: its gradient shows {rank} samples, but the gradient of this layer only {batch_size}, "
            "so the inputs are linearly dependent"
        )
    if factors is None:
        with suppress(RankError):
            factors = decompose(seen, batch_size)
    if factors is None or factors.batch_size < batch_size:
        why = f"not used: its gradient has a rank below the {batch_size} samples of the batch"
        return _weights_only(seen, batch_size, why)
    next_layer = _equations(factors, seen.weight)
    for name, matrix in (("the weights of this layer", preactivations), ("its weights", next_layer.back)):
        # The length of a column depends on how strong the gradients of the samples are, which does not matter here.
        pivots = torch.linalg.qr(sphere.retract(matrix.T).T)[1].diagonal().abs()
        if bool(pivots.min() <= MIN_INDEPENDENT_DISTANCE):
            return Reading(f"not used: {name} do not distinguish {batch_size} samples")
    return Reading("used", next_layer)


def _observe(
    next_grad_weight: Tensor | None, next_weight: Tensor | None, preactivations: Float[Tensor, "m b"]
) -> Observation:
    """Check the tensors of the next layer, and that the neurons of this layer are its inputs."""
    if next_grad_weight is None or next_weight is None:
        missing = "next_grad_weight" if next_grad_weight is None else "next_weight"
        raise ShapeError(f"{missing} is missing: pass both the gradient and the weight of the next layer, or neither")
    seen = observe(next_grad_weight, None, next_weight, None, prefix="next_")
    neurons = len(preactivations)
    if next_weight.shape[1] != neurons:
        raise ShapeError(
            f"next_weight has shape {tuple(next_weight.shape)}, but this layer has {neurons} neurons: "
            f"expected (outputs, {neurons})"
        )
    if next_weight.device != preactivations.device:
        raise DtypeError(f"next_weight is on {next_weight.device}, weight on {preactivations.device}: use one device")
    return seen


def _factors_at_clear_gap(seen: Observation) -> Factors | None:
    """Return the factors of a gradient if its singular values have a clear gap after its rank, else None."""
    try:
        factors = decompose(seen)
    except RankError:
        return None
    rank = factors.batch_size
    return factors if 0 < rank < len(factors.spectrum) and has_clear_gap(factors.spectrum, rank) else None


def _weights_only(seen: Observation, batch_size: int, why: str, rounds: int = 1) -> Reading:
    """Return what the weights of the next layer give, if its gradient is not used for the reason ``why``."""
    outputs = few_outputs(seen, batch_size, rounds)
    if outputs is None:
        return Reading(why)
    unknowns = outputs.span.shape[1]
    return Reading(f"{why}; its weights leave {unknowns} unknowns for each column of D", outputs=outputs)


def few_outputs(seen: Observation, batch_size: int, rounds: int = 1) -> FewOutputs | None:
    """Return span(W₂ᵀ L₂) for a next layer with few outputs, where L₂ spans the columns of G₂; None for other layers.

    Every column d_i of D lies in this span before its activation pattern is applied. A layer has few outputs if there
    are at most half as many outputs as samples, and at most half as many outputs as neurons.
    """
    outputs, neurons = seen.weight.shape
    if 2 * outputs > min(batch_size, neurons // rounds):
        return None
    gradients, weights = (each.chunk(rounds, dim=1) for each in (seen.gradient, seen.weight))
    spans = [_sent_back(*each) for each in zip(gradients, weights, strict=True)]
    return FewOutputs(torch.block_diag(*spans), seen.weight, rounds) if all(each.numel() for each in spans) else None


def _sent_back(gradient: Float[Tensor, "outputs m"], weight: Float[Tensor, "outputs m"]) -> Float[Tensor, "m r"]:
    """Return an orthonormal basis of span(W₂ᵀ L₂)."""
    columns, sizes, _ = torch.linalg.svd(gradient, full_matrices=False)
    sent = weight.T @ columns[:, sizes > NEGLIGIBLE_SHARE * sizes[0]]
    if not sent.numel():
        return sent
    span, sizes, _ = torch.linalg.svd(sent, full_matrices=False)
    return span[:, sizes > NEGLIGIBLE_SHARE * sizes[0]].contiguous()


def _equations(factors: Factors, weight: Tensor) -> NextLayer:
    """Return the equations of a next layer from the factors of its gradient and its weights."""
    live = max(1, factors.live_neurons)
    return NextLayer(
        activations=factors.rows.T.contiguous(),
        singular_values=factors.singular_values,
        back=weight.T @ factors.left,
        column=float(weight.square().sum(0).mean().sqrt()),
        noise=float(torch.linalg.vector_norm(factors.row_noise)) / live**0.5,
    )
