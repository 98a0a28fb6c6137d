"""Signals that a next layer with few outputs can send back: where reflections start, and the set they project onto.

In one round, the signal of a sample is W₂ᵀ r before its activation pattern is applied, with one unknown r for each
output. In several rounds of one client it is s_t W₂,tᵀ r_t in round t. The outputs of a network change little from one
round to the next, so r_t is nearly the same r in all rounds, and s_t is zero in rounds from which the sample is absent.
The signal over T rounds then has only r + T unknowns instead of r·T. What the reflections find is solved again without
this assumption (``over_rounds``).
"""

import torch

from spearpp.inversion.next_layer import NEGLIGIBLE_SHARE, FewOutputs
from spearpp.linalg import sphere
from spearpp.types import Float, Tensor

PAIR_STARTS = 0.75
"""Share of the starts that begin at the signal of a pair of outputs, one predicted instead of the other. Measured: with
this share, reflections found 186 of 234 columns at b=256. Random starts find the same columns again and again
(docs/lab/notebook.md, section "The weights of an output layer")."""
LOGIT_SIZES = (0.0, 1.0, 4.0)
"""Sizes of the random outputs from which starts over several rounds compute softmax(o) - e_y. Design choice: outputs of
a new network, of a network in training, and of a network that is confident."""
WEAK_SHARE = 0.3
"""Share of the rounds in which the signal of a start is weak. Design choice: samples may be absent from rounds."""
WEAK_SIZE = 0.1
"""Size of a weak signal, relative to the others. Design choice: small, and not zero."""
RANK_ONE_STEPS = 3
"""Power iterations that approximate the coefficients of all rounds by rank one. Design choice: further reflections
correct the rest."""


class SignalsOfRound:
    """Signals of one round: the span of the weights of the next layer."""

    def __init__(self, outputs: FewOutputs, dtype: torch.dtype) -> None:
        self.span, self.pairs = outputs.span.to(dtype), outputs.between()

    def starts(self, size: int, generator: torch.Generator, dtype: torch.dtype) -> Float[Tensor, "size m"]:
        """Return random signals, most of them near the signal of a pair of outputs, where most columns are."""
        span = self.span
        starts = sphere.uniform(size, span.shape[1], generator, dtype=dtype, device=span.device) @ span.T
        pairs = torch.randperm(len(self.pairs), generator=generator, device=generator.device).to(span.device)
        pairs = pairs.repeat(-(-size // max(1, len(pairs))))[: int(PAIR_STARTS * size)]
        starts[: len(pairs)] = self.pairs[pairs].to(dtype)
        return starts

    def project(self, signals: Float[Tensor, "k m"]) -> Float[Tensor, "k m"]:
        """Return the projections onto the span."""
        return (signals @ self.span) @ self.span.T


class SignalsOfRounds:
    """Signals over several rounds, with nearly the same gradient of the outputs in each: s_t W₂,tᵀ r."""

    def __init__(self, outputs: FewOutputs, dtype: torch.dtype) -> None:
        count = len(outputs.weight)
        self.rounds = outputs.rounds
        self.weight = outputs.weight.reshape(count, self.rounds, -1).transpose(0, 1)
        mean = self.weight.mean(0)
        # The gradients of a softmax sum to zero, so one dimension is missing in the span of every round.
        self.sums_to_zero = count > 1 and outputs.span.shape[1] < count * self.rounds
        left, sizes, _ = torch.linalg.svd(mean - mean.mean(0) * self.sums_to_zero, full_matrices=False)
        kept = sizes > NEGLIGIBLE_SHARE * sizes[0]
        basis = (self.weight.mT @ (left[:, kept] / sizes[kept])).contiguous()
        self.basis, self.inverse = basis.to(dtype), torch.linalg.pinv(basis).to(dtype)

    def starts(self, size: int, generator: torch.Generator, dtype: torch.dtype) -> Float[Tensor, "size m"]:
        """Return signals of random outputs and labels, weak in some of the rounds."""
        count = self.weight.shape[1]
        device = generator.device
        sizes = torch.tensor(LOGIT_SIZES, device=device).repeat(size)[:size, None]
        logits = sizes * torch.randn(size, count, generator=generator, device=device)
        labels = torch.randint(count, (size,), generator=generator, device=device)
        gradient = logits.softmax(1) - torch.nn.functional.one_hot(labels, count)
        if not self.sums_to_zero:
            gradient = torch.randn(size, count, generator=generator, device=device)
        weak = torch.rand(size, self.rounds, generator=generator, device=device) < WEAK_SHARE
        strength = torch.where(weak, WEAK_SIZE, 1.0)
        gradient, strength = gradient.to(self.weight), strength.to(self.weight)
        return sphere.retract(torch.einsum("so,st,tom->stm", gradient, strength, self.weight).flatten(1)).to(dtype)

    def project(self, signals: Float[Tensor, "k m"]) -> Float[Tensor, "k m"]:
        """Return nearby signals: the coefficients of all rounds are approximated by rank one, with factors s_t ≥ 0."""
        parts = signals.reshape(len(signals), self.rounds, -1).transpose(0, 1)
        coefficients = parts @ self.inverse.mT
        strength = torch.linalg.vector_norm(coefficients, dim=2, keepdim=True)
        common = coefficients[0]
        for _ in range(RANK_ONE_STEPS):
            common = (strength * coefficients).sum(0)
            common = common / torch.linalg.vector_norm(common, dim=1, keepdim=True).clamp_min(1e-20)
            strength = (coefficients * common).sum(2, keepdim=True).clamp_min(0)
        return ((strength * common) @ self.basis.mT).transpose(0, 1).flatten(1)
