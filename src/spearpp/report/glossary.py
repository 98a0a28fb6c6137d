"""Terms of the report, each explained for readers who do not know the method (``glossary.toml``)."""

from collections.abc import Collection

from spearpp.report.data import data


def anchor(term: str) -> str:
    """Return the identifier of a term on the page.

    >>> anchor("one sample or a mean"), anchor("ε (epsilon)")
    ('term-one-sample-or-a-mean', 'term-ε-(epsilon)')
    """
    return "term-" + "-".join(term.split())


def glossary(used: Collection[str]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return the groups of the glossary: a title, and for each term its anchor, its name and its explanation.

    Claims and numbers that the page does not use are left out.
    """
    shown = []
    for title, terms in data("glossary.toml").items():
        kept = [(anchor(term), term, text) for term, text in terms.items() if title == "Terms" or term in used]
        shown += [(title, kept)] if kept else []
    return shown


def explained(term: str) -> str | None:
    """Return the anchor of a term, or None if the glossary does not contain it."""
    return anchor(term) if any(term in terms for terms in data("glossary.toml").values()) else None
