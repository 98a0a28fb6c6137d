"""What an inversion hands back, and how it tells of its progress."""

import html
from dataclasses import dataclass, field

from spearpp.inversion.evidence import Certificates, WitnessCertificates
from spearpp.inversion.factors import Factors
from spearpp.pictures import gallery
from spearpp.types import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class Progress:
    """How far a search has come, for whoever shows it."""

    batch_size: int
    """b, as read off the spectrum."""
    found: int
    """Independent directions in the pool, at most b."""
    starts: int
    """Starts spent so far."""
    total_starts: int
    """Starts at most."""
    score: float | None
    """λ of the best choice so far; None until b directions are there."""
    rounds: int = 0
    """Rounds, or chunks of starts, done so far."""


@dataclass(frozen=True)
class Stats:
    """What an inversion cost and why it ended."""

    starts: int = 0
    steps: int = 0
    """Gradient steps summed over starts."""
    candidates: int = 0
    """Directions in the pool at the end."""
    found: int = 0
    """Directions of the result that were found; the others complete the basis."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: decompose, search, pool, filter."""
    stopped: str = ""
    """Why it ended, in words."""
    rounds: int = 0
    """Rounds, or chunks of starts."""
    interrupted: bool = False
    """Whether Ctrl-C ended the search; what had been found by then is in the result."""


@dataclass(frozen=True, eq=False)
class Inversion:
    """What came out of a gradient.

    ``inputs[i]`` belongs to ``directions[i]``. With one witness and fewer directions found than samples,
    the last inputs come from the orthogonal complement and all of them are approximate, unless what is
    missing or wrong is so weak that the stronger inputs are certified: then only these are returned. With
    two, every input that was seen is exact on its own, and only those are returned.
    """

    inputs: Float[Tensor, "k n"]
    """Recovered inputs, certified ones first. Where only two layers together certify them, just those k."""
    certified: Bool[Tensor, "k"]
    """Exact by certificate, which needs no truth; see ``certificates``. A certified input is one training sample, or
    the weighted mean of several that activate the same neurons with proportional signals: from this layer alone nobody
    can tell these apart. ``spearpp.audit`` can where it knows the model and the loss."""
    score: float
    """λ, the sparsity matching coefficient: the share of entries of D that are zero just where the
    recovered inputs silence the neuron."""
    batch_size: int
    """b: the samples visible in the gradient. Repeated samples count once, samples that fire no
    neuron not at all."""
    directions: Float[Tensor, "found b"]
    """The unit directions q found and used, one a row."""
    scale_known: bool
    """False for a layer without bias: inputs are then known up to a positive factor, and given with
    unit norm."""
    certificates: Certificates | WitnessCertificates | None
    """The evidence for each input; None if one witness found fewer directions than samples and none is certified."""
    spectrum: Float[Tensor, "r"]
    """Singular values of the gradient, largest first: b of them stand above the noise."""
    zeros: Int[Tensor, "found"]
    """For each direction found, how many neurons have no gradient from its input, of those that have one at all."""
    fits: Bool[Tensor, "k"]
    """Which inputs fit the gradient, certified or not: they silence no neuron that has a gradient from them."""
    next_layer: str
    """What became of the next layer's gradient, in words: "not given", "used", or why not used."""
    stats: Stats
    factors: Factors | None = None
    """The gradient's factors L and R, to replay inputs with; None for a result that was read from a folder."""

    @property
    def missing(self) -> int:
        """How many samples of the batch have not come back certified."""
        return self.batch_size - int(self.certified.sum())

    def __repr__(self) -> str:
        scale = "" if self.scale_known else ", up to scale"
        return (
            f"Inversion({int(self.certified.sum())} of {self.batch_size} inputs certified{scale}, "
            f"λ = {self.score:.6g}, {self.stats.starts:,} starts, {self.stats.stopped})"
        )

    def _repr_html_(self) -> str:
        captions = ["certified" if exact else "approximate" for exact in self.certified.tolist()]
        return f"<p><b>{html.escape(repr(self))}</b></p>" + gallery(self.inputs, captions)
