"""The command line: ``spearpp demo | audit | layers | simulate | score | report | watch``."""

from spearpp.cli.app import main

__all__ = ["main"]
