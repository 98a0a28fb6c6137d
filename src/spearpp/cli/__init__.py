"""The command line: ``spearpp demo | audit | layers | simulate | score | report | reproduce | frontier``."""

from spearpp.cli.app import main

__all__ = ["main"]
