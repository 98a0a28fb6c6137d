"""The store of measured cells: one SQLite file.

SQLite runs in WAL mode. A commit is atomic even if the process is killed, several processes can read and write at the
same time, and standard tools can open the file.
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
from spearpp.experiments.cell import Cell, Setting, cells_of, code_version, commit

APPLICATION_ID = 0x53504152
"""SQLite application id of a store: the letters "SPAR"."""
FORMAT = 1
"""Version of the table layout, kept as the SQLite user version."""
WAIT_SECONDS = 60.0
"""Longest time that a process waits for another one to finish writing. Design choice: far longer than a write takes."""
RETRY_SECONDS = 0.02
"""Pause between two attempts to prepare a new file. Design choice: short for a user, long for a processor."""
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
    """The file is not a store of experiments, or it cannot be read or written."""


@dataclass(frozen=True)
class Stored:
    """One measured cell and how it was measured."""

    seed: int
    result: dict[str, Any]
    commit: str
    """Git commit that measured the cell."""
    versions: dict[str, str]
    """Versions of the libraries, and the device."""


class Store:
    """An open store. Several processes may open the same file.

    The first result that is stored for a cell is kept.

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
            # Autocommit: each statement is a transaction of its own.
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
        """Prepare the file, and try again while another process prepares it.

        SQLite does not wait for locks when it changes the journal mode.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self._prepare()
                return
            except sqlite3.OperationalError as error:
                if self._connection.in_transaction:
                    self._connection.rollback()
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)

    def _prepare(self) -> None:
        """Check that the file is a store, or make it one if it is empty."""
        execute = self._connection.execute
        execute("BEGIN")  # so that the three values belong to the same state of the file
        application = execute("PRAGMA application_id").fetchone()[0]
        tables = execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        written = execute("PRAGMA user_version").fetchone()[0]
        execute("COMMIT")
        if application != APPLICATION_ID and tables:
            raise StoreError(f"{self.path} is a database of something else: choose another file with --store")
        if written > FORMAT:
            raise StoreError(
                f"{self.path} has format {written}, but this version of spearpp reads up to {FORMAT}: update spearpp"
            )
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        if application == APPLICATION_ID and written == FORMAT:
            return
        execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";"):
            execute(statement)
        execute(f"PRAGMA application_id = {APPLICATION_ID}")
        execute(f"PRAGMA user_version = {FORMAT}")
        execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.path} cannot be used as a store: {error}. If the file is damaged, move it away "
                "and measure again"
            ) from error

    def put(self, cell: Cell, result: dict[str, Any], versions: dict[str, str]) -> bool:
        """Store a result. Return False, and change nothing, if the store already has a result for the cell."""
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
        """Return the result that this code version stored for a cell, or None."""
        with self._errors():
            row = self._connection.execute(
                "SELECT result, commit_id, versions FROM cells WHERE key = ?", (cell.key,)
            ).fetchone()
        if row is None:
            return None
        try:
            return Stored(cell.seed, json.loads(row[0]), row[1], json.loads(row[2]))
        except ValueError as error:
            raise StoreError(f"{self.path} contains a damaged result with key {cell.key[:12]}: {error}") from error

    def batches(self, setting: Setting, count: int) -> list[Stored]:
        """Return the results that this code version stored for the first ``count`` seeds of a setting."""
        return [found for cell in cells_of(setting, count) if (found := self.get(cell)) is not None]

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells that this code version has not stored yet, without duplicates, in the given order."""
        wanted = {cell.key: cell for cell in cells}
        with self._errors():
            rows = self._connection.execute("SELECT key FROM cells WHERE code = ?", (code_version(),)).fetchall()
        known = {key for (key,) in rows}
        return [cell for key, cell in wanted.items() if key not in known]

    def stale(self, cells: Iterable[Cell]) -> int:
        """Return the number of results that other code versions stored for these cells. Reports do not use them."""
        wanted = {(cell.identity, cell.seed) for cell in cells}
        with self._errors():
            rows = self._connection.execute(
                "SELECT setting, seed FROM cells WHERE code != ?", (code_version(),)
            ).fetchall()
        return sum((setting, seed) in wanted for setting, seed in rows)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
