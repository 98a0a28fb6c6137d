"""The result of one audit inside a federation."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spearpp.config import Config
from spearpp.report import now
from spearpp.report.decision import describe, judge, why_refused
from spearpp.report.leaks import Leak
from spearpp.report.timeline import Entry


@dataclass(frozen=True)
class Outcome:
    """Result of one audit."""

    name: str
    verdict: str | None
    """LEAKS, NOT_FOUND or NOT_APPLICABLE. None if the update was not audited."""
    summary: str
    """The verdict in one sentence, or the reason why there is no verdict."""
    recovered: int = 0
    """Number of inputs that were recovered, exactly or up to a stated error."""
    fitting: int = 0
    """Number of further inputs that fit the update without proof that they are samples."""
    batch_estimate: int = 0
    """Number of samples in the update, estimated from its gradients. 0 if unknown."""
    seconds: float = 0.0
    folder: str | None = None
    """Path of the report. None if there is no report."""
    problem: str | None = None
    """Error of the audit or of its report. None if there was no error."""
    found: tuple[Leak, ...] = ()
    """Every leak of the update."""
    date: str = field(default_factory=now)
    """Time at which the audit ended, in UTC."""
    sha256: str | None = None
    """SHA-256 hash of the audited file. None if the update came from memory."""

    @property
    def leaks(self) -> bool:
        """Whether training data was recovered."""
        return self.verdict == "LEAKS"

    def acceptances(self, config: Config | None) -> list[str]:
        """Return one line for each leak that the file of accepted leaks names, and whether it is accepted."""
        judged = self._judged(config)
        return [f"{each['status']}: {each['id']}: {describe(each)}" for each in judged if each["acceptance"]]

    def accepted(self, config: Config | None) -> bool:
        """Return whether there are leaks, and every one of them is accepted."""
        judged = self._judged(config)
        return bool(judged) and all(each["status"] == "accepted" for each in judged)

    def fails(self, config: Config | None, fail_on: str) -> bool:
        """Return whether the leaks that are not accepted fail a gate. See ``spearpp.report.decision.refused``."""
        return fail_on != "never" and bool(self.why_refused(config, fail_on))

    def why_refused(self, config: Config | None, fail_on: str) -> str:
        """Return which leaks fail a gate, and which threshold applied, or an empty string if the gate passes."""
        gate = {"thresholds": (config or Config()).thresholds, "fail_on": fail_on}
        return why_refused(self._judged(config), gate)

    def _judged(self, config: Config | None) -> list[dict[str, Any]]:
        hashes = () if self.sha256 is None else (self.sha256,)
        return judge(self.found, config or Config(), hashes)

    def entry(self, out: Path, config: Config | None = None) -> Entry:
        """Return the entry of this audit in the timeline of a folder of reports."""
        folder = None if self.folder is None else Path(os.path.relpath(self.folder, out)).as_posix()
        return Entry(
            date=self.date,
            name=self.name,
            verdict=self.verdict,
            summary=self.summary,
            recovered=self.recovered,
            samples=self.batch_estimate,
            fitting=self.fitting,
            seconds=round(self.seconds, 3),
            report=folder,
            accepted=self.accepted(config),
        )

    @classmethod
    def failed(cls, name: str, why: str) -> "Outcome":
        """Create the outcome of an update that was not audited."""
        return cls(name, None, why, problem=why)
