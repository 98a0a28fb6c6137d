"""One simulated attack: a client computes an update on a batch, the server inverts it, and the result is scored."""

import base64
import math
import time
import zlib
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from spearpp.errors import OptionError, RankError
from spearpp.experiments.cell import register
from spearpp.experiments.source import Source
from spearpp.inversion.evidence import EXACT
from spearpp.inversion.invert import invert
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import pose
from spearpp.inversion.result import Inversion
from spearpp.inversion.selection import Selection, inputs_at
from spearpp.linalg.nullspace import kernel_vectors
from spearpp.metrics import PAPER_PSNR, Score, score
from spearpp.search import Gated, Search
from spearpp.simulate import Batch, Client, FedSGD, LayerGradient, linear_layers, mlp
from spearpp.types import Tensor

WRONG_PSNR = -20 * math.log10(EXACT)
"""A certified input with a PSNR below this value, 60 dB, counts as wrong. Derived: pixels are at most 1, so the root
mean square error of an exact input is at most ``EXACT``."""
MASKS_PER_CHUNK = 16
"""Number of samples whose null vectors are computed at once. Design choice: the memory for 16 m x b matrices."""


@dataclass(frozen=True)
class Measurement:
    """Result of the attack on one batch. All PSNRs are in dB. The defaults describe an attack that recovers nothing."""

    b: int
    seconds: float
    """Duration of the inversion."""
    decompose: float
    """Seconds of it that the singular value decomposition took."""
    stopped: str
    """Why the search stopped, or the message of the ``RankError``."""
    accurate: bool = False
    """Whether the mean PSNR is above the threshold. The paper calls the share of such batches accuracy."""
    exact: bool = False
    """Whether the PSNR of every input is above the threshold."""
    recovered: int = 0
    """Number of inputs with a PSNR above the threshold."""
    certified: int = 0
    wrongly_certified: int = 0
    """Number of certified inputs with a PSNR below ``WRONG_PSNR`` to the true input they are matched to."""
    missed: int = 0
    """Number of inputs with a PSNR above ``PAPER_PSNR`` that were not certified."""
    mean_psnr: float = 0.0
    with_masks: float | None = None
    """Mean PSNR if the true activation patterns are known, an upper limit under noise; None if not measured."""
    score: float = 0.0
    """Score of the selected directions, as ``spearpp.invert`` reports it."""
    starts: int = 0
    images: str | None = None
    """Original and recovered pixels as bytes, compressed with zlib and encoded as base64; None if not kept."""


@register
@dataclass(frozen=True)
class Attack:
    """A setting of one attack: batch size, network, client, data and search.

    An attack and a seed together are a cell.

    >>> done = Attack(b=4, m=60, search=Gated(), data=Source("digits")).measure(1000, torch.device("cpu"))
    >>> done["exact"], done["certified"]
    (True, 4)
    """

    b: int
    m: int
    search: Search = Gated()
    client: Client = FedSGD()
    """What the client does, and how its update changes before the server receives it: ``FedSGD() | TopK(0.1)``."""
    data: Source = Source()
    depth: int = 3
    """Number of hidden layers, with m neurons each."""
    layers_used: int = 1
    """Number of layers whose gradients the attack uses. 1: the first layer. 2: the first layer and the next layer."""
    normalise: bool = True
    """Whether the inputs of the network are normalised. If False, they are pixels in [0, 1]."""
    threshold: float = PAPER_PSNR
    """PSNR in dB above which an input counts as recovered."""
    bound: bool = False
    """Whether to measure the PSNR with known activation patterns (``Measurement.with_masks``)."""
    keep_images: bool = False
    """Whether to keep the original and the recovered pixels."""

    def __post_init__(self) -> None:
        if min(self.b, self.m, self.depth) < 1 or self.layers_used not in (1, 2):
            given = f"b={self.b}, m={self.m}, depth={self.depth}, layers_used={self.layers_used}"
            raise OptionError(f"{given}: b, m and depth must be at least 1, and layers_used must be 1 or 2")

    def prepare(self, seed: int, device: torch.device) -> tuple[Batch, list[LayerGradient]]:
        """Return the client's batch and, for each Linear layer, the gradients that the server receives."""
        generator = torch.Generator().manual_seed(seed)
        batch = self.data.draw(self.b, generator, normalise=self.normalise)
        model = mlp(batch.inputs.shape[1], [self.m] * self.depth, self.data.classes, generator=generator).to(device)
        return batch, linear_layers(model, self.client(model, batch, generator))

    def measure(self, seed: int, device: torch.device) -> dict[str, Any]:
        """Simulate the client, invert its update, and return the fields of ``Measurement``."""
        batch, (seen, following, *_) = self.prepare(seed, device)
        use_next_layer = self.layers_used == 2
        began = time.perf_counter()
        try:
            result = invert(
                *seen,
                next_grad_weight=following.grad_weight if use_next_layer else None,
                next_weight=following.weight if use_next_layer else None,
                search=self.search,
                generator=torch.Generator().manual_seed(seed),
            )
        except RankError as error:  # the batch is too large for the layer: no input is recovered
            seconds = time.perf_counter() - began
            return asdict(Measurement(b=self.b, seconds=seconds, decompose=seconds, stopped=str(error)))
        seconds = time.perf_counter() - began
        scored = partial(score, truth=batch.inputs, normalisation=batch.normalisation, threshold=self.threshold)
        compared = scored(result.inputs)
        bound = scored(with_true_masks(seen, batch)).mean_psnr if self.bound else None
        images = _images(batch, result, compared) if self.keep_images else None
        one = measurement(self.b, result, compared, result.certified.cpu(), seconds, result.stats.stopped)
        return asdict(replace(one, with_masks=bound, images=images))


