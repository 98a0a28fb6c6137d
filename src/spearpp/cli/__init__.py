"""Command line: ``spearpp demo | audit | preflight | layers | simulate | score | report | compare | watch | …``."""

import sys

from spearpp.about import __version__

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code. See ``spearpp.cli.app.main``.

    ``--version`` alone is answered without importing PyTorch, because the import takes seconds.
    """
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"spearpp {__version__}")  # noqa: T201
        return 0
    from spearpp.cli.app import main as run

    return run(arguments)
