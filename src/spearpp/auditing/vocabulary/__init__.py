"""The vocabulary of a client: which tokens, categories or items its training looked up in embedding tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spearpp.auditing.vocabulary.rows import looked_up
from spearpp.errors import OptionError
from spearpp.model.embeddings import Table
from spearpp.update import ClientUpdate

POSITIONS = 8
"""If the training looked up exactly the first rows of a table, and at least this many, the table counts as a table of
positions. A design choice: the tokens of a text are hardly ever exactly the first tokens of a vocabulary."""


@dataclass(frozen=True)
class Vocabulary:
    """What one embedding table reveals."""

    table: str
    """Name of the module."""
    rows: int
    """Number of rows of the table."""
    count: int
    """Number of rows that the client's training looked up. 0 if nothing is claimed."""
    used: tuple[int, ...]
    """These rows. Empty if they were redacted."""
    words: tuple[str, ...]
    """The word or column value of each of these rows. Empty without a vocabulary file, or if they were redacted."""
    reason: str
    """What explains the other rows, or why nothing is claimed. The text has no capital letter and no full stop."""
    positions: bool = False
    """Whether the rows are the first ones of the table, as the rows of a table of positions are."""

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Vocabulary":
        """Return the vocabulary from its entry in ``report.json``."""
        used, words = tuple(int(each) for each in content["used"]), tuple(str(each) for each in content["words"])
        sizes = int(content["rows"]), int(content["count"])
        return cls(str(content["table"]), *sizes, used, words, str(content["reason"]), bool(content["positions"]))

    @property
    def leaks(self) -> bool:
        """Whether the table reveals which tokens, categories or items the client has."""
        return self.count > 0 and not self.positions


Words = Sequence[str] | Mapping[str, Sequence[str]]
"""One word per row of the only table that fits, or the words of several tables by name of the module."""


def audit_vocabulary(update: ClientUpdate, tables: list[Table], words: Words | None = None) -> tuple[Vocabulary, ...]:
    """Return what each embedding table reveals.

    Args:
        update: what the client sent, without any correction for weight decay.
        tables: the tables, from ``find_tables``.
        words: the words of the rows, or None.

    Raises:
        OptionError: if the words do not fit a table.

    >>> import torch
    >>> from torch import nn
    >>> from spearpp.model.embeddings import find_tables
    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(24, 2))
    >>> model(torch.tensor([[3, 5, 40], [5, 6, 7]])).square().sum().backward()
    >>> update = ClientUpdate.from_gradients(model)
    >>> audit_vocabulary(update, find_tables(model, update))[0].used
    (3, 5, 6, 7, 40)
    """
    named = words_by_table(tables, words)
    return tuple(_audit_table(update, table, named.get(table.name, ())) for table in tables)


def unite_vocabularies(rounds: Sequence[tuple[Vocabulary, ...]]) -> tuple[Vocabulary, ...]:
    """Return what the tables reveal over several rounds: a row counts if the training of any round looked it up.

    Args:
        rounds: what each round reveals, all for the same tables in the same order.

    >>> first = Vocabulary("words", 9, 1, (4,), ("red",), "other rows did not move")
    >>> second = Vocabulary("words", 9, 2, (2, 4), ("blue", "red"), "other rows did not move")
    >>> unite_vocabularies([(first,), (second,)])[0].words
    ('blue', 'red')
    """
    united = []
    for same in zip(*rounds, strict=True):
        rows = tuple(sorted({row for each in same for row in each.used}))
        words = {row: word for each in same for row, word in zip(each.used, each.words, strict=False)}
        reason = next((each.reason for each in reversed(same) if each.count), same[-1].reason)
        known = tuple(words[row] for row in rows) if words else ()
        united.append(Vocabulary(same[-1].table, same[-1].rows, len(rows), rows, known, reason, _are_positions(rows)))
    return tuple(united)


def words_by_table(tables: list[Table], words: Words | None) -> dict[str, Sequence[str]]:
    """Return the words of each table, by name of the table.

    Raises:
        OptionError: if the words do not fit a table.
    """
    if words is None:
        return {}
    sizes = ", ".join(f"{each.name} with {each.rows:,} rows" for each in tables) or "none"
    if not isinstance(words, Mapping):
        fitting = [each for each in tables if each.rows == len(words)]
        fitting = fitting or [each for each in tables if each.rows > len(words)]
        if len(fitting) != 1:
            many = "no embedding table fits" if not fitting else f"{len(fitting)} embedding tables fit"
            why = f"{many} a vocabulary of {len(words):,} entries (tables: {sizes})"
            raise OptionError(f"{why}. Name the table: a mapping in Python, --vocabulary TABLE=FILE in the shell")
        words = {fitting[0].name: words}
    for name, entries in words.items():
        table = next((each for each in tables if each.name == name), None)
        if table is None:
            raise OptionError(f"the vocabulary names the table {name[:80]!r}, but the model has these: {sizes}")
        if len(entries) > table.rows:
            raise OptionError(f"the vocabulary of {name} has {len(entries):,} entries, but only {table.rows:,} rows")
    return dict(words)


def _audit_table(update: ClientUpdate, table: Table, words: Sequence[str]) -> Vocabulary:
    if table.why_not is not None:
        return Vocabulary(table.name, table.rows, 0, (), (), table.why_not)
    used, reason = looked_up(update, table)
    rows = tuple(used.nonzero()[:, 0].tolist())
    known = tuple(words[row] if row < len(words) else f"row {row}" for row in rows) if words else ()
    return Vocabulary(table.name, table.rows, len(rows), rows, known, reason, _are_positions(rows))


def _are_positions(rows: tuple[int, ...]) -> bool:
    """Return whether the rows are the first ones of their table, and at least ``POSITIONS``."""
    return len(rows) >= POSITIONS and rows == tuple(range(len(rows)))
