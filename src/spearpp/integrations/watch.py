"""Audit update files as they appear in a folder, for platforms without an integration.

The folder is scanned repeatedly, so no file-system notifications are needed. A file counts as complete if it did not
change between two scans and can be read. A list of audited files, identified by their content, is stored in the folder
of reports. A restart therefore continues where the last run ended, and copies of an update are audited only once.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from spearpp.errors import DataError, OptionError, SpearError
from spearpp.integrations.common.job import LOGGER, SCRATCH, Job, Settings, perform
from spearpp.integrations.common.outcome import Outcome
from spearpp.report import timeline
from spearpp.report.leaks import Leak
from spearpp.update import ClientUpdate, Kind
from spearpp.update.files import READERS, FileName, open_tensors, write_whole
from spearpp.update.rounds import by_number
from spearpp.update.source import sha256_of

MEMORY = "watched.json"
"""File in the folder of reports that lists the audited updates."""
TRIES = 5
"""Scans of an unreadable, unchanged file after which the file is skipped until it changes.

Design choice: a file that is still being written usually changes between two scans.
"""
Stamp = tuple[int, int]
"""Size and modification time of a file. A changed stamp means that the file changed."""


@dataclass
class _FileState:
    """State of one file after the last scan."""

    stamp: Stamp
    tries: int = 0
    done: bool = False


@dataclass
class Watch:
    """A folder of updates, the folder of their reports, and the list of audited updates.

    Raises:
        SpearError: If the folder does not exist, or if the list of audited updates is damaged.
    """

    folder: Path
    settings: Settings
    """Settings of the audits. ``settings.out`` is the folder of reports. With ``settings.history``, the files in one
    folder count as rounds of one client, in the order of their names."""
    _: KW_ONLY
    before: FileName | None = None
    """Weights before training, for files that do not contain them."""
    kind: Kind = "weights"
    lr: float | None = None
    steps: int | None = None
    samples: int | None = None
    """Number of samples that each client trained on, if known."""
    model_of: Callable[[ClientUpdate], nn.Module | None] | None = None
    """Function that returns the model of an update. None uses ``settings.model``."""

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise DataError(f"{self.folder} is not a folder")
        if self.settings.out is None:
            raise OptionError("watching a folder needs a folder for reports: set out=")
        if self.settings.history and self.before is not None:
            raise OptionError("history needs updates that contain the weights of their own round: leave out before=")
        self.out = Path(self.settings.out)
        self._verdicts: set[str | None] = set()
        self._states: dict[Path, _FileState] = {}
        self.memory = self._load_memory()

    def look(self) -> list[Outcome]:
        """Scan the folder once. Audit every file that is new and complete, and return the results."""
        return list(self._scan())

    def settled(self) -> bool:
        """Return whether every file in the folder was audited, was audited earlier, or was skipped."""
        return all(path in self._states and self._states[path].done for path, _ in self._files())

    def run(self, interval: float, *, once: bool = False) -> Iterator[Outcome]:
        """Scan the folder every ``interval`` seconds and yield the result of each audit.

        With ``once``, stop when all files in the folder are processed.
        """
        while True:
            yield from self._scan()
            if once and self.settled():
                return
            time.sleep(interval)

    def _files(self) -> Iterator[tuple[Path, Stamp]]:
        """Yield the update files in the folder. Skip hidden files, reports and the file of the weights."""
        reports = self.out.resolve()
        for path in sorted(self.folder.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(self.folder).parts)
            if hidden or path.suffix.lower() not in READERS or path.resolve().is_relative_to(reports):
                continue
            if self.before is not None and path.resolve() == Path(self.before).resolve():
                continue
            try:
                status = path.stat()
            except OSError:
                continue  # The file was deleted meanwhile.
            if path.is_file():
                yield path, (status.st_size, status.st_mtime_ns)

    def _scan(self) -> Iterator[Outcome]:
        for path, stamp in self._files():
            state = self._states.get(path)
            if state is None or state.stamp != stamp:
                self._states[path] = _FileState(stamp)  # The file may still be written to: wait for the next scan.
            elif not state.done:
                yield from self._attempt(path, state)

    def _attempt(self, path: Path, state: _FileState) -> Iterator[Outcome]:
        """Audit a file. Yield a result if the file is finished: audited, or skipped after ``TRIES`` attempts."""
        state.tries += 1
        try:
            content = sha256_of(path)
            if content in self.memory:
                state.done = True
                LOGGER.info("%s: already audited, %s", path, self.memory[content].get("summary"))
                return
            update = ClientUpdate.load(path, **self._load_options(path))
            update.verify()
        except (SpearError, OSError) as error:
            if state.tries < TRIES:
                return  # The file may be incomplete.
            state.done = True
            outcome = Outcome.failed(path.name, f"cannot read {path.name} as an update: {error}")
            self._show(outcome)
            yield outcome  # Not stored in the memory, because the file may be repaired before the next run.
            return
        settings = self.settings
        if self.model_of is not None:
            settings = replace(settings, model=self.model_of(update))
        name = f"{path.stem}-{content[:12]}"
        earlier = tuple(self._earlier(path))[-settings.history :] if settings.history else ()
        client = path.stem if path.parent == self.folder else path.parent.name
        about = {"source": [str(path)], "client": client}
        job = Job(name, None, update, about=about, samples=self.samples, earlier=earlier)
        outcome = replace(perform(job, replace(settings, history=0)), sha256=content)
        report_failed = outcome.problem is not None and outcome.verdict is not None
        state.done = not report_failed or state.tries >= TRIES
        if not report_failed:
            self._remember(content, path, outcome)
        if state.done:
            self._show(outcome)
            yield outcome

    def _show(self, outcome: Outcome) -> None:
        """Add a finished audit to the timeline, and a file that cannot be read only once.

        A timeline that cannot be written does not stop the audits.
        """
        self._verdicts.add(outcome.verdict)
        entry = outcome.entry(self.out, self.settings.config)
        try:
            if entry.verdict is not None or not timeline.contains(self.out, entry):
                timeline.add(self.out, [entry])
        except (SpearError, OSError) as error:
            LOGGER.warning("cannot write the timeline: %s", error)

    @property
    def empty(self) -> bool:
        """Whether no scan saw an update file."""
        return not self._states

    @property
    def verdicts(self) -> set[str | None]:
        """The verdicts of this run and of earlier ones. None stands for an update that could not be audited."""
        return self._verdicts | {each.get("verdict") for each in self.memory.values()}

    def failing(self, fail_on: str) -> list[Outcome]:
        """Return the updates, audited in this run or in an earlier one, that fail a gate today."""
        known = [_remembered(content, each) for content, each in self.memory.items()]
        return [each for each in known if each.fails(self.settings.config, fail_on)]

    def _earlier(self, path: Path) -> Iterator[ClientUpdate]:
        """Yield the updates that come before a file in its folder, which must belong to one client, oldest first."""
        files = [each for each, _ in self._files() if each.parent == path.parent]
        for each in sorted(files, key=lambda each: by_number(each.name)):
            if each == path:
                return
            with suppress(SpearError, OSError):
                yield ClientUpdate.load(each, **self._load_options(each))

    def _load_options(self, path: Path) -> dict[str, Any]:
        """Return the arguments for ``ClientUpdate.load``. A file that contains the weights needs only its kind."""
        if self.before is None or open_tensors(path)[1]:
            return {"kind": self.kind}
        return {"before": self.before, "kind": self.kind, "lr": self.lr, "steps": self.steps}

    def _remember(self, content: str, path: Path, outcome: Outcome) -> None:
        """Add an audit to the list of audited updates and store the list."""
        self.memory[content] = {
            "file": str(path.relative_to(self.folder)),
            "report": None if outcome.folder is None else Path(outcome.folder).name,
            "verdict": outcome.verdict,
            "fitting": outcome.fitting,
            "summary": outcome.summary,
            "date": outcome.date,
            "leaks": [asdict(each) for each in outcome.found],
        }
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            write_whole(self.out / MEMORY, (json.dumps(self.memory, indent=1, sort_keys=True) + "\n").encode())
        except (SpearError, OSError) as error:
            LOGGER.warning("cannot store the list of audited updates, a restart will audit them again: %s", error)

    def _load_memory(self) -> dict[str, dict[str, Any]]:
        """Read the list of audited updates, and remove incomplete reports of an earlier run."""
        file = self.out / MEMORY
        for scratch in self.out.glob(f"{SCRATCH}*"):
            shutil.rmtree(scratch, ignore_errors=True)
        if not file.exists():
            return {}
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {file}: {error}. Delete the file to audit all updates again") from error
        if not isinstance(content, dict) or not all(isinstance(each, dict) for each in content.values()):
            raise DataError(f"{file} is not a list of audited updates. Delete the file to audit all updates again")
        return content


def _remembered(content: str, entry: dict[str, Any]) -> Outcome:
    """Return the outcome of an audit from the list of audited updates."""
    try:
        found = tuple(Leak(**each) for each in entry["leaks"])
    except (KeyError, TypeError) as error:
        why = f"{MEMORY} has a damaged entry. Delete the file to audit all updates again: {error!r}"
        raise DataError(why) from error
    return Outcome(str(entry.get("file")), entry.get("verdict"), str(entry.get("summary")), found=found, sha256=content)
