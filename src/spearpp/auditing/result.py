"""The result of an audit."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from spearpp.auditing.checks import Finding
from spearpp.auditing.claims import Claim, ClaimKind, reasons
from spearpp.auditing.estimate import Estimate
from spearpp.auditing.replay import Replay
from spearpp.auditing.vocabulary import Vocabulary
from spearpp.inversion.result import Inversion
from spearpp.model import Layer
from spearpp.pictures import Shape, gallery
from spearpp.types import Bool, Int, Tensor

if TYPE_CHECKING:
    from spearpp.auditing.folder import Redaction
    from spearpp.update.files import FileName


class Verdict(StrEnum):
    """The verdict of an audit. There is no verdict "safe"."""

    LEAKS = "LEAKS"
    """At least one training input was recovered, or the vocabulary of the client."""
    NOT_FOUND = "NOT_FOUND"
    """No input was proved to be a training sample. This does not prove that the update is safe."""
    NOT_APPLICABLE = "NOT_APPLICABLE"
    """No layer of the update can be inverted."""


@dataclass(frozen=True, eq=False)
class LayerAudit:
    """The result for one layer."""

    layer: Layer
    reason: str
    """Why the layer was inverted, or why it was not inverted."""
    inversion: Inversion | None = None
    labels: Int[Tensor, "k"] | None = None
    """The class of each input of the inversion. -1 for an input that no label fits. None if labels are unknown."""
    claims: tuple[Claim, ...] = ()
    """One claim per input of the inversion, in the same order. Empty before the inputs are judged."""
    invertible: bool = True
    """Whether the audit could invert the layer, also if it had no time for it. A layer that qualifies
    (``Layer.qualifies``) cannot be inverted if its gradient has full rank or is damaged."""

    @property
    def batch_size(self) -> int | None:
        """Number of samples that the gradient of the layer shows: its rank. None if the layer was not inverted."""
        return None if self.inversion is None else self.inversion.batch_size

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search of this layer."""
        return self.inversion is not None and self.inversion.stats.interrupted

    @property
    def complete(self) -> bool:
        """Whether every sample that the gradient shows has a certified input."""
        found = self.inversion
        return found is not None and 0 < int(found.certified.sum()) == found.batch_size

    @property
    def exact(self) -> int:
        """Number of inputs that were recovered exactly. Each is one sample, or the mean of several samples."""
        return sum(each.certified for each in self.claims)

    @property
    def approximate(self) -> int:
        """Number of the other recovered inputs, which have a larger stated error."""
        return len(self.inputs) - self.exact

    @property
    def fitting(self) -> int:
        """Number of inputs that fit the gradient, but are not proved to be samples. They do not count as recovered."""
        return sum(each.kind in (ClaimKind.SEVERAL, ClaimKind.FITS) for each in self.claims)

    @property
    def inputs(self) -> Tensor:
        """All recovered inputs, exact or approximate."""
        if self.inversion is None:
            return torch.zeros(0, self.layer.features)
        return self.inversion.inputs[self.is_recovered.to(self.inversion.inputs.device)]

    @property
    def error(self) -> float:
        """The largest stated relative error of the recovered inputs."""
        return max((each.error for each in self.claims if each.recovered), default=0.0)

    @property
    def is_recovered(self) -> Bool[Tensor, "k"]:
        """Which inputs of the inversion count as recovered."""
        if self.inversion is None:
            return torch.zeros(0, dtype=torch.bool)
        recovered = [each.recovered for each in self.claims] or [False] * len(self.inversion.inputs)
        return torch.tensor(recovered, dtype=torch.bool)


@dataclass(frozen=True)
class RoundSummary:
    """What the audit of one round alone gave."""

    verdict: str | None
    """The verdict of the round alone. None if it was not audited alone."""
    batch_size: int | None
    """Number of samples that the gradient of the round shows. None if this could not be determined."""
    recovered: int
    """Number of inputs that were recovered from this round alone."""


@dataclass(frozen=True)
class History:
    """The rounds of an audit, and what they gave together.

    ``present`` and ``known_from`` have one entry for each recovered input of the best layer.
    """

    rounds: tuple[RoundSummary, ...]
    """The rounds, oldest first."""
    joined: tuple[int, ...]
    """Indices of the rounds whose gradients were joined. Empty if they were not joined."""
    samples: int | None
    """Number of different samples in the joined rounds. None if the rounds were not joined or show no clear number."""
    outcome: str
    """What joining the rounds gave, or why they were not joined. The text has no capital letter and no full stop."""
    present: tuple[tuple[int, ...], ...]
    """For each recovered input, the indices of the rounds to which it contributes."""
    known_from: tuple[int, ...]
    """For each recovered input, the index of the first round that, together with the rounds before it, proves the
    input."""

    @property
    def recovered_alone(self) -> int:
        """Number of inputs that were recovered from the best single round."""
        return max((each.recovered for each in self.rounds), default=0)

    def known_after(self, index: int) -> int:
        """Return how many of the recovered inputs were known after the round with this index."""
        return sum(first <= index for first in self.known_from)


