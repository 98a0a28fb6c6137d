"""What an audit comes to."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from spearpp.auditing.checks import Finding
from spearpp.auditing.claims import Claim, Kind, reasons
from spearpp.auditing.estimate import Estimate
from spearpp.auditing.replay import Replay
from spearpp.inversion.result import Inversion
from spearpp.model import Layer
from spearpp.pictures import Shape, gallery
from spearpp.types import Bool, Int, Tensor

if TYPE_CHECKING:
    from spearpp.auditing.folder import Redaction
    from spearpp.update.files import FileName


class Verdict(StrEnum):
    """What an audit comes to. There is no "safe"."""

    LEAKS = "LEAKS"
    NOT_FOUND = "NOT_FOUND"
    NOT_APPLICABLE = "NOT_APPLICABLE"


@dataclass(frozen=True, eq=False)
class LayerAudit:
    """One layer: what it holds, and what came of it."""

    layer: Layer
    feasible: bool
    reason: str
    """Why it was inverted, or why not."""
    inversion: Inversion | None = None
    labels: Int[Tensor, "k"] | None = None
    """The class of each recovered input, -1 where none fits; None where labels cannot be told."""
    claims: tuple[Claim, ...] = ()
    """What is claimed of each input of the inversion, in its order; empty before that is judged."""

    @property
    def batch_size(self) -> int | None:
        """How many samples its gradient holds, where that could be read."""
        return None if self.inversion is None else self.inversion.batch_size

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended its search."""
        return self.inversion is not None and self.inversion.stats.interrupted

    @property
    def recovered(self) -> int:
        """How many of them were recovered exactly: each one sample, or a mean of samples that cannot be told apart."""
        return sum(each.certified for each in self.claims)

    @property
    def approximate(self) -> int:
        """How many more were recovered up to an error that is stated."""
        return len(self.inputs) - self.recovered

    @property
    def fitting(self) -> int:
        """How many more fit the gradient without being proved to be samples; their claims say why."""
        return sum(each.kind in (Kind.SEVERAL, Kind.FITS) for each in self.claims)

    @property
    def inputs(self) -> Tensor:
        """The inputs that count as recovered."""
        if self.inversion is None:
            return torch.zeros(0, self.layer.features)
        return self.inversion.inputs[self.held.to(self.inversion.inputs.device)]

    @property
    def error(self) -> float:
        """The largest stated error of these inputs, over their norm."""
        return max((each.error for each in self.claims if each.recovered), default=0.0)

    @property
    def held(self) -> Bool[Tensor, "k"]:
        """Which rows of the inversion count as recovered."""
        if self.inversion is None:
            return torch.zeros(0, dtype=torch.bool)
        known = [each.recovered for each in self.claims] or [False] * len(self.inversion.inputs)
        return torch.tensor(known, dtype=torch.bool)


@dataclass(frozen=True, eq=False)
class AuditResult:
    """What one update gives away."""

    verdict: Verdict
    summary: str
    """The verdict in a sentence."""
    layers: list[LayerAudit]
    findings: list[Finding]
    caveats: list[str]
    """What the verdict does not say."""
    replay: Replay | None
    """The update computed again from what was recovered, where all of it was."""
    seconds: float
    budget: float | None
    """Seconds that were allowed; None for no bound but the search's own."""
    interrupted: bool = False
    """Whether Ctrl-C ended it early; what had been found by then is in it."""
    estimated: Estimate | None = None
    """How the client trained, told from its update; None for gradients, and where the batch did not come back whole."""

    @property
    def best(self) -> LayerAudit | None:
        """The layer that gives away most: the model's inputs before features, then the larger number."""
        return best_of(self.layers)

    @property
    def fitting(self) -> int:
        """How many inputs fit a layer's gradient without being proved to be samples, in the layer with most of them."""
        return max((each.fitting for each in self.layers), default=0)

    @property
    def why_not_certified(self) -> str | None:
        """Why these are not certified: the most frequent reason; None if there are none."""
        if not self.fitting:
            return None
        return reasons(max(self.layers, key=lambda each: each.fitting).claims, Kind.SEVERAL, Kind.FITS)

    @property
    def shown(self) -> LayerAudit | None:
        """The layer to show: the one that gives away most, or else the one with most inputs that fit."""
        if self.best is not None or not self.fitting:
            return self.best
        return max(self.layers, key=lambda each: (each.layer.sees != "features", each.fitting > 0, each.fitting))

    @property
    def rows(self) -> Int[Tensor, "k"]:
        """Which rows of the best layer's inversion ``inputs`` are."""
        best = self.best
        if best is None or best.inversion is None:
            return torch.zeros(0, dtype=torch.int64)
        return best.held.nonzero()[:, 0]

    @property
    def inputs(self) -> Tensor:
        """The recovered inputs of the layer that gives away most."""
        best = self.best
        if best is None or best.inversion is None:
            return torch.zeros(0, 0)
        return best.inversion.inputs[self.rows.to(best.inversion.inputs.device)]

    def __repr__(self) -> str:
        return f"AuditResult({self.summary}; {len(self.layers)} layers, {self.seconds:.3g} s)"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(each.layer.name)}</td><td>{each.layer.neurons} x {each.layer.features}</td>"
            f"<td>{'' if each.batch_size is None else each.batch_size}</td><td>{each.recovered}</td>"
            f"<td>{html.escape(each.reason)}</td></tr>"
            for each in self.layers
        )
        head = "<tr><th>layer</th><th>neurons x inputs</th><th>samples</th><th>exact</th><th>outcome</th></tr>"
        labels = None if self.best is None or self.best.labels is None else self.best.labels[self.rows].tolist()
        captions = [f"{row + 1}" if labels is None else f"label {labels[row]}" for row in range(len(self.inputs))]
        warned = "<p>Recovered inputs are personal data if the training data was.</p>" if len(self.inputs) else ""
        return (
            f"<p><b>{html.escape(self.summary)}</b></p><table>{head}{rows}</table>"
            + gallery(self.inputs, captions)
            + warned
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the recovered numbers, as JSON takes it; the content of ``report.json``."""
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
        """Write ``report.json`` and ``recovered.safetensors`` into a folder; see ``spearpp.auditing.folder.save``."""
        from spearpp.auditing.folder import save

        save(self, folder, redact=redact, shape=shape, about=about)

    @classmethod
    def load(cls, folder: "FileName") -> "AuditResult":
        """Read one that ``save`` wrote.

        Raises:
            DataError: if the folder holds none, or one of another version.
        """
        from spearpp.auditing.folder import load

        return load(folder)


def best_of(audits: list[LayerAudit]) -> LayerAudit | None:
    """The layer that gives away most: inputs before features, then the larger number; None if none does."""
    found = [each for each in audits if len(each.inputs)]
    return max(found, key=lambda each: (each.layer.sees != "features", len(each.inputs)), default=None)
