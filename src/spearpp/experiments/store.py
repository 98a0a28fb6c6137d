"""Where measured cells are kept: one SQLite file, each cell once, whole or not at all.

SQLite in WAL mode: a commit is atomic also under ``kill -9``, several processes may read and write, and the file
can be looked at with tools that everyone has.
"""

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spearpp.errors import SpearError
from spearpp.experiments.cell import Cell
from spearpp.experiments.version import code_version, commit

APPLICATION = 0x53504152
"""Marks the file as ours ("SPAR")."""
FORMAT = 1
WAIT_SECONDS = 60.0
"""How long a writer waits for another."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS cells (
    key TEXT PRIMARY KEY,
    setting TEXT NOT NULL,
    seed INTEGER NOT NULL,
    code TEXT NOT NULL,
    result TEXT NOT NULL,
    commit_id TEXT NOT NULL,
    versions TEXT NOT NULL,
    stored TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_setting ON cells (setting, seed);
"""


class StoreError(SpearError):
    """A file that is not a store of experiments, or cannot be used as one."""


@dataclass(frozen=True)
class Stored:
    """One measured cell, with where it came from."""

    key: str
    seed: int
    code: str
    result: dict[str, Any]
    commit: str
    versions: dict[str, str]
    stored: str
    """UTC, ISO 8601."""


class Store:
    """The file, opened. Safe to open in several processes at once.

    >>> import tempfile
    >>> from spearpp.experiments.attack import Attack
    >>> cell = Cell(Attack(b=4, m=60), 1000)
    >>> with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "cells.sqlite") as store:
    ...     store.put(cell, {"exact": True}, {}), store.put(cell, {"exact": False}, {}), store.get(cell).result
    (True, False, {'exact': True})
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # No connection-wide transaction: each statement commits by itself.
            self._connection = sqlite3.connect(self.path, timeout=WAIT_SECONDS, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self.path} cannot be opened as a store: {error}") from error
        with self._errors():
            try:
                self._wait_and_prepare()
            except BaseException:
                self._connection.close()
                raise

    def _wait_and_prepare(self) -> None:
        """Two processes may find the file new at once, and SQLite itself does not wait to change the journal."""
        end = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self._prepare()
                return
            except sqlite3.OperationalError as error:
                if self._connection.in_transaction:
                    self._connection.rollback()
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def _prepare(self) -> None:
        read = self._connection.execute
        read("BEGIN")  # so that all three are of one moment
        marked = read("PRAGMA application_id").fetchone()[0]
        tables = read("SELECT count(*) FROM sqlite_master").fetchone()[0]
        written = read("PRAGMA user_version").fetchone()[0]
        read("COMMIT")
        if marked != APPLICATION and tables:
            raise StoreError(f"{self.path} is a database of something else: name another file with --store")
        if written > FORMAT:
            raise StoreError(f"{self.path} has format {written}, this version reads up to {FORMAT}: update spearpp")
        read("PRAGMA journal_mode = WAL")
        read("PRAGMA synchronous = FULL")
        if marked == APPLICATION and written == FORMAT:
            return
        read("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";"):
            read(statement)
        read(f"PRAGMA application_id = {APPLICATION}")
        read(f"PRAGMA user_version = {FORMAT}")
        read("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.path} cannot be used as a store: {error}. If it is damaged, move it away; "
                "what it held must be measured again"
            ) from error

    def put(self, cell: Cell, result: dict[str, Any], versions: dict[str, str]) -> bool:
        """Keep a result. False if there is one already, which stays as it is."""
        row = (
            cell.key,
            cell.identity,
            cell.seed,
            code_version(),
            json.dumps(result, sort_keys=True),
            commit(),
            json.dumps(versions, sort_keys=True),
            datetime.now(UTC).isoformat(timespec="seconds"),
        )
        with self._errors():
            done = self._connection.execute("INSERT OR IGNORE INTO cells VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            return done.rowcount == 1

    def get(self, cell: Cell) -> Stored | None:
        """What is kept for a cell at this code version."""
        with self._errors():
            names = "key, seed, code, result, commit_id, versions, stored"
            row = self._connection.execute(
                f"SELECT {names} FROM cells WHERE key = ?",  # noqa: S608
                (cell.key,),
            ).fetchone()
        if row is None:
            return None
        key, seed, code, result, commit_id, versions, stored = row
        try:
            return Stored(key, seed, code, json.loads(result), commit_id, json.loads(versions), stored)
        except ValueError as error:
            raise StoreError(f"{self.path} holds a damaged result under {key[:12]}: {error}") from error

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those not measured yet at this code version, each once, in the order given."""
        wanted = {cell.key: cell for cell in cells}
        with self._errors():
            known = {
                row[0]
                for row in self._connection.execute(
                    "SELECT key FROM cells WHERE code = ?", (code_version(),)
                ).fetchall()
            }
        return [cell for key, cell in wanted.items() if key not in known]

    def stale(self, cells: Iterable[Cell]) -> int:
        """Results kept for these cells by other code versions; they are not counted anywhere."""
        wanted = {(cell.identity, cell.seed) for cell in cells}
        with self._errors():
            rows = self._connection.execute(
                "SELECT setting, seed FROM cells WHERE code != ?", (code_version(),)
            ).fetchall()
        return sum((setting, seed) in wanted for setting, seed in rows)

    def __len__(self) -> int:
        with self._errors():
            count: int = self._connection.execute("SELECT count(*) FROM cells").fetchone()[0]
        return count

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