@dataclass(frozen=True, eq=False)
class AuditResult:
    """What an audit recovered from one update."""

    verdict: Verdict
    summary: str
    """The verdict in one sentence."""
    layers: list[LayerAudit]
    findings: list[Finding]
    caveats: list[str]
    """Sentences about what the verdict does not say."""
    replay: Replay | None
    """The comparison of the update with its replay from the recovered inputs. None if inputs or labels are missing."""
    seconds: float
    """How long the audit took."""
    budget: float | None
    """The time limit in seconds. None if only the search limits the time."""
    interrupted: bool = False
    """Whether Ctrl-C ended the audit early. The result contains what was found until then."""
    estimated: Estimate | None = None
    """How the client trained. None for gradients, and if some inputs or labels of the batch are missing."""
    history: History | None = None
    """What several rounds gave, alone and together. None for an audit of one update."""
    vocabulary: tuple[Vocabulary, ...] = ()
    """What each embedding table reveals: which tokens, categories or items the client's training looked up."""

    @property
    def best(self) -> LayerAudit | None:
        """The layer with the most serious leak, or None if no input was recovered (``best_of``)."""
        return best_of(self.layers)

    @property
    def fitting(self) -> int:
        """The largest number of inputs of one layer that fit its gradient, but are not proved to be samples."""
        return max((each.fitting for each in self.layers), default=0)

    @property
    def why_not_certified(self) -> str | None:
        """The most frequent reason why the inputs that ``fitting`` counts are not proved. None if there are none."""
        if not self.fitting:
            return None
        return reasons(max(self.layers, key=lambda each: each.fitting).claims, ClaimKind.SEVERAL, ClaimKind.FITS)

    @property
    def shown(self) -> LayerAudit | None:
        """The layer to show: ``best``, or else the layer with the most inputs that fit. None if there is neither."""
        if self.best is not None or not self.fitting:
            return self.best
        return max(self.layers, key=lambda each: (each.layer.sees != "features", each.fitting > 0, each.fitting))

    @property
    def rows(self) -> Int[Tensor, "k"]:
        """The indices of ``inputs`` in the inversion of the best layer."""
        return torch.zeros(0, dtype=torch.int64) if self.best is None else self.best.is_recovered.nonzero()[:, 0]

    @property
    def inputs(self) -> Tensor:
        """The recovered inputs of the best layer."""
        return torch.zeros(0, 0) if self.best is None else self.best.inputs

    def __repr__(self) -> str:
        return f"AuditResult({self.summary}; {len(self.layers)} layers, {self.seconds:.3g} s)"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(each.layer.name)}</td><td>{each.layer.neurons} x {each.layer.features}</td>"
            f"<td>{'' if each.batch_size is None else each.batch_size}</td><td>{each.exact}</td>"
            f"<td>{html.escape(each.reason)}</td></tr>"
            for each in self.layers
        )
        head = "<tr><th>layer</th><th>neurons x inputs</th><th>samples</th><th>exact</th><th>outcome</th></tr>"
        labels = None if self.best is None or self.best.labels is None else self.best.labels[self.rows].tolist()
        captions = [f"{row + 1}" if labels is None else f"label {labels[row]}" for row in range(len(self.inputs))]
        warning = "<p>Recovered inputs are personal data if the training data was.</p>" if len(self.inputs) else ""
        return (
            f"<p><b>{html.escape(self.summary)}</b></p><table>{head}{rows}</table>"
            + gallery(self.inputs, captions)
            + warning
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the recovered numbers in a form for JSON: the content of ``report.json``."""
        from spearpp.auditing.document import document

        return document(self)

    def save(
        self,
        folder: "FileName",
        *,
        redact: "Redaction" = "none",
        shape: Shape | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``report.json`` and ``recovered.safetensors`` into a folder. See ``spearpp.auditing.folder.save``."""
        from spearpp.auditing.folder import save

        save(self, folder, redact=redact, shape=shape, about=about)

    @classmethod
    def load(cls, folder: "FileName") -> "AuditResult":
        """Read a result that ``save`` wrote.

        Raises:
            DataError: if the folder contains no result, or a result of another version.
        """
        from spearpp.auditing.folder import load

        return load(folder)


def best_of(audits: list[LayerAudit]) -> LayerAudit | None:
    """Return the layer with the most serious leak, or None if no layer has recovered inputs.

    Inputs of the model are more serious than features. Among layers of the same kind, the number of recovered inputs
    decides.
    """
    found = [each for each in audits if len(each.inputs)]
    return max(found, key=lambda each: (each.layer.sees != "features", len(each.inputs)), default=None)


def whole_batches(audits: list[LayerAudit]) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and labels of every layer that has an input of the model and a label for each sample it shows."""
    return [
        (each.inversion.inputs, each.labels)
        for each in audits
        if each.inversion is not None and each.labels is not None and each.layer.sees != "features"
        if len(each.inversion.inputs) == each.inversion.batch_size and bool((each.labels >= 0).all())
    ]


def verdict_of(audits: list[LayerAudit], tables: tuple[Vocabulary, ...], *, tried: bool) -> Verdict:
    """Return the verdict for all layers and embedding tables. ``tried`` says whether any layer could be inverted."""
    if best_of(audits) is not None or any(each.leaks for each in tables):
        return Verdict.LEAKS
    return Verdict.NOT_FOUND if tried else Verdict.NOT_APPLICABLE
