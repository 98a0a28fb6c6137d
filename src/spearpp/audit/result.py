"""What an audit comes to."""

from dataclasses import dataclass
from enum import StrEnum

import torch

from spearpp.consistency import Finding
from spearpp.layers import Layer
from spearpp.replay import Replay
from spearpp.result import Inversion
from spearpp.shapes import Int, Tensor


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

    @property
    def batch_size(self) -> int | None:
        """How many samples its gradient holds, where that could be read."""
        return None if self.inversion is None else self.inversion.batch_size

    @property
    def recovered(self) -> int:
        """How many of them came back exactly, with a certificate."""
        return 0 if self.inversion is None else int(self.inversion.certified.sum())

    @property
    def approximate(self) -> int:
        """How many more came back up to noise, with evidence that they are in the batch."""
        return len(self.inputs) - self.recovered

    @property
    def inputs(self) -> Tensor:
        """The inputs that are in the batch by their certificates, exact ones first."""
        held = self._held
        if self.inversion is None or held is None:
            return torch.zeros(0, self.layer.features)
        return self.inversion.inputs[held]

    @property
    def error(self) -> float:
        """The largest implied error of these inputs, over their root mean square."""
        held = self._held
        if self.inversion is None or self.inversion.certificates is None or held is None or not bool(held.any()):
            return 0.0
        return float(self.inversion.certificates.error[held].max())

    @property
    def _held(self) -> Tensor | None:
        if self.inversion is None or self.inversion.certificates is None:
            return None
        # A single direction above noise may be the mean of many alike: nothing tells them apart.
        alone = self.inversion.batch_size == 1
        return self.inversion.certified if alone else self.inversion.certified | self.inversion.certificates.consistent


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

    @property
    def best(self) -> LayerAudit | None:
        """The layer that gives away most: the model's inputs before features, then the larger number."""
        return best_of(self.layers, self.replay)

    @property
    def inputs(self) -> Tensor:
        """What the layer that gives away most gave: inputs with evidence, or all that a replay proves."""
        best = self.best
        if best is None or best.inversion is None:
            return torch.zeros(0, 0)
        return best.inputs if len(best.inputs) else best.inversion.inputs


def best_of(audits: list[LayerAudit], again: Replay | None) -> LayerAudit | None:
    """The layer that gives away most: inputs before features, be they proved by certificates or by a replay."""
    proven = again is not None and again.proves
    found = [each for each in audits if len(each.inputs) or (proven and each.labels is not None)]
    return max(found, key=lambda each: (each.layer.sees != "features", len(each.inputs)), default=None)
