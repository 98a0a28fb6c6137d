"""The command line: ``spearpp demo | audit | layers | simulate | score | report``."""

from spearpp.cli.app import main

__all__ = ["main"]