def measurement(
    b: int, found: Inversion, compared: Score, certified: Tensor, seconds: float, stopped: str
) -> Measurement:
    """Return what one attack recovered, compared with the truth. ``certified`` says it for each input, (k,)."""
    psnr = torch.zeros(len(certified))  # of each recovered input to the true input that it is matched to, or 0
    matched = compared.assignment >= 0
    psnr[compared.assignment[matched]] = compared.psnr[matched].float()
    return Measurement(
        b=b,
        accurate=compared.accurate,
        exact=compared.exact,
        recovered=compared.recovered,
        certified=int(certified.sum()),
        wrongly_certified=int((certified & (psnr < WRONG_PSNR)).sum()),
        missed=int((~certified & (psnr > PAPER_PSNR)).sum()),
        mean_psnr=compared.mean_psnr,
        score=found.score,
        starts=found.stats.starts,
        seconds=seconds,
        decompose=found.stats.seconds["decompose"],
        stopped=stopped,
    )


def with_true_masks(seen: LayerGradient, batch: Batch) -> Tensor:
    """Recover the inputs, (b, n), with the true activation patterns of the first layer known.

    Each direction is the null vector of those rows of the gradient's left factor whose neurons the true input does not
    activate. Under noise, this is an upper limit for what a search can reach.
    """
    if seen.bias is None:
        raise OptionError("the layer has no bias, so the scale of its inputs is unknown")
    problem = pose(observe(*seen))
    left, noise = problem.factors.left, problem.factors.row_noise
    silent = batch.inputs.to(seen.weight) @ seen.weight.T + seen.bias <= 0
    rows = left / noise.clamp_min(torch.finfo(noise.dtype).tiny)[:, None] * noise.max()
    directions = torch.cat([kernel_vectors(part[:, :, None] * rows)[0] for part in silent.split(MASKS_PER_CHUNK)])
    chosen = Selection.of(problem, directions, silent)
    return inputs_at(problem, chosen.points, chosen.zeros)


def pixels_of(images: str, b: int) -> tuple[Tensor, Tensor]:
    """Decode ``Measurement.images``: original and recovered pixels in [0, 1], (b, n) each."""
    values = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(images))), dtype=torch.uint8)
    originals, recovered = values.float().div(255).reshape(2, b, -1)
    return originals, recovered


def _images(batch: Batch, result: Inversion, compared: Score) -> str:
    originals = batch.normalisation.undo(batch.inputs)
    recovered = torch.zeros_like(originals)
    matched = compared.assignment >= 0
    rows = compared.assignment[matched].to(result.inputs.device)
    recovered[matched] = batch.normalisation.undo(result.inputs[rows].cpu()).to(recovered)
    both = (torch.stack([originals, recovered]).clamp(0, 1) * 255).round().to(torch.uint8)
    return base64.b64encode(zlib.compress(both.contiguous().numpy().tobytes(), 9)).decode()
