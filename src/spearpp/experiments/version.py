"""Identifies the code, the commit and the libraries that measured a cell."""

import hashlib
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy
import scipy
import torch

from spearpp.about import __version__

PACKAGE = Path(__file__).parents[1]
NOT_MEASURING = frozenset(
    "__init__.py __main__.py about.py auditing cli experiments integrations pictures.py plotting.py report".split()  # noqa: SIM905
)
"""Files and packages that a measurement does not run. Of ``experiments``, only ``MEASURING`` is part of the digest."""
MEASURING = ("experiments/attack.py", "experiments/source.py", "experiments/training.py")
"""Files of ``experiments`` that a measurement runs."""


@cache
def code_version() -> str:
    """Return the release and a digest of the source files that a measurement runs.

    Results of another code version stay in the store, but reports do not use them.

    >>> code_version().startswith(__version__ + "+")
    True
    """
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.relative_to(PACKAGE).parts[0] not in NOT_MEASURING]
    digest = hashlib.sha256()
    for file in [*files, *(PACKAGE / name for name in MEASURING)]:
        digest.update(file.relative_to(PACKAGE).as_posix().encode())
        digest.update(file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


@cache
def commit() -> str:
    """Return the git commit of the source, followed by ``-dirty`` if files have changed since.

    Without git, for example in a container image, return the environment variable SPEARPP_COMMIT, or "unknown".
    """
    try:
        _git(
            "ls-files", "--error-unmatch", "__init__.py"
        )  # fails if the repository around us does not track this package
        dirty = "-dirty" if _git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return _git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("SPEARPP_COMMIT", "unknown")


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of Python and the libraries, and the device, of this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "device": f"{device.type}: {name}",
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)  # noqa: S603
    return done.stdout.strip()
