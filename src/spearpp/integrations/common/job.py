"""One audit inside a federation: its settings, its input, its result, and its report folder."""

import logging
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
from spearpp.auditing.rounds import audit_rounds
from spearpp.auditing.task import MEMORY, Task
from spearpp.config import Config
from spearpp.errors import DataError, OptionError, SpearError
from spearpp.integrations.common.federation import RoundStore, Training
from spearpp.integrations.common.outcome import Outcome
from spearpp.model.loss import Loss
from spearpp.report.leaks import leaks
from spearpp.types import Tensor
from spearpp.update import KINDS, ClientUpdate, Kind

LOGGER = logging.getLogger("spearpp.integrations")
"""The logger of all integrations."""
SCRATCH = ".partial-"
"""Prefix of the temporary folder in which a report is written."""


@dataclass(frozen=True)
class Settings:
    """Settings of the audits of one integration."""

    model: nn.Module | None = None
    """The network, for its layers and for replays. Without it, every 2-D weight is tried."""
    budget: float | None = 30.0
    """Time limit of one audit in seconds. None means no limit."""
    out: str | os.PathLike[str] | None = None
    """Folder for reports. None writes no reports."""
    redact: Redaction = "omit"
    """How reports hide recovered inputs, which are personal data if the training data is."""
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further fields for ``report.json`` of every report."""
    memory: int | None = MEMORY
    """Memory limit for one layer in bytes. None means no limit."""
    history: int = 0
    """Number of earlier rounds of each client that are kept and audited together with the new one. 0 keeps none."""
    config: Config | None = None
    """Accepted leaks and thresholds of ``spearpp.toml``. None accepts nothing."""
    fail_on: str = "never"
    """What fails the gate, for the reports: "leak", "certified" or "never"."""
    loss: str = Loss.CROSS_ENTROPY
    """Loss of the clients: "cross-entropy", "mse", "bce" or "unknown"."""

    def __post_init__(self) -> None:
        if self.redact not in REDACTIONS:
            raise OptionError(f"redact={self.redact!r}: expected one of {', '.join(REDACTIONS)}")
        self.task()  # checks the options of an audit
        if isinstance(self.history, bool) or not isinstance(self.history, int) or self.history < 0:
            raise OptionError(f"history={self.history!r}: expected the number of earlier rounds to keep, or 0")
        if self.history and self.out is None:
            raise OptionError("history needs a folder for reports, because rounds are kept below it: set out=")

    def task(self, samples: int | None = None) -> Task:
        """Return the options of an audit of an update with this number of samples, and check them."""
        generator, loss = torch.Generator().manual_seed(self.seed), Loss.named(self.loss)
        return Task(self.model, self.budget, self.memory, batch_size=samples, loss=loss, generator=generator)

    @property
    def rounds(self) -> RoundStore | None:
        """The earlier rounds of the clients, or None if none are kept."""
        return RoundStore(Path(self.out), self.history) if self.history and self.out is not None else None


@dataclass(frozen=True, eq=False)
class Job:
    """One update to audit."""

    name: str
    """Path of the report below the folder for reports."""
    before: Mapping[str, Tensor] | None
    """The weights sent to the client. None if ``after`` is a complete update."""
    after: Mapping[str, Tensor] | ClientUpdate
    """What the client sent back."""
    kind: Kind = "weights"
    training: Training = Training()
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further fields for ``report.json`` of this report."""
    samples: int | None = None
    """Number of samples the client reports to have trained on. None if unknown."""
    client: str | None = None
    """Pseudonym of the client, for its history. None if the client is unknown."""
    earlier: tuple[ClientUpdate, ...] = ()
    """Earlier rounds of the client, oldest first, if the caller has them."""

    def update(self, model: nn.Module | None = None) -> ClientUpdate:
        """Build the client's update. Tensors that arrived as a numbered list get the model's parameter names."""
        if isinstance(self.after, ClientUpdate):
            return self.after
        if self.before is None or self.kind not in KINDS:
            raise OptionError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}, with weights before training")
        before, after = _named(self.before, model), _named(self.after, model)
        if self.kind == "gradients":
            return ClientUpdate.from_gradients(before, after)
        lr, steps = self.training.rate, self.training.steps
        return ClientUpdate.from_weights(before, after, lr=lr, steps=steps, deltas=self.kind == "deltas")


