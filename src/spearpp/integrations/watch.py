"""Audits of update files as they appear in a folder, for platforms without a hook.

Files are looked at again and again; nothing is needed of the file system. A file counts as whole when it has not
changed between two looks and can be read. What was done is remembered by content in the folder of reports: a restart
goes on, and the same update under two names is audited once.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from spearpp.errors import DataError, OptionError, SpearError
from spearpp.integrations.common.job import SCRATCH, Job, Outcome, Settings, perform
from spearpp.integrations.common.policy import tell
from spearpp.update import ClientUpdate, Kind
from spearpp.update.files import FileName, open_tensors, write_whole

LOGGER = logging.getLogger("spearpp.integrations")
ENDINGS = (".safetensors", ".npz", ".pt", ".pth", ".bin", ".ckpt")
MEMORY = "watched.json"
TRIES = 5
"""Looks at a file that cannot be read and does not change, after which it is given up until it does."""
Stamp = tuple[int, int]


@dataclass
class _Seen:
    """One file as it was last seen."""

    stamp: Stamp
    tries: int = 0
    done: bool = False


class Watch:
    """A folder of updates, the folder of their reports, and what was done so far."""

    def __init__(
        self,
        folder: FileName,
        settings: Settings,
        *,
        before: FileName | None = None,
        kind: Kind = "weights",
        lr: float | None = None,
        steps: int | None = None,
        model_of: Callable[[ClientUpdate], nn.Module | None] | None = None,
    ) -> None:
        """Set it up; ``model_of`` gives the model for an update, where that depends on it.

        Raises:
            SpearError: if there is no such folder, or its reports' folder holds a damaged memory.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise DataError(f"{folder} is no folder")
        if settings.out is None:
            raise OptionError("watching needs a folder for reports")
        self.out = Path(settings.out)
        self.settings, self.before, self.kind, self.lr, self.steps = settings, before, kind, lr, steps
        self._model_of = model_of
        self._seen: dict[Path, _Seen] = {}
        self.memory = self._load()

    def look(self) -> list[Outcome]:
        """Audit every file that is whole and new since the last look."""
        return list(self._look())

    def settled(self) -> bool:
        """Whether every file there is was audited, given up or known."""
        files = dict(self._files())
        return all(path in self._seen and self._seen[path].done for path in files)

    def run(self, interval: float, *, once: bool = False) -> Iterator[Outcome]:
        """Look every so many seconds, for ever, or until every file there is was dealt with."""
        while True:
            yield from self._look()
            if once and self.settled():
                return
            time.sleep(interval)

    def _files(self) -> Iterator[tuple[Path, Stamp]]:
        reports = self.out.resolve()
        for path in sorted(self.folder.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(self.folder).parts)
            if hidden or path.suffix.lower() not in ENDINGS or path.resolve().is_relative_to(reports):
                continue
            if self.before is not None and path.resolve() == Path(self.before).resolve():
                continue
            try:
                state = path.stat()
            except OSError:
                continue  # gone again
            if path.is_file():
                yield path, (state.st_size, state.st_mtime_ns)

    def _look(self) -> Iterator[Outcome]:
        for path, stamp in self._files():
            seen = self._seen.get(path)
            if seen is None or seen.stamp != stamp:
                self._seen[path] = _Seen(stamp)  # it may still be written to: wait for the next look
            elif not seen.done:
                yield from self._attempt(path, seen)

    def _attempt(self, path: Path, seen: _Seen) -> Iterator[Outcome]:
        try:
            content = _hash(path)
            if content in self.memory:
                seen.done = True
                LOGGER.info("%s: known, %s", path, self.memory[content].get("summary"))
                return
            update = ClientUpdate.load(path, **self._given(path))
            update.verify()
        except (SpearError, OSError) as error:
            seen.tries += 1
            if seen.tries < TRIES:
                return  # half-written files look like this too
            seen.done = True
            outcome = Outcome.failed(path.name, f"{path.name} cannot be read as an update: {error}")
            tell(outcome)
            yield outcome  # not remembered: it may be mended while nobody watches
            return
        name = f"{path.stem}-{content[:12]}"
        settings = self.settings
        if self._model_of is not None:
            settings = replace(settings, model=self._model_of(update))
        outcome = perform(Job(name, None, update, about={"source": [str(path)]}), settings)
        tell(outcome)
        seen.done = outcome.problem is None or outcome.verdict is None or seen.tries + 1 >= TRIES
        seen.tries += 1
        if outcome.problem is None or outcome.verdict is None:
            self._remember(content, path, outcome)
            yield outcome
        elif seen.done:
            yield outcome  # the report could not be written, time and again

    def _given(self, path: Path) -> dict[str, Any]:
        if self.before is None or open_tensors(path)[1]:
            return {"kind": self.kind}
        return {"before": self.before, "kind": self.kind, "lr": self.lr, "steps": self.steps}

    def _remember(self, content: str, path: Path, outcome: Outcome) -> None:
        self.memory[content] = {
            "file": str(path.relative_to(self.folder)),
            "report": None if outcome.folder is None else Path(outcome.folder).name,
            "verdict": outcome.verdict,
            "fitting": outcome.fitting,
            "summary": outcome.summary,
        }
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            write_whole(self.out / MEMORY, (json.dumps(self.memory, indent=1, sort_keys=True) + "\n").encode())
        except (SpearError, OSError) as error:
            LOGGER.warning("what was audited cannot be remembered beyond this run: %s", error)

    def _load(self) -> dict[str, dict[str, Any]]:
        file = self.out / MEMORY
        for scratch in self.out.glob(f"{SCRATCH}*"):
            shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
        if not file.exists():
            return {}
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read: {error}; remove it to audit everything again") from error
        if not isinstance(content, dict) or not all(isinstance(each, dict) for each in content.values()):
            raise DataError(f"{file} is no memory of watched files; remove it to audit everything again")
        return content


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for part in iter(lambda: file.read(2**20), b""):
            digest.update(part)
    return digest.hexdigest()
