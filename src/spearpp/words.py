"""Read the words of an embedding table from a file: a tokenizer, a JSON list, or one entry per line."""

import json
from pathlib import Path

from spearpp.errors import DataError, needs
from spearpp.update.files import FileName
from spearpp.update.source import read_file

MAX_BYTES = 2**28
"""Largest size of a vocabulary file. A design choice: 256 MiB are far more than any tokenizer needs."""
MAX_ENTRIES = 10_000_000
"""Largest number of entries of a vocabulary. A design choice: larger tables do not fit into most models."""


def read_words(path: FileName) -> list[str]:
    """Return the word of each row of an embedding table.

    Args:
        path: a ``tokenizer.json`` file of Hugging Face ``tokenizers``, a ``.json`` file with a list of strings, or a
            text file with one entry per line. The first entry belongs to row 0.

    Raises:
        DataError: if the file is missing, too large or has another content.
        MissingExtraError: if the file is a tokenizer and ``tokenizers`` is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "colours.json").write_text('["red", "green", "blue"]')
    ...     read_words(Path(folder) / "colours.json")
    ['red', 'green', 'blue']
    """
    file = Path(path)
    try:
        text = read_file(file, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not a text file in UTF-8: {error}") from error
    entries = _of_json(file, text) if file.suffix == ".json" else text.splitlines()
    if not 0 < len(entries) <= MAX_ENTRIES:
        raise DataError(f"{file} has {len(entries):,} entries: expected 1 to {MAX_ENTRIES:,}")
    return entries


def _of_json(file: Path, text: str) -> list[str]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if isinstance(content, dict) and "model" in content:
        return _of_tokenizer(file, text)
    if not isinstance(content, list) or not all(isinstance(each, str) for each in content):
        raise DataError(f"{file} is neither a tokenizer nor a JSON list of strings")
    return content


def _of_tokenizer(file: Path, text: str) -> list[str]:
    """Return the decoded text of every token, or the token itself if its text is empty."""
    with needs("tokenizers", "text"):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_str(text)
        numbers = set(tokenizer.get_vocab(with_added_tokens=True).values())
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{file} is not a tokenizer: {error}") from error
    rows = max(numbers, default=-1) + 1
    if rows > MAX_ENTRIES:
        raise DataError(f"{file} has {rows:,} tokens, more than the {MAX_ENTRIES:,} allowed")
    return [tokenizer.decode([row]).strip() or tokenizer.id_to_token(row) or f"row {row}" for row in range(rows)]
