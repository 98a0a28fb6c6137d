"""Shows the examples of docstrings, written as ``>>>`` lines, as code and not as quotations."""

from typing import Any

from griffe import Extension, Object


class Doctests(Extension):
    """Puts a fence around every run of ``>>>`` lines and what they print."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for everything that was read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with its examples fenced; one ends at an empty line."""
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        if not inside and line.startswith(">>> "):
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines[:-1])
