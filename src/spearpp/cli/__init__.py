"""Command line: ``spearpp demo | audit | layers | simulate | score | report | watch | reproduce | frontier``."""

from spearpp.cli.app import main

__all__ = ["main"]
