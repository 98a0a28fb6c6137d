"""One batch: a client trains on it, the server inverts what it got, and the truth is the judge."""

import base64
import time
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from spearpp.errors import OptionError, RankError
from spearpp.experiments.codec import register
from spearpp.experiments.source import Source
from spearpp.inversion.invert import invert
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import pose
from spearpp.inversion.result import Inversion
from spearpp.inversion.selection import Selection, recover
from spearpp.linalg.nullspace import kernel_vectors
from spearpp.metrics import Score, score
from spearpp.search import Gated, Search
from spearpp.simulate import Batch, Cast, Client, FedSGD, LayerGradient, Quantise, TopK, linear_layers, mlp
from spearpp.types import Tensor

RIGHT, WRONG = 90.0, 60.0
"""dB: an uncertified input over the first was missed; a certified one under the second is wrong."""


@dataclass(frozen=True)
class Measurement:
    """What came of one batch."""

    b: int
    accurate: bool
    """Mean PSNR over the threshold, the paper's accuracy."""
    exact: bool
    """Every input over it."""
    recovered: int
    """Inputs over it."""
    certified: int
    wrongly_certified: int
    """Certified inputs with a PSNR under 60 dB to the nearest true one."""
    missed: int
    """Inputs over 90 dB that were not certified."""
    mean_psnr: float
    with_masks: float | None
    """Mean PSNR with the true masks given, the most that noise allows; None where it was not asked for."""
    score: float
    starts: int
    seconds: float
    decompose: float
    """Of these seconds, the singular value decomposition."""
    stopped: str
    images: str | None = None
    """Originals and recoveries as bytes, zlib and base64; None where they were not asked for."""


@register
@dataclass(frozen=True)
class Attack:
    """A setting: batch size, network, client, data and search. With a seed it is a cell.

    >>> from spearpp.simulate import FedSGD
    >>> done = Attack(b=4, m=60, search=Gated(), data=Source("digits")).measure(1000, torch.device("cpu"))
    >>> done["exact"], done["certified"]
    (True, 4)
    """

    b: int
    m: int
    search: Search = Gated()
    client: Client = FedSGD()
    changes: tuple[TopK | Quantise | Cast, ...] = ()
    """What happens to the update on its way."""
    data: Source = Source()
    depth: int = 3
    """Hidden layers, m neurons each."""
    witnesses: int = 1
    """1: the first layer alone. 2: the gradient of the second as well."""
    normalise: bool = True
    threshold: float = 90.0
    bound: bool = False
    """Whether to measure what the true masks would give."""
    keep_images: bool = False

    def __post_init__(self) -> None:
        if min(self.b, self.m, self.depth) < 1 or self.witnesses not in (1, 2):
            given = f"b={self.b}, m={self.m}, depth={self.depth}, witnesses={self.witnesses}"
            raise OptionError(f"{given}: each at least 1, and one witness or two")

    def prepare(self, seed: int, device: torch.device) -> tuple[Batch, list[LayerGradient]]:
        """The client's batch, and what the server sees of each Linear layer."""
        generator = torch.Generator().manual_seed(seed)
        batch = self.data.draw(self.b, generator, normalise=self.normalise)
        model = mlp(batch.inputs.shape[1], [self.m] * self.depth, self.data.classes, generator=generator).to(device)
        client = self.client
        for change in self.changes:
            client = client | change
        return batch, linear_layers(model, client(model, batch, generator))

    def measure(self, seed: int, device: torch.device) -> dict[str, Any]:
        """Play the client, invert, compare; the same for the same seed, but for the seconds."""
        batch, (seen, following, *_) = self.prepare(seed, device)
        two = self.witnesses == 2
        began = time.perf_counter()
        try:
            result = invert(
                *seen,
                next_grad_weight=following.grad_weight if two else None,
                next_weight=following.weight if two else None,
                search=self.search,
                generator=torch.Generator().manual_seed(seed),
            )
        except RankError as error:  # a batch that fills the layer is a batch that does not come back
            return asdict(_nothing(self.b, time.perf_counter() - began, str(error)))
        seconds = time.perf_counter() - began
        scored = partial(score, truth=batch.inputs, normalisation=batch.normalisation, threshold=self.threshold)
        compared = scored(result.inputs)
        certified, near = _nearest(result, compared)
        bound = scored(with_true_masks(seen, batch)).mean_psnr if self.bound else None
        return asdict(
            Measurement(
                b=self.b,
                accurate=compared.accurate,
                exact=compared.exact,
                recovered=compared.recovered,
                certified=int(certified.sum()),
                wrongly_certified=int((certified & (near < WRONG)).sum()),
                missed=int((~certified & (near > RIGHT)).sum()),
                mean_psnr=compared.mean_psnr,
                with_masks=bound,
                score=result.score,
                starts=result.stats.starts,
                seconds=seconds,
                decompose=result.stats.seconds["decompose"],
                stopped=result.stats.stopped,
                images=_images(batch, result, compared) if self.keep_images else None,
            )
        )


def with_true_masks(seen: LayerGradient, batch: Batch) -> Tensor:
    """What comes back if every direction is solved for the rows its true input silences."""
    if seen.bias is None:
        raise OptionError("the layer has no bias, so the scale of its inputs is not known")
    problem = pose(observe(*seen))
    left, noise = problem.factors.left, problem.factors.row_noise
    silent = batch.inputs.to(seen.weight) @ seen.weight.T + seen.bias <= 0
    rows = left / noise.clamp_min(torch.finfo(noise.dtype).tiny)[:, None] * noise.max()
    directions = torch.cat([kernel_vectors(part[:, :, None] * rows)[0] for part in silent.split(16)])
    return recover(problem, Selection.of(problem, directions, silent))


def pixels_of(images: str, b: int) -> tuple[Tensor, Tensor]:
    """Originals and recoveries on the [0, 1] scale, (b, n) each, from what a measurement kept."""
    values = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(images))), dtype=torch.uint8)
    originals, recovered = values.float().div(255).reshape(2, b, -1)
    return originals, recovered


def _nearest(result: Inversion, compared: Score) -> tuple[Tensor, Tensor]:
    """For each recovered input whether it is certified, and its PSNR to the true one it was assigned to."""
    certified = result.certified.cpu()
    near = torch.zeros(len(certified))
    near[compared.assignment[compared.assignment >= 0]] = compared.psnr[compared.assignment >= 0].float()
    return certified, near


def _images(batch: Batch, result: Inversion, compared: Score) -> str:
    originals = batch.normalisation.undo(batch.inputs)
    recovered = torch.zeros_like(originals)
    there = compared.assignment >= 0
    rows = compared.assignment[there].to(result.inputs.device)
    recovered[there] = batch.normalisation.undo(result.inputs[rows].cpu()).to(recovered)
    both = (torch.stack([originals, recovered]).clamp(0, 1) * 255).round().to(torch.uint8)
    return base64.b64encode(zlib.compress(both.contiguous().numpy().tobytes(), 9)).decode()


def _nothing(b: int, seconds: float, why: str) -> Measurement:
    return Measurement(
        b=b,
        accurate=False,
        exact=False,
        recovered=0,
        certified=0,
        wrongly_certified=0,
        missed=0,
        mean_psnr=0.0,
        with_masks=None,
        score=0.0,
        starts=0,
        seconds=seconds,
        decompose=seconds,
        stopped=why,
    )
