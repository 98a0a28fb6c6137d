"""Suggestions for errors: what the user can try next."""

from spearpp.errors import MissingExtraError, NonFiniteError, SpearError


def hint(error: Exception, command: str = "COMMAND") -> str:
    """Return a suggestion for an error, or an empty string if the error message itself says what to do.

    Whoever raises a ``SpearError`` passes the suggestion as ``hint=``. Other errors get one by their type.

    Args:
        error: The error.
        command: The command that raised it, for a reference to its help.
    """
    if isinstance(error, MissingExtraError):
        return ""
    if isinstance(error, SpearError) and error.hint:
        return error.hint
    if isinstance(error, NonFiniteError):
        return "audit another round: the client's training diverged, or the file is damaged"
    if isinstance(error.__cause__ or error, FileNotFoundError):
        return "check the path. Relative paths start at the current folder"
    return f"spearpp {command} --help shows examples"
