"""Data files of the report: measured defences, the glossary, and the rules of SARIF."""

import json
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def data(name: str) -> Any:
    """Return the content of a JSON or TOML file of this package.

    >>> list(data("glossary.toml"))
    ['Terms', 'Claims', 'Numbers of the evidence']
    """
    text = files("spearpp.report").joinpath(name).read_text("utf-8")
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)
