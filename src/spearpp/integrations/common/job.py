"""One audit inside a federation: what it needs, what comes of it, and its folder, whole or not at all."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import spearpp.report as reports
from spearpp.auditing import AuditResult, audit
from spearpp.auditing.folder import REDACTIONS, Redaction
from spearpp.auditing.memory import MEMORY, check_memory
from spearpp.errors import DataError, OptionError, SpearError
from spearpp.integrations.common.training import Training
from spearpp.types import Tensor
from spearpp.update import KINDS, ClientUpdate, Kind

SCRATCH = ".partial-"
"""How the folder of a report that is being written begins."""


@dataclass(frozen=True)
class Settings:
    """How audits are done, wherever they are done."""

    model: nn.Module | None = None
    """The network, to tell its layers and to replay; without it every 2-D weight is tried."""
    budget: float | None = 30.0
    """Seconds for one audit."""
    out: str | os.PathLike[str] | None = None
    """Folder for reports; None writes none."""
    redact: Redaction = "omit"
    """What is kept of recovered inputs: they are personal data if the training data was."""
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else every report shall hold."""
    memory: int | None = MEMORY
    """Bytes that the work on one layer may take; None for no bound."""

    def __post_init__(self) -> None:
        if self.redact not in REDACTIONS:
            raise OptionError(f"redact={self.redact!r}: one of {', '.join(REDACTIONS)}")
        if self.budget is not None and not self.budget > 0:
            raise OptionError(f"budget={self.budget}: seconds, or None for none")
        check_memory(self.memory)


@dataclass(frozen=True, eq=False)
class Job:
    """One update to audit."""

    name: str
    """Where its report goes below the folder for reports."""
    before: Mapping[str, Tensor] | None
    """The weights sent to the client; None if ``after`` is a whole update."""
    after: Mapping[str, Tensor] | ClientUpdate
    """What it sent back."""
    kind: Kind = "weights"
    training: Training = Training()
    about: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    """How many samples the client says it trained on."""

    def update(self, model: nn.Module | None = None) -> ClientUpdate:
        """The client's update, in the model's names where it came as a list.

        Raises:
            SpearError: if it is none.
        """
        if isinstance(self.after, ClientUpdate):
            return self.after
        if self.before is None or self.kind not in KINDS:
            raise OptionError(f"kind={self.kind!r} with weights before={self.before is not None}")
        before, after = _named(self.before, model), _named(self.after, model)
        if self.kind == "gradients":
            return ClientUpdate.from_gradients(before, after)
        lr, steps = self.training.rate, self.training.steps
        return ClientUpdate.from_weights(before, after, lr=lr, steps=steps, deltas=self.kind == "deltas")


@dataclass(frozen=True)
class Outcome:
    """What came of one audit."""

    name: str
    verdict: str | None
    """LEAKS, NOT_FOUND or NOT_APPLICABLE; None if there was no audit."""
    summary: str
    """The verdict in a sentence, or why there is none."""
    recovered: int = 0
    """Inputs that were recovered, exactly or up to a stated error."""
    fitting: int = 0
    """Further inputs that fit the update without being proved to be samples."""
    batch_estimate: int = 0
    """Samples that the update shows; 0 where that cannot be read."""
    seconds: float = 0.0
    folder: str | None = None
    """Where the report is; None if there is none."""
    problem: str | None = None
    """What went wrong, with the audit or with its report."""

    @property
    def leaks(self) -> bool:
        """Whether training data came back."""
        return self.verdict == "LEAKS"

    @classmethod
    def failed(cls, name: str, why: str) -> "Outcome":
        """An audit that did not take place."""
        return cls(name, None, why, problem=why)


def tensors_of(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """A platform's arrays as tensors of their own memory: NumPy arrays, or tensors on any device.

    Raises:
        DataError: for anything else.
    """
    found = {}
    for name, each in arrays.items():
        if isinstance(each, Tensor):
            found[str(name)] = each.detach().cpu().clone()
            continue
        try:
            array = numpy.array(each)
            found[str(name)] = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{str(name)[:80]!r} is no array of numbers: {error}") from error
    return found


def perform(job: Job, settings: Settings) -> Outcome:
    """Audit an update and write its report. Nothing that an update holds makes it raise."""
    try:
        update = job.update(settings.model)
        generator = torch.Generator().manual_seed(settings.seed)
        result = audit(
            update,
            settings.model,
            budget=settings.budget,
            memory=settings.memory,
            batch_size=job.samples,
            generator=generator,
        )
    except SpearError as error:
        return Outcome.failed(job.name, f"not audited: {error}")
    except Exception as error:  # an update from outside may break anything
        return Outcome.failed(job.name, f"not audited, a defect: {type(error).__name__}: {error}")
    folder, problem = None, None
    if settings.out is not None:
        about = {"received": repr(update), "threat_model": update.threat_model, **settings.about, **job.about}
        try:
            folder = write_folder(result, Path(settings.out) / job.name, settings.redact, about)
        except (SpearError, OSError) as error:
            problem = f"no report written: {error}"
    sizes = [each.batch_size or 0 for each in result.layers]
    best = result.best
    return Outcome(
        name=job.name,
        verdict=str(result.verdict),
        summary=result.summary,
        recovered=len(result.inputs),
        fitting=result.fitting,
        batch_estimate=max(sizes, default=0) if best is None else best.batch_size or 0,
        seconds=result.seconds,
        folder=None if folder is None else str(folder),
        problem=problem,
    )


def write_folder(result: AuditResult, place: Path, redact: Redaction, about: Mapping[str, Any]) -> Path:
    """Write a report beside its place and move the whole folder there.

    Raises:
        SpearError, OSError: if it cannot be written; nothing is left behind.
    """
    scratch = scratch_of(place)
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        reports.write(scratch, result, redact=redact, about=dict(about))
        if place.exists():
            shutil.rmtree(place)
        scratch.replace(place)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return place


def scratch_of(place: Path) -> Path:
    """Where a report is while it is being written."""
    return place.with_name(SCRATCH + place.name)


def _named(tensors: Mapping[str, Tensor], model: nn.Module | None) -> Mapping[str, Tensor]:
    """In the model's names, where the tensors have numbers for names and are as many."""
    if model is None or not all(name.isdecimal() for name in tensors):
        return tensors
    names = list(model.state_dict())
    if len(names) != len(tensors):
        return tensors
    return dict(zip(names, (tensors[name] for name in sorted(tensors, key=int)), strict=True))