def tensors_of(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy a platform's NumPy arrays, or tensors on any device, to CPU tensors."""
    tensors = {}
    for name, each in arrays.items():
        if isinstance(each, Tensor):
            tensors[str(name)] = each.detach().cpu().clone()
            continue
        try:
            array = numpy.array(each)
            tensors[str(name)] = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{str(name)[:80]!r} is not an array of numbers: {error}") from error
    return tensors


def perform(job: Job, settings: Settings) -> Outcome:
    """Audit an update and write its report. The function never raises because of the content of an update."""
    try:
        update = job.update(settings.model)
        result = _audit(job, update, settings)
    except SpearError as error:
        return Outcome.failed(job.name, f"not audited: {error}")
    except Exception as error:  # An update from outside can raise any exception.
        return Outcome.failed(job.name, f"not audited, internal error: {type(error).__name__}: {error}")
    folder, problem = None, None
    if settings.out is not None:
        about = {"received": repr(update), "threat_model": update.threat_model, **settings.about, **job.about}
        try:
            folder = write_folder(result, Path(settings.out) / job.name, settings, about)
        except (SpearError, OSError) as error:
            problem = f"no report written: {error}"
    sizes = [each.batch_size or 0 for each in result.layers]
    best = result.best
    return Outcome(
        name=job.name,
        verdict=str(result.verdict),
        summary=result.summary,
        recovered=len(result.inputs),
        fitting=result.fitting if best is None else best.fitting,
        batch_estimate=max(sizes, default=0) if best is None else best.batch_size or 0,
        seconds=result.seconds,
        folder=None if folder is None else str(folder),
        problem=problem,
        found=tuple(leaks(result.to_dict())),
    )


def _audit(job: Job, update: ClientUpdate, settings: Settings) -> AuditResult:
    """Audit an update, together with earlier rounds of its client if they are kept and may say more."""

    def audit_one(one: ClientUpdate, seconds: float | None) -> AuditResult:
        task = settings.task(job.samples)
        options: dict[str, Any] = {"memory": task.memory, "batch_size": task.batch_size, "generator": task.generator}
        return audit(one, task.model, budget=seconds, loss=settings.loss, **options)

    store, earlier = settings.rounds, list(job.earlier)
    if store is not None and job.client is not None:
        earlier = store.earlier(job.client)
        try:
            store.add(job.client, update)
        except (SpearError, OSError) as error:
            LOGGER.warning("%s: the round cannot be kept for later audits: %s", job.name, error)
    if not earlier:
        return audit_one(update, settings.budget)
    return audit_rounds([*earlier, update], settings.task(job.samples), audit_one, each_alone=False)


def write_folder(result: AuditResult, path: Path, settings: Settings, about: Mapping[str, Any]) -> Path:
    """Write a report to a temporary folder, which is removed after an error, and move the complete one to its path."""
    scratch = scratch_of(path)
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        reports.write(
            *(scratch, result),
            redact=settings.redact,
            about=dict(about),
            config=settings.config,
            fail_on=settings.fail_on,
        )
        if path.exists():
            shutil.rmtree(path)
        scratch.replace(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return path


def scratch_of(path: Path) -> Path:
    """Return the temporary folder in which the report for this path is written."""
    return path.with_name(SCRATCH + path.name)


def _named(tensors: Mapping[str, Tensor], model: nn.Module | None) -> Mapping[str, Tensor]:
    """Rename tensors from list positions to the model's parameter names, if their numbers match."""
    if model is None or not all(name.isdecimal() for name in tensors):
        return tensors
    names = list(model.state_dict())
    if len(names) != len(tensors):
        return tensors
    return dict(zip(names, (tensors[name] for name in sorted(tensors, key=int)), strict=True))
